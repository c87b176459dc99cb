"""Workers whose machines' clocks are wrong."""

import threading

import pytest

from penstock import Delivery, Settings, SimulatedClock, TopologyBuilder, Transport
from penstock.clock import SystemClock
from penstock.driver.coordinator import Coordinator
from penstock.driver.registry import WorkerConnection, WorkerRegistry
from penstock.metrics.bus import MetricsBus
from penstock.plan.planner import make_plan
from penstock.protocol.client import ControlClient
from penstock.protocol.driver_clock import DriverClock, RunTime
from penstock.protocol.events import Hello, WorkerReport
from penstock.testing import CaptureBolt, FeederSpout, LocalRunner


class Skewed:
    """Another clock, whose wall time is wrong by so many seconds, and whose monotonic time began elsewhere."""

    def __init__(self, skew, right=None):
        self.skew, self.right = skew, right or SystemClock()

    def now(self):
        return self.right.now() + self.skew

    def monotonic(self):
        return self.right.monotonic() + 1e6


def measured(local, right):
    clock = DriverClock(local)
    clock.add(clock.monotonic(), RunTime(right).now(), clock.monotonic())
    return clock


def test_the_sample_with_the_shortest_round_trip_counts():
    time = SimulatedClock(1000.0)
    clock = DriverClock(time)
    assert clock.now() == 1000.0
    clock.add(sent=0.0, driver_time=570.0, received=100.0)
    assert clock.now() == 1520.0
    clock.add(sent=100.0, driver_time=607.5, received=101.0)  # the error is at most 0.5 s
    assert clock.now() == 1507.0
    clock.add(sent=110.0, driver_time=700.0, received=170.0)
    assert clock.now() == 1507.0
    assert clock.skew == -507.0


def test_old_samples_are_forgotten():
    clock = DriverClock(SimulatedClock(1000.0))
    clock.add(0.0, 500.0, 0.0)
    for _ in range(8):
        clock.add(0.0, 600.0, 2.0)
    assert clock.now() == 1599.0


def test_setting_the_drivers_clock_does_not_change_its_time():
    right = SimulatedClock(50.0)
    local = Skewed(100.0, right)
    time = RunTime(local)
    local.skew = -3600.0
    right.advance(2.0)
    assert time.now() == pytest.approx(152.0)


@pytest.mark.parametrize("skew", [-90.0, 0.0, 90.0])
def test_a_worker_that_connects_knows_the_drivers_time(skew):
    coordinator = Coordinator(clock=Skewed(5.0))
    coordinator.start()
    client = None
    try:
        client = ControlClient(coordinator.address, coordinator.secret, lambda: None, Skewed(skew))
        assert client.clock.now() == pytest.approx(Skewed(5.0).now(), abs=0.5)
        assert client.clock.skew == pytest.approx(skew - 5.0, abs=0.5)
    finally:
        if client is not None:
            client.close()
        coordinator.stop()


def run(monkeypatch, clock_of):
    """How many tuples a bolt executed and how many it dropped as too old, with a clock for each worker."""
    builder = TopologyBuilder()
    builder.set_spout("words", FeederSpout("word"))
    builder.set_bolt("show", CaptureBolt()).shuffle_grouping("words")
    topology = builder.build(
        "t", Settings(delivery=Delivery("at_least_once", message_timeout=30.0), transport=Transport(fusing=False))
    )
    monkeypatch.setattr(LocalRunner, "clock_of", lambda local, worker: clock_of(worker, local.clock))
    local = LocalRunner(topology)
    local.feed("words", [(str(number),) for number in range(20)])
    local.run(2.0)
    (stats,) = local.stats("show")
    local.close()
    return stats.executed, stats.expired


@pytest.mark.parametrize("skew", [-3600.0, 3600.0])
def test_tuples_are_not_dropped_where_clocks_differ_by_more_than_the_time_out(monkeypatch, skew):
    def of(worker, clock):
        return measured(Skewed(skew * worker.stage, clock), clock)

    assert run(monkeypatch, of) == (20, 0)


def test_with_clocks_that_are_not_corrected_they_would_be(monkeypatch):
    assert run(monkeypatch, lambda worker, clock: Skewed(3600.0 * worker.stage, clock))[0] == 0


def test_a_wrong_clock_is_noted_once_for_each_node(caplog):
    builder = TopologyBuilder()
    builder.set_spout("words", FeederSpout("word"))
    builder.set_bolt("show", CaptureBolt()).shuffle_grouping("words")
    plan = make_plan(builder.build("t"))
    bus = MetricsBus(plan)
    registry = WorkerRegistry(0, plan, bus, 1, threading.Condition(), lambda call: call())
    for worker, (node, skew) in enumerate([("a/1", 0.9), ("b/2", -35.25), ("b/3", -35.25), ("c/4", 2.0)]):
        connection = WorkerConnection(Hello(0, worker, 0, 1, node), None)
        registry.add(connection)
        for _ in range(2):
            registry.handle(connection, WorkerReport(0, 0, 0, 0.0, 0, {}, clock_skew=skew))
    advice = (
        "Time-outs and latencies are corrected for it; times that your code reads are not. "
        "Synchronise the clocks of the nodes (NTP)."
    )
    assert [(note.kind, note.text) for note in bus.notes()] == [
        ("clock", f"The clock of node b is 35.2 s behind the driver's. {advice}"),
        ("clock", f"The clock of node c is 2.0 s ahead of the driver's. {advice}"),
    ]
    assert caplog.text.count("The clock of node b") == 1
