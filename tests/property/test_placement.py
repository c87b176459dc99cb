"""ERDM on any cluster: limits hold, critical executors stay, nothing is lost, and no path costs more than the
critical path."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.control.erdm import plan
from penstock.control.limits import Loads
from penstock.control.paths import critical, node_costs, path_of
from penstock.control.placement import ExecutorStream, PlacedExecutor, PlacementNode, PlacementSnapshot, Use
from penstock.control.placement_report import as_json, explain
from penstock.control.roster import Roster
from penstock.sim.baselines import leedsp, round_robin, wndvr
from penstock.sim.tmsh import tmsh

# quarters, so that sums are exact and limits are reached exactly
amounts = st.integers(0, 12).map(lambda value: value / 4)


@st.composite
def snapshots(draw, most=14):
    names = [f"n{index}" for index in range(draw(st.integers(1, 6)))]
    limits = st.integers(1, 40).map(lambda value: value / 4)
    uses = st.builds(Use, amounts, amounts, amounts)
    nodes = tuple(PlacementNode(name, draw(st.builds(Use, limits, limits, limits)), draw(uses)) for name in names)
    count = draw(st.integers(0, most))
    allowed = st.none() | st.frozensets(st.sampled_from(names))
    executors = tuple(
        PlacedExecutor(
            f"e{index}",
            f"c{index % 3}",
            draw(st.sampled_from(names)),
            *(draw(amounts) for _ in range(3)),
            nodes=draw(allowed),
        )
        for index in range(count)
    )
    order = draw(st.permutations(range(count)))
    pairs = [(a, b) for at, a in enumerate(order) for b in order[at + 1 :]]
    chosen = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=30)) if pairs else []
    streams = tuple(ExecutorStream(f"e{a}", f"e{b}", 1.0, draw(amounts)) for a, b in chosen)
    return PlacementSnapshot(nodes, executors, streams)


plans = st.tuples(snapshots(), st.sampled_from([0.0, 0.1, 0.5]), st.sampled_from([None, 0.5, 1.0]))


@given(plans)
def test_no_move_takes_a_node_beyond_a_limit(drawn):
    """Moves are carried out one by one, and loads are computed anew after each."""
    snapshot, slack, fill = drawn
    for move in plan(snapshot, slack, fill).moves:
        assert snapshot.places[move.executor] == move.source
        target = snapshot.graph.node_position[move.target]
        assert Loads(snapshot).at_limit(target) is None
        snapshot = snapshot.moved({move.executor: move.target})
        loads = Loads(snapshot)
        for used, limit in zip(loads.used, loads.limits, strict=True):
            assert used[target] <= limit[target]


@given(plans)
def test_what_a_plan_leaves(drawn):
    snapshot, slack, fill = drawn
    found = plan(snapshot, slack, fill)
    after = snapshot.moved({move.executor: move.target for move in found.moves})
    moved, stayed = {move.executor for move in found.moves}, {stay.executor for stay in found.stays}
    assert len(moved) == len(found.moves)
    assert not moved & found.critical.executors, "critical executors never move"
    assert moved | stayed | found.critical.executors == set(snapshot.places), "each is told of"
    assert len(after.executors) == len(snapshot.executors)
    assert all(move.target in found.critical.nodes and move.reason for move in found.moves)
    assert all(stay.reason for stay in found.stays)
    assert {release.node for release in found.releases} == {
        node.name for node in snapshot.nodes if node.name not in after.places.values()
    }, "released is what is empty"
    for move in found.moves:
        allowed = snapshot.executors[snapshot.graph.position[move.executor]].nodes
        assert allowed is None or move.target in allowed
    assert explain(found)
    assert as_json(found)["moves"] == [vars(move) for move in found.moves]


@given(plans)
def test_targets_are_those_of_the_rules_asked_node_by_node(drawn):
    """The plan compared with a straightforward implementation of its rules."""
    snapshot, slack, fill = drawn
    found = plan(snapshot, slack, fill)
    critical_nodes = {snapshot.graph.node_position[name] for name in found.critical.nodes}
    told = {move.executor: snapshot.graph.node_position[move.target] for move in found.moves}
    loads = Loads(snapshot)
    for index in snapshot.graph.order:
        executor = snapshot.executors[index]
        if executor.id in found.critical.executors:
            continue
        need = loads.need(index)
        open_to = {
            node
            for node in critical_nodes
            if loads.lacking(need, node) is None
            and (executor.nodes is None or snapshot.nodes[node].name in executor.nodes)
        }
        homes = {loads.places[parent] for parent, _ in snapshot.graph.parents[index]} & open_to
        wanted = min(homes or open_to, key=lambda n: (loads.counts[n], loads.share(n), n), default=None)
        assert told.get(executor.id) == wanted
        if wanted is not None:
            loads.move(index, wanted, need)


@given(snapshots(), st.integers(0, 2**32))
def test_no_path_costs_more_than_the_critical_one(snapshot, seed):
    found, draw = critical(snapshot), random.Random(seed)
    assert max(node_costs(snapshot).values(), default=0.0) == pytest.approx(found.path.cost)
    for start in range(len(snapshot.executors)):
        trail = [start]
        while children := snapshot.graph.children[trail[-1]]:
            trail.append(draw.choice(children)[0])
        cost = path_of(snapshot, [snapshot.executors[index].id for index in trail]).cost
        assert cost <= found.path.cost * (1 + 1e-9)


@given(plans)
def test_the_same_snapshot_leads_to_the_same_plan(drawn):
    snapshot, slack, fill = drawn
    again = PlacementSnapshot(snapshot.nodes, snapshot.executors, snapshot.streams)
    assert plan(snapshot, slack, fill) == plan(again, slack, fill)


@given(plans)
def test_more_slack_and_less_fill_never_make_fewer_nodes_critical(drawn):
    snapshot, slack, _ = drawn
    one = set(plan(snapshot).critical.nodes)
    assert one <= set(plan(snapshot, slack).critical.nodes)
    assert one <= set(plan(snapshot, fill=1.0).critical.nodes) <= set(plan(snapshot, fill=0.5).critical.nodes)


@given(snapshots())
def test_the_roster_finds_what_a_scan_finds(snapshot):
    """Also if nodes are set aside and return: large and small executors in any order, from n0 to the others."""
    snapshot = snapshot.moved(dict.fromkeys(snapshot.places, "n0"))
    loads, others = Loads(snapshot), range(1, len(snapshot.nodes))

    def key(node):
        return (loads.counts[node], loads.share(node))

    roster = Roster(loads, others, key)
    for index in range(len(snapshot.executors)):
        need = loads.need(index)
        fits = [node for node in others if loads.lacking(need, node) is None]
        found = roster.first(need)
        assert found == min(fits, key=lambda node: (key(node), node), default=None)
        if found is not None:
            loads.move(index, found, need)
            roster.moved(found)


@given(snapshots())
def test_strategies_name_what_there_is(snapshot):
    names = {node.name for node in snapshot.nodes}
    for found in (round_robin(snapshot), tmsh(snapshot), leedsp(snapshot), wndvr(snapshot), wndvr(snapshot, True)):
        places = snapshot.places
        for move in found.moves:
            assert places[move.executor] == move.source != move.target
            assert move.target in names
            places[move.executor] = move.target
        assert not {release.node for release in found.releases} & set(places.values())
        assert all(0 < each.frequency <= 1 and 0 < each.voltage <= 1 for each in found.settings)
