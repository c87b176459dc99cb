"""What paths through the executors cost, and which is critical (C definition 3, eq. 1–5).

Costs are seconds of work for each second of the stream, so that both kinds add up: computation is the seconds an
executor was busy (its share of cores), communication the seconds its bytes keep the link between two nodes
occupied (bytes a second over the lesser of the two nodes' bandwidths). C has seconds for each tuple: divide by
tuples a second.

A path goes from an executor without parents to one without children. Paths are never listed: there are more than
executors by orders of magnitude. Everything here is one pass over executors and streams.
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
    """From the executor before it; 0 for the first and inside a node."""


@dataclass(frozen=True)
class Path:
    hops: tuple[Hop, ...]

    @property
    def computation(self) -> float:
        """C eq. 2, W_computation."""
        return sum(hop.computation for hop in self.hops)

    @property
    def communication(self) -> float:
        """C eq. 4, W_node: between nodes only, for inside a node it counts as nothing (C eq. 24)."""
        return sum(hop.communication for hop in self.hops)

    @property
    def cost(self) -> float:
        """C eq. 1 and 4: l_p, all executors and all edges of the path."""
        return self.computation + self.communication


@dataclass(frozen=True)
class Critical:
    """What lies on the critical path."""

    path: Path
    nodes: tuple[str, ...]
    """Critical nodes, as in the snapshot."""
    executors: frozenset[str]
    """Critical executors: all that are on critical nodes, on the path or not (C definition 3)."""


def computation(executor: PlacedExecutor) -> float:
    """C eq. 2, an executor's part of W_computation: busy seconds a second."""
    return executor.cpu


def communication(bytes: float, bandwidth: float, other: float) -> float:
    """C eq. 4, an edge's part of W_node, between two nodes of these bandwidths: seconds of the link a second."""
    return bytes / min(bandwidth, other)


def path_of(snapshot: PlacementSnapshot, executors: Sequence[str]) -> Path:
    """The path through these executors (C eq. 1); each must send to the next."""
    graph, nodes = snapshot.graph, snapshot.nodes
    hops: list[Hop] = []
    before = -1
    for name in executors:
        index = graph.position[name]
        cost, place = 0.0, graph.places[index]
        if before >= 0:
            sent = [bytes for parent, bytes in graph.parents[index] if parent == before]
            if not sent:
                raise ValueError(f"a path follows the streams; {executors[len(hops) - 1]} sends nothing to {name}")
            there = graph.places[before]
            if there != place:
                cost = communication(sent[0], nodes[there].limit.bandwidth, nodes[place].limit.bandwidth)
        executor = snapshot.executors[index]
        hops.append(Hop(name, executor.node, computation(executor), cost))
        before = index
    return Path(tuple(hops))


def critical(snapshot: PlacementSnapshot, slack: float = 0.0) -> Critical:
    """The most costly path (C eq. 5), its nodes and their executors; of equal paths the first in the snapshot's
    order.

    With ``slack`` the nodes of all paths that cost at least (1 − slack) of it count as critical too. C's 14
    critical nodes of 16 cannot come from one path through three components, so it must have had something like it.
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
    """The same path, with so many more nodes counted as critical, those of the most costly paths first, that the
    executors of all others should fit on them with ``fill`` of each limit in use (ours).

    Sums only: what is free on each of many nodes may be too little for an executor, so let ``fill`` be below 1.
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
    """For each node with executors the cost of the most costly path through it: how critical it is."""
    found: dict[str, float] = {}
    for executor, cost in zip(snapshot.executors, _through(snapshot, _upstream(snapshot)[0]), strict=True):
        found[executor.node] = max(found.get(executor.node, 0.0), cost)
    return found


def _upstream(snapshot: PlacementSnapshot) -> tuple[list[float], list[int]]:
    """For each executor the cost of the most costly path that ends with it, and its parent there; -1 for none."""
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
    """For each executor the cost of the most costly path through it."""
    graph = snapshot.graph
    places, bandwidths = graph.places, [node.limit.bandwidth for node in snapshot.nodes]
    down = [0.0] * len(places)
    """Of what comes after it."""
    for index in reversed(graph.order):
        place = places[index]
        for child, bytes in graph.children[index]:
            there = places[child]
            cost = down[child] + computation(snapshot.executors[child])
            if there != place:
                cost += communication(bytes, bandwidths[place], bandwidths[there])
            down[index] = max(down[index], cost)
    return [before + after for before, after in zip(up, down, strict=True)]
