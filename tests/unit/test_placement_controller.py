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


def sample(places=WORKERS, limit=4.0, load=1.0, spark=0.0):
    """All send evenly to all of the next component. ``spark``: cores of Spark's processes on each node."""
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
        tuple(
            NodeLoad(node, Use(sum(each.cpu for each in loads if each.node == node)), Use(spark), limits, limits)
            for node in nodes
        ),
        workers,
    )  # fmt: skip


def erdm(**settings):
    return PlacementController(settings_with(placement="erdm", **settings))


def test_executors_move_to_the_critical_nodes_and_the_others_are_left():
    placements = erdm()
    found = placements.decide(1.0, sample(), unused=0)
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
    assert erdm().decide(1.0, sample(together), unused=0) is None


def test_room_is_left_on_nodes_that_are_filled():
    """Together 1.8 cores: with limits of 1.2 they fit on two nodes, but not with a tenth of each to spare."""
    assert erdm(placement_fill=1.0).decide(1.0, sample(limit=1.2), unused=0).leaves == {"c"}
    tight = erdm(placement_fill=0.7).decide(1.0, sample(limit=1.2), unused=0)
    assert tight is None or not tight.leaves


def test_nodes_come_back_when_one_is_at_its_limit_and_are_not_left_again_at_once():
    placements = erdm()
    assert placements.decide(1.0, sample(load=5.0), unused=0) is None, "there is none to ask for"
    found = placements.decide(1.0, sample(load=5.0), unused=2)
    assert (found.placement, found.leaves) == (None, frozenset())
    assert found.reason == (
        "a is at its limit of cpu, 5.05 cores of 4.00 cores (Spark's processes 0.00 cores, executors 5.00 cores): "
        "2 nodes more requested"
    )
    placements.pause()
    decisions = [placements.decide(1.0, sample(), unused=0) for n in range(11)]
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
    assert erdm().decide(1.0, sample(spread, limit=20.0), unused=0) is None


def said(placements):
    return placements.outcomes[-1].text


def test_each_load_sample_has_an_outcome():
    placements = erdm()
    together = {name: ("a", cpu) for name, (_, cpu) in WORKERS.items()}
    placements.decide(1.0, sample(together), unused=0)
    assert said(placements) == "no move: all executors are on one node"
    found = placements.decide(2.0, sample(), unused=0)
    assert said(placements) == found.reason
    placements.pause()
    placements.decide(3.0, sample(), unused=0)
    assert said(placements) == (
        "no move for 10 more load samples, because nodes were requested again or a move failed"
    )
    placements.note_refusal(4.0, "too few slots")
    assert said(placements) == "not done: too few slots"
    assert [each.time for each in placements.outcomes] == [1.0, 2.0, 3.0, 4.0]
    for _ in range(30):
        placements.decide(5.0, sample(), unused=0)
    assert len(placements.outcomes) == 16


def test_why_nothing_moves_names_the_node_and_what_spark_uses_there():
    """Of half a core Spark's processes use most, so nothing fits anywhere."""
    small = {name: (node, cpu / 10) for name, (node, cpu) in WORKERS.items()}
    tight = erdm(spark_cores=0.3)
    assert tight.decide(1.0, sample(small, limit=0.4, spark=0.31), unused=0) is None
    assert said(tight) == (
        "no move: to empty c, its 2 executors need 0.04 cores, but the other nodes together have room for 0.00 "
        "cores; a uses 0.41 cores of the 0.36 cores that may be used, of which 0.30 cores are reserved for "
        "Spark's processes. "
        "a is at its limit of cpu, 0.41 cores of 0.40 cores (Spark's processes 0.31 cores, executors 0.10 cores), "
        "and no node is unused"
    )


def test_why_moves_are_not_worthwhile():
    spread = {**WORKERS, "count@2.1": ("c", 9.0)}
    placements = erdm()
    assert placements.decide(1.0, sample(spread, limit=20.0), unused=0) is None
    assert "would empty no node and save" in said(placements) or said(placements).startswith("no move: ")


def test_what_spark_uses_beyond_its_base_moves_with_the_executors():
    snapshot = sample(spark=0.25).snapshot(settings_with(spark_cores=0.05))
    cpu = {each.id: each.cpu for each in snapshot.executors}
    assert {node.other.cpu for node in snapshot.nodes} == {0.05}, "that stays"
    assert cpu["lines@0.0"] == pytest.approx(0.6 * (1 + 0.2 / 1.0))
    assert cpu["split@1.0"] == pytest.approx(0.5 + 0.2), "alone on its node"
    idle = sample(spark=0.01).snapshot(settings_with(spark_cores=0.05))
    assert {node.other.cpu for node in idle.nodes} == {0.05}, "reserved, although it uses less"
    assert {each.id: each.cpu for each in idle.executors}["split@1.0"] == 0.5


def test_the_literal_critical_path_and_the_widened_one():
    """The path crosses a and b. Together their room is too small for c, so the widened ones are all three."""
    full = sample(limit=0.95)
    path, widened = (plan_for(full, settings_with(critical=each)) for each in ("path", "widened"))
    assert path.critical.nodes == ("a", "b")
    assert widened.critical.nodes == ("a", "b", "c")
    roomy = sample(limit=4.0)
    path, widened = (plan_for(roomy, settings_with(critical=each)) for each in ("path", "widened"))
    assert path == widened, "nothing had to be added"


def test_erdm_acts_releases_and_takes_back_as_the_load_changes():
    """A day of one topology, simulated: idle, then it is released, then the load rises, then falls again."""
    placements, seen = erdm(), []
    for now, load, unused in ((1, 1.0, 0), (2, 1.0, 1), (3, 4.0, 1), (4, 1.0, 0)):
        places = WORKERS if unused == 0 else {**WORKERS, "split@1.1": ("a", 0.2), "count@2.1": ("a", 0.1)}
        found = placements.decide(float(now), sample(places, load=load), unused)
        seen.append(None if found is None else ("back" if found.placement is None else sorted(found.leaves)))
        if seen[-1] == "back":
            placements.pause()
    assert seen == [["c"], None, "back", None]
    assert "no move for 10 more load samples" in said(placements)


def test_erdm_watches_the_load_without_being_told_to():
    assert Settings(placement=Placement("erdm")).monitored
    assert not Settings().monitored
    with pytest.raises(SettingError, match=r"placement.fill: 1.5 is not allowed: it must be a share"):
        Settings(placement=Placement(fill=1.5))
