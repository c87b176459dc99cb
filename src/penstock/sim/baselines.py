"""The strategies C compares ERDM with (C §4.1), as decisions over the same snapshot, for the simulator.

C tells each in a sentence or two and cites the rest. What is here is that much, no more: each docstring says what
is modelled and what is not. TMSH-Storm is in ``control.tmsh``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.control.energy import PowerModel
from penstock.control.limits import Loads
from penstock.control.paths import critical
from penstock.control.placement import ExecutorMove, PlacementSnapshot, Regulate, Release
from penstock.control.roster import Roster

FREQUENCIES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Steps of a CPU's frequency as a share of the full one: those of a desktop CPU of C's time, rounded."""

LOW_VOLTAGE = 0.8
"""Of memory: 1.2 of DDR3's 1.5 V, what the modules of C's time bear."""


@dataclass(frozen=True)
class Proposal:
    """What a strategy wants: moves in order, then releases; settings of nodes hold from then on."""

    moves: tuple[ExecutorMove, ...] = ()
    releases: tuple[Release, ...] = ()
    settings: tuple[Regulate, ...] = ()


def round_robin(snapshot: PlacementSnapshot) -> Proposal:
    """Storm's default: executors, component by component, to one node after the other.

    Modelled: that. Not modelled: several workers on a node, workers that are taken. Asks for no limit, as Storm
    does not.
    """
    components = list(dict.fromkeys(executor.component for executor in snapshot.executors))
    rank = {component: index for index, component in enumerate(components)}
    moves = []
    for index, executor in enumerate(sorted(snapshot.executors, key=lambda each: rank[each.component])):
        target = snapshot.nodes[index % len(snapshot.nodes)].name
        if target != executor.node:
            moves.append(ExecutorMove(executor.id, executor.node, target, "its turn"))
    return Proposal(tuple(moves))


def leedsp(
    snapshot: PlacementSnapshot, models: Mapping[str, PowerModel] | None = None, target: float = 0.8
) -> Proposal:
    """LEEDSP: as many nodes, and those at such a CPU frequency, that CPU power is least with ``target`` of the
    cycles in use at most.

    Modelled: the number of nodes and the frequency, chosen together; the least used nodes are emptied, their
    executors and those beyond the target go to the node with the lowest CPU use that has room. CPU and idle power
    only, for C finds that it passes over memory and network. Not modelled: the forecast of the load (the next
    window is taken to be like this one), a change of parallelism, the queueing model that turns use into latency.
    """
    loads = Loads(snapshot)
    order = sorted(range(len(snapshot.nodes)), key=lambda node: (-loads.share(node), node))
    kept = order[: _least_power(snapshot, loads, order, models or {}, target)]
    roster = Roster(loads, kept, lambda node: (loads.share(node),))
    residents: dict[int, list[int]] = {node: [] for node in order}
    for index in snapshot.graph.order:
        residents[loads.places[index]].append(index)
    moves: list[ExecutorMove] = []
    for place, node in enumerate([*order[len(kept) :], *kept]):
        emptied = place < len(order) - len(kept)
        for index in residents[node]:
            if not emptied and loads.share(node) <= target:
                break
            need, executor = loads.need(index), snapshot.executors[index]
            goal = roster.first(need)
            if goal is None or goal == node or not _allowed(executor.nodes, snapshot.nodes[goal].name):
                continue
            if not emptied and loads.share(goal) + need.cpu / loads.limits[0][goal] > target:
                break
            loads.move(index, goal, need)
            roster.moved(goal)
            roster.moved(node)
            moves.append(ExecutorMove(executor.id, executor.node, snapshot.nodes[goal].name, "lowest CPU use"))
    releases = tuple(
        Release(snapshot.nodes[node].name, "less power without it") for node in order if not loads.counts[node]
    )
    settings = []
    for node in sorted(set(order) - {node for node in order if not loads.counts[node]}):
        step = _frequency(loads.share(node), target)
        reason = f"CPU use {loads.share(node):.0%}"
        settings.append(Regulate(snapshot.nodes[node].name, reason, frequency=step))
    return Proposal(tuple(moves), releases, tuple(settings))


def wndvr(
    snapshot: PlacementSnapshot, on_critical_path: bool = False, threshold: float = 0.7, slack: float = 0.0
) -> Proposal:
    """WNDVR-Storm: memory at a lower voltage on nodes that get little data. ``on_critical_path``: DVRCP, critical
    nodes too; without, DVRNP, the others only.

    Modelled: the lower voltage where less than ``threshold`` of the bandwidth is in use, full voltage else;
    nothing moves. Not modelled: what a lower voltage does to the memory's speed, steps between the two voltages,
    the moments of regulation that make C's curve unsteady.
    """
    loads, nodes = Loads(snapshot), set(critical(snapshot, slack).nodes)
    settings = []
    for index, node in enumerate(snapshot.nodes):
        if node.name in nodes and not on_critical_path:
            continue
        use = loads.used[2][index] / loads.limits[2][index]
        if use < threshold:
            settings.append(Regulate(node.name, f"{use:.0%} of the bandwidth in use", voltage=LOW_VOLTAGE))
    return Proposal(settings=tuple(settings))


def _least_power(
    snapshot: PlacementSnapshot,
    loads: Loads,
    order: Sequence[int],
    models: Mapping[str, PowerModel],
    target: float,
) -> int:
    """How many nodes, most used first, draw the least; all of them where even all at full frequency are too
    few."""
    work, cores, idle, cpu = sum(loads.used[0]), 0.0, 0.0, 0.0
    best, least = len(order), math.inf
    for count, node in enumerate(order, start=1):
        model = models.get(snapshot.nodes[node].name, _DEFAULT)
        cores += loads.limits[0][node]
        idle += model.idle
        cpu += model.cpu
        share = work / cores
        if share > target:
            continue
        watts = idle + cpu * share * _frequency(share, target) ** 2
        if watts < least:
            best, least = count, watts
    return best


def _frequency(share: float, target: float) -> float:
    """The lowest at which the same work takes ``target`` of the cycles at most; the full one where none does."""
    return next((step for step in FREQUENCIES if share <= target * step), FREQUENCIES[-1])


def _allowed(nodes: frozenset[str] | None, name: str) -> bool:
    return nodes is None or name in nodes


_DEFAULT = PowerModel()
