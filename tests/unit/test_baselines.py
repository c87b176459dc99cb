"""The strategies C compares with decide what their docstrings say."""

from __future__ import annotations

import pytest

from penstock.control.energy import power
from penstock.control.erdm import inter_node
from penstock.control.limits import Loads
from penstock.control.placement import ExecutorStream, PlacedExecutor, PlacementNode, PlacementSnapshot
from penstock.sim.baselines import LOW_VOLTAGE, leedsp, round_robin, wndvr
from penstock.sim.tmsh import tmsh
from tests.placements import NODE, example_of_pu_2021, large


def places(snapshot, proposal):
    return snapshot.places | {move.executor: move.target for move in proposal.moves}


def test_round_robin_deals_component_by_component():
    nodes = tuple(PlacementNode(name, NODE) for name in ("n1", "n2"))
    executors = tuple(PlacedExecutor(name, name[0], "n1", 0.1) for name in ("b0", "a0", "b1", "a1"))
    snapshot = PlacementSnapshot(nodes, executors)
    assert places(snapshot, round_robin(snapshot)) == {"b0": "n1", "b1": "n2", "a0": "n1", "a1": "n2"}


def test_round_robin_leaves_counts_that_differ_by_one_at_most():
    snapshot = example_of_pu_2021()
    found = list(places(snapshot, round_robin(snapshot)).values())
    counts = [found.count(node.name) for node in snapshot.nodes]
    assert sorted(counts) == [3, 4, 4]
    assert round_robin(snapshot.moved(places(snapshot, round_robin(snapshot)))).moves == ()


def test_tmsh_moves_to_where_most_bytes_go_and_releases_nothing():
    nodes = tuple(PlacementNode(name, NODE) for name in ("n1", "n2", "n3"))
    executors = (
        PlacedExecutor("s", "s", "n1", 0.1),
        PlacedExecutor("b", "b", "n2", 0.1),
        PlacedExecutor("t", "t", "n3", 0.1),
    )
    streams = ExecutorStream("s", "b", 1.0, 3e6), ExecutorStream("b", "t", 1.0, 1e6)
    snapshot = PlacementSnapshot(nodes, executors, streams)
    found = tmsh(snapshot)
    assert {move.executor: move.target for move in found.moves} == {"s": "n2", "t": "n2"}
    assert found.moves[0].reason == "3.00 MB/s less between nodes"
    assert not found.releases


def test_tmsh_keeps_the_limits_in_the_end_and_each_direction_of_a_link():
    snapshot = large(160, 16)
    found = tmsh(snapshot)
    after = snapshot.moved(places(snapshot, found))
    assert inter_node(snapshot, after.graph.places).saved > 0.1
    assert len(found.moves) > 20
    loads, graph = Loads(after), after.graph
    for node in {graph.node_position[move.target] for move in found.moves}:
        for resource in range(3):
            assert loads.used[resource][node] <= 0.951 * loads.limits[resource][node]
        mine = [index for index, place in enumerate(graph.places) if place == node]
        out = sum(bytes for each in mine for to, bytes in graph.children[each] if graph.places[to] != node)
        assert out <= 0.451 * loads.limits[2][node]


def test_tmsh_moves_an_executor_only_where_it_may_be():
    nodes = tuple(PlacementNode(name, NODE) for name in ("n1", "n2"))
    executors = (
        PlacedExecutor("s", "s", "n1", 0.1, nodes=frozenset({"n1"})),
        PlacedExecutor("b", "b", "n2", 0.1, nodes=frozenset({"n2"})),
    )
    assert not tmsh(PlacementSnapshot(nodes, executors, (ExecutorStream("s", "b", 1.0, 3e6),))).moves


def test_leedsp_takes_fewer_nodes_and_less_frequency_and_so_less_power():
    snapshot = large(160, 16)
    found = leedsp(snapshot)
    after = snapshot.moved(places(snapshot, found))
    released = {release.node for release in found.releases}
    assert released
    assert not released & set(after.places.values())
    then = power(after, released=released, regulated=found.settings)
    assert then.total < power(snapshot).total
    loads, by_name = Loads(after), {setting.node: setting for setting in found.settings}
    for index, node in enumerate(after.nodes):
        if node.name not in released:
            step = by_name[node.name].frequency
            assert loads.share(index) <= 0.8 * step or step == 1.0


def test_leedsp_spreads_what_is_too_much_for_a_node():
    nodes = tuple(PlacementNode(name, NODE) for name in ("n1", "n2"))
    executors = tuple(PlacedExecutor(f"x{index}", "x", "n1", 0.9) for index in range(4))
    snapshot = PlacementSnapshot(nodes, executors)
    found = leedsp(snapshot)
    loads = Loads(snapshot.moved(places(snapshot, found)))
    assert sorted(loads.counts) == [1, 3]
    assert max(loads.share(0), loads.share(1)) <= 0.8
    assert not found.releases


@pytest.mark.parametrize(("on_critical_path", "lowered"), [(False, {"n3"}), (True, {"n1", "n2", "n3"})])
def test_wndvr_lowers_the_voltage_off_the_critical_path_or_on_it_too(on_critical_path, lowered):
    found = wndvr(example_of_pu_2021(), on_critical_path)
    assert {setting.node for setting in found.settings} == lowered
    assert {setting.voltage for setting in found.settings} == {LOW_VOLTAGE}
    assert not found.moves
    assert not found.releases
    assert power(example_of_pu_2021(), regulated=found.settings).dynamic < power(example_of_pu_2021()).dynamic


def test_wndvr_leaves_nodes_with_much_data_alone():
    assert not wndvr(example_of_pu_2021(), True, threshold=1e-6).settings
