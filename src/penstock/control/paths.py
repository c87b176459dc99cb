"""The cost of paths through the executors, and the critical path (Pu 2021, definition 3 and equations 1 to 5).

Costs are seconds of work per second of the stream, so that both kinds can be added. Computation is the time for
which an executor was busy (its share of cores). Communication is the time for which its bytes occupy the link
between two nodes (bytes per second over the smaller bandwidth of the two nodes). Pu 2021 uses seconds per tuple:
divide by tuples per second.

A path leads from an executor without parents to one without children. Paths are never enumerated, because there
are far more paths than executors. Every function is one pass over executors and streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.control.limits import Loads
from penstock.control.placement import RESOURCES, PlacedExecutor, PlacementSnapshot


@dataclass(frozen=True)
class Hop:
    """One executor of a path."""

    executor: str
    node: str
    computation: float
    communication: float
    """Communication from the previous executor. 0 for the first executor and within a node."""


@dataclass(frozen=True)
class Path:
    hops: tuple[Hop, ...]

    @property
    def computation(self) -> float:
        """W_computation (Pu 2021, equation 2)."""
        return sum(hop.computation for hop in self.hops)

    @property
    def communication(self) -> float:
        """W_node (Pu 2021, equation 4). Only between nodes; within a node the cost is 0 (equation 24)."""
        return sum(hop.communication for hop in self.hops)

    @property
    def cost(self) -> float:
        """l_p, over all executors and edges of the path (Pu 2021, equations 1 and 4)."""
        return self.computation + self.communication


@dataclass(frozen=True)
class Critical:
    """The critical path with its nodes and executors."""

    path: Path
    nodes: tuple[str, ...]
    """The critical nodes, in the order of the snapshot."""
    executors: frozenset[str]
    """All executors on critical nodes, whether or not they are on the path (Pu 2021, definition 3)."""


def computation(executor: PlacedExecutor) -> float:
    """An executor's part of W_computation (Pu 2021, equation 2): busy seconds per second."""
    return executor.cpu


def communication(bytes: float, bandwidth: float, other: float) -> float:
    """An edge's part of W_node between nodes of these bandwidths (Pu 2021, equation 4): busy link seconds per
    second."""
    return bytes / min(bandwidth, other)


def path_of(snapshot: PlacementSnapshot, executors: Sequence[str]) -> Path:
    """The path through these executors (Pu 2021, equation 1). Each must send to the next."""
    graph, nodes = snapshot.graph, snapshot.nodes
    hops: list[Hop] = []
    before = -1
    for name in executors:
        index = graph.position[name]
        cost, place = 0.0, graph.places[index]
        if before >= 0:
            sent = [bytes for parent, bytes in graph.parents[index] if parent == before]
            if not sent:
                raise ValueError(f"{executors[len(hops) - 1]} does not send to {name}, so this is not a path")
            there = graph.places[before]
            if there != place:
                cost = communication(sent[0], nodes[there].limit.bandwidth, nodes[place].limit.bandwidth)
        executor = snapshot.executors[index]
        hops.append(Hop(name, executor.node, computation(executor), cost))
        before = index
    return Path(tuple(hops))


def critical(snapshot: PlacementSnapshot, slack: float = 0.0) -> Critical:
    """The most expensive path (Pu 2021, equation 5), its nodes and their executors. Of equally expensive paths the
    first in the order of the snapshot.

    With ``slack``, the nodes of all paths that cost at least (1 − slack) of it are critical as well. Pu 2021
    reports 14 critical nodes of 16, which a single path through three components cannot have, so its
    implementation must have used a similar rule.
    """
    if not snapshot.executors:
        return Critical(Path(()), (), frozenset())
    graph = snapshot.graph
    up, via = _upstream(snapshot)
    ends = [index for index, children in enumerate(graph.children) if not children]
    at = max(ends, key=up.__getitem__)
    greatest, trail = up[at], []
    while at >= 0:
        trail.append(at)
        at = via[at]
    trail.reverse()
    on = {graph.places[index] for index in trail}
    if slack > 0:
        enough = (1 - slack) * greatest
        on |= {graph.places[index] for index, cost in enumerate(_through(snapshot, up)) if cost >= enough}
    return _critical(snapshot, path_of(snapshot, [snapshot.executors[index].id for index in trail]), on)


def widened(snapshot: PlacementSnapshot, found: Critical, fill: float) -> Critical:
    """The same path with more critical nodes, by falling cost of the paths through them, until the executors of
    all other nodes should fit when ``fill`` of each limit is used. This extends Pu 2021.

    The check compares sums only. The free resources of each single node may be too small for an executor, so
    choose ``fill`` below 1.
    """
    costs, position, loads = node_costs(snapshot), snapshot.graph.node_position, Loads(snapshot)
    on = {position[name] for name in found.nodes}
    rest = sorted(position[name] for name in costs if position[name] not in on)
    rest.sort(key=lambda node: -costs[snapshot.nodes[node].name])

    def free(resource: int, node: int) -> float:
        return max(fill * loads.limits[resource][node] - loads.used[resource][node], 0.0)

    def moves(resource: int, node: int) -> float:
        other: float = getattr(snapshot.nodes[node].other, RESOURCES[resource])
        return loads.used[resource][node] - other

    resources = range(len(RESOURCES))
    room = [sum(free(resource, node) for node in on) for resource in resources]
    needs = [sum(moves(resource, node) for node in rest) for resource in resources]
    for node in rest:
        if all(needs[resource] <= room[resource] for resource in resources):
            break
        on.add(node)
        for resource in resources:
            room[resource] += free(resource, node)
            needs[resource] -= moves(resource, node)
    return _critical(snapshot, found.path, on)


def _critical(snapshot: PlacementSnapshot, path: Path, on: set[int]) -> Critical:
    places = snapshot.graph.places
    return Critical(
        path,
        tuple(node.name for index, node in enumerate(snapshot.nodes) if index in on),
        frozenset(executor.id for executor, place in zip(snapshot.executors, places, strict=True) if place in on),
    )


def node_costs(snapshot: PlacementSnapshot) -> dict[str, float]:
    """For each node with executors, the cost of the most expensive path through it."""
    found: dict[str, float] = {}
    for executor, cost in zip(snapshot.executors, _through(snapshot, _upstream(snapshot)[0]), strict=True):
        found[executor.node] = max(found.get(executor.node, 0.0), cost)
    return found


def _upstream(snapshot: PlacementSnapshot) -> tuple[list[float], list[int]]:
    """For each executor, the cost of the most expensive path that ends with it, and its parent on that path (-1:
    none)."""
    graph = snapshot.graph
    places, bandwidths = graph.places, [node.limit.bandwidth for node in snapshot.nodes]
    costs, via = [0.0] * len(places), [-1] * len(places)
    for index in graph.order:
        place = places[index]
        most, best = 0.0, -1
        for parent, bytes in graph.parents[index]:
            there = places[parent]
            cost = costs[parent]
            if there != place:
                cost += communication(bytes, bandwidths[there], bandwidths[place])
            if best < 0 or cost > most:
                most, best = cost, parent
        costs[index], via[index] = most + computation(snapshot.executors[index]), best
    return costs, via


def _through(snapshot: PlacementSnapshot, up: list[float]) -> list[float]:
    """For each executor, the cost of the most expensive path through it."""
    graph = snapshot.graph
    places, bandwidths = graph.places, [node.limit.bandwidth for node in snapshot.nodes]
    down = [0.0] * len(places)
    """The cost of the part after the executor."""
    for index in reversed(graph.order):
        place = places[index]
        for child, bytes in graph.children[index]:
            there = places[child]
            cost = down[child] + computation(snapshot.executors[child])
            if there != place:
                cost += communication(bytes, bandwidths[place], bandwidths[there])
            down[index] = max(down[index], cost)
    return [before + after for before, after in zip(up, down, strict=True)]
