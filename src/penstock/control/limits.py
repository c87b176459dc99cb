"""The used resources of nodes and the check whether an executor fits on a node (Pu 2021, definition 4 and
algorithm 1)."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.control.placement import RESOURCES, PlacementSnapshot


@dataclass(frozen=True)
class AtLimit:
    """A node that is at a limit, and the resources concerned."""

    node: str
    resource: str
    used: float
    limit: float


@dataclass(frozen=True)
class Need:
    """What an executor adds to a node it moves to (r′ in Pu 2021, equations 9 to 11)."""

    cpu: float
    memory: float
    bandwidth: float
    """Bytes per second, if none of its neighbours is on the node."""
    shared: dict[int, float]
    """Bytes per second that it exchanges with executors on each node. On the node it moves to, this traffic no
    longer uses the network, so the bandwidth of both ends is subtracted."""

    def of(self, resource: int, node: int) -> float:
        if resource == 0:
            return self.cpu
        if resource == 1:
            return self.memory
        return self.bandwidth - 2 * self.shared.get(node, 0.0)


class Loads:
    """The nodes of a snapshot while a plan is made. Each move takes effect at once. Nodes and executors are
    positions.

    Bandwidth is computed from the streams instead of adding up measured values. Two executors on one node need no
    bandwidth, so a move can lower the use of a node, and measured values would be wrong after the first move.
    """

    def __init__(self, snapshot: PlacementSnapshot) -> None:
        self.snapshot = snapshot
        graph = snapshot.graph
        self.places = list(graph.places)
        """The node of each executor, after the moves so far."""
        self.counts = [0] * len(snapshot.nodes)
        self.used = [
            [node.other.cpu for node in snapshot.nodes],
            [node.other.memory for node in snapshot.nodes],
            [node.other.bandwidth for node in snapshot.nodes],
        ]
        """By resource and node: o in Pu 2021."""
        self.limits = [
            [node.limit.cpu for node in snapshot.nodes],
            [node.limit.memory for node in snapshot.nodes],
            [node.limit.bandwidth for node in snapshot.nodes],
        ]
        """By resource and node: r in Pu 2021."""
        self._outside = [0.0] * len(self.places)
        """Bytes per second of each executor that belong to no stream."""
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
        """The used share of the CPU limit."""
        return self.used[0][node] / self.limits[0][node]

    def at_limit(self, node: int) -> int | None:
        """The first resource that is used up to its limit (Pu 2021, algorithm 1, line 1)."""
        for resource in range(len(RESOURCES)):
            if self.used[resource][node] >= self.limits[resource][node]:
                return resource
        return None

    def need(self, executor: int) -> Need:
        """What the executor would add to a node, with its neighbours where they are now."""
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
        """The first resource that forbids the move. None if the executor may move to the node (Pu 2021, algorithm
        1, theorem 1)."""
        full = self.at_limit(node)
        if full is not None:
            return full
        for resource in range(len(RESOURCES)):
            if need.of(resource, node) + self.used[resource][node] > self.limits[resource][node]:
                return resource
        return None

    def move(self, executor: int, target: int, need: Need) -> None:
        """Move an executor. ``need`` must be current. This method does not check limits; use ``lacking`` for
        that."""
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
        """N″ in Pu 2021: the nodes at a limit, each with all resources concerned."""
        return tuple(
            AtLimit(node.name, name, self.used[resource][index], self.limits[resource][index])
            for index, node in enumerate(self.snapshot.nodes)
            for resource, name in enumerate(RESOURCES)
            if self.used[resource][index] >= self.limits[resource][index]
        )

    def why_not(self, need: Need, node: int) -> str:
        """The reason why the executor may not move to the node. Empty if it may."""
        resource = self.lacking(need, node)
        if resource is None:
            return ""
        name, used, limit = (
            self.snapshot.nodes[node].name,
            self.used[resource][node],
            self.limits[resource][node],
        )
        if self.at_limit(node) is not None:
            return f"{name} uses {amount(resource, used)} and is at its limit of {amount(resource, limit)}"
        added = amount(resource, need.of(resource, node))
        return f"{name} uses {amount(resource, used)} of {amount(resource, limit)}, and the move would add {added}"


def amount(resource: int | str, value: float) -> str:
    """A value with its unit, for display."""
    if resource in (0, "cpu"):
        return f"{value:.2f} cores"
    if resource in (1, "memory"):
        return f"{value / 1e6:,.0f} MB"
    return f"{value / 1e6:,.2f} MB/s"
