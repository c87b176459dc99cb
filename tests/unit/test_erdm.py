"""Which executors move where and why: the example of Pu 2021 (figures 2 to 4, equations 13 to 16), limits,
reports."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from penstock.control.erdm import ErdmPolicy, InterNode, plan
from penstock.control.placement import (
    ExecutorMove,
    ExecutorStream,
    PlacedExecutor,
    PlacementNode,
    PlacementSnapshot,
    Release,
    Use,
)
from penstock.control.placement_report import as_json, explain
from penstock.errors import SettingError
from tests.placements import NODE, example_of_pu_2021


def moves(found):
    return {move.executor: move.target for move in found.moves}


def test_the_example_of_pu_2021():
    """e_c moves to its parent on n1 (equation 13), e_i to n1 with fewer executors (equation 14), n3 is
    released."""
    found = plan(example_of_pu_2021())
    assert moves(found) == {"c": "n1", "e": "n2", "g": "n2", "i": "n1"}
    assert found.releases == (Release("n3", "all its executors move"),)
    assert not found.stays
    reasons = {move.executor: move.reason for move in found.moves}
    assert reasons["c"] == "parent a on critical node n1"
    assert reasons["g"] == "parent e on critical node n2", "e counts where it moved to"
    assert reasons["i"] == (
        "parents on 2 critical nodes; n1 (4 executors, CPU 30%) before n2 (6 executors, CPU 35%): fewest executors"
    )


@pytest.mark.parametrize(("busy", "goes"), [(0.9, "n2"), (0.0, "n1")])
def test_with_equal_counts_e_i_goes_where_less_cpu_is_used(busy, goes):
    """Pu 2021, equation 15: only i is left on n3, and either node has five executors; c makes n1 busier or not."""
    (move,) = plan(example_of_pu_2021(cpu={"c": busy}, places={"c": "n1", "g": "n1", "e": "n2"})).moves
    assert (move.executor, move.target) == ("i", goes)
    assert "(5 executors" in move.reason
    assert move.reason.endswith("equally few executors, lowest CPU use")


def test_with_n1_at_its_limit_e_c_goes_to_any_critical_node():
    """Pu 2021, equation 16."""
    full = Use(1.1, 8e9, 12.5e6)  # a, d1 and f1 use exactly this
    found = plan(example_of_pu_2021(limits={"n1": full}))
    assert moves(found) == {"c": "n2", "e": "n2", "g": "n2", "i": "n2"}
    assert found.moves[0].reason == (
        "n1 uses 1.10 cores and is at its limit of 1.10 cores; the first of all critical nodes with room "
        "is n2 (4 executors, CPU 30%)"
    )
    assert [(at.node, at.resource) for at in found.limit_nodes] == [("n1", "cpu")]


def test_with_no_room_anywhere_it_stays_and_its_node_too():
    found = plan(example_of_pu_2021(memory={"g": 9e9, "c": 1e8}))
    assert moves(found) == {"c": "n1", "e": "n2", "i": "n1"}
    (stay,) = found.stays
    assert (stay.executor, stay.node) == ("g", "n3")
    assert stay.reason == (
        "n2 uses 500 MB of 8,000 MB, and the move would add 9,000 MB; none of 2 critical nodes it may move to "
        "has room"
    )
    assert not found.releases


def test_an_executor_without_a_critical_parent_goes_to_any_critical_node_by_the_two_rules():
    nodes = tuple(PlacementNode(f"n{index}", NODE) for index in (1, 2, 3))
    executors = (
        PlacedExecutor("s", "s", "n1", 1.0),
        PlacedExecutor("b", "b", "n2", 1.0),
        PlacedExecutor("t", "t", "n2", 0.1),
        PlacedExecutor("u", "u", "n3", 0.1),  # no parent at all
        PlacedExecutor("v", "v", "n3", 0.1),
    )
    found = plan(PlacementSnapshot(nodes, executors, (ExecutorStream("s", "b", 1.0, 1e3),)))
    assert found.critical.nodes == ("n1", "n2")
    assert moves(found) == {"u": "n1", "v": "n1"}, "n1 has 1, then 2 as n2, with less CPU"
    assert found.moves[0].reason.startswith(
        "no parent on a critical node; the first of all critical nodes with room is n1 (1 executor,"
    )


def test_a_node_without_a_worker_for_it_is_passed_over():
    snapshot, allowed = example_of_pu_2021(), {"c": frozenset({"n2", "n3"}), "e": frozenset({"n3"})}
    executors = tuple(replace(each, nodes=allowed.get(each.id)) for each in snapshot.executors)
    found = plan(replace(snapshot, executors=executors))
    assert moves(found)["c"] == "n2"
    assert found.moves[0].reason.startswith(
        "n1 has no slot for it; the first of all critical nodes with room is n2"
    )
    (stay,) = found.stays
    assert stay.reason == "n2 has no slot for it; none of 0 critical nodes it may move to has room"


def test_moves_before_it_count_for_a_limit():
    """The parent's node has room for one of two executors: the second goes to the other critical node."""
    nodes = PlacementNode("n1", Use(2.0, 8e9, 12.5e6)), PlacementNode("n2", NODE), PlacementNode("n3", NODE)
    executors = (
        PlacedExecutor("s", "s", "n1", 1.4),
        PlacedExecutor("b", "b", "n2", 1.0),
        PlacedExecutor("x", "x", "n3", 0.4),
        PlacedExecutor("y", "x", "n3", 0.4),
    )
    streams = (
        ExecutorStream("s", "b", 1.0, 1e3),
        ExecutorStream("s", "x", 1.0, 1e3),
        ExecutorStream("s", "y", 1.0, 1e3),
    )
    assert moves(plan(PlacementSnapshot(nodes, executors, streams))) == {"x": "n1", "y": "n2"}


def test_cost_after_by_the_formula_and_counted():
    """Pu 2021, equation 20: of 13 streams between nodes a-c, b-e, c-f1, e-f2 and f1-i become local. The computed
    cost includes g-i, which was local before; the formula does not."""
    found, each = plan(example_of_pu_2021()).cost, 1e4 / 12.5e6
    assert (found.paths, found.local, found.opened) == (13, 5, 1)
    assert found.before == pytest.approx(13 * each)
    assert found.estimated == pytest.approx(8 * each)
    assert found.after == pytest.approx(9 * each)
    assert found.saved == pytest.approx(4 / 13)


def test_cost_after_of_nothing():
    assert InterNode(0, 0, 0, 0.0, 0.0).estimated == 0.0
    assert InterNode(0, 0, 0, 0.0, 0.0).saved == 0.0


def test_the_policy_says_moves_then_releases():
    found = ErdmPolicy().decide(example_of_pu_2021())
    assert [type(each) for each in found] == [ExecutorMove] * 4 + [Release]


def test_a_plan_that_frees_nothing_and_saves_nothing_is_not_carried_out():
    """x is unrelated to the others, and y has no room to follow it: n3 keeps y, and no stream becomes local."""
    nodes = tuple(PlacementNode(f"n{index}", NODE) for index in (1, 2, 3, 4))
    executors = (
        PlacedExecutor("s", "s", "n1", 1.0),
        PlacedExecutor("b", "b", "n2", 1.0),
        PlacedExecutor("x", "x", "n3", 0.1),
        PlacedExecutor("y", "y", "n3", 0.1, memory=9e9),
    )
    snapshot = PlacementSnapshot(
        nodes, executors, (ExecutorStream("s", "b", 1.0, 1e3), ExecutorStream("x", "y", 1.0, 1e3))
    )
    found = plan(snapshot)
    assert moves(found) == {"x": "n1"}
    assert found.cost.opened == 1
    assert not found.worthwhile
    assert ErdmPolicy().decide(snapshot) == [Release("n4", "it has no executor")]
    assert explain(found)[-1].startswith("not carried out")


def test_carried_out_it_wants_nothing_more():
    snapshot = example_of_pu_2021()
    found = plan(snapshot)
    after = snapshot.moved(moves(found))
    assert not plan(after).moves
    assert after.executors[0].network == pytest.approx(1e4), "only d2 of a's children is elsewhere"


@pytest.mark.parametrize("wrong", [{"slack": 1.0}, {"slack": -0.1}, {"fill": 0.0}, {"fill": 1.1}])
def test_settings_out_of_bounds_are_refused(wrong):
    with pytest.raises(SettingError, match="Leave it out to get the default") as caught:
        ErdmPolicy(**wrong)
    assert repr(next(iter(wrong.values()))) in str(caught.value)


# ---- what is told -----------------------------------------------------------------------------------------


def test_the_explanation():
    full = Use(1.1, 8e9, 12.5e6)
    assert explain(plan(example_of_pu_2021(limits={"n1": full}, memory={"g": 9e9})), shown=2) == [
        "critical path: 2.001 s of work per second (computation 2.000, between nodes 0.001)",
        "  a on n1: 0.500",
        "  d1 on n1: 0.500",
        "  f2 on n2: 0.500 + 0.001 from the previous executor",
        "  h on n2: 0.500",
        "critical: 2 nodes (n1, n2), 7 executors",
        "at a limit: 2",
        "  n1: cpu 1.10 cores of 1.10 cores",
        "  n3: memory 9,300 MB of 8,000 MB",
        "moves: 3",
        "  c: n3 -> n2: n1 uses 1.10 cores and is at its limit of 1.10 cores; the first of all critical nodes "
        "with room is n2 (4 executors, CPU 30%)",
        "  e: n3 -> n2: parent b on critical node n2",
        "  … and 1 more",
        "stay: 1",
        "  g on n3: n2 uses 600 MB of 8,000 MB, and the move would add 9,000 MB; "
        "none of 2 critical nodes it may move to has room",
        "released: none",
        "between nodes: 4 of 13 streams become local, 2 no longer are; cost 0.010 -> 0.009 s per second (-15.4%)",
    ]


def test_the_explanation_of_nothing():
    assert explain(plan(PlacementSnapshot((PlacementNode("n1", NODE),), ()))) == ["nothing runs"]


def test_json_has_it_all():
    found = json.loads(json.dumps(as_json(plan(example_of_pu_2021()))))
    assert found["critical_nodes"] == ["n1", "n2"]
    assert [hop["executor"] for hop in found["critical_path"]["hops"]] == ["a", "d1", "f2", "h"]
    assert found["moves"][0] == {
        "executor": "c",
        "source": "n3",
        "target": "n1",
        "reason": "parent a on critical node n1",
    }
    assert found["releases"] == [{"node": "n3", "reason": "all its executors move"}]
    assert found["inter_node"]["local"] == 5
    assert found["worthwhile"] is True
