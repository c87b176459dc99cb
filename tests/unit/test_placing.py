"""Change requests of the placement policy: which nodes are released, into how many slots, and what is said of a
change that failed. Without Spark, on a simulated clock."""

import dataclasses

import pytest

from penstock.control.arbiter import ChangeSource
from penstock.driver.placement_controller import Rearrangement
from penstock.driver.requests import MoveRequest, ReplaceRequest
from penstock.plan.model import WorkerId
from penstock.plan.slot_placement import SlotPlacement, slots_for
from tests.unit import fake_world
from tests.unit.fake_world import World


@pytest.fixture
def by_erdm(monkeypatch):
    """Topologies are placed by ERDM, with its numbers of slots."""
    made = fake_world.topology

    def topology(folder, guarantee, tasks=4, spare_slots=0):
        form = made(folder, guarantee, tasks, spare_slots)
        placement = dataclasses.replace(form.settings.placement, policy="erdm")
        return dataclasses.replace(form, settings=dataclasses.replace(form.settings, placement=placement))

    monkeypatch.setattr(fake_world, "topology", topology)


def decided(world, monkeypatch, places, leaves):
    """What the placer requests when ERDM wants the workers there."""
    changes, current = world.supervisor.changes, world.supervisor.runs.current
    wanted = {**current.places(), **places}
    found = Rearrangement(SlotPlacement(wanted, exact=False), frozenset(leaves), "test")
    monkeypatch.setattr(changes.placements, "on", True)
    monkeypatch.setattr(changes.placements, "decide", lambda *_: found)
    return changes.placer.next(object(), current)


def test_a_release_takes_nodes_along_that_no_executor_is_on(tmp_path, monkeypatch):
    """They were released by a second replacement, one load sample later."""
    world = World(tmp_path, spare_slots=1, nodes=4)
    current = world.supervisor.runs.current
    used = current.nodes
    spouts = current.places()[WorkerId(0, 0)]
    (other, *_) = used - {spouts}
    empty = {f"host/{name}" for name in world.engine.names} - used
    assert empty, "the test needs a node without executors"
    request = decided(world, monkeypatch, {WorkerId(0, 0): other}, {spouts})
    assert isinstance(request, ReplaceRequest), "a worker of a spout cannot move alone"
    assert request.leaves == {spouts, *empty}
    assert f"{min(empty)} has no executor any more" in request.reason or len(empty) > 1


def test_a_node_that_joined_too_late_to_be_used_is_released_without_a_replacement(tmp_path, monkeypatch):
    world = World(tmp_path, spare_slots=1)
    changes, current = world.supervisor.changes, world.supervisor.runs.current
    world.engine.names.append("late")
    monkeypatch.setattr(changes.placements, "on", True)
    monkeypatch.setattr(changes.placements, "decide", lambda *_: None)
    changes.placements.pause()
    assert changes.placer.next(object(), current) is None
    assert "late" in world.engine.names, "not while moves are suspended"
    monkeypatch.setattr(changes.placements, "_paused_samples", 0)
    assert changes.placer.next(object(), current) is None
    assert (world.engine.names, world.engine.nodes_away) == (["0", "1"], 1)
    assert "does not use Spark executor late" in changes.placements.decisions[-1].text
    assert changes.placer.unused(current) == 1, "it is requested again when a node is full"


def test_a_single_executor_moves_although_a_node_is_empty(tmp_path, monkeypatch):
    world = World(tmp_path, spare_slots=1, nodes=4)
    places = world.supervisor.runs.current.places()
    (target, *_) = {f"host/{name}" for name in world.engine.names} - set(places.values())
    request = decided(world, monkeypatch, {WorkerId(1, 0): target}, {places[WorkerId(1, 0)]})
    assert isinstance(request, MoveRequest)
    assert request.nodes == {WorkerId(1, 0): target}


def test_the_new_form_fits_beside_what_the_old_one_holds_on_the_nodes_that_stay(tmp_path, by_erdm, monkeypatch):
    """Free slots were counted for all nodes together, so the new form could have more tasks than the nodes that
    stay can run beside the old one. It never connected, and the release failed."""
    world = World(tmp_path, nodes=3)
    world.engine.slots = 9
    runs = world.supervisor.runs
    old = runs.current
    held = sum(old.deployment.slots)
    assert held == 11
    monkeypatch.setattr(
        old, "slots_on", lambda nodes: held
    )  # all on the nodes that stay, as Spark may spread them
    places = {worker: f"host/{worker.index % 2}" for worker in old.plan.worker_ids()}
    placer = world.supervisor.changes.placer
    request = placer.request(SlotPlacement(places, exact=False), frozenset({"host/2"}), "test", old)
    world.supervisor.request(request)
    world.settle()
    assert request.answer.result(0)
    assert sum(world.engine.queries[-1].launch.slots) <= 2 * world.engine.slots - held
    assert runs.current.nodes == {"host/0", "host/1"}


def test_no_slot_is_kept_free_on_a_single_node(tmp_path, by_erdm):
    plan = World(tmp_path).supervisor.runs.current.plan
    anywhere = SlotPlacement({}, exact=False)
    assert slots_for(plan, anywhere, 1, None) == (1, 4), "there is no other node to move to"
    assert slots_for(plan, anywhere, 2, None) == (1, 8)


def test_why_a_change_failed_is_in_the_status(tmp_path):
    world = World(tmp_path, spare_slots=1)
    changes, current = world.supervisor.changes, world.supervisor.runs.current
    for source, told in ((ChangeSource.OPERATOR, 0), (ChangeSource.PLACEMENT, 1)):
        request = MoveRequest({WorkerId(1, 0): "nowhere"}, "ERDM moves 1 of 3", current.number, source)
        changes.carry_out(request)
        assert len(changes.placements.outcomes) == told
    (outcome,) = changes.placements.outcomes
    assert outcome.text.startswith("not done: ERDM moves 1 of 3: ")
    assert "cannot move to nowhere" in outcome.text
    assert changes.placements.paused, "the same would fail again"
