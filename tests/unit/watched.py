"""A topology for tests of views, without Spark: the real bus, driver and migrations, with reports from the
test."""

import copy
import dataclasses
import math
import threading

from penstock import SimulatedClock, TopologyBuilder, make_plan
from penstock.driver import status
from penstock.driver.coordinator import Coordinator
from penstock.driver.load_monitor import LoadMonitor
from penstock.driver.migration_controller import MigrationController
from penstock.driver.placement_controller import PlacementController
from penstock.driver.refit_controller import RefitController
from penstock.driver.registry import WorkerConnection
from penstock.driver.requests import Moved
from penstock.driver.scaling_controller import ScalingController
from penstock.errors import SettingError, TopologyFailed
from penstock.metrics.bus import MetricsBus
from penstock.metrics.stats import TaskStats
from penstock.plan.model import WorkerId
from penstock.protocol.events import Hello, WorkerReport
from penstock.testing import CaptureBolt, FeederSpout
from tests.helpers import settings_with

LINES, ORDERS, SPLIT_0, SPLIT_1, SHOW = 1, 2, 3, 4, 5
"""Task ids."""


def topology(name="word-count", **settings):
    builder = TopologyBuilder()
    builder.set_spout("lines", FeederSpout("line")).set_max_rate(1000)
    builder.set_spout("orders", FeederSpout("line"))
    split = builder.set_bolt("split", PassOn(), 2)
    split.shuffle_grouping("lines").shuffle_grouping("orders")
    builder.set_bolt("show", CaptureBolt()).global_grouping("split")
    built = builder.build("word-count", settings_with(delivery="at_least_once", **settings))
    return dataclasses.replace(built, name=name)  # any name, even one that build() would reject


class PassOn(CaptureBolt):
    def declare_output_fields(self, declarer):
        declarer.declare("line")


class Watched:
    """A test double. ``kill``, ``activate`` and ``deactivate`` behave like those of ``RunningTopology``."""

    def __init__(self, name="word-count", **settings):
        self.clock = SimulatedClock(1000.0)
        self.internals = self.placing = self
        self.name = name
        self.topology = topology(name, **settings)
        self.plan = make_plan(self.topology)
        self.bus = MetricsBus(self.plan, self.clock.monotonic)
        self.server = Coordinator()
        self.workers = {}
        self.migrations = MigrationController(self.plan, self.topology.settings)
        self.scalings = ScalingController(self.plan, self.topology, self.topology.settings)
        self.refits = RefitController(self.plan, self.topology, self.topology.settings)
        self.placements = PlacementController(self.topology.settings)
        self.monitor = LoadMonitor(self.topology.settings, self.clock)
        self.state, self.restarts, self.committed, self.begun = "active", 0, 0, 1000.0
        self.commit_age = None
        self.ackers = []
        self.max_rates = {"lines": 1000.0, "orders": math.inf}
        self.closing, self.left_behind, self.error = threading.Event(), "", None
        self.ended = lambda: None
        self.killed_with = None
        self.rearranged, self.more = None, 2

    def report(self, worker, tasks, attempt=0, **more):
        data = {task: copy.deepcopy(stats) for task, stats in tasks.items()}
        pending, cpu = more.pop("pending", 0), more.pop("cpu", 1.5)
        self.bus.record(attempt, WorkerId(*worker), WorkerReport(0, 0, pending, cpu, 2_000_000, data, **more))

    def connect(self, worker, pid=4321, node="node-a", attempt=0):
        hello = Hello(*worker, attempt, pid, node)
        self.workers[WorkerId(*worker)] = WorkerConnection(hello, None)

    def status(self):
        return status.take(self, self.clock)

    def poll(self):
        return self.monitor.poll(self.clock.monotonic(), self.bus, self.workers)

    def explain(self):
        return self.monitor.placement()

    def rearrange(self):
        return self.rearranged

    def move(self, worker, node):
        if str(worker) not in map(str, self.plan.worker_ids()):
            raise SettingError("topology 'word-count'", f"it has no worker {worker}, only 0.0, 0.1, 1.0, …")
        if node not in ("a", "b"):
            raise TopologyFailed(
                "topology 'word-count'", f"a worker cannot move to {node}, which has no free slot"
            )
        return Moved(0.0, worker, "b", node, gap=0.041, seconds=0.3, steps={"prefetched": 0.1})

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
        self.closing.set()
        self.ended()
        if self.error is not None:
            raise self.error


def busy(watched):
    """Two seconds of work: 100 lines per second with two words each; ``show`` cannot keep up."""
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
        published = {SHOW: [["written", 2 * n], ["share", math.nan]]}
        watched.report((2, 0), {SHOW: show}, published=published, errors=errors, pending=3)
        watched.clock.advance(1.0)
    for worker in ((0, 0), (0, 1), (1, 0), (1, 1)):
        watched.connect(worker)
