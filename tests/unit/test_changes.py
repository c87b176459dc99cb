"""Every change of a running topology, with everything that can go wrong between any two of its steps: a query is
lost, workers fall silent, a step is refused, somebody ends the topology, the driver dies. Without Spark, on a
simulated clock.

Whatever happens, exactly one query run emits and commits, or the topology has ended with a reason; every task slot
is given back; and whoever asked for the change has an answer.
"""

import pytest

from penstock.driver.lifecycle import OVER, TopologyPhase
from penstock.driver.requests import MoveRequest, ReplaceRequest
from penstock.errors import PenstockError
from penstock.plan.model import WorkerId
from penstock.plan.slot_placement import SlotPlacement
from tests.unit.fake_world import DriverDied, Fault, World, topology

GUARANTEES = ("at_most_once", "at_least_once", "exactly_once")
FAULTS = ("refused", "old_lost", "newest_lost", "mute", "killed", "driver_died")


class Scenario:
    """A change that is asked for in a world of its own."""

    kind, spare_slots = "replacement", 0

    def __init__(self, folder, guarantee):
        self.folder, self.guarantee = folder, guarantee
        self.world = World(folder, guarantee, self.spare_slots)
        self.answers = []

    def begin(self):
        """Ask for it."""
        request = self.request()
        self.answers.append(request.answer)
        self.world.supervisor.request(request)

    def run(self):
        self.begin()
        self.world.settle()


class Replace(Scenario):
    def request(self):
        return ReplaceRequest(topology(self.folder, self.guarantee, tasks=3), "test")


class StopAndGo(Scenario):
    def request(self):
        return ReplaceRequest(topology(self.folder, self.guarantee, tasks=3), "test", pause=True)


class Release(Scenario):
    """All workers to one node; the other is released."""

    def request(self):
        runs = self.world.supervisor.runs
        places = dict.fromkeys(runs.current.plan.worker_ids(), "host/0")
        placer = self.world.supervisor.changes.placer
        return placer.request(SlotPlacement(places, exact=False), frozenset({"host/1"}), "test", runs.current)


class TakeBack(Scenario):
    """A node that was released before is used again."""

    def begin(self):
        self.world.engine.release_nodes(["host/1"])
        supervisor = self.world.supervisor
        assert supervisor.changes.placer.take_back("test", supervisor.runs.current)


class Move(Scenario):
    kind, spare_slots = "move", 1

    def request(self):
        current = self.world.supervisor.runs.current
        worker = WorkerId(1, 0)
        (node,) = {"host/0", "host/1"} - {current.registry.workers[worker].hello.node}
        return MoveRequest({worker: node}, "test", current.number)


class Restarted(Scenario):
    kind = "restart"

    def begin(self):
        self.world.engine.queries[0].lose()


class Ended(Scenario):
    kind = "shutdown"

    def begin(self):
        self.world.supervisor.ask_to_end(drain=True)


SCENARIOS = (Replace, StopAndGo, Release, TakeBack, Move, Restarted, Ended)


def steps_of(scenario, guarantee, folder):
    """The names of its steps, in order, without repetitions."""
    made, names = scenario(folder, guarantee), []
    runner = made.world.supervisor.runner
    reached = runner.reached

    def note(change, step):
        if change.kind == made.kind and step not in names:
            names.append(step)
        reached(change, step)

    runner.reached = note
    made.run()
    return names


@pytest.mark.parametrize("guarantee", GUARANTEES)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_nothing_goes_wrong(tmp_path, scenario, guarantee):
    made = scenario(tmp_path, guarantee)
    made.run()
    made.world.check()
    for answer in made.answers:
        assert answer.result(0) is not None
    expected = TopologyPhase.ENDED if scenario is Ended else TopologyPhase.ACTIVE
    assert made.world.supervisor.lifecycle.phase is expected
    assert made.world.supervisor.lifecycle.restarts.count == (scenario is Restarted)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(
    ("scenario", "guarantee"),
    [(scenario, "exactly_once") for scenario in SCENARIOS]
    + [(scenario, guarantee) for scenario in (Replace, Move) for guarantee in GUARANTEES[:2]],
)
def test_something_goes_wrong_between_any_two_steps(tmp_path, scenario, guarantee, fault):
    for number, step in enumerate(steps_of(scenario, guarantee, tmp_path / "dry")):
        folder = tmp_path / str(number)
        made = scenario(folder, guarantee)
        struck = Fault(made.world, made.kind, step, fault)
        if fault == "driver_died":
            with pytest.raises(DriverDied):
                made.run()
            assert len(made.world.emitting()) <= 1, step
            again = World(folder, guarantee)
            again.settle()
            again.check()
            continue
        made.run()
        assert struck.struck, step
        try:
            made.world.check()
        except AssertionError as error:
            raise AssertionError(f"{fault} in step {step}: {error}") from error
        for answer in made.answers:
            assert answer.done(), f"{fault} in step {step}: nobody answered"
            assert answer.exception() is None or isinstance(answer.exception(), PenstockError)
        life = made.world.supervisor.lifecycle
        if fault == "killed":
            assert life.phase in OVER, step


@pytest.mark.parametrize("guarantee", GUARANTEES)
def test_a_form_that_does_not_open_is_taken_back(tmp_path, guarantee):
    made = Replace(tmp_path, guarantee)
    made.world.cannot_open.add(1)
    made.run()
    made.world.check()
    (answer,) = made.answers
    assert "no such table" in str(answer.exception())
    current = made.world.supervisor.runs.current
    assert len(current.plan.tasks_of["count"]) == 2, "the old form runs again"
    assert made.world.supervisor.lifecycle.restarts.count == 1


def test_a_replacement_tells_when_each_step_ended(tmp_path):
    made = Replace(tmp_path, "exactly_once")
    made.run()
    replaced = made.answers[0].result(0)
    order = [
        "checked",
        "reserved",
        "standing_by",
        "copied",
        "paused",
        "drained",
        "closed",
        "claimed",
        "opened",
        "activated",
    ]
    assert [step for step in replaced.steps if step in order] == order
    assert 0 < replaced.gap < 0.5


def test_requests_wait_for_each_other_and_are_refused_after_the_end(tmp_path):
    made = Replace(tmp_path, "exactly_once")
    made.begin()
    made.begin()
    made.world.settle()
    assert [answer.result(0).parallelism["count"] for answer in made.answers] == [3, 3]
    made.world.supervisor.ask_to_end(drain=False)
    made.world.settle()
    made.begin()
    assert "it is ended, not running" in str(made.answers[-1].exception(0))


def test_too_few_slots_change_nothing(tmp_path):
    made = Replace(tmp_path, "exactly_once")
    made.world.engine.slots = 2
    made.run()
    made.world.check()
    assert "a replacement without a pause needs 4 task slots in addition to the 3 in use" in str(
        made.answers[0].exception()
    )
    assert not made.world.supervisor.lifecycle.restarts.count


def test_it_gives_up_after_some_restarts(tmp_path):
    made = Restarted(tmp_path, "exactly_once")
    made.world.cannot_open.update(range(1, 10))
    made.run()
    made.world.check()
    life = made.world.supervisor.lifecycle
    assert (life.phase, life.restarts.count) == (TopologyPhase.FAILED, 3)
    assert "it failed again after 3 restarts" in str(life.error)


@pytest.mark.parametrize("where", ["launch", "nodes", "take_nodes_back"])
def test_an_engine_that_dies_ends_the_topology(tmp_path, where):
    made = Replace(tmp_path, "exactly_once")

    def dead(*_):
        raise ConnectionError("the JVM is gone")

    setattr(made.world.engine, where, dead)
    made.begin()
    if where == "take_nodes_back":
        made.world.engine.queries[0].lose()
    made.world.settle()
    assert made.answers[0].done()
    if where == "take_nodes_back":
        assert "the JVM is gone" in str(made.world.supervisor.lifecycle.error)
    else:
        made.world.check()
        assert "the JVM is gone" in str(made.answers[0].exception())
