"""What nodes have in use and what may move in (C's resource constraint, definition 4 and algorithm 1)."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.control.placement import RESOURCES, PlacementSnapshot


@dataclass(frozen=True)
class AtLimit:
    """A limit node, and for what."""

    node: str
    resource: str
    used: float
    limit: float


@dataclass(frozen=True)
class Need:
    """What an executor adds to a node it moves to (C eq. 9–11, r′)."""

    cpu: float
    memory: float
    bandwidth: float
    """If none of its neighbours is there."""
    shared: dict[int, float]
    """Bytes a second it exchanges with executors, by their node. With those of the node it moves to it talks
    without the network, and they with it: both ends' bandwidth is given back."""

    def of(self, resource: int, node: int) -> float:
        if resource == 0:
            return self.cpu
        if resource == 1:
            return self.memory
        return self.bandwidth - 2 * self.shared.get(node, 0.0)


class Loads:
    """The nodes of a snapshot while a plan is made: each move counts at once. Nodes and executors by position.

    Bandwidth is counted, not added up from what was measured: two executors on one node need none, so a move may
    lessen a node's use, and a measured figure would go wrong with the first move.
    """

    def __init__(self, snapshot: PlacementSnapshot) -> None:
        self.snapshot = snapshot
        graph = snapshot.graph
        self.places = list(graph.places)
        """The node of each executor, as moved so far."""
        self.counts = [0] * len(snapshot.nodes)
        self.used = [
            [node.other.cpu for node in snapshot.nodes],
            [node.other.memory for node in snapshot.nodes],
            [node.other.bandwidth for node in snapshot.nodes],
        ]
        """By resource and node: C's o."""
        self.limits = [
            [node.limit.cpu for node in snapshot.nodes],
            [node.limit.memory for node in snapshot.nodes],
            [node.limit.bandwidth for node in snapshot.nodes],
        ]
        """By resource and node: C's r."""
        self._outside = [0.0] * len(self.places)
        """Bytes a second of each executor that no stream accounts for."""
        cpu, memory, bandwidth = self.used
        for index, (executor, place) in enumerate(zip(snapshot.executors, self.places, strict=True)):
            crossing = 0.0
            for edges in (graph.parents[index], graph.children[index]):
                for other, bytes in edges:
                    if self.places[other] != place:
                        crossing += bytes
            self._outside[index] = max(executor.network - crossing, 0.0)
            self.counts[place] += 1
            cpu[place] += executor.cpu
            memory[place] += executor.memory
            bandwidth[place] += crossing + self._outside[index]

    def share(self, node: int) -> float:
        """Of its CPU limit that is in use."""
        return self.used[0][node] / self.limits[0][node]

    def at_limit(self, node: int) -> int | None:
        """The first resource of which as much is in use as may be (algorithm 1, line 1)."""
        for resource in range(len(RESOURCES)):
            if self.used[resource][node] >= self.limits[resource][node]:
                return resource
        return None

    def need(self, executor: int) -> Need:
        """What it would add anywhere, with its neighbours where they are now."""
        each, graph = self.snapshot.executors[executor], self.snapshot.graph
        shared: dict[int, float] = {}
        total = self._outside[executor]
        for edges in (graph.parents[executor], graph.children[executor]):
            for other, bytes in edges:
                place = self.places[other]
                shared[place] = shared.get(place, 0.0) + bytes
                total += bytes
        return Need(each.cpu, each.memory, total, shared)

    def lacking(self, need: Need, node: int) -> int | None:
        """The first resource that forbids the move; None: data may move in (algorithm 1, C theorem 1)."""
        full = self.at_limit(node)
        if full is not None:
            return full
        for resource in range(len(RESOURCES)):
            if need.of(resource, node) + self.used[resource][node] > self.limits[resource][node]:
                return resource
        return None

    def move(self, executor: int, target: int, need: Need) -> None:
        """``need`` as of now. The caller has asked ``lacking``, or does not care."""
        source = self.places[executor]
        cpu, memory, bandwidth = self.used
        cpu[source] -= need.cpu
        memory[source] -= need.memory
        bandwidth[source] -= need.of(2, source)
        cpu[target] += need.cpu
        memory[target] += need.memory
        bandwidth[target] += need.of(2, target)
        self.counts[source] -= 1
        self.counts[target] += 1
        self.places[executor] = target

    def limit_nodes(self) -> tuple[AtLimit, ...]:
        """C's N″, each with all resources it is at the limit of."""
        return tuple(
            AtLimit(node.name, name, self.used[resource][index], self.limits[resource][index])
            for index, node in enumerate(self.snapshot.nodes)
            for resource, name in enumerate(RESOURCES)
            if self.used[resource][index] >= self.limits[resource][index]
        )

    def why_not(self, need: Need, node: int) -> str:
        """Why the executor may not move there; empty if it may."""
        resource = self.lacking(need, node)
        if resource is None:
            return ""
        name, used, limit = (
            self.snapshot.nodes[node].name,
            self.used[resource][node],
            self.limits[resource][node],
        )
        if self.at_limit(node) is not None:
            return f"{name} is at its limit of {amount(resource, limit)} with {amount(resource, used)}"
        added = amount(resource, need.of(resource, node))
        return f"{name} uses {amount(resource, used)} of {amount(resource, limit)} and {added} would come"


def amount(resource: int | str, value: float) -> str:
    """With its unit, for people."""
    if resource in (0, "cpu"):
        return f"{value:.2f} cores"
    if resource in (1, "memory"):
        return f"{value / 1e6:,.0f} MB"
    return f"{value / 1e6:,.2f} MB/s"
