"""Acknowledged results reach the store, once and in order, whichever process is killed and when."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import sqlite3
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from penstock.persist import EmbeddedQueue
from penstock.persist.entries import unpack
from penstock.persist.memcached import MemcachedQueue
from penstock.persist.memory import MemoryQueue
from penstock.persist.redis import RedisQueue
from penstock.persist.spec import find
from tests.fault.harness import Run
from tests.fault.persist_harness import (
    GatedStore,
    PersistRun,
    PostgresTable,
    RefusingStore,
    SlowRowsStore,
    SQLiteTable,
    is_bad,
    stopped,
)
from tests.unit.test_persist_processor import Bench, Killed

LEVELS = pytest.mark.parametrize("delivery", ["at_least_once", "exactly_once"])
COMBINATIONS = [  # the first two are the short form: between them they have everything
    ("embedded", "sqlite", "at_least_once"),
    ("redis", "postgres", "exactly_once"),
    ("embedded", "postgres", "at_least_once"),
    ("redis", "sqlite", "exactly_once"),
    ("embedded", "sqlite", "exactly_once"),
    ("redis", "postgres", "at_least_once"),
    ("embedded", "postgres", "exactly_once"),
    ("redis", "sqlite", "at_least_once"),
]
_tables = itertools.count(1)


@pytest.fixture
def make_table(tmp_path, request):
    """A table of a kind: ``make_table("postgres", upsert=True)``."""

    def make(kind="sqlite", upsert=False, **options):
        if kind == "sqlite":
            return SQLiteTable(str(tmp_path / "results.db"), upsert, **options)
        return PostgresTable(request.getfixturevalue("postgres"), f"results_{next(_tables)}", upsert, **options)

    return make


@pytest.fixture
def make_queue(request):
    def make(kind, **options):
        if kind == "embedded":
            return EmbeddedQueue(**options)
        if kind == "redis":
            return RedisQueue(request.getfixturevalue("redis").url, **options)
        return MemcachedQueue(request.getfixturevalue("memcached").address, **options)

    return make


def passed(run, campaign, **more):
    """Compare, put the outcome into the report, and fail where there is one."""
    said = run.judge(**more)
    campaign(run)
    assert not said, "\n".join([*said, run.story()])


@pytest.mark.seeds(2, 32)
def test_killed_again_and_again(tmp_path, campaign, full, seed, make_table, make_queue, request):
    """Every fourth time round a key has one row; else all are there, in their order."""
    kind, store, delivery = COMBINATIONS[seed % 8]
    table = make_table(store, upsert=seed // 8 % 4 == 3)
    queue = make_queue(kind)
    servers = {"queue": "redis"} if kind == "redis" else {}
    servers |= {"store": "postgres"} if store == "postgres" else {}
    servers = {name: request.getfixturevalue(fixture) for name, fixture in servers.items()}
    with PersistRun(tmp_path, 1000 + seed, delivery, queue, table, slow=True, servers=servers) as run:
        run.await_acks(200)
        single = [("worker",), ("processor",), *((server,) for server in servers)]
        double = list(itertools.combinations(["worker", "processor", *servers], 2))
        strikes = [*single, *run.random.choices(double, k=8 - len(single))] if full else single
        run.random.shuffle(strikes)
        for strike in strikes:
            run.wait_a_while()
            run.strike(*strike)
            if run.random.random() < 0.5:  # else the next may strike while it recovers
                run.recovered()
        run.finish()
    passed(run, campaign)


# ---- memcached --------------------------------------------------------------------------------------------


@LEVELS
@pytest.mark.seeds(0, 2)
def test_memcached_loses_nothing_when_workers_and_processors_die(
    tmp_path, campaign, delivery, seed, make_table, make_queue
):
    queue, table = make_queue("memcached"), make_table(upsert=bool(seed))
    with PersistRun(tmp_path, 1100 + seed, delivery, queue, table, slow=True) as run:
        run.await_acks(200)
        for strike in [("worker",), ("processor",), ("worker", "processor")] * 2:
            run.wait_a_while()
            run.strike(*strike)
            run.recovered()
        run.finish()
    passed(run, campaign)


@pytest.mark.seeds(0, 2)
def test_a_queue_in_memory_loses_nothing_when_workers_and_processors_die(tmp_path, campaign, seed, make_table):
    queue, table = MemoryQueue(), make_table(upsert=bool(seed))
    with PersistRun(tmp_path, 1150 + seed, "at_least_once", queue, table, slow=True) as run:
        run.await_acks(200)
        for strike in [("worker",), ("processor",), ("worker", "processor")] * 2:
            run.wait_a_while()
            run.strike(*strike)
            run.recovered()
        run.finish()
    passed(run, campaign)
    (spec,) = find(run.state, "persisted")
    shutil.rmtree(queue.open(spec.name, spec.folder)._folder.parent)


@LEVELS
@pytest.mark.seeds(0, 2)
def test_a_crash_of_memcached_loses_only_what_was_in_it(
    tmp_path, campaign, delivery, seed, make_table, make_queue, memcached
):
    queue, table = make_queue("memcached"), make_table()
    lost = set()
    with PersistRun(tmp_path, 1200 + seed, delivery, queue, table, servers={"queue": memcached}) as run:
        run.await_acks(200)
        for _ in range(3):
            run.wait_a_while()
            run.await_("a processor", run.processors)
            with stopped(*run.processors()):
                run.await_acks(500)  # which are in memcached now
                with stopped(run.worker):
                    time.sleep(0.1)  # the server answers what it was asked
                    lost |= content(queue)
                    memcached.kill()
                    memcached.start()
            run.faults.append(["persist kill memcached", None])
            run.await_acks(500)
        run.finish()
    assert lost - {(n, start) for n, _, start in table.rows()}, "what no processor had read is lost"
    passed(run, campaign, lost=lost)
    assert run.lost > 0, run.story()


@pytest.mark.seeds(2, 8)
def test_one_memcached_of_three_dies_and_nothing_is_lost_with_two_copies(
    tmp_path, campaign, seed, make_table, memcacheds
):
    """One server at a time, once the results that waited in the one before are in the store again on two."""
    delivery = ["at_least_once", "exactly_once"][seed % 2]
    queue = MemcachedQueue([server.address for server in memcacheds], copies=2)
    servers = {f"memcached {number}": server for number, server in enumerate(memcacheds)}
    with PersistRun(tmp_path, 1250 + seed, delivery, queue, make_table(), slow=True, servers=servers) as run:
        run.await_acks(200)
        strikes = [("memcached 0",), ("worker",), ("memcached 1", "processor"), ("processor",), ("memcached 2",)]
        run.random.shuffle(strikes)
        for strike in strikes:
            run.wait_a_while()
            run.strike(*strike)
            run.recovered()
            run.await_("the servers to be used again", lambda: not run.status().get("warning"))
        run.finish()
    assert run.lost == 0, run.story()
    passed(run, campaign)


@pytest.mark.seeds(1, 4)
def test_one_memcached_of_three_dies_and_only_what_was_in_it_is_lost_and_counted(
    tmp_path, campaign, seed, make_table, memcacheds
):
    delivery = ["at_least_once", "exactly_once"][seed % 2]
    queue = MemcachedQueue([server.address for server in memcacheds])
    table = make_table()
    with PersistRun(tmp_path, 1270 + seed, delivery, queue, table, servers={"memcached": memcacheds[1]}) as run:
        run.await_acks(200)
        run.await_("a processor", run.processors)
        with stopped(*run.processors()):
            run.await_acks(3000)  # part of them are on that server now
            memcacheds[1].kill()
            run.await_acks(1000)  # the others take what comes
        acks = run.acks()
        run.await_("rows of the others", lambda: len(table.rows()) > acks)
        assert "does not answer" in run.status()["warning"], run.story()
        memcacheds[1].start()
        run.await_("the server to be used again", lambda: not run.status().get("warning"))
        run.await_acks(1000)
        run.faults.append(["persist kill memcached of three", None])
        run.finish()
    stored = {(n, start) for n, _, start in table.rows()} | set(run.dead_letters())
    acked = {(n, start) for start, n in run.oracle.read()}
    missing = acked - stored
    assert 0 < len(missing) < 4000
    assert run.lost > 0, run.story()
    passed(run, campaign, lost=missing)


def content(queue):
    """⟨n, start⟩ of the rows in a queue."""
    with contextlib.closing(queue.open("persisted/sink", "")) as client:
        tables = [unpack(data).table() for _, data in client.read(10**6)]
    return {(row["n"], row["start"]) for table in tables for row in table.to_pylist()}


# ---- stores that misbehave --------------------------------------------------------------------------------


@pytest.mark.seeds(1, 9)
def test_a_store_that_hangs_in_a_write_is_ended_by_the_watchdog(tmp_path, campaign, seed, make_table):
    """Wherever it hangs; a row whose processor ends between its dead letter and the commit is one dead letter."""
    gate = ["rejected", "before", "written"][seed % 3]
    table = make_table(make=GatedStore)
    with PersistRun(tmp_path, 1300 + seed, "exactly_once", EmbeddedQueue(), table, timeout=0.6) as run:
        run.await_acks(200)
        run.wait_a_while()
        (tmp_path / gate).touch()
        run.await_("the store to hang", (tmp_path / f"{gate}.reached").exists)
        (hanging,) = run.processors()
        acks = run.acks()
        run.await_("the watchdog", lambda: not hanging.is_running() or hanging.status() == psutil.STATUS_ZOMBIE)
        run.await_("word of it", lambda: "has not answered" in run.status().get("trouble", ""))
        assert run.acks() > acks, "the topology does not wait"
        (tmp_path / gate).unlink()
        run.faults.append([f"persist store hangs: {gate}", None])
        run.await_("rows of the next", lambda: len(table.rows()) > acks)
        run.finish()
    passed(run, campaign)


@pytest.mark.seeds(0, 2)
def test_killed_between_a_dead_letter_and_the_commit(tmp_path, campaign, seed, make_table):
    table = make_table(make=GatedStore)
    with PersistRun(tmp_path, 1400 + seed, "exactly_once", EmbeddedQueue(), table) as run:
        for _ in range(3):
            (tmp_path / "rejected").touch()
            run.await_("a dead letter", (tmp_path / "rejected.reached").exists)
            run.strike("processor", "worker") if run.random.random() < 0.5 else run.strike("processor")
            (tmp_path / "rejected").unlink()
            run.recovered()
            (tmp_path / "rejected.reached").unlink(missing_ok=True)
        run.finish()
    assert sorted(n for n, _ in run.dead_letters()) == [n for n in range(total(run)) if is_bad(n)]
    passed(run, campaign)


def test_a_dead_letter_of_an_orphan_is_its_successor_s_too(tmp_path):
    """The orphan keeps the dead letter after its successor was started, and dies before the commit."""
    bench = Bench(tmp_path, key=())
    with contextlib.closing(sqlite3.connect(bench.folder / "results.db")) as connection:
        connection.execute("CREATE TABLE results (word TEXT, n INTEGER CHECK (n <> 13)) STRICT")

    def die(reached):
        if reached == "rejected":
            raise Killed

    orphan, successor = bench.processor(die), bench.processor()
    bench.drain(successor)
    bench.put(("a", 1), ("bad", 13))
    with pytest.raises(Killed):
        bench.drain(orphan)
    bench.drain(successor)
    assert bench.stored() == [("a", 1)]
    assert len(bench.dead_letters()) == 1


def total(run):
    return int((run.folder / "ceiling").read_text())


@LEVELS
@pytest.mark.seeds(0, 2)
def test_postgres_hangs_for_longer_than_the_time_out(tmp_path, campaign, delivery, seed, make_table, postgres):
    table = make_table("postgres", timeout=1.5)
    with PersistRun(tmp_path, 1500 + seed, delivery, EmbeddedQueue(), table, rate=500, timeout=3.5) as run:
        run.await_("rows", table.rows)
        for hang in (1.0, 6.0):  # the store's own time-out helps; then, at connecting, the watchdog does
            run.wait_a_while()
            server = psutil.Process(postgres._server.pid)
            with stopped(server, *server.children()):
                run.await_("word of it", lambda: run.status().get("trouble"))
                acks = run.acks()
                until = time.monotonic() + hang
                run.await_("the hang to end", lambda until=until: time.monotonic() > until)
                assert run.acks() > acks, "the topology does not wait"
            run._struck = time.monotonic()
            run.faults.append(["persist store stopped", None])
            run.recovered()
        run.finish()
    passed(run, campaign)


@pytest.mark.seeds(0, 1)
def test_a_backlog_gets_through_a_store_that_takes_its_time(tmp_path, campaign, seed, make_table):
    """A batch of ``flush_rows`` takes a fifth of the time-out. What has piled up must not come as one batch, which
    would be ended by the watchdog, and the next processor's too, for ever."""
    table = make_table(make=SlowRowsStore)
    options = {"rate": 3000, "flush_rows": 1000, "flush_every": 0.2, "timeout": 1.0}
    with PersistRun(tmp_path, 1550 + seed, "at_least_once", EmbeddedQueue(), table, **options) as run:
        run.await_("rows", table.rows)
        (tmp_path / "away").touch()
        run.await_acks(15_000)
        (tmp_path / "away").unlink()
        run._struck = time.monotonic()
        run.faults.append(["persist backlog", None])
        run.recovered()
        run.finish()
    passed(run, campaign)


@LEVELS
@pytest.mark.seeds(0, 1)
def test_the_disk_of_the_store_is_full_for_a_while(tmp_path, campaign, delivery, seed, small_disk):
    table = SQLiteTable(str(small_disk / "results.db"), upsert=False)
    with PersistRun(tmp_path, 1600 + seed, delivery, EmbeddedQueue(), table) as run:
        run.await_("rows", table.rows)
        with fill(small_disk):
            run.await_("word of it", lambda: "full" in run.status().get("trouble", ""))
            run.await_acks(1000)
            run._struck = time.monotonic()
        run.faults.append(["persist store full", None])
        run.recovered()
        run.finish()
    passed(run, campaign)


@LEVELS
@pytest.mark.seeds(0, 1)
def test_the_disk_of_the_queue_is_full_for_a_while(tmp_path, campaign, delivery, seed, small_disk, make_table):
    """Nothing is acked meanwhile, and nothing that was is lost."""
    queue = EmbeddedQueue(str(small_disk))
    with PersistRun(tmp_path, 1650 + seed, delivery, queue, make_table()) as run:
        run.await_acks(200)
        with fill(small_disk):
            run.await_("word of it", lambda: "No space" in "".join(run.status().get("errors", [])))
            run._struck = time.monotonic()
        run.faults.append(["persist queue full", None])
        run.recovered()
        run.finish()
    passed(run, campaign)


@contextlib.contextmanager
def fill(disk):
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    yield
    ballast.unlink()


@LEVELS
@pytest.mark.parametrize("kind", ["embedded", "redis"])
@pytest.mark.seeds(0, 1)
def test_a_full_queue_holds_the_source_back(tmp_path, campaign, delivery, kind, seed, make_table, make_queue):
    """The store is away: the queue fills, the bolt takes no more, and neither memory nor disk grows. Exactly once
    flow control lets a source emit a little at all times."""
    most, rate = 300_000, 20_000
    queue, table = make_queue(kind, max_bytes=most), make_table(make=RefusingStore)
    with PersistRun(tmp_path, 1700 + seed, delivery, queue, table, rate=rate) as run:
        run.await_acks(200)
        (tmp_path / "away").touch()
        run.await_("the source to be held back", lambda: emitted_within(1.0, run) < rate / 20)
        before, size = run.status(), disk_bytes(tmp_path)
        assert emitted_within(3.0, run) < 3 * rate / 20, run.story()
        after = run.status()
        assert after["acked"] == before["acked"], run.story()
        assert after["rss"] - before["rss"] < 4 << 20, run.story()
        assert disk_bytes(tmp_path) - size < 1 << 20, run.story()
        assert most / 2 < run.waiting() < 2 * most, run.story()
        (tmp_path / "away").unlink()
        run._struck = time.monotonic()
        run.faults.append(["persist store away, queue full", None])
        run.recovered()
        run.finish()
    passed(run, campaign)


def emitted_within(seconds, run):
    run.await_("the worker's word", run.status)
    before, until = run.status()["next"], time.monotonic() + seconds
    run.await_("time to pass", lambda: time.monotonic() > until)
    return run.status()["next"] - before


def disk_bytes(folder):
    total = 0
    for path in Path(folder).rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


# ---- on Spark ---------------------------------------------------------------------------------------------


class SparkRun(Run):
    """The topology of the fault tests, its results by way of a PersistBolt into SQLite."""

    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        self.config["persist"] = str(self.folder / "results.db")

    def rows(self):
        with contextlib.closing(sqlite3.connect(self.config["persist"], timeout=30.0)) as connection:
            try:
                return Counter(connection.execute("SELECT origin, n FROM results").fetchall())
            except sqlite3.OperationalError:  # nothing was written yet
                return Counter()

    def processors(self):
        family = psutil.Process(self.driver.pid).children(recursive=True)
        return [process.pid for process in family if is_processor(process)]

    def kill_processor(self):
        """It has recovered when there are new rows or, where all of them were there already, a new one."""
        self.await_("a processor", self.processors)
        (killed,), rows = self.processors(), self.rows()
        done = self.wanted().keys() <= rows.keys()
        struck = time.time()
        os.kill(killed, signal.SIGKILL)
        if done:
            self.await_("the next processor", lambda: self.processors() not in ([], [killed]))
        else:
            self.await_("rows of the next processor", lambda: self.rows().total() > rows.total())
        self.faults.append(("persist kill processor on Spark", round(time.time() - struck, 2)))


def is_processor(process):
    with contextlib.suppress(psutil.Error):
        return "penstock.persist.process" in process.cmdline()
    return False


@LEVELS
@pytest.mark.seeds(1, 3)
def test_worker_and_processor_killed_on_spark(tmp_path, campaign, full, delivery, seed):
    with SparkRun(tmp_path, 1800 + seed, delivery, count=45_000 if full else 15_000, rate=1_500) as run:
        run.await_("rows", lambda: run.rows())
        for kill in [run.kill_processor, run.kill_worker] * (2 if full else 1):
            run.wait_a_while()
            kill()
        run.finish()
    campaign(run)
