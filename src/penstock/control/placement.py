"""The input and output of placement policies: executors on nodes, streams between them, and suggested moves.

Pure and inert: the load monitor creates a ``PlacementSnapshot``, a policy returns suggestions, and the driver
carries them out. An executor is the tasks of one component in one worker. A node is a host with a Spark executor.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

RESOURCES = ("cpu", "memory", "bandwidth")
"""The three resources of Pu 2021, in the order in which algorithm 1 checks them."""


@dataclass(frozen=True)
class Use:
    """Amounts of the three resources of a node, or limits for them; ``math.inf`` means no limit."""

    cpu: float = 0.0
    """Cores: busy seconds per second."""
    memory: float = 0.0
    """Bytes."""
    bandwidth: float = 0.0
    """Bytes per second, in and out together."""

    def times(self, share: float) -> Use:
        return Use(self.cpu * share, self.memory * share, self.bandwidth * share)


@dataclass(frozen=True)
class PlacedExecutor:
    """The load of one executor in the last load sample."""

    id: str
    component: str
    node: str
    cpu: float
    """Cores: busy seconds per second."""
    memory: float = 0.0
    """Bytes that move with the executor."""
    network: float = 0.0
    """Bytes per second exchanged with other nodes. The part that its streams do not account for (a source, a
    store) moves with it. If it is less than the streams carry, the streams count."""
    nodes: frozenset[str] | None = None
    """The nodes it may move to, because a move needs a slot of its stage there. None: any node. Only its own node:
    the executor is fixed."""


@dataclass(frozen=True)
class ExecutorStream:
    """All tuples from one executor to another, over all streams of the topology. At most one per pair."""

    source: str
    target: str
    tuples: float
    """Per second."""
    bytes: float
    """Per second."""


@dataclass(frozen=True)
class PlacementNode:
    name: str
    limit: Use
    """The permitted use, r in Pu 2021 (equations 6 to 8): the part of the node's resources that may be used. All
    values are above 0."""
    other: Use = field(default_factory=Use)
    """Use by other programs than this topology. It remains when all executors leave."""


@dataclass(frozen=True)
class PlacementSnapshot:
    """The complete input of a policy. The streams form no cycle. Equal snapshots lead to equal decisions: if
    several nodes are equally good, the one that comes first in ``nodes`` is chosen."""

    nodes: tuple[PlacementNode, ...]
    executors: tuple[PlacedExecutor, ...]
    streams: tuple[ExecutorStream, ...] = ()

    def __post_init__(self) -> None:
        _unique("nodes", (node.name for node in self.nodes))
        _unique("executors", (executor.id for executor in self.executors))
        names = {node.name for node in self.nodes}
        for node in self.nodes:
            if not all(getattr(node.limit, resource) > 0 for resource in RESOURCES):
                raise ValueError(f"the limits of a node must be above 0, but {node.name} has {node.limit}")
            _amounts(node.name, node.other.cpu, node.other.memory, node.other.bandwidth)
        for executor in self.executors:
            if executor.node not in names:
                raise ValueError(f"executor {executor.id} is on {executor.node}, which is not in the snapshot")
            _amounts(executor.id, executor.cpu, executor.memory, executor.network)
        pairs = {(stream.source, stream.target) for stream in self.streams}
        if len(pairs) < len(self.streams):
            _unique("streams", (f"{stream.source} -> {stream.target}" for stream in self.streams))
        known = self.graph.position
        for stream in self.streams:
            if stream.source not in known or stream.target not in known:
                raise ValueError(f"the snapshot lacks an executor of stream {stream.source} -> {stream.target}")
            if not (0 <= stream.bytes < math.inf and 0 <= stream.tuples < math.inf):
                _amounts(f"{stream.source} -> {stream.target}", stream.bytes, stream.tuples)

    @cached_property
    def graph(self) -> Graph:
        return Graph(self)

    @property
    def places(self) -> dict[str, str]:
        """The node of each executor."""
        return {executor.id: executor.node for executor in self.executors}

    def moved(self, places: Mapping[str, str]) -> PlacementSnapshot:
        """The snapshot with these executors on other nodes: the expected next measurement if nothing else
        changes."""
        old, position = self.places, self.graph.position
        new = old | dict(places)
        crossing, then = [0.0] * len(self.executors), [0.0] * len(self.executors)
        for stream in self.streams:
            for where, total in ((old, crossing), (new, then)):
                if where[stream.source] != where[stream.target]:
                    total[position[stream.source]] += stream.bytes
                    total[position[stream.target]] += stream.bytes
        executors = (
            dataclasses.replace(
                executor,
                node=new[executor.id],
                network=max(executor.network - crossing[index], 0.0) + then[index],
            )
            for index, executor in enumerate(self.executors)
        )
        return dataclasses.replace(self, executors=tuple(executors))


class Graph:
    """The streams of a snapshot by positions in its ``executors`` and ``nodes``, for fast loops."""

    def __init__(self, snapshot: PlacementSnapshot) -> None:
        self.position = {executor.id: index for index, executor in enumerate(snapshot.executors)}
        self.node_position = {node.name: index for index, node in enumerate(snapshot.nodes)}
        self.places = [self.node_position.get(executor.node, -1) for executor in snapshot.executors]
        """The node of each executor."""
        self.parents: list[list[tuple[int, float]]] = [[] for _ in snapshot.executors]
        """For each executor, pairs of sending executor and bytes per second."""
        self.children: list[list[tuple[int, float]]] = [[] for _ in snapshot.executors]
        position = self.position
        for stream in snapshot.streams:
            source, target = position.get(stream.source), position.get(stream.target)
            if source is not None and target is not None:
                self.parents[target].append((source, stream.bytes))
                self.children[source].append((target, stream.bytes))
        self._names = [executor.id for executor in snapshot.executors]

    @cached_property
    def order(self) -> list[int]:
        """Positions of the executors, each after all its parents, otherwise in the order of the snapshot."""
        waits = [len(parents) for parents in self.parents]
        found = [index for index, parents in enumerate(self.parents) if not parents]
        for index in found:
            for child, _ in self.children[index]:
                waits[child] -= 1
                if not waits[child]:
                    found.append(child)
        if len(found) < len(waits):
            left = [self._names[index] for index, count in enumerate(waits) if count]
            raise ValueError(f"the streams form a cycle in or before {left[:10]}")
        return found


# ---- suggestions ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ExecutorMove:
    """Move the executor with its state and data from one node to another."""

    executor: str
    source: str
    target: str
    reason: str


@dataclass(frozen=True)
class ExecutorStay:
    """The executor should have moved, but no node has room. Informative; there is nothing to carry out."""

    executor: str
    node: str
    reason: str


@dataclass(frozen=True)
class Release:
    """No executor is left on the node after the moves, so the topology no longer needs it."""

    node: str
    reason: str


@dataclass(frozen=True)
class Regulate:
    """Sets the power regulation of a node, for the strategies with which Pu 2021 compares. Only simulated: Spark
    sets neither."""

    node: str
    reason: str
    frequency: float = 1.0
    """Share of the full CPU frequency, above 0 and up to 1."""
    voltage: float = 1.0
    """Share of the full memory voltage, above 0 and up to 1."""


Suggestion = ExecutorMove | Release | Regulate


def _unique(what: str, names: Iterable[str]) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ValueError(f"a snapshot has {what} more than once: {twice[:10]}")


def _amounts(name: str, *values: float) -> None:
    if not all(0 <= value < math.inf for value in values):
        raise ValueError(f"amounts must be at least 0 and finite, but {name} has {values}")
