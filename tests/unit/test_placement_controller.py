"""What ERDM decides for a running topology: who moves, which nodes are left, when they are asked for again."""

import pytest

from penstock import Placement, Settings
from penstock.control.placement import ExecutorStream, Use
from penstock.driver.load_sample import ExecutorLoad, MonitorSample, NodeLoad
from penstock.driver.placement_controller import PlacementController, plan_for
from penstock.errors import SettingError
from penstock.plan.model import WorkerId
from tests.helpers import settings_with

WORKERS = {
    "lines@0.0": ("a", 0.6),
    "split@1.0": ("b", 0.5),
    "split@1.1": ("c", 0.2),
    "count@2.0": ("a", 0.4),
    "count@2.1": ("c", 0.1),
}
"""The critical path is lines@0.0 → split@1.0 → count@2.0, on a and b."""


def sample(places=WORKERS, limit=4.0, load=1.0):
    """All send evenly to all of the next component."""
    loads = [
        ExecutorLoad(name, name.partition("@")[0], node, cpu * load, 1e6) for name, (node, cpu) in places.items()
    ]
    workers = {name: WorkerId.parse(name.partition("@")[2]) for name in places}
    streams = [
        ExecutorStream(one, other, 1_000.0, 1e5)
        for one in places
        for other in places
        if workers[other].stage == workers[one].stage + 1
    ]
    nodes = sorted({node for node, _ in places.values()})
    limits = Use(limit, 1e9, 25e6)
    return MonitorSample(
        "words", 0.0, 30.0, tuple(loads), tuple(streams),
        tuple(NodeLoad(node, Use(), Use(), limits, limits) for node in nodes), workers,
    )  # fmt: skip


def erdm(**settings):
    return PlacementController(settings_with(placement="erdm", **settings))


def test_executors_move_to_the_critical_nodes_and_the_others_are_left():
    placements = erdm()
    found = placements.decide(sample(), unused=0)
    places = found.placement.nodes
    assert found.leaves == {"c"}
    assert set(places) == {WorkerId.parse(name.partition("@")[2]) for name in WORKERS}, (
        "all workers have their place"
    )
    assert {places[WorkerId(0, 0)], places[WorkerId(2, 0)]} == {"a"}
    assert places[WorkerId(1, 0)] == "b"
    assert set(places.values()) == {"a", "b"}
    assert not found.placement.exact, "the nodes that stay have all slots there are"
    assert found.reason.startswith(
        "ERDM moves 2 of 5 executors to 2 nodes (a, b) and releases c; cost between nodes -"
    )


def test_nothing_is_done_where_all_is_in_its_place():
    together = {name: ("a", cpu) for name, (_, cpu) in WORKERS.items()}
    assert erdm().decide(sample(together), unused=0) is None


def test_room_is_left_on_nodes_that_are_filled():
    """Together 1.8 cores: with limits of 1.2 they fit on two nodes, but not with a tenth of each to spare."""
    assert erdm(placement_fill=1.0).decide(sample(limit=1.2), unused=0).leaves == {"c"}
    tight = erdm(placement_fill=0.7).decide(sample(limit=1.2), unused=0)
    assert tight is None or not tight.leaves


def test_nodes_come_back_when_one_is_at_its_limit_and_are_not_left_again_at_once():
    placements = erdm()
    assert placements.decide(sample(load=5.0), unused=0) is None, "there is none to ask for"
    found = placements.decide(sample(load=5.0), unused=2)
    assert (found.placement, found.leaves) == (None, frozenset())
    assert found.reason == "a is at its limit of cpu, 5.00 cores of 4.00 cores: 2 nodes more requested"
    placements.pause()
    decisions = [placements.decide(sample(), unused=0) for n in range(11)]
    assert decisions[:10] == [None] * 10
    assert decisions[10].leaves == {"c"}


def test_by_hand_it_does_not_wait():
    placements = erdm()
    placements.pause()
    assert placements.by_hand(sample()).leaves == {"c"}


def test_what_cannot_be_done_is_said_once():
    placements = erdm()
    for _ in range(3):
        placements.note_refusal(2.0, "no room")
    placements.note(3.0, "moved")
    placements.note_refusal(4.0, "no room")
    assert [each.text for each in placements.decisions] == ["not done: no room", "moved", "not done: no room"]


def test_a_few_bytes_are_not_worth_a_move():
    """With a, b and c critical nothing becomes free."""
    spread = {**WORKERS, "count@2.1": ("c", 9.0)}
    found = plan_for(sample(spread, limit=20.0), Settings())
    assert not found.releases
    assert erdm().decide(sample(spread, limit=20.0), unused=0) is None


def test_erdm_watches_the_load_without_being_told_to():
    assert Settings(placement=Placement("erdm")).monitored
    assert not Settings().monitored
    with pytest.raises(SettingError, match=r"placement.fill: 1.5 is not allowed: it must be a share"):
        Settings(placement=Placement(fill=1.5))
