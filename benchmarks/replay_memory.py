"""What a worker keeps of a tuple in flight: the growth of a spout's process with 50,000 pending tuples of 10 KB,
for a ``ReplaySpout`` over Kafka and over the queue on disk.

Each measurement is a process of its own: ``python -m benchmarks.replay_memory SOURCE HOW``. It drives a real
spout with the pending table and the message ids of a worker, and a collector that drops the tuples at once.
First all tuples are acked, so that buffers, the read-ahead and the allocator reach their size; then none is.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from benchmarks.harness import Results, median, run_json, say
from penstock import Conf
from penstock.acking.pending import Pending
from penstock.replay import DiskQueue, Eden, QueueEden, ReplayRecord, ReplaySpout
from penstock.replay.replayer import CAPACITY, READ_AHEAD_BYTES
from penstock.state.values import TaskState
from penstock.topology.components import Context, Failure
from penstock.topology.streams import DEFAULT_STREAM
from penstock.worker.tracking import MessageIds, Tracker

SOURCES = ("queue", "kafka")
PENDING, SIZE = 50_000, 10_000  # tuples, bytes
WARM_UP = 30_000  # tuples: several times what is read ahead
_REST = 12_000  # tuples never emitted: at the end, too, as many are read ahead as may be
_FEED = 2_000  # tuples written at a time
_PATIENCE = 120.0  # seconds without a tuple until the measurement is given up
_SETTLING, _STEADY = 30.0, 1 << 18  # seconds at most, bytes
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "8192", "MALLOC_MMAP_MAX_": "60000", "MALLOC_TOP_PAD_": "0"}
"""Environment of a measurement: memory of a tuple that is freed leaves the process at once. Otherwise the gaps
between the tuples that are read ahead, 40 MB in other places each time, would hide what 50,000 numbers take."""
_HOW = ("rss", "traced")


def measure_replay_memory(results: Results, options: argparse.Namespace) -> None:
    """Bytes per pending tuple: growth of resident memory (after the allocator has given back what is free), and
    of what Python and numpy have allocated. The bar is the worst of all. ``--quick`` takes one measurement of
    each kind."""
    repeats = options.repeats or (1 if options.quick else 3)
    worst, fastest = 0.0, []
    for source in SOURCES:
        for how in _HOW:
            found = []
            for number in range(repeats):
                command = [sys.executable, "-m", "benchmarks.replay_memory", source, how]
                found.append(run_json(command, env={**os.environ, **_ALLOCATOR}))
                say(f"  repeat {number + 1}: {source}, {how}: {found[-1]['bytes']:.1f} bytes per pending tuple")
            values = [each["bytes"] for each in found]
            worst = max(worst, median(values))
            results.row(
                what=f"pending tuples of {SIZE:,} bytes, {source}",
                pending=PENDING,
                measured="resident memory" if how == "rss" else "allocated by Python and numpy",
                **{"bytes each": median(values), "s to store them after a failure": found[-1]["stored_s"]},
                repeats=" ".join(f"{value:.1f}" for value in values),
            )
            fastest.append(found[-1]["stored_s"])
    results.bar("replay.bytes_per_pending", worst, "bytes (the worst source and measure)")
    results.bar("replay.store_all_s", max(fastest), f"s until {PENDING:,} failed tuples are in From")


# ---- one measurement -------------------------------------------------------------------------------------


class _PendingTable:
    """A collector that does with message ids what a worker does, and drops the tuples."""

    def __init__(self) -> None:
        self.pending = Pending(3600.0)
        self._ids = MessageIds(Tracker(1, "spout"), 1, self.pending, time.monotonic)

    def ready(self, stream: str = DEFAULT_STREAM) -> bool:
        return True

    def room(self, stream: str = DEFAULT_STREAM) -> int:
        return sys.maxsize

    def emit_batch(self, columns: Any, stream: str = DEFAULT_STREAM, msg_ids: Sequence[Any] | None = None) -> None:
        assert msg_ids is not None
        self._ids.add_many(msg_ids)
        self._ids.take(len(msg_ids))

    def emit_batch_direct(
        self, task: int, columns: Any, stream: str = DEFAULT_STREAM, msg_ids: Sequence[Any] | None = None
    ) -> None:
        raise NotImplementedError("tuples are not sent to a chosen task")


@contextmanager
def _source(kind: str, folder: Path, count: int) -> Iterator[Eden]:
    texts = (f"{number:09d}".ljust(SIZE, "x") for number in range(count))
    if kind == "queue":
        queue = DiskQueue(folder / "eden")
        for first in range(0, count, _FEED):
            queue.append([ReplayRecord((next(texts),)) for _ in range(first, min(first + _FEED, count))])
        queue.close()
        yield QueueEden(folder / "eden", (("line", str),))
        return
    from penstock.connectors.kafka_eden import KafkaEden
    from penstock.connectors.kafka_replay import Broker
    from penstock.testing.servers.kafka import KafkaServer

    with KafkaServer() as kafka:
        kafka.create_topic("lines")
        broker = Broker("benchmark", kafka.bootstrap, {})
        for first in range(0, count, _FEED):
            broker.produce("lines", 0, [next(texts).encode() for _ in range(first, min(first + _FEED, count))])
        broker.close()
        # What the client fetches ahead is bounded, but between 0 and 16 MB: it would hide what is measured.
        yield KafkaEden(kafka.bootstrap, "lines", options={"queued.max.messages.kbytes": 1024})


def _run(kind: str, traced: bool, folder: Path) -> dict[str, float]:
    conf: Conf = {}
    with _source(kind, folder, WARM_UP + PENDING + _REST) as eden:
        table, state = _PendingTable(), TaskState()
        spout = ReplaySpout(eden)
        ids = {"lines": (1,)}
        context = Context("memory", "lines", 1, 0, ids, delivery="at_least_once", state=state, folder=str(folder))
        spout.open(conf, context, table)
        spout.activate()
        if traced:
            tracemalloc.start()  # before the warm-up: what is read ahead counts before and after
        while table.pending.next < WARM_UP:
            _emit(spout, table)
            spout.ack_many(table.pending.take_all())  # type: ignore[arg-type]
            spout.before_snapshot()
        before = _memory(spout, traced)
        begun = table.pending.count
        while table.pending.count - begun < PENDING:
            _emit(spout, table)
        grown = _memory(spout, traced) - before
        tracemalloc.stop()
        pending, stored_from = table.pending.count - begun, time.monotonic()
        spout.deactivate()
        spout.fail_many(table.pending.take_all(), Failure("", "replaced", handed_on=True))  # type: ignore[arg-type]
        while not spout.settled():
            time.sleep(0.005)  # as long as the threads of the spout work
        stored = time.monotonic() - stored_from
        spout.close()
        return {"bytes": grown / pending, "stored_s": stored}


def _emit(spout: ReplaySpout, table: _PendingTable) -> None:
    count, since = table.pending.next, time.monotonic()
    while table.pending.next == count:
        spout.next_batch()
        if spout._replayer is not None:
            spout._replayer.wait(0.01)
        if time.monotonic() - since > _PATIENCE:
            raise SystemExit("the source has no more tuples")


def _memory(spout: ReplaySpout, traced: bool) -> int:
    """Bytes, while as much is read ahead as may be."""
    replayer, since = spout._replayer, time.monotonic()
    assert replayer is not None
    while len(replayer._read) < 0.95 * min(CAPACITY, READ_AHEAD_BYTES // SIZE):
        time.sleep(0.01)  # as long as the thread that reads works
        if time.monotonic() - since > _PATIENCE:
            raise SystemExit("the source has no more tuples")
    gc.collect()
    return tracemalloc.get_traced_memory()[0] if traced else _resident()


def _resident() -> int:
    """Resident memory without what the allocator keeps for later, once it no longer changes: the client of Kafka
    fetches ahead, too."""
    libc, since = ctypes.CDLL(None), time.monotonic()
    last: list[int] = []
    while time.monotonic() - since < _SETTLING:
        libc.malloc_trim(0)
        last = [*last[-3:], int(psutil.Process().memory_info().rss)]
        if len(last) == 4 and max(last) - min(last) < _STEADY:
            break
        time.sleep(0.5)
    return last[-1]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("source", choices=SOURCES)
    parser.add_argument("how", choices=_HOW)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(_run(options.source, options.how == "traced", Path(folder))))


if __name__ == "__main__":
    main()
