"""Components whose work can be checked against a sequential oracle, and topologies of them.

Every spout task emits the numbers from 0 to its count, each with a key. The counting bolts emit ⟨key, how often so
far⟩, so that what sinks get tells of the state too: each pair once, whatever the order.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from penstock import (
    BasicBolt,
    BatchBolt,
    BatchSpout,
    Delivery,
    Lifecycle,
    RichBolt,
    Settings,
    Spout,
    Topology,
    TopologyBuilder,
    TransactionalSink,
)
from penstock.faults import STEPS
from penstock.testing import LocalRunner

KEYS = 7
SPOUTS = ("numbers", "quick", "slow")
INTERVAL = 0.004  # simulated seconds between two epochs: five of them in a run, or more where workers are slow
WORKER_STEPS = ("marked", "snapshotted", "written", "published")
"""Those that each worker takes on its own: the first in the first stage, the second in the others."""


class Crash(Exception):
    """The process died here."""


def die():
    raise Crash


def key_of(number):
    return f"k{number % KEYS}"


# ---- spouts ------------------------------------------------------------------------------------------------


class Numbers(Spout):
    """A few numbers every other call; where it is, is its state."""

    def __init__(self, count, burst=8):
        self._count, self._burst = count, burst
        self._rests = False

    def declare_output_fields(self, declarer):
        declarer.declare(("n", int), ("key", str))

    def open(self, conf, context, collector):
        self._collector = collector
        self.position = context.state.value("position", 0)
        self.acked = []

    def next_tuple(self):
        self._rests = not self._rests
        if self._rests:
            return
        end = min(self.position.value + self._burst, self._count)
        for n in range(self.position.value, end):
            self._collector.emit([n, key_of(n)], msg_id=n)
        self.position.value = end

    @property
    def done(self):
        return self.position.value == self._count

    def ack(self, msg_id):
        self.acked.append(msg_id)


class NumberBatches(BatchSpout):
    """The same in batches, with the position in a map."""

    def __init__(self, count, burst=24):
        self._count, self._burst = count, burst
        self._rests = False

    def declare_output_fields(self, declarer):
        declarer.declare(("n", int), ("key", str))

    def open(self, conf, context, collector):
        self._collector = collector
        self.positions = context.state.map("positions", 0)

    def next_batch(self):
        self._rests = not self._rests
        begin = self.positions["at"]
        end = min(begin + self._burst, self._count)
        if self._rests or begin == end:
            return
        self._collector.emit_batch([list(range(begin, end)), [key_of(n) for n in range(begin, end)]])
        self.positions["at"] = end

    @property
    def done(self):
        return self.positions["at"] == self._count


class Replays(Spout):
    """At least once: emits again what failed; its state is the number below which all are acked."""

    def __init__(self, count, burst=8):
        self._count, self._burst = count, burst
        self._rests = False

    def declare_output_fields(self, declarer):
        declarer.declare(("n", int), ("key", str))

    def open(self, conf, context, collector):
        self._collector = collector
        self.low = context.state.value("low", 0)
        self._next = self.low.value
        self._open = set()

    def next_tuple(self):
        self._rests = not self._rests
        if self._rests:
            return
        for _ in range(min(self._burst, self._count - self._next)):
            self._open.add(self._next)
            self._emit(self._next)
            self._next += 1

    def before_snapshot(self):
        self.low.value = min(self._open, default=self._next)

    def ack(self, msg_id):
        self._open.remove(msg_id)

    def fail(self, msg_id, failure):
        self._emit(msg_id)

    @property
    def done(self):
        return self._next == self._count

    def _emit(self, n):
        self._collector.emit([n, key_of(n)], msg_id=n)


# ---- bolts -------------------------------------------------------------------------------------------------


class Pass(BasicBolt):
    """Emits what it gets, and counts it in a value."""

    def declare_output_fields(self, declarer):
        declarer.declare(("n", int), ("key", str))

    def prepare(self, conf, context):
        self.seen = context.state.value("seen", 0, merge=operator.add)

    def execute(self, tup, collector):
        self.seen.value += 1
        collector.emit(tup)


class BatchPass(BatchBolt):
    def declare_output_fields(self, declarer):
        declarer.declare(("n", int), ("key", str))

    def execute_batch(self, batch, source, collector):
        collector.emit_batch(batch)


class Count(BasicBolt):
    """⟨key, how often so far⟩ for each tuple."""

    def declare_output_fields(self, declarer):
        declarer.declare(("key", str), ("times", int))

    def prepare(self, conf, context):
        self.counts = context.state.map("counts", 0)

    def execute(self, tup, collector):
        self.counts[tup.key] += 1
        collector.emit([tup.key, self.counts[tup.key]])


class RichCount(RichBolt):
    """The same, with all counts in one value that is changed in place."""

    def declare_output_fields(self, declarer):
        declarer.declare(("key", str), ("times", int))

    def prepare(self, conf, context, collector):
        self._collector = collector
        self.counts = context.state.value("counts", {}).value

    def execute(self, tup):
        self.counts[tup.key] = self.counts.get(tup.key, 0) + 1
        self._collector.emit([tup.key, self.counts[tup.key]], anchors=tup)
        self._collector.ack(tup)


class BatchCount(BatchBolt):
    """The same, a batch at a time."""

    def declare_output_fields(self, declarer):
        declarer.declare(("key", str), ("times", int))

    def prepare(self, conf, context):
        self.counts = context.state.map("counts", 0)

    def execute_batch(self, batch, source, collector):
        keys = batch.column("key").to_pylist()
        before = Counter(dict(zip(keys, self.counts.get_columns(keys), strict=True)))
        times = []
        for key in keys:
            before[key] += 1
            times.append(before[key])
        self.counts.add_columns(batch.column("key"))
        collector.emit_batch([keys, times])


class Seen(BasicBolt):
    """At least once: how often each number came."""

    def prepare(self, conf, context):
        self.times = context.state.map("times", 0)

    def execute(self, tup, collector):
        self.times[tup.n] += 1


# ---- a sink ------------------------------------------------------------------------------------------------

WORLDS: dict[str, World] = {}
"""Outside systems by name: what they hold survives a crash."""


class World:
    """An outside system: transactions that are prepared, and rows that everyone sees."""

    def __init__(self):
        self.prepared: dict[str, list[Any]] = {}
        self.rows: list[Any] = []
        self.done: set[str] = set()

    def commit(self, token):
        if token not in self.done:
            assert token in self.prepared, f"{token} was promised to be there"
            self.rows += self.prepared.pop(token)
            self.done.add(token)


class Outside(TransactionalSink):
    """Writes to a ``World``."""

    starts = 0

    def __init__(self, world):
        self._world = world

    def prepare(self, conf, context):
        self._rows = []
        self._task = f"{context.component}/{context.index}/"
        Outside.starts += 1
        self._start = Outside.starts

    @property
    def world(self):
        return WORLDS[self._world]

    def recover(self, tokens):
        for token in tokens:
            self.world.commit(token)
        for token in [token for token in self.world.prepared if token.startswith(self._task)]:
            del self.world.prepared[token]

    def write(self, batch, source):
        self._rows += [tuple(row.values()) for row in batch.to_pylist()]

    def prepare_commit(self, epoch):
        if not self._rows:
            return None
        token = f"{self._task}{epoch}/{self._start}"
        self.world.prepared[token], self._rows = self._rows, []
        return token

    def commit(self, token):
        self.world.commit(token)


# ---- topologies --------------------------------------------------------------------------------------------


def diamond(builder, count, sink):
    """Two ways to the counts: over the middle, and past it, relayed by the workers in between."""
    builder.set_spout("numbers", Numbers(count), 2)
    builder.set_bolt("middle", Pass(), 2).shuffle_grouping("numbers")
    builder.set_bolt("count", Count(), 2).fields_grouping("middle", "key").fields_grouping("numbers", "key")
    builder.set_bolt("sink", sink, 2).shuffle_grouping("count")
    return {"numbers": 2 * 2}


def fused(builder, count, sink):
    """Fused groups in the first stage, and of counts with their sinks."""
    builder.set_spout("numbers", Numbers(count), 2)
    builder.set_bolt("one", Pass(), 2).local_or_shuffle_grouping("numbers")
    builder.set_bolt("two", BatchPass(), 2).local_or_shuffle_grouping("one")
    builder.set_bolt("count", RichCount(), 2).fields_grouping("two", "key")
    builder.set_bolt("sink", sink, 2).local_or_shuffle_grouping("count")
    return {"numbers": 2}


def speeds(builder, count, sink):
    """A quick batch spout and a slow one that meet, one of them past two stages."""
    builder.set_spout("quick", NumberBatches(count))
    builder.set_spout("slow", Numbers(count, burst=2))
    builder.set_bolt("one", BatchPass(), 2).shuffle_grouping("quick")
    builder.set_bolt("two", Pass()).shuffle_grouping("one")
    builder.set_bolt("count", BatchCount(), 2).fields_grouping("two", "key").fields_grouping("slow", "key")
    builder.set_bolt("sink", sink, 1).shuffle_grouping("count")
    return {"quick": 1, "slow": 1}


SHAPES = {"diamond": diamond, "fused": fused, "speeds": speeds}


def build(shape, count, sink, crash_at="") -> tuple[Topology, Counter[str]]:
    """A topology, and how often it counts each key."""
    builder = TopologyBuilder()
    copies = SHAPES[shape](builder, count, sink)
    oracle: Counter[str] = Counter()
    for n in range(count):
        oracle[key_of(n)] += sum(copies.values())
    settings = Settings(
        delivery=Delivery("exactly_once", epoch_interval=INTERVAL), lifecycle=Lifecycle(crash_at=crash_at)
    )
    return builder.build("t", settings), oracle


def crash_points(epochs):
    """Every step of a commit, in every epoch asked for."""
    return [f"{step}:{epoch}" for step in STEPS for epoch in epochs]


def counts(runner: LocalRunner) -> Counter[str]:
    total: Counter[str] = Counter()
    for bolt in runner.component("count"):
        total.update(dict(bolt.counts))
    return total


def pairs(oracle) -> list[tuple[str, int]]:
    """What sinks hold when each key was counted so often."""
    return sorted((key, times) for key, most in oracle.items() for times in range(1, most + 1))


def run_to_the_end(runner: LocalRunner) -> None:
    """All tuples done with, and committed and published."""
    run_until_idle(runner)
    last = runner.commits.newest
    run_until(runner, lambda: runner.commits.published > last)


def run_until_idle(runner: LocalRunner) -> None:
    """All tuples done with, also where spouts rest."""
    spouts = [spout for id in SPOUTS if id in runner.plan.tasks_of for spout in runner.component(id)]
    run_until(runner, lambda: all(spout.done for spout in spouts))
    runner.run_until_idle()


def flap(runner, component, draw, until, seconds=0.002):
    """Set other migration routes of the component every now and then."""
    tasks = len(runner.plan.tasks_of[component])
    end = runner.clock.now() + 10.0
    while not until():
        assert runner.clock.now() < end, "stuck"
        heavy = draw.sample(range(tasks), draw.randrange(tasks))
        light = [task for task in range(tasks) if task not in heavy]
        runner.reroute(component, {task: draw.choice(light) for task in heavy})
        runner.run(draw.uniform(0.0, seconds))


def run_until(runner: LocalRunner, condition: Callable[[], bool]) -> None:
    end = runner.clock.now() + 10.0
    while not condition():
        assert runner.clock.now() < end, "stuck"
        runner.run(INTERVAL)


def rows_of(table: pa.Table) -> list[tuple[Any, ...]]:
    return sorted(tuple(row.values()) for row in table.to_pylist())
