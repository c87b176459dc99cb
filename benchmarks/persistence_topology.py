"""The persistence experiment of *Lu 2020*, section 6.3: a word count whose results go to a slow store. There are
four ways: through the delayed queue into a slow or a fast store; directly; and through a queue inside the worker,
the first attempt of *Lu 2020* (figure 10)."""

from __future__ import annotations

import os
import queue
import secrets
import signal
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from benchmarks.book import made_lines, micros
from benchmarks.hops import APART
from penstock import (
    BasicBolt,
    BatchBolt,
    BatchCollector,
    BatchSpout,
    BatchSpoutCollector,
    Collector,
    Conf,
    Context,
    Delivery,
    Failure,
    OutputDeclarer,
    Settings,
    Source,
    Topology,
    TopologyBuilder,
    Tuple,
)
from penstock.persist.bolt import PersistBolt
from penstock.persist.queues import PersistentQueue
from penstock.persist.stores import Overtaken, Reject, Store, StoreClient

WORDS = 10  # words per line; the number of a result is its line's number times this plus its position in the line
SLEEP = 0.05  # seconds per write
_MOST = 1_000  # lines per batch of the spout
_PATIENCE = 3600.0  # seconds; the message timeout. The direct way is minutes late, which timeouts would hide
_FIELDS: tuple[tuple[str, type], ...] = (("result", int), ("word", str), ("count", int), ("since", int))

IntArray = npt.NDArray[np.int64]


def words_to_store(
    case: str, folder: Path, rate: float, mrwq: PersistentQueue | None = None, room_mb: float = 0.0
) -> Topology:
    """Lines at a rate of ``rate`` words per second → split → count → persist in one of four ways: delayed (with
    any queue), instant, direct, inner. All files are in ``folder``: see ``acked``, ``times``, ``times_stored`` and
    ``stored``. ``room_mb``: the memory by which the process of the persist bolt may grow, or 0 for no limit."""
    store = SleepingStore(str(folder / "store"), 0.0 if case == "instant" else SLEEP)
    others: dict[str, Any] = {"direct": DirectBolt, "inner": InnerQueueBolt}
    builder = TopologyBuilder()
    builder.set_spout("lines", PacedLines(rate / WORDS))
    builder.set_bolt("split", SplitLines()).shuffle_grouping("lines")
    builder.set_bolt("count", CountWords(), 2).fields_grouping("split", "word")
    bolt = others[case](store) if case in others else TimedPersistBolt(store, mrwq)
    builder.set_bolt("persist", bolt).shuffle_grouping("count")
    settings = Settings(
        delivery=Delivery("at_least_once", message_timeout=_PATIENCE, state_dir=str(folder / "state")),
        workers=APART,  # the slow store must hold up the persist bolt alone
        conf={"folder": str(folder), "room_mb": room_mb},
    )
    return builder.build(f"{case.replace(' ', '-')}-{folder.name}", settings)


# ---- what is left of a run -----------------------------------------------------------------------------


def acked(folder: Path) -> IntArray:
    """The numbers of the acked lines, in the order of the acks."""
    return _numbers(folder / "acked")


def times(folder: Path) -> tuple[IntArray, IntArray]:
    """For each result in microseconds: when its line was due, and when it was persisted, that is acked."""
    since, came = _numbers(folder / "persisted").reshape(-1, 2).T
    return since, came


def times_stored(folder: Path) -> tuple[IntArray, IntArray]:
    """Like ``times``, until the result was in the store."""
    since, came = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for path in _files(str(folder / "store")):
        since.append(_open(path).read_all()["since"].to_numpy())
        # The clock of a file system ticks in milliseconds, so a file may appear older than its content.
        came.append(np.maximum(since[-1], os.stat(path).st_mtime_ns // 1000))
    return np.concatenate(since), np.concatenate(came)


def stored(folder: Path) -> IntArray:
    """The numbers of the results in the store, in order."""
    paths = _files(str(folder / "store"))
    parts = [_open(path).read_all()["result"].to_numpy() for path in paths]
    return np.concatenate([np.empty(0, np.int64), *parts])


def rows_stored(folder: Path) -> int:
    """The number of results in the store; fast enough to ask every second."""
    return _newest(str(folder / "store"))[1]


def _numbers(path: Path) -> IntArray:
    return np.fromfile(path, np.int64) if path.exists() else np.empty(0, np.int64)


class Notes:
    """A file of numbers. They are not kept in memory, because memory is measured and a kill would lose them."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def add(self, numbers: IntArray) -> None:
        os.write(self._file, numbers.tobytes())

    def came(self, since: Any) -> None:
        """Append these numbers with the current time."""
        since = np.asarray(since, np.int64)
        self.add(np.stack([since, np.full(len(since), micros())], axis=1))


# ---- the store -----------------------------------------------------------------------------------------


class SleepingStore(Store):
    """A folder with one file per write, which takes ``seconds``. The file contains the total number of rows and
    the queue's progress."""

    key = ()

    def __init__(self, folder: str, seconds: float) -> None:
        self.folder, self.seconds = folder, seconds

    def check(self, where: str) -> None:
        """Nothing to open."""

    def open(self) -> SleepingClient:
        os.makedirs(self.folder, exist_ok=True)
        return SleepingClient(self.folder, self.seconds)

    def __str__(self) -> str:
        return f"a store that takes {self.seconds * 1000:g} ms per write"


class SleepingClient(StoreClient):
    def __init__(self, folder: str, seconds: float) -> None:
        self._folder, self._seconds = folder, seconds

    def progress(self, queue: str) -> str:
        return _newest(self._folder)[2]

    def write(self, queue: str, rows: pa.Table, before: str, after: str, reject: Reject) -> None:
        number, total, recorded = _newest(self._folder)
        time.sleep(self._seconds)
        if recorded != before or not self._add(number + 1, rows, total + rows.num_rows, after):
            raise Overtaken(self._folder, f"another processor also writes for '{queue}'")

    def keep(self, row: Sequence[Any]) -> None:
        """Write one result without recording a queue's progress."""
        table = pa.table({name: [value] for (name, _), value in zip(_FIELDS, row, strict=True)})
        self.write("", table, "", "", lambda rejected: None)

    def close(self) -> None:
        pass

    def _add(self, number: int, rows: pa.Table, total: int, progress: str) -> bool:
        """Add a file atomically. Returns False if another process has added a file with that number."""
        staged = f"{self._folder}/.{secrets.token_hex(8)}"
        rows = rows.replace_schema_metadata({"total": str(total), "progress": progress})
        with pa.OSFile(staged, "wb") as file, pa.ipc.new_file(file, rows.schema) as out:
            out.write_table(rows)
        try:
            os.link(staged, f"{self._folder}/{number:08}")
        except FileExistsError:
            return False
        finally:
            os.unlink(staged)
        return True


def _files(folder: str) -> list[str]:
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return [f"{folder}/{name}" for name in sorted(names) if not name.startswith(".")]


def _open(path: str) -> pa.ipc.RecordBatchFileReader:
    return pa.ipc.open_file(pa.OSFile(path))


def _newest(folder: str) -> tuple[int, int, str]:
    """The number of the newest file, the total number of rows, and the progress."""
    files = _files(folder)
    if not files:
        return 0, 0, ""
    metadata = _open(files[-1]).schema.metadata
    return int(os.path.basename(files[-1])), int(metadata[b"total"]), metadata[b"progress"].decode()


# ---- the word count ------------------------------------------------------------------------------------


class PacedLines(BatchSpout):
    """Emits ``rate`` lines per second of ``WORDS`` words each, with their numbers and due times, so that lateness
    counts as latency. Writes acks to a file at once, so that a new process emits exactly what was not acked."""

    def __init__(self, rate: float) -> None:
        self._rate = rate

    def declare_output_fields(self, declarer: OutputDeclarer) -> None:
        declarer.declare(("number", int), ("line", str), ("since", int))

    def open(self, conf: Conf, context: Context, collector: BatchSpoutCollector) -> None:
        self._collector = collector
        words = " ".join(made_lines()).split(" ")
        self._pool = [" ".join(words[at : at + WORDS]) for at in range(0, len(words) - WORDS, WORDS)]
        folder = Path(conf["folder"])
        done = acked(folder)
        self._next = int(done.max()) + 1 if len(done) else 0
        self._again: deque[int] = deque(np.setdiff1d(np.arange(self._next), done).tolist())
        self._acked = Notes(folder / "acked")

    def activate(self) -> None:
        self._begun, self._emitted = time.time(), 0

    def next_batch(self) -> None:
        due = int((time.time() - self._begun) * self._rate) + 1
        count = min(due - self._emitted, _MOST)
        if count <= 0 or not self._collector.ready():
            return
        numbers = [self._take() for _ in range(count)]
        since = (self._begun + np.arange(self._emitted, self._emitted + count) / self._rate) * 1e6
        self._emitted += count
        lines = [self._pool[number % len(self._pool)] for number in numbers]
        self._collector.emit_batch(
            [pa.array(numbers, pa.int64()), pa.array(lines), pa.array(since.astype(np.int64))], msg_ids=numbers
        )

    def ack_many(self, msg_ids: Sequence[Any]) -> None:
        self._acked.add(np.array(msg_ids, np.int64))

    def fail(self, msg_id: Any, failure: Failure) -> None:
        self._again.append(msg_id)

    def _take(self) -> int:
        if self._again:
            return self._again.popleft()
        self._next += 1
        return self._next - 1


class SplitLines(BatchBolt):
    def declare_output_fields(self, declarer: OutputDeclarer) -> None:
        declarer.declare(("result", int), ("word", str), ("since", int))

    def execute_batch(self, batch: pa.RecordBatch, source: Source, collector: BatchCollector) -> None:
        numbers, lines, since = batch.columns
        results = (numbers.to_numpy()[:, None] * WORDS + np.arange(WORDS)).ravel()
        words = pc.split_pattern(lines, " ").flatten()
        rows = np.repeat(np.arange(batch.num_rows), WORDS)
        collector.emit_batch([pa.array(results), words, since.take(pa.array(rows))])


class CountWords(BatchBolt):
    def declare_output_fields(self, declarer: OutputDeclarer) -> None:
        declarer.declare(*_FIELDS)

    def prepare(self, conf: Conf, context: Context) -> None:
        self._counts: dict[str, int] = {}

    def execute_batch(self, batch: pa.RecordBatch, source: Source, collector: BatchCollector) -> None:
        results, words, since = batch.columns
        counts, told = self._counts, []
        for word in words.to_pylist():
            count = counts[word] = counts.get(word, 0) + 1
            told.append(count)
        collector.emit_batch([results, words, pa.array(told, pa.int64()), since])


# ---- the ways to the store -----------------------------------------------------------------------------


class MemoryLimit:
    """Ends the process with SIGKILL when it uses more memory than it may, as the kernel does. Its growth counts
    from ``settle`` seconds after the first call of ``check``, when all pools and buffers have been made."""

    def __init__(self, conf: Conf, settle: float = 3.0) -> None:
        self._room, self._settle = float(conf["room_mb"]), settle
        self._since: float | None = None
        self._most = float("inf")

    def check(self) -> None:
        if not self._room:
            return
        if self._since is None:
            self._since = time.monotonic()
        if self._most == float("inf") and time.monotonic() - self._since >= self._settle:
            self._most = _rss_mb() + self._room
        if _rss_mb() > self._most:
            os.kill(os.getpid(), signal.SIGKILL)


def _rss_mb() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


class TimedPersistBolt(PersistBolt):
    """The delayed persistent queue. A result is persisted, and acked, when it is in the queue."""

    def connect(self, conf: Conf, context: Context) -> None:
        super().connect(conf, context)
        self._memory = MemoryLimit(conf)
        self._times = Notes(Path(conf["folder"]) / "persisted")
        self._since: list[IntArray] = []

    def write(self, batch: pa.RecordBatch, source: Source) -> None:
        self._memory.check()
        super().write(batch, source)
        self._since.append(batch.column("since").to_numpy())

    def prepare_commit(self, epoch: int) -> Any:
        token = super().prepare_commit(epoch)
        if self._since:
            self._times.came(np.concatenate(self._since))
            self._since = []
        return token


class DirectBolt(BasicBolt):
    """Writes each result and waits for it: case D of *Lu 2020*."""

    def __init__(self, store: SleepingStore) -> None:
        self._store = store

    def prepare(self, conf: Conf, context: Context) -> None:
        self._times = Notes(Path(conf["folder"]) / "persisted")
        self._client = self._store.open()

    def execute(self, tup: Tuple, collector: Collector) -> None:
        self._client.keep(tup)
        self._times.came([tup.since])


class InnerQueueBolt(BatchBolt):
    """An unbounded queue inside the worker and a thread that writes row by row (*Lu 2020*, figure 10). Results are
    acked when they are in that queue."""

    def __init__(self, store: SleepingStore) -> None:
        self._store = store

    def prepare(self, conf: Conf, context: Context) -> None:
        self._memory = MemoryLimit(conf)
        self._times = Notes(Path(conf["folder"]) / "persisted")
        self._queue: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        threading.Thread(target=self._write, name="inner-queue", daemon=True).start()

    def execute_batch(self, batch: pa.RecordBatch, source: Source, collector: BatchCollector) -> None:
        self._memory.check()
        for row in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            self._queue.put(row)
        self._times.came(batch.column("since").to_numpy())

    def _write(self) -> None:
        client = self._store.open()
        while True:
            client.keep(self._queue.get())
