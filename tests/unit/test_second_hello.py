"""A slot from which a second process connects. Spark starts a task again whose process has died."""

import threading

import pytest

from penstock import TopologyBuilder
from penstock.driver.coordinator import Coordinator
from penstock.driver.registry import WorkerConnection, WorkerRegistry
from penstock.errors import ControlRefused
from penstock.metrics.bus import MetricsBus
from penstock.plan.model import WorkerId
from penstock.plan.planner import make_plan
from penstock.protocol.client import ControlClient
from penstock.protocol.events import Hello
from penstock.testing import CaptureBolt, FeederSpout
from tests.unit.fake_world import FakeWorker, World

BOLTS = WorkerId(1, 0)


def plan():
    builder = TopologyBuilder()
    builder.set_spout("words", FeederSpout("word"))
    builder.set_bolt("show", CaptureBolt()).shuffle_grouping("words")
    return make_plan(builder.build("t"))


class Silent:
    """The driver's end of a connection whose worker says nothing."""

    def write(self, data): ...

    def close(self): ...


def connection(pid):
    return WorkerConnection(Hello(0, 0, 0, pid, "host/0"), Silent())


def registry(placed=False):
    made = plan()
    return WorkerRegistry(0, made, MetricsBus(made), 1, threading.Condition(), lambda call: call(), placed)


@pytest.mark.parametrize("gone", [False, True])
def test_it_is_refused_and_the_first_stays(gone):
    made, first, second = registry(), connection(1), connection(2)
    made.add(first)
    made.open(1, 0, {})
    if gone:
        made.connection_lost(first)
    with pytest.raises(ControlRefused, match=r"worker 0.0: .*process 2 on host/0.*process 1"):
        made.add(second)
    assert made.workers == {first.id: first}
    assert made.broken == gone, "a loss stays a loss"


def test_a_slot_that_was_assigned_is_not_given_to_another_process():
    made, first = registry(placed=True), connection(1)
    made.add(first)
    made.assign_slots({first.id: first.id})
    made.connection_lost(first)
    with pytest.raises(ControlRefused):
        made.add(connection(2))
    assert made.slots == made.workers == {first.id: first}


@pytest.mark.parametrize("placed", [False, True])
def test_it_is_accepted_if_the_first_died_before_it_was_told_anything(placed):
    made, first, second = registry(placed), connection(1), connection(2)
    made.add(first)
    made.connection_lost(first)
    made.add(second)
    assert (made.slots if placed else made.workers) == {first.id: second}
    assert not made.broken


def test_the_coordinator_closes_its_connection_and_the_topology_does_not_fail():
    coordinator = Coordinator()
    coordinator.start()
    made = plan()
    registry, clients = coordinator.begin(0, made, MetricsBus(made), 1), []
    try:
        for pid in (1, 2):
            client = ControlClient(coordinator.address, coordinator.secret, lambda: None)
            clients.append(client)
            client.send(Hello(0, 0, 0, pid, "host/0"))
            assert coordinator.wait(lambda: registry.workers or coordinator.refused, 20)
        assert coordinator.wait(lambda: coordinator.refused == 1, 20)
        assert [each.hello.pid for each in registry.workers.values()] == [1]
        assert registry.failure is None
        assert not registry.broken
    finally:
        for client in clients:
            client.close()
        coordinator.stop()


def test_a_lost_worker_leads_to_a_restart_even_if_its_slot_connects_again(tmp_path):
    world = World(tmp_path)
    run, query = world.supervisor.runs.current, world.query_of(0)
    lost = next(each for each in query.workers if each.id == BOLTS)
    lost.die()
    lost.connection.gone_at -= 1.0  # within the time in which the engine may explain the loss
    query.workers.append(FakeWorker(world, run.registry, query.launch, BOLTS, "host/0"))
    world.turn_until(lambda: world.refused)
    assert world.supervisor.lifecycle.restarts.count == 0
    lost.connection.gone_at -= 100.0  # that time is over; connections use the clock of the machine
    world.settle()
    world.check()
    assert world.supervisor.lifecycle.restarts.count == 1
    assert all(each.ready for each in world.supervisor.runs.current.registry.workers.values())
