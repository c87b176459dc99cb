"""What ERDM decides for a running topology: who moves, which nodes are left, when they are asked for again."""

import pytest

from penstock import Settings
from penstock.control.placement import Stream, Use
from penstock.coordinator.load_window import ExecutorLoad, NodeLoad, Window
from penstock.coordinator.placements import Placements, plan_for
from penstock.errors import SettingError
from penstock.plan.model import SlotId

SLOTS = {
    "lines@0.0": ("a", 0.6),
    "split@1.0": ("b", 0.5),
    "split@1.1": ("c", 0.2),
    "count@2.0": ("a", 0.4),
    "count@2.1": ("c", 0.1),
}
"""The critical path is lines@0.0 → split@1.0 → count@2.0, on a and b."""


def window(places=SLOTS, limit=4.0, load=1.0):
    """All send evenly to all of the next component."""
    loads = [
        ExecutorLoad(name, name.partition("@")[0], node, cpu * load, 1e6) for name, (node, cpu) in places.items()
    ]
    slots = {name: SlotId.parse(name.partition("@")[2]) for name in places}
    streams = [
        Stream(one, other, 1_000.0, 1e5)
        for one in places
        for other in places
        if slots[other].stage == slots[one].stage + 1
    ]
    nodes = sorted({node for node, _ in places.values()})
    limits = Use(limit, 1e9, 25e6)
    return Window(
        "words", 0.0, 30.0, tuple(loads), tuple(streams),
        tuple(NodeLoad(node, Use(), Use(), limits, limits) for node in nodes), slots,
    )  # fmt: skip


def erdm(**settings):
    return Placements(Settings(placement="erdm", **settings))


def test_executors_move_to_the_critical_nodes_and_the_others_are_left():
    placements = erdm()
    found = placements.look(window(), unused=0)
    places = found.placement.nodes
    assert found.leaves == {"c"}
    assert set(places) == {SlotId.parse(name.partition("@")[2]) for name in SLOTS}, "all slots have their place"
    assert {places[SlotId(0, 0)], places[SlotId(2, 0)]} == {"a"}
    assert places[SlotId(1, 0)] == "b"
    assert set(places.values()) == {"a", "b"}
    assert not found.placement.exact, "the nodes that stay have all seats there are"
    assert found.reason.startswith("ERDM: 2 of 5 executors to 2 nodes (a, b), c left; -")


def test_nothing_is_done_where_all_is_in_its_place():
    together = {name: ("a", cpu) for name, (_, cpu) in SLOTS.items()}
    assert erdm().look(window(together), unused=0) is None


def test_room_is_left_on_nodes_that_are_filled():
    """Together 1.8 cores: with limits of 1.2 they fit on two nodes, but not with a tenth of each to spare."""
    assert erdm(placement_fill=1.0).look(window(limit=1.2), unused=0).leaves == {"c"}
    tight = erdm(placement_fill=0.7).look(window(limit=1.2), unused=0)
    assert tight is None or not tight.leaves


def test_nodes_come_back_when_one_is_at_its_limit_and_are_not_left_again_at_once():
    placements = erdm()
    assert placements.look(window(load=5.0), unused=0) is None, "there is none to ask for"
    found = placements.look(window(load=5.0), unused=2)
    assert (found.placement, found.leaves) == (None, frozenset())
    assert found.reason == "a is at its limit of cpu, 5.00 cores of 4.00 cores: 2 nodes more asked for"
    placements.rest()
    looks = [placements.look(window(), unused=0) for n in range(11)]
    assert looks[:10] == [None] * 10
    assert looks[10].leaves == {"c"}


def test_by_hand_it_does_not_wait():
    placements = erdm()
    placements.rest()
    assert placements.by_hand(window()).leaves == {"c"}


def test_what_cannot_be_done_is_said_once():
    placements = erdm()
    for _ in range(3):
        placements.refused(2.0, "no room")
    placements.note(3.0, "moved")
    placements.refused(4.0, "no room")
    assert [each.text for each in placements.decisions] == ["not done: no room", "moved", "not done: no room"]


def test_a_few_bytes_are_not_worth_a_move():
    """With a, b and c critical nothing becomes free."""
    spread = {**SLOTS, "count@2.1": ("c", 9.0)}
    found = plan_for(window(spread, limit=20.0), Settings())
    assert not found.releases
    assert erdm().look(window(spread, limit=20.0), unused=0) is None


def test_erdm_watches_the_load_without_being_told_to():
    assert Settings(placement="erdm").monitored
    assert not Settings().monitored
    with pytest.raises(SettingError, match="placement_fill: is a share"):
        Settings(placement_fill=1.5)
