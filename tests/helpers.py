"""Small components and topologies shared by several tests."""

from __future__ import annotations

import dataclasses
from collections import deque

from penstock import BasicBolt, BatchBolt, BatchSpout, RichBolt, Settings, TopologyBuilder
from penstock.settings import BY_NAME
from penstock.testing import CaptureBolt, FeederSpout, LocalRunner

MANY = 1000
"""More workers than any topology of the tests has executors."""


def wide(topology):
    """The topology with a worker for each executor, unless it says how many it wants."""
    settings = topology.settings
    if settings.workers.count:
        return topology
    workers = dataclasses.replace(settings.workers, count=MANY)
    return dataclasses.replace(topology, settings=dataclasses.replace(settings, workers=workers))


class Pass(BasicBolt):
    """Emits its input."""

    def __init__(self, *fields):
        self._fields = fields

    def declare_output_fields(self, declarer):
        declarer.declare(*self._fields)

    def execute(self, tup, collector):
        collector.emit(tup)


class RichPass(RichBolt):
    """Emits its input, anchored, and acks it."""

    def __init__(self, *fields):
        self._fields = fields

    def declare_output_fields(self, declarer):
        declarer.declare(*self._fields)

    def prepare(self, conf, context, collector):
        self._collector = collector

    def execute(self, tup):
        self._collector.emit(tup, anchors=tup)
        self._collector.ack(tup)


class BatchPass(BatchBolt):
    """Emits its input in batches."""

    def __init__(self, *fields):
        self._fields = fields

    def declare_output_fields(self, declarer):
        declarer.declare(*self._fields)

    def execute_batch(self, batch, source, collector):
        collector.emit_batch(batch)


class BatchFeeder(BatchSpout):
    """Emits the given batches, ``at_once`` of them per call."""

    def __init__(self, *fields, batches, at_once=1):
        self._fields, self._batches, self._at_once = fields, deque(batches), at_once

    def declare_output_fields(self, declarer):
        declarer.declare(*self._fields)

    def open(self, conf, context, collector):
        self._collector = collector

    def next_batch(self):
        for _ in range(min(self._at_once, len(self._batches))):
            self._collector.emit_batch(self._batches.popleft())


class CaptureBatches(BatchBolt):
    """Keeps every batch and its source."""

    def __init__(self):
        self.batches = []

    def execute_batch(self, batch, source, collector):
        self.batches.append((batch, source))


def line_topology(spout, *bolts, settings=None, parallelism=1, local=False):
    """``spout`` -> ``b1`` -> ``b2`` ... by shuffle grouping, or local-or-shuffle; each at ``parallelism``."""
    builder = TopologyBuilder()
    builder.set_spout("spout", spout, parallelism)
    above = "spout"
    for number, bolt in enumerate(bolts, 1):
        declarer = builder.set_bolt(f"b{number}", bolt, parallelism)
        (declarer.local_or_shuffle_grouping if local else declarer.shuffle_grouping)(above)
        above = f"b{number}"
    return builder.build("line", settings or Settings())


def run_rows(fields, rows, bolt, settings=None, **options):
    """Feed rows through ``bolt`` (component ``b1``) into a capture (``b2``). Returns the idle runner."""
    runner = LocalRunner(
        line_topology(FeederSpout(*fields, rows=rows), bolt, CaptureBolt(), settings=settings), **options
    )
    runner.run_until_idle()
    return runner


def per_task(runner, component):
    """The tuples that each task of a ``CaptureBolt`` received, as plain tuples, lowest task first."""
    return [[tuple(tup) for tup in bolt.tuples] for bolt in runner.component(component)]


def executors_of(runner):
    """All executors of the runner's workers."""
    return [executor for worker in runner.workers.values() for executor in worker.inspect().executors]


def reports_of(runner):
    """What each worker reported last, by id, after it was asked to."""
    runner.report()
    return {id: connection.answer for id, connection in runner.registry.workers.items()}


class Driven:
    """A worker without a host. ``events`` and ``jobs`` collect what it wants."""

    def __init__(self, worker):
        self.worker, self.events, self.jobs, self.wait = worker, [], [], 0.0

    def offer(self, frame):
        return self.worker.intake.offer(frame)

    def tell(self, command):
        self.events += self.worker.handle(command)

    def turn(self):
        """The rows of one turn."""
        turn = self.worker.turn()
        self.events += turn.events
        self.jobs += turn.jobs
        self.wait = turn.wake_at - self.worker._clock.monotonic()
        self.worker.validate()
        return turn.rows

    @property
    def now(self):
        return self.worker.inspect()


def settings_with(**values):
    """Settings by short names: the name of a group for its first setting, otherwise the name of the setting. If
    two groups have a setting of that name, the name of the group comes first:
    ``settings_with(delivery="exactly_once", seed=3, scaling_interval=1.0)``."""
    return Settings().with_values({_dotted(name): value for name, value in values.items()})


def _dotted(name):
    full = [each for each in BY_NAME if name in (each.partition(".")[2], each.replace(".", "_"))]
    (found,) = full or [name]
    return found
