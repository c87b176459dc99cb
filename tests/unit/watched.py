"""A topology to look at, without Spark: the real bus, coordinator and migrations, and a test's own reports."""

import dataclasses
import math
import threading

from penstock import Settings, SimulatedClock, TopologyBuilder, make_plan
from penstock.coordinator import status
from penstock.coordinator.crew import Connection
from penstock.coordinator.load_monitor import LoadMonitor
from penstock.coordinator.messages import Hello, Report
from penstock.coordinator.migrations import Migrations
from penstock.coordinator.placements import Placements
from penstock.coordinator.scalings import Scalings
from penstock.coordinator.server import Coordinator
from penstock.errors import SettingError, TopologyFailed
from penstock.metrics.bus import MetricsBus
from penstock.metrics.stats import TaskStats
from penstock.plan.model import SlotId
from penstock.spark.moving import Moved
from penstock.testing import CaptureBolt, FeederSpout

LINES, ORDERS, SPLIT_0, SPLIT_1, SHOW = 1, 2, 3, 4, 5
"""Tasks."""


def topology(name="word-count", **settings):
    builder = TopologyBuilder()
    builder.set_spout("lines", FeederSpout("line")).set_max_rate(1000)
    builder.set_spout("orders", FeederSpout("line"))
    split = builder.set_bolt("split", PassOn(), 2)
    split.shuffle_grouping("lines").shuffle_grouping("orders")
    builder.set_bolt("show", CaptureBolt()).global_grouping("split")
    built = builder.build("word-count", Settings(delivery="at_least_once", **settings))
    return dataclasses.replace(built, name=name)  # any name, also one that build() would reject


class PassOn(CaptureBolt):
    def declare_output_fields(self, declarer):
        declarer.declare("line")


class Watched:
    """The double. ``kill``, ``activate`` and ``deactivate`` do what ``RunningTopology`` says they do."""

    def __init__(self, name="word-count", **settings):
        self.clock = SimulatedClock(1000.0)
        self.topology = topology(name, **settings)
        self.plan = make_plan(self.topology)
        self.bus = MetricsBus(self.plan, self.clock.monotonic)
        self.coordinator = Coordinator()
        self.slots = {}
        self.migrations = Migrations(self.plan, self.topology.settings)
        self.scalings = Scalings(self.plan, self.topology, self.topology.settings)
        self.placements = Placements(self.topology.settings)
        self.monitor = LoadMonitor(self.topology.settings, self.clock)
        self.state, self.restarts, self.committed, self.begun = "active", 0, 0, 1000.0
        self.commit_age = None
        self.max_rates = {"lines": 1000.0, "orders": math.inf}
        self.ending, self.left_behind, self.error = threading.Event(), "", None
        self.ended = lambda: None
        self.killed_with = None
        self.rearranged, self.more = None, 2

    def report(self, slot, tasks, attempt=0, **more):
        data = {str(task): stats.to_json() for task, stats in tasks.items()}
        pending, cpu = more.pop("pending", 0), more.pop("cpu", 1.5)
        self.bus.record(attempt, SlotId(*slot), Report(0, 0, pending, cpu, 2_000_000, data, **more))

    def connect(self, slot, pid=4321, node="node-a", attempt=0):
        hello = Hello(*slot, attempt, pid, node)
        self.slots[SlotId(*slot)] = Connection(hello, None)

    def status(self):
        return status.take(self, self.clock)

    def look(self):
        return self.monitor.look(self.clock.monotonic(), self.bus, self.slots)

    def placement(self):
        return self.monitor.placement()

    def rearrange(self):
        return self.rearranged

    def move(self, slot, node):
        if str(slot) not in map(str, self.plan.slot_ids()):
            raise SettingError("topology 'word-count'", "has the slots 0.0, 0.1, 1.0, …", slot)
        if node not in ("a", "b"):
            raise TopologyFailed("topology 'word-count'", "a slot moves to a free seat", node)
        return Moved(0.0, slot, "b", node, gap=0.041, seconds=0.3, steps={"seated": 0.1})

    def spread(self):
        return self.more

    def set_max_rates(self, rates):
        self.max_rates |= rates

    def activate(self):
        if self.error is not None:
            raise self.error
        self.state = "active"

    def deactivate(self):
        self.state = "inactive"

    def kill(self, drain=True):
        self.killed_with = drain
        self.ending.set()
        self.ended()
        if self.error is not None:
            raise self.error


def busy(watched):
    """Two seconds of work: 100 lines a second, each of two words; ``show`` cannot keep up."""
    slow = {"queued": 15_000, "capacity": 16_384, "demand": 900.0}
    for second in range(3):
        n = 100 * second
        lines = TaskStats(emitted=n, sent=n, sent_bytes=10 * n, acked=n // 2, failed=second, limit=1000.0)
        split = TaskStats(received=n // 2, executed=n // 2, emitted=n, busy=n * 1e-4, capacity=16_384)
        split.latency.record(0.003, n)
        show = TaskStats(received=n, executed=n, errors=second, last_error="no ink", **(slow if second else {}))
        watched.report((0, 0), {LINES: lines}, pending=7)
        watched.report((1, 0), {SPLIT_0: split})
        watched.report((1, 1), {SPLIT_1: split})
        errors = ["component 'show': no ink"] if second == 2 else []
        published = {str(SHOW): [["written", 2 * n], ["share", math.nan]]}
        watched.report((2, 0), {SHOW: show}, published=published, errors=errors, pending=3)
        watched.clock.advance(1.0)
    for slot in ((0, 0), (0, 1), (1, 0), (1, 1)):
        watched.connect(slot)
