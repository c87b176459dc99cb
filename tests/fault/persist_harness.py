"""Runs a topology with a PersistBolt, kills what a seed says, and compares the store with what was acked."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pickle
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path

import psutil

from penstock.persist import PersistBolt, PersistentQueue, SQLiteStore, Store
from penstock.persist.spec import find
from penstock.persist.stores import StoreUnavailable
from penstock.replay.dead_letters import DiskDeadLetterStore
from tests.fault.persist_process import PASSING, Oracle, key_of

ROOT = Path(__file__).resolve().parents[2]
DEADLINE = 90.0  # seconds for a whole run, on a busy machine
_CHECK = "CHECK (n % 401 <> 200)"


def is_bad(n):
    """No table here takes such a row."""
    return n % 401 == 200


class SQLiteTable:
    """A table in a file; with ``upsert`` one row for each key, else all, in the order of their writing."""

    def __init__(self, path, upsert, make=SQLiteStore, **options):
        self.path, self.upsert = path, upsert
        with contextlib.closing(self.connect()) as connection:
            connection.execute("PRAGMA journal_mode = WAL")
            if upsert:
                connection.execute(
                    f"CREATE TABLE results (n INTEGER {_CHECK}, key TEXT PRIMARY KEY, start INTEGER)"
                )
            else:
                connection.execute(
                    "CREATE TABLE results (place INTEGER PRIMARY KEY AUTOINCREMENT,"
                    f" n INTEGER {_CHECK}, key TEXT, start INTEGER)"
                )
        self.store = make(path, "results", key=["key"] if upsert else [], timeout=0.5, **options)

    def connect(self):
        return sqlite3.connect(self.path, timeout=30.0, isolation_level=None)

    def rows(self):
        """⟨n, key, start⟩ of each."""
        with contextlib.closing(self.connect()) as connection:
            order = "key" if self.upsert else "place"
            return connection.execute(f"SELECT n, key, start FROM results ORDER BY {order}").fetchall()


class PostgresTable:
    """The same in PostgreSQL, under a name of its own."""

    def __init__(self, server, name, upsert, **options):
        from penstock.persist.postgres import PostgresStore

        self.server, self.name, self.upsert = server, name, upsert
        columns = f"n bigint {_CHECK}, key text {'PRIMARY KEY' if upsert else ''}, start bigint"
        self._ask("DROP TABLE IF EXISTS penstock_queues")  # another run's queue has the same name
        self._ask(f"CREATE TABLE {name} (place bigserial, {columns})")
        self.store = PostgresStore(server.dsn, name, key=["key"] if upsert else [], **options)

    def _ask(self, statement):
        import psycopg

        with psycopg.connect(self.server.dsn, autocommit=True) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []

    def rows(self):
        return self._ask(f"SELECT n, key, start FROM {self.name} ORDER BY place")


class GatedStore(SQLiteStore):
    """Stands still for ever in its write, at the ``gate`` that a file of that name in the table's folder names:
    ``before`` anything is done, once a row was ``rejected``, or when all is ``written``."""

    def open(self):
        client = super().open()
        write = client.write

        def gated(queue, rows, before, after, reject):
            def rejecting(rejected):
                reject(rejected)
                self.pass_gate("rejected")

            self.pass_gate("before")
            write(queue, rows, before, after, rejecting)
            self.pass_gate("written")

        client.write = gated
        return client

    def pass_gate(self, name):
        gate = Path(self.path).parent / name
        if gate.exists():
            gate.with_suffix(".reached").touch()
            while True:
                time.sleep(60)


class SlowStore(Store):
    """Another store that takes a moment before and after each write: kills strike in all its gaps."""

    def __init__(self, store):
        self.store, self.key = store, store.key

    def check(self, where):
        self.store.check(where)

    def open(self):
        client = self.store.open()
        client.write = _slowly(client.write)
        return client

    def __str__(self):
        return f"slow {self.store}"


class SlowQueue(PersistentQueue):
    """The same for a queue's put and release."""

    def __init__(self, queue):
        self.queue, self.max_bytes = queue, queue.max_bytes

    def check(self, where, folder):
        self.queue.check(where, folder)

    def open(self, name, folder):
        client = self.queue.open(name, folder)
        client.put, client.release = _slowly(client.put), _slowly(client.release)
        return client

    def __str__(self):
        return f"slow {self.queue}"


def _slowly(call):
    def slow(*args):
        time.sleep(random.uniform(0, 0.03))
        call(*args)
        time.sleep(random.uniform(0, 0.03))

    return slow


class RefusingStore(SQLiteStore):
    """Away for as long as there is a file ``away`` beside its own."""

    def open(self):
        client = super().open()
        write = client.write

        def refusing(*args):
            if (Path(self.path).parent / "away").exists():
                raise StoreUnavailable(str(self), "it is not there")
            write(*args)

        client.write = refusing
        return client


class SlowRowsStore(RefusingStore):
    """Takes 5,000 rows a second."""

    def open(self):
        client = super().open()
        write = client.write

        def slow(queue, rows, *more):
            if not (Path(self.path).parent / "away").exists():
                time.sleep(rows.num_rows / 5000)
            write(queue, rows, *more)

        client.write = slow
        return client


class PersistRun:
    """One topology with a PersistBolt under fire."""

    def __init__(
        self, folder, seed, delivery, queue, table, *, rate=2500, slow=False, state=None, servers=None, **bolt
    ):
        self.folder, self.seed, self.delivery = Path(folder), seed, delivery
        self.queue, self.table = queue, table
        self.servers = servers or {}
        """What can be killed and started again, by the names of the kinds of faults."""
        self.random = random.Random(seed)
        self.faults = []
        """What was done: ⟨kind, seconds until there were new acks or new rows⟩."""
        self.wrong = None
        """How many results are missing, doubled or out of order; once judged."""
        self.again = self.lost = self.failed = self.given_up = 0
        """Entries passed over, entries lost, messages failed and workers that gave up, in all processes."""
        self.state = str(state or self.folder / "state")
        options = {"flush_every": 0.03, "flush_rows": 400, "timeout": 20.0, "drain_for": 30.0, **bolt}
        work = {
            "delivery": delivery,
            "rate": rate,
            "state": self.state,
            "bolt": PersistBolt(
                SlowStore(table.store) if slow else table.store, SlowQueue(queue) if slow else queue, **options
            ),
        }
        (self.folder / "work.pickle").write_bytes(pickle.dumps(work))
        self.oracle = Oracle(self.folder)
        self.log = self.folder / "worker.log"
        self.starts = 0
        self.worker = None
        self._orphans = set()
        self._last = {}
        self.deadline = time.monotonic() + DEADLINE

    # ---- the worker ------------------------------------------------------------------------------------

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *exception):
        for process in [self.worker, *self.processors()]:
            with contextlib.suppress(psutil.Error, AttributeError):
                process.kill()
        if self.worker is not None:
            self.worker.wait()

    def start(self):
        self._note_status()
        self.starts += 1
        with self.log.open("ab") as log:
            self.worker = subprocess.Popen(
                [sys.executable, "-m", "tests.fault.persist_process", str(self.folder), str(self.starts)],
                cwd=ROOT,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def status(self):
        """What the worker of now says; empty before its first word."""
        with contextlib.suppress(OSError, ValueError):
            found = json.loads((self.folder / "status.json").read_text())
            if found["start"] == self.starts:
                return found
        return {}

    def _note_status(self):
        """Add what the worker before has counted."""
        last = self.status()
        self.again += last.get("again", 0)
        self.lost += last.get("lost", 0)
        self.failed += last.get("failed", 0)

    def keep(self):
        """Start a worker that gave up again, as the supervisor on Spark does."""
        code = self.worker.poll()
        if code == PASSING:
            self.given_up += 1
            time.sleep(0.1)
            self.start()
        elif code is not None:
            raise AssertionError(f"the worker ended with {code}\n{self.story()}")

    def await_(self, what, condition):
        while not condition():
            self.keep()
            assert time.monotonic() < self.deadline, f"waited too long for {what}\n{self.story()}"
            time.sleep(0.01)  # polls, because other processes cannot be waited for

    def processors(self):
        """Those of the worker of now."""
        found = []
        with contextlib.suppress(psutil.Error):
            for process in psutil.Process(self.worker.pid).children():
                with contextlib.suppress(psutil.Error):
                    if "penstock.persist.process" in process.cmdline():
                        found.append(process)
        self._orphans.update(found)
        return found

    def story(self):
        return (
            f"{self.table.store} behind {self.queue}, {self.delivery}, seed {self.seed}, faults {self.faults}, "
            f"status {self.status()}\n{self.log.read_text()[-4000:]}"
        )

    # ---- faults ----------------------------------------------------------------------------------------

    def wait_a_while(self, least=0.02, most=0.9):
        until = time.monotonic() + self.random.uniform(least, most)
        self.await_("a moment to strike", lambda: time.monotonic() > until)

    def await_acks(self, count=1):
        """So many more acks than there are now."""
        wanted = self.acks() + count
        self.await_("acks", lambda: self.acks() >= wanted)

    def acks(self):
        path = self.folder / "acked"
        return path.stat().st_size // 16 if path.exists() else 0

    def strike(self, *kinds):
        """Kill -9 all of these at once; servers come back after a moment, and so does the worker."""
        if "processor" in kinds:
            self.await_("a processor", self.processors)
        self.processors()
        struck = time.monotonic()
        for kind in kinds:
            if kind == "worker":
                self.worker.kill()
            elif kind == "processor":
                for process in self.processors():
                    with contextlib.suppress(psutil.Error):
                        process.kill()
            else:
                self.servers[kind].kill()
        if "worker" in kinds:
            assert self.worker.wait() == -signal.SIGKILL, self.story()
            self.start()
        away = [self.servers[kind] for kind in kinds if kind in self.servers]
        if away:
            self.wait_a_while(0.0, 0.6)
        for server in away:
            server.start()
        self.faults.append([f"persist kill {'+'.join(kinds)}", None])
        self._struck = struck

    def recovered(self):
        """Wait for new acks and new rows, and note how long that took."""
        acks, rows = self.acks(), self.table.rows()
        self.await_("new acks", lambda: self.acks() > acks)
        self.await_("new rows", lambda: self.table.rows() != rows)
        self.faults[-1][1] = round(time.monotonic() - self._struck, 2)

    def finish(self):
        """Let all be acked and drained, and the worker end."""
        (self.folder / "stop").touch()
        while self.worker.poll() != 0:
            self.keep()
            assert time.monotonic() < self.deadline, f"waited too long for the end\n{self.story()}"
            time.sleep(0.01)  # another process
        self._note_status()
        psutil.wait_procs(self._orphans, 15)

    # ---- results ---------------------------------------------------------------------------------------

    def dead_letters(self):
        """⟨n, start⟩ of the dead letters."""
        (spec,) = find(self.state, "persisted")
        dead = DiskDeadLetterStore(Path(spec.dead))
        with contextlib.closing(dead):
            values = [dead_letter.record.payload[1] for dead_letter in dead.read_all()]
        return [(row["n"], row["start"]) for row in values]

    def waiting(self):
        (spec,) = find(self.state, "persisted")
        with contextlib.closing(spec.queue.open(spec.name, spec.folder)) as client:
            return client.waiting()

    def judge(self, lost=frozenset()):
        """What is wrong, in words; and ``self.wrong``, how many results. ``lost`` are ⟨n, start⟩ that may be
        missing."""
        total = int((self.folder / "ceiling").read_text())
        acked = [(n, start) for start, n in self.oracle.read()]
        rows, dead_letters = self.table.rows(), self.dead_letters()
        wrong = (self._judge_keys if self.table.upsert else self._judge_rows)(
            total, acked, rows, dead_letters, lost
        )
        wrong["dead letters that are good rows"] = [
            dead_letter for dead_letter in dead_letters if not is_bad(dead_letter[0])
        ]
        wrong["dead letters twice"] = _twice(dead_letters)
        if self.delivery == "at_least_once":
            wrong["never acked"] = sorted(set(range(total)) - {n for n, _ in acked})
        self.wrong = sum(map(len, wrong.values()))
        said = [f"{len(what)} {name}, such as {what[:5]}" for name, what in wrong.items() if what]
        if self.waiting():
            said.append(f"{self.waiting()} bytes wait after the drain")
        if self.failed:
            said.append(f"{self.failed} messages failed")
        return said

    def _judge_rows(self, total, acked, rows, dead_letters, lost):
        stored = Counter((n, start) for n, _, start in rows)
        kept = stored.keys() | set(dead_letters)
        wrong = {
            "acked and missing": [each for each in acked if each not in kept and each not in lost],
            "doubled": _twice((n, start) for n, _, start in rows),
            "under another key": [(n, key) for n, key, _ in rows if key != key_of(n)],
            "rows that no table takes": [n for n, _, _ in rows if is_bad(n)],
        }
        if self.delivery == "exactly_once":
            numbers = Counter(n for n, _ in kept)
            lost_numbers = {n for n, _ in lost}
            wrong["missing"] = [n for n in range(total) if n not in numbers and n not in lost_numbers]
            wrong["twice"] = _twice(n for n, _, _ in rows)
        else:  # whatever is there a second time was emitted again, since it had not been acked
            first_acked = dict(sorted(acked, reverse=True))
            wrong["again although acked"] = [(n, start) for n, start in kept if first_acked.get(n, start) < start]
        by_key = defaultdict(list)
        for n, key, start in rows:
            by_key[key].append((start, n))
        wrong["out of order"] = [
            (key, before, after)
            for key, puts in by_key.items()
            for before, after in itertools.pairwise(puts)
            if before >= after
        ]
        return wrong

    def _judge_keys(self, total, acked, rows, dead_letters, lost):
        """Each key has what was put last for it. That was acked: what was not is put again later."""
        assert not lost
        if self.delivery == "exactly_once":
            last = {key_of(n): n for n in range(total) if not is_bad(n)}
            found = {key: n for n, key, _ in rows}
        else:
            last = {key_of(n): (start, n) for start, n in sorted((s, n) for n, s in acked) if not is_bad(n)}
            found = {key: (start, n) for n, key, start in rows}
        return {"not the last of their key": sorted(set(last.items()) ^ set(found.items()), key=str)}


def _twice(things):
    return [thing for thing, times in Counter(things).items() if times > 1]


@contextlib.contextmanager
def stopped(*processes):
    """Have processes stand still, and wait until they do."""
    pids = [process.pid for process in processes]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
