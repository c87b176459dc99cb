"""The experiment of *Sun 2022*, section 3, on Spark: a source, three branches of different speed, a sink that
merges."""

from __future__ import annotations

import random
import time
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

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
    Flow,
    Grouping,
    Lifecycle,
    Migration,
    OutputDeclarer,
    Router,
    Settings,
    Source,
    Targets,
    Topology,
    TopologyBuilder,
    Transport,
    Tuple,
)
from penstock.topology.groupings import Split, by_position

SPEEDS = (50.0, 30.0, 20.0)  # packets per second of each branch, 100 in total: 5 GB in 1 MB packets take a minute
BURST = 400.0  # packets per second while the source sends
ON, OFF = 0.5, 1.5  # seconds it sends and pauses: 100 packets per second on average, the capacity of all branches
HOT = 0.6  # share of a burst that goes to one randomly chosen branch; the others share the rest
PAYLOAD = 10_000  # bytes of a packet; 1 MB in Sun 2022
QUEUE = 40  # packets in a branch's queue
COMPUTED = 0.4
"""Share of a packet's time in which its branch computes: three busy branches then take 1.2 of two cores, and do
not slow each other. For the rest of the time it waits, as a slower node would."""


class Packets(BatchSpout):
    """Emits ``count`` packets in bursts, each with its branch and a value to be summed."""

    def __init__(self, count: int, seed: int) -> None:
        self._count, self._seed = count, seed

    def declare_output_fields(self, declarer: OutputDeclarer) -> None:
        declarer.declare(("branch", int), ("amount", int), ("payload", bytes))

    def open(self, conf: Conf, context: Context, collector: BatchSpoutCollector) -> None:
        self._collector = collector
        self._packets = packets(self._count, self._seed)
        self._sent = 0

    def activate(self) -> None:
        self._begun = time.monotonic()

    def next_batch(self) -> None:
        cycles, within = divmod(time.monotonic() - self._begun, ON + OFF)
        due = int((cycles * ON + min(within, ON)) * BURST)
        end = min(due, self._count, self._sent + 2)
        if end > self._sent and self._collector.ready():
            chosen = self._packets[self._sent : end]
            self._sent = end
            self._collector.emit_batch(
                [[branch for branch, _ in chosen], [value for _, value in chosen], [bytes(PAYLOAD)] * len(chosen)]
            )


def packets(count: int, seed: int) -> list[tuple[int, int]]:
    """Branch and value of each packet; the same for every strategy."""
    rng = random.Random(seed)
    result: list[tuple[int, int]] = []
    while len(result) < count:
        hot = rng.randrange(len(SPEEDS))
        weights = [HOT if branch == hot else (1 - HOT) / (len(SPEEDS) - 1) for branch in range(len(SPEEDS))]
        burst = int(ON * BURST)
        branches = rng.choices(range(len(SPEEDS)), weights, k=burst)
        result += [(branch, rng.randrange(1000)) for branch in branches]
    return result[:count]


class ByBranch(Grouping):
    """Routes a packet to the branch that it names."""

    name = "by branch"

    def router(self, targets: Targets) -> Router:
        return _ByBranch()


class _ByBranch(Router):
    def split(self, batch: pa.RecordBatch) -> Split:
        return by_position(batch.column("branch").to_numpy(), len(SPEEDS))


class ByShare(Grouping):
    """The static allocation of *Sun 2022*: shares are fixed beforehand by the known speeds, whatever a packet
    names."""

    name = "by share"

    def router(self, targets: Targets) -> Router:
        return _ByShare()


class _ByShare(Router):
    def __init__(self) -> None:
        self._given = np.zeros(len(SPEEDS))

    def split(self, batch: pa.RecordBatch) -> Split:
        chosen = []
        for _ in range(batch.num_rows):
            branch = int(np.argmin((self._given + 1) / SPEEDS))
            self._given[branch] += 1
            chosen.append(branch)
        return by_position(np.array(chosen), len(SPEEDS))


class Work(BatchBolt):
    """Compresses packets for its branch's time, and emits their number and sum as partials."""

    emits_partials = True

    def declare_output_fields(self, declarer: OutputDeclarer) -> None:
        declarer.declare(("packets", int), ("total", int))

    def prepare(self, conf: Conf, context: Context) -> None:
        self._seconds = 1 / SPEEDS[context.index]

    def execute_batch(self, batch: pa.RecordBatch, source: Source, collector: BatchCollector) -> None:
        begun = time.monotonic()
        for payload in batch.column("payload"):
            compute(payload.as_py(), COMPUTED * self._seconds)
        time.sleep(max(0.0, begun + self._seconds * batch.num_rows - time.monotonic()))
        collector.emit_batch([[batch.num_rows], [sum(batch.column("amount").to_pylist())]])


def compute(payload: bytes, seconds: float) -> int:
    """Compress a packet, again and again, for so much CPU time. Returns its compressed size."""
    end = time.thread_time() + seconds
    while True:
        size = len(zlib.compress(payload, 9))
        if time.thread_time() >= end:
            return size


class Merge(BasicBolt):
    """The sink, which merges the partials."""

    merges_partials = True

    def prepare(self, conf: Conf, context: Context) -> None:
        self._context, self._packets, self._total = context, 0, 0

    def execute(self, tup: Tuple, collector: Collector) -> None:
        self._packets += tup.packets
        self._total += tup.total
        self._context.publish([[self._packets, self._total]])


def three_branches(count: int, seed: int, strategy: str, conf: dict[str, Any] | None = None) -> Topology:
    """``strategy``: credit, static or migration. Queues hold ``QUEUE`` packets."""
    settings = Settings(
        flow=Flow(
            "step" if strategy == "migration" else "credit",
            inbox_capacity=QUEUE,
            overflow_bytes=0,  # queues of fixed length, as in Sun 2022
        ),
        migration=Migration(strategy == "migration", interval=0.2),
        workers=APART,
        transport=Transport(0.0, frame_bytes=2 * PAYLOAD),
        lifecycle=Lifecycle(metrics_interval=0.1),
    ).with_values(conf or {})
    builder = TopologyBuilder()
    builder.set_spout("source", Packets(count, seed))
    grouping = ByShare() if strategy == "static" else ByBranch()
    builder.set_bolt("work", Work(), len(SPEEDS)).grouping("source", grouping)
    builder.set_bolt("merge", Merge()).global_grouping("work")
    return builder.build("three-branches", settings)


def expected(count: int, seed: int) -> Sequence[int]:
    """The number and sum of the packets that the sink must reach."""
    chosen = packets(count, seed)
    return [len(chosen), sum(value for _, value in chosen)]
