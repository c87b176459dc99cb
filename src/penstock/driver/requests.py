"""Change requests of users and policies for a running topology, and their results. Plain data."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from penstock.plan.model import WorkerId
from penstock.plan.slot_placement import SlotPlacement
from penstock.topology.builder import Topology


@dataclass(frozen=True)
class Replaced:
    """The result of a replacement."""

    time: float
    """When the spouts of the new form were activated, on the monotonic clock."""
    parallelism: Mapping[str, int]
    """Number of tasks of each component in the new form."""
    reason: str
    gap: float
    """Seconds in which no spout emitted."""
    seconds: float
    """From the request to the end of the gap."""
    left_behind: str = ""
    """What happened to tuples that were not finished in time. Empty if all were."""
    steps: Mapping[str, float] = field(default_factory=dict)
    """When each step ended, in seconds since the request."""

    def __str__(self) -> str:
        text = f"{self.reason}; {self.gap * 1000:.0f} ms without spouts, after {self.seconds:.1f} s of preparation"
        return f"{text}; {self.left_behind}" if self.left_behind else text


@dataclass(frozen=True)
class Moved:
    """The result of moving a worker to another node."""

    time: float
    """When the worker continued on the other node, on the monotonic clock."""
    worker: WorkerId
    source: str
    target: str
    """Nodes."""
    gap: float
    """Seconds in which no process did the worker's work."""
    seconds: float
    """From the beginning of the move to the end of the gap."""
    steps: Mapping[str, float] = field(default_factory=dict)
    """When each step ended, in seconds since the beginning."""

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "worker": str(self.worker)}

    def __str__(self) -> str:
        way = f"worker {self.worker} from {self.source} to {self.target}"
        return f"{way}; {self.gap * 1000:.0f} ms without it, after {self.seconds:.1f} s of preparation"


@dataclass(frozen=True)
class ReplaceRequest:
    """A request to replace the topology by another form of it."""

    topology: Topology
    reason: str
    pause: bool = False
    """Stop the old form first, so that task slots for one form are enough."""
    placement: SlotPlacement | None = None
    """The nodes of the workers. None: the engine decides."""
    leaves: frozenset[str] = frozenset()
    """Nodes that get no worker of the new form, and are released."""
    takes_back: int | None = None
    """Request released nodes again first, and wait until there are this many nodes in total."""
    answer: Future[Replaced] = field(default_factory=Future)
    """The result, for a thread that waits for it."""
    since: float = field(default_factory=time.monotonic)
    """When it was requested, on the monotonic clock."""
    kind = "replacement"


@dataclass(frozen=True)
class MoveRequest:
    """A request to move workers to other nodes, one after the other."""

    nodes: Mapping[WorkerId, str]
    """The new node of each worker."""
    reason: str
    attempt: int
    """The number of the query run that the workers belong to."""
    by_policy: bool = False
    answer: Future[list[Moved]] = field(default_factory=Future)
    """The results, for a thread that waits for them."""
    kind = "move"


ChangeRequest = ReplaceRequest | MoveRequest
