"""The strategies that *Pu 2021* compares ERDM with (section 4.1), as decisions on the same snapshot, for the
simulator.

The paper describes each strategy in one or two sentences and cites other papers for the rest. These functions
model only what it describes; each docstring says what is modelled and what is not. TMSH-Storm is in ``sim.tmsh``.
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
"""CPU frequencies as shares of the full frequency: those of a desktop CPU of 2021, rounded."""

LOW_VOLTAGE = 0.8
"""Memory voltage as a share of the full voltage: 1.2 V of DDR3's 1.5 V, the lowest that DDR3 modules support."""


@dataclass(frozen=True)
class Proposal:
    """A strategy's decision: moves in order, then releases. Settings of nodes hold from then on."""

    moves: tuple[ExecutorMove, ...] = ()
    releases: tuple[Release, ...] = ()
    settings: tuple[Regulate, ...] = ()


def round_robin(snapshot: PlacementSnapshot) -> Proposal:
    """Storm's default scheduler: assigns executors, ordered by component, to one node after the other.

    Not modelled: several workers per node, and workers that are in use. Limits are ignored, as in Storm.
    """
    components = list(dict.fromkeys(executor.component for executor in snapshot.executors))
    rank = {component: index for index, component in enumerate(components)}
    moves = []
    for index, executor in enumerate(sorted(snapshot.executors, key=lambda each: rank[each.component])):
        target = snapshot.nodes[index % len(snapshot.nodes)].name
        if target != executor.node:
            moves.append(ExecutorMove(executor.id, executor.node, target, "round robin"))
    return Proposal(tuple(moves))


def leedsp(
    snapshot: PlacementSnapshot, models: Mapping[str, PowerModel] | None = None, target: float = 0.8
) -> Proposal:
    """LEEDSP: chooses the number of nodes and their CPU frequency so that CPU power is lowest while at most
    ``target`` of the cycles are in use.

    Modelled: the number of nodes and the frequency, chosen together. The least used nodes are emptied; their
    executors, and those above the target on other nodes, move to the node with the lowest CPU use that has room.
    Only CPU and idle power count, because *Pu 2021* states that LEEDSP ignores memory and network. Not modelled:
    the load forecast (the next load sample is assumed to equal this one), changes of parallelism, and the queueing
    model for latency.
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
        Release(snapshot.nodes[node].name, "lower power without it") for node in order if not loads.counts[node]
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
    """WNDVR-Storm: lowers the memory voltage of nodes that receive little data. With ``on_critical_path`` it is
    DVRCP, which includes critical nodes; without it is DVRNP, which excludes them.

    Modelled: the lower voltage if less than ``threshold`` of the bandwidth is in use, otherwise the full voltage.
    Nothing moves. Not modelled: the effect of the voltage on memory speed, voltages in between, and the duration
    of regulation, which makes the paper's curve unsteady.
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
    """The number of nodes, most used first, that draw the least power. All nodes if even all of them at full
    frequency are not enough."""
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
    """The lowest frequency at which the work takes at most ``target`` of the cycles; the full one if none
    suffices."""
    return next((step for step in FREQUENCIES if share <= target * step), FREQUENCIES[-1])


def _allowed(nodes: frozenset[str] | None, name: str) -> bool:
    return nodes is None or name in nodes


_DEFAULT = PowerModel()
