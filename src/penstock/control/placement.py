"""What a placement policy is told and what it may say (SPEC 6): executors on nodes, streams between them.

Pure and inert: the load monitor fills a ``PlacementSnapshot``, a policy answers with suggestions, somebody else
carries them out. An executor is the tasks of one component in one worker; a node is a Spark executor, a host.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

RESOURCES = ("cpu", "memory", "bandwidth")
"""C's three, in the order algorithm 1 asks for them."""


@dataclass(frozen=True)
class Use:
    """Of a node's three resources, or a limit for them; ``math.inf`` is no limit."""

    cpu: float = 0.0
    """Cores: busy seconds a second."""
    memory: float = 0.0
    """Bytes."""
    bandwidth: float = 0.0
    """Bytes a second, in and out together."""

    def times(self, share: float) -> Use:
        return Use(self.cpu * share, self.memory * share, self.bandwidth * share)


@dataclass(frozen=True)
class PlacedExecutor:
    """One executor over the last window."""

    id: str
    component: str
    node: str
    cpu: float
    """Cores: busy seconds a second."""
    memory: float = 0.0
    """Bytes that go with it when it moves."""
    network: float = 0.0
    """Bytes a second it sent to and received from other nodes. What its streams do not account for (a source, a
    store) goes with it; where it is less than they carry, they count."""
    nodes: frozenset[str] | None = None
    """Where it may go, for a move needs a worker of its stage there; None is anywhere. Only its own node: it is
    fixed."""


@dataclass(frozen=True)
class ExecutorStream:
    """From one executor to another, all streams of the topology together; at most one for each pair."""

    source: str
    target: str
    tuples: float
    """A second."""
    bytes: float
    """A second."""


@dataclass(frozen=True)
class PlacementNode:
    name: str
    limit: Use
    """What may be in use, C's r (eq. 6–8): as much of what the node has as one wants to be used. All above 0."""
    other: Use = field(default_factory=Use)
    """In use by what is no executor of this topology; stays when all executors leave."""


@dataclass(frozen=True)
class PlacementSnapshot:
    """Everything a policy needs. Streams make no cycle. Equal snapshots lead to equal decisions; where all rules
    leave several nodes, the one named first in ``nodes`` is taken."""

    nodes: tuple[PlacementNode, ...]
    executors: tuple[PlacedExecutor, ...]
    streams: tuple[ExecutorStream, ...] = ()

    def __post_init__(self) -> None:
        _unique("nodes", (node.name for node in self.nodes))
        _unique("executors", (executor.id for executor in self.executors))
        names = {node.name for node in self.nodes}
        for node in self.nodes:
            if not all(getattr(node.limit, resource) > 0 for resource in RESOURCES):
                raise ValueError(f"a node's limits are above 0; {node.name} has {node.limit}")
            _amounts(node.name, node.other.cpu, node.other.memory, node.other.bandwidth)
        for executor in self.executors:
            if executor.node not in names:
                raise ValueError(f"executors are on nodes of the snapshot; {executor.id} is on {executor.node}")
            _amounts(executor.id, executor.cpu, executor.memory, executor.network)
        pairs = {(stream.source, stream.target) for stream in self.streams}
        if len(pairs) < len(self.streams):
            _unique("streams", (f"{stream.source} -> {stream.target}" for stream in self.streams))
        known = self.graph.position
        for stream in self.streams:
            if stream.source not in known or stream.target not in known:
                raise ValueError(f"streams join executors of the snapshot; got {stream.source} -> {stream.target}")
            if not (0 <= stream.bytes < math.inf and 0 <= stream.tuples < math.inf):
                _amounts(f"{stream.source} -> {stream.target}", stream.bytes, stream.tuples)

    @cached_property
    def graph(self) -> Graph:
        return Graph(self)

    @property
    def places(self) -> dict[str, str]:
        """Executor → node."""
        return {executor.id: executor.node for executor in self.executors}

    def moved(self, places: Mapping[str, str]) -> PlacementSnapshot:
        """The same load with these executors elsewhere: what is measured next if nothing else changes."""
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
    """The streams of a snapshot by positions in its ``executors`` and ``nodes``, for work that is done for
    each."""

    def __init__(self, snapshot: PlacementSnapshot) -> None:
        self.position = {executor.id: index for index, executor in enumerate(snapshot.executors)}
        self.node_position = {node.name: index for index, node in enumerate(snapshot.nodes)}
        self.places = [self.node_position.get(executor.node, -1) for executor in snapshot.executors]
        """The node of each executor."""
        self.parents: list[list[tuple[int, float]]] = [[] for _ in snapshot.executors]
        """For each executor ⟨executor, bytes a second⟩ of what comes in."""
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
        """Upstream first: each executor after all of its parents, otherwise as in the snapshot."""
        waits = [len(parents) for parents in self.parents]
        found = [index for index, parents in enumerate(self.parents) if not parents]
        for index in found:
            for child, _ in self.children[index]:
                waits[child] -= 1
                if not waits[child]:
                    found.append(child)
        if len(found) < len(waits):
            left = [self._names[index] for index, count in enumerate(waits) if count]
            raise ValueError(f"streams of a topology make no cycle; got one in or before {left[:10]}")
        return found


# ---- suggestions ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ExecutorMove:
    """The executor goes from one node to another, its state and its data with it."""

    executor: str
    source: str
    target: str
    reason: str


@dataclass(frozen=True)
class ExecutorStay:
    """The executor should have moved and has nowhere to go. Nothing to carry out, something to tell."""

    executor: str
    node: str
    reason: str


@dataclass(frozen=True)
class Release:
    """After the moves no executor is on the node: the topology needs it no more."""

    node: str
    reason: str


@dataclass(frozen=True)
class Regulate:
    """A node's electricity, for the strategies C compares with. Only simulated: Spark sets neither."""

    node: str
    reason: str
    frequency: float = 1.0
    """Share of the CPU's full frequency, above 0 and up to 1."""
    voltage: float = 1.0
    """Share of the memory's full voltage, above 0 and up to 1."""


Suggestion = ExecutorMove | Release | Regulate


def _unique(what: str, names: Iterable[str]) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ValueError(f"{what} of a snapshot differ; got {twice[:10]} more than once")


def _amounts(name: str, *values: float) -> None:
    if not all(0 <= value < math.inf for value in values):
        raise ValueError(f"what is used is 0 or more and finite; {name} has {values}")
