"""Snapshots, the cost of paths, and what fits on a node (Pu 2021)."""

from __future__ import annotations

import math

import pytest

from penstock.control.limits import AtLimit, Loads
from penstock.control.paths import critical, node_costs, path_of, widened
from penstock.control.placement import ExecutorStream, PlacedExecutor, PlacementNode, PlacementSnapshot, Use
from tests.placements import NODE, ON_FIGURE_4, example_of_pu_2021


def test_the_critical_path_of_figure_4_and_its_nodes():
    found = critical(example_of_pu_2021())
    assert tuple(hop.executor for hop in found.path.hops) == ON_FIGURE_4
    assert found.nodes == ("n1", "n2")
    assert found.executors == {"a", "d1", "f1", "b", "d2", "f2", "h"}


def test_a_path_costs_what_its_executors_work_and_what_goes_from_node_to_node():
    path = critical(example_of_pu_2021()).path
    assert path.computation == pytest.approx(4 * 0.5)
    assert [hop.communication for hop in path.hops] == [0.0, 0.0, pytest.approx(1e4 / 12.5e6), 0.0]
    assert path.cost == pytest.approx(2.0 + 0.0008)


def test_a_link_is_as_fast_as_its_slower_end():
    narrow = Use(4.0, 8e9, 1e6)
    path = path_of(example_of_pu_2021(limits={"n2": narrow}), ("d1", "f2"))
    assert path.communication == pytest.approx(1e4 / 1e6)


def test_communication_alone_can_make_a_path_critical():
    nodes = PlacementNode("n1", NODE), PlacementNode("n2", NODE)
    executors = (
        PlacedExecutor("s", "s", "n1", 0.2),
        PlacedExecutor("near", "b", "n1", 0.3),
        PlacedExecutor("far", "b", "n2", 0.1),
    )
    streams = ExecutorStream("s", "near", 1.0, 5e6), ExecutorStream("s", "far", 1.0, 5e6)
    found = critical(PlacementSnapshot(nodes, executors, streams))
    assert [hop.executor for hop in found.path.hops] == ["s", "far"]
    assert found.path.cost == pytest.approx(0.2 + 0.4 + 0.1)


def test_of_equal_paths_the_first_is_critical_and_it_reaches_from_end_to_end():
    idle = dict.fromkeys(("a", "b", "c", "d1", "d2", "e", "f1", "f2", "g", "h", "i"), 0.0)
    snapshot = example_of_pu_2021(cpu=idle, places=dict.fromkeys(idle, "n1"))
    assert [hop.executor for hop in critical(snapshot).path.hops] == ["a", "c", "f1", "h"]


def test_with_slack_the_nodes_of_nearly_as_costly_paths_are_critical_too():
    snapshot = example_of_pu_2021()
    assert critical(snapshot, slack=0.1).nodes == ("n1", "n2")
    assert critical(snapshot, slack=0.25).nodes == ("n1", "n2", "n3")  # a, d1, f2, i: 1.6 of 2.0


def test_a_node_is_as_critical_as_the_most_costly_path_through_it():
    costs = node_costs(example_of_pu_2021())
    assert costs["n1"] == costs["n2"] == pytest.approx(2.0008)
    assert costs["n3"] == pytest.approx(path_of(example_of_pu_2021(), ("a", "c", "f2", "h")).cost)


def test_critical_nodes_are_widened_until_the_rest_fits():
    snapshot = example_of_pu_2021()
    found = critical(snapshot)
    assert widened(snapshot, found, 0.9).nodes == ("n1", "n2")
    assert widened(snapshot, found, 0.3).nodes == ("n1", "n2", "n3")  # 1.2 of 4 cores, and n2 uses as many


def test_a_topology_of_nothing_has_no_critical_path():
    found = critical(PlacementSnapshot((PlacementNode("n1", NODE),), ()))
    assert (found.path.hops, found.nodes, found.path.cost) == ((), (), 0)


def test_a_path_that_no_stream_follows_is_refused():
    with pytest.raises(ValueError, match="a does not send to h"):
        path_of(example_of_pu_2021(), ("a", "h"))


NODES = (PlacementNode("n1", NODE),)
ONE = PlacedExecutor("a", "a", "n1", 0.1)


@pytest.mark.parametrize(
    ("nodes", "executors", "streams", "says"),
    [
        (NODES * 2, (), (), "a snapshot has nodes more than once: \\['n1'\\]"),
        (NODES, (ONE, ONE), (), "a snapshot has executors more than once: \\['a'\\]"),
        (NODES, (PlacedExecutor("a", "a", "n7", 0.1),), (), "a is on n7"),
        (NODES, (PlacedExecutor("a", "a", "n1", -0.1),), (), "at least 0 and finite, but a has"),
        (NODES, (PlacedExecutor("a", "a", "n1", math.nan),), (), "at least 0 and finite, but a has"),
        (NODES, (ONE,), (ExecutorStream("a", "z", 1.0, 1.0),), "lacks an executor of stream a -> z"),
        (
            NODES,
            (ONE, PlacedExecutor("b", "b", "n1", 0.0)),
            (ExecutorStream("a", "b", 1.0, 1.0),) * 2,
            "streams more than once: \\['a -> b'\\]",
        ),
        (NODES, (ONE, PlacedExecutor("b", "b", "n1", 0.0)), (ExecutorStream("a", "b", 1.0, -1.0),), "a -> b has"),
        ((PlacementNode("n1", Use(0.0, 1.0, 1.0)),), (), (), "limits of a node must be above 0, but n1 has"),
    ],
)
def test_a_snapshot_that_makes_no_sense_is_refused(nodes, executors, streams, says):
    with pytest.raises(ValueError, match=says):
        PlacementSnapshot(nodes, executors, streams)


def test_a_cycle_is_refused():
    pair = ONE, PlacedExecutor("b", "b", "n1", 0.1)
    snapshot = PlacementSnapshot(
        NODES, pair, (ExecutorStream("a", "b", 1.0, 1.0), ExecutorStream("b", "a", 1.0, 1.0))
    )
    with pytest.raises(ValueError, match="form a cycle in or before \\['a', 'b'\\]"):
        critical(snapshot)


# ---- limits -----------------------------------------------------------------------------------------------


def one_and(other: Use, limit: Use = NODE, executor: PlacedExecutor | None = None) -> tuple[Loads, int | None]:
    """An executor on n2, and the resource that n1 lacks for it, given what n1 uses."""
    nodes = PlacementNode("n1", limit, other), PlacementNode("n2", NODE)
    loads = Loads(PlacementSnapshot(nodes, (executor or PlacedExecutor("x", "x", "n2", 0.5, 1e9, 1e6),)))
    return loads, loads.lacking(loads.need(0), 0)


@pytest.mark.parametrize(
    ("other", "lacks"),
    [
        (Use(3.5, 7e9, 11.5e6), None),  # exactly at the limit of all three
        (Use(3.6, 7e9, 11.5e6), 0),
        (Use(3.5, 7.1e9, 11.5e6), 1),
        (Use(3.5, 7e9, 11.6e6), 2),
    ],
)
def test_data_moves_in_only_if_all_three_hold(other, lacks):
    assert one_and(other)[1] == lacks


@pytest.mark.parametrize(("other", "at"), [(Use(4.0, 0, 0), 0), (Use(0, 8e9, 0), 1), (Use(0, 0, 12.5e6), 2)])
def test_nothing_moves_to_a_limit_node_not_even_what_adds_nothing(other, at):
    loads, lacks = one_and(other, executor=PlacedExecutor("x", "x", "n2", 0.0))
    assert lacks == at
    assert loads.limit_nodes() == (AtLimit("n1", ("cpu", "memory", "bandwidth")[at], max(vars(other).values()),
                                           max(vars(other).values())),)  # fmt: skip


def test_the_reason_says_what_lacks():
    loads, _ = one_and(Use(3.6, 0, 0))
    assert loads.why_not(loads.need(0), 0) == "n1 uses 3.60 cores of 4.00 cores, and the move would add 0.50 cores"
    loads, _ = one_and(Use(0, 8e9, 0))
    assert loads.why_not(loads.need(0), 0) == "n1 uses 8,000 MB and is at its limit of 8,000 MB"
    loads, _ = one_and(Use())
    assert loads.why_not(loads.need(0), 0) == ""


def test_bandwidth_is_what_goes_over_the_network():
    """x reads 5 MB/s from its parent on n1 and 1 MB/s from a store. On the node of its parent only the store is
    left."""
    nodes = PlacementNode("n1", NODE), PlacementNode("n2", NODE)
    executors = PlacedExecutor("p", "p", "n1", 0.1, network=5e6), PlacedExecutor("x", "x", "n2", 0.1, network=6e6)
    snapshot = PlacementSnapshot(nodes, executors, (ExecutorStream("p", "x", 1.0, 5e6),))
    loads = Loads(snapshot)
    assert loads.used[2] == [5e6, 6e6]
    need = loads.need(1)
    assert need.of(2, 0) == 1e6 - 5e6
    loads.move(1, 0, need)
    assert loads.used[2] == [1e6, 0.0]
    assert Loads(snapshot.moved({"x": "n1"})).used[2] == [1e6, 0.0]


def test_who_leaves_its_neighbour_behind_needs_bandwidth_at_both_ends():
    nodes = PlacementNode("n1", NODE), PlacementNode("n2", NODE)
    executors = PlacedExecutor("p", "p", "n1", 0.1), PlacedExecutor("x", "x", "n1", 0.1)
    loads = Loads(PlacementSnapshot(nodes, executors, (ExecutorStream("p", "x", 1.0, 5e6),)))
    assert loads.used[2] == [0.0, 0.0]
    loads.move(1, 1, loads.need(1))
    assert loads.used[2] == [5e6, 5e6]
