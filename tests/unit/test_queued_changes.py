"""Changes that are requested while another one is carried out, or while nodes are awaited. Without Spark, on a
simulated clock."""

from types import SimpleNamespace

import pytest

from penstock import Delivery, Lifecycle, Settings, TopologyBuilder
from penstock.driver import lifecycle
from penstock.driver.handle import RunningTopology
from penstock.driver.lifecycle import OVER, TopologyPhase
from penstock.driver.operator import Operator
from penstock.driver.request_queue import Posted
from penstock.errors import StateError, TopologyError
from penstock.protocol.requests import OperatorRequest
from penstock.testing import CaptureBolt, FeederSpout
from tests.unit import fake_world
from tests.unit.fake_world import World


def two_bolts(folder, guarantee, tasks=2, spare_slots=0):
    builder = TopologyBuilder()
    builder.set_spout("numbers", FeederSpout("x"))
    builder.set_bolt("count", CaptureBolt(), tasks).fields_grouping("numbers", "x")
    builder.set_bolt("other", CaptureBolt(), 2).fields_grouping("numbers", "x")
    settings = Settings(
        delivery=Delivery(guarantee, state_dir=str(folder)), lifecycle=Lifecycle(start_timeout=20.0)
    )
    return builder.build("words", settings)


class QueueWorld(World):
    """The methods of ``running`` post their requests and do not wait: ``requests`` has them."""

    def __init__(self, folder):
        super().__init__(folder, nodes=3)
        self.requests = []
        self.supervisor.change = self._post
        self.supervisor.call = lambda function: function()
        self.running = RunningTopology(self.supervisor)

    def _post(self, request):
        self.requests.append(request)
        self.supervisor.request(request)

    def finish(self):
        self.turn_until(lambda: all(request.answer.done() for request in self.requests))
        return [request.answer.exception() for request in self.requests]

    def tasks(self):
        return {name: len(tasks) for name, tasks in self.supervisor.runs.current.plan.tasks_of.items()}


@pytest.fixture
def world(tmp_path, monkeypatch):
    monkeypatch.setattr(fake_world, "topology", two_bolts)
    return QueueWorld(tmp_path)


# ---- the form of the topology ------------------------------------------------------------------------------


def test_two_scalings_at_the_same_time_are_both_carried_out(world):
    world.running.scale({"count": 4})
    world.running.scale({"other": 5})
    assert world.finish() == [None, None]
    assert world.tasks() == {"numbers": 1, "count": 4, "other": 5}


def test_a_scaling_applies_to_the_code_that_runs_then(world):
    changed = two_bolts(world.folder, "exactly_once", tasks=3)
    world.running.replace(changed, "changed code")
    world.running.scale({"other": 5})
    assert world.finish() == [None, None]
    assert world.tasks() == {"numbers": 1, "count": 3, "other": 5}
    assert world.running.internals.topology.nodes["count"] is changed.nodes["count"]


def test_a_file_that_is_loaded_again_keeps_a_scaling_that_was_carried_out_meanwhile(world):
    internals = world.running.internals
    internals.load = lambda target: two_bolts(world.folder, "exactly_once", tasks=3)
    world.running.scale({"other": 5})

    def change_and_wait(request):
        world._post(request)
        world.turn_until(request.answer.done)
        return request.answer.result()

    world.supervisor.change = change_and_wait
    answer = Operator(world.running)(OperatorRequest("replace", {"target": "words.py"}))
    assert '"kept": {"other": 5}' in answer.text
    assert world.tasks() == {"numbers": 1, "count": 3, "other": 5}


@pytest.mark.parametrize(
    ("parallelism", "text"),
    [
        ({"cuont": 4}, "it has no component 'cuont' to scale. Did you mean 'count'?"),
        ({"numbers": 4}, "a spout keeps its number of tasks"),
        ({"count": 0}, "parallelism must be a whole number of at least 1, not 0"),
        ({"count": "4"}, "parallelism must be a whole number of at least 1, not '4'"),
    ],
)
def test_whoever_scales_is_told_what_is_wrong(world, parallelism, text):
    world.running.scale(parallelism)
    (error,) = world.finish()
    assert isinstance(error, TopologyError)
    assert text in str(error)
    world.settle()
    world.check()
    assert world.supervisor.lifecycle.phase is TopologyPhase.ACTIVE


def test_spreading_over_all_nodes_keeps_a_form_that_was_requested_meanwhile(world):
    world.engine.release_nodes(["host/2"])
    world.running.scale({"count": 4})
    assert world.running.internals.placing.spread() == 1
    assert world.finish() == [None]
    world.turn_until(lambda: len(world.supervisor.changes.replaced) == 2)
    assert world.tasks() == {"numbers": 1, "count": 4, "other": 2}


# ---- nodes that are awaited --------------------------------------------------------------------------------


@pytest.fixture
def awaiting(world):
    """A world that waits for a node, which joins after 30 s."""
    engine = world.engine
    engine.release_nodes(["host/2"])

    def slowly():
        count, engine.nodes_away = engine.nodes_away, 0
        if count:
            world.after(30.0, lambda: engine._join(count))

    engine.take_nodes_back = slowly
    assert world.running.internals.placing.spread() == 1
    return world


def test_requests_are_served_while_nodes_are_awaited(awaiting):
    world, since = awaiting, awaiting.waiter.now()
    world.running.scale({"count": 4})
    assert world.finish() == [None]
    posted = Posted(lifecycle.SpoutsRequested(False))
    world.supervisor._requests.post(posted)
    world.turn_until(posted.answer.done)
    assert world.waiter.now() < since + 5.0
    assert world.emitting() == set()
    world.turn_until(lambda: len(world.supervisor.changes.replaced) == 2)
    assert 30.0 <= world.waiter.now() - since < 40.0
    assert len(world.supervisor.runs.current.nodes) == 3
    assert world.emitting() == set(), "the spouts stay deactivated"


def test_a_lost_lease_is_noticed_while_nodes_are_awaited(awaiting):
    world, since = awaiting, awaiting.waiter.now()
    world.supervisor._lease = SimpleNamespace(error=StateError("lease", "lost"), release=lambda: None)
    world.turn_until(lambda: world.supervisor.lifecycle.phase in OVER)
    assert world.waiter.now() < since + 10.0
    assert "lost" in str(world.supervisor.lifecycle.error)


def test_nodes_that_do_not_join_are_not_awaited_for_ever(awaiting):
    world, since = awaiting, awaiting.waiter.now()
    world.engine._join = lambda count: None
    world.turn_until(lambda: len(world.supervisor.changes.replaced) == 1)
    assert 60.0 <= world.waiter.now() - since < 70.0


def test_awaited_nodes_that_are_requested_again_are_still_counted(awaiting):
    assert awaiting.running.internals.placing.spread() == 1
    awaiting.turn_until(lambda: awaiting.supervisor.changes.replaced)
    awaiting.settle()
    assert len(awaiting.supervisor.changes.replaced) == 1
    assert awaiting.running.internals.placing.spread() == 0
