"""What somebody, or a policy, wants changed in a running topology, and what came of it. Plain data."""

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
    """A replacement that took place."""

    time: float
    """When the spouts of the new form emitted, on the monotonic clock."""
    parallelism: Mapping[str, int]
    """Tasks of each component from now on."""
    reason: str
    gap: float
    """Seconds in which no spout emitted."""
    seconds: float
    """From the request to the end of the gap."""
    left_behind: str = ""
    """What became of tuples that there was no time to finish."""
    steps: Mapping[str, float] = field(default_factory=dict)
    """When each step ended, in seconds since the request."""

    def __str__(self) -> str:
        text = f"{self.reason}; {self.gap * 1000:.0f} ms without spouts, after {self.seconds:.1f} s of preparation"
        return f"{text}; {self.left_behind}" if self.left_behind else text


@dataclass(frozen=True)
class Moved:
    """A worker that is on another node."""

    time: float
    """When, on the monotonic clock."""
    worker: WorkerId
    source: str
    target: str
    """Nodes."""
    gap: float
    """Seconds in which nobody did the worker's work."""
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
    """Let another form of the topology take over."""

    topology: Topology
    reason: str
    pause: bool = False
    """Stop the old form first: then task slots for both are not needed."""
    placement: SlotPlacement | None = None
    """Where its workers are to run; None: where the engine puts them."""
    leaves: frozenset[str] = frozenset()
    """Nodes that get nothing of the new form, and are released."""
    takes_back: int | None = None
    """Take released nodes back first, and wait until there are so many."""
    answer: Future[Replaced] = field(default_factory=Future)
    """For whoever waits."""
    since: float = field(default_factory=time.monotonic)
    kind = "replacement"


@dataclass(frozen=True)
class MoveRequest:
    """Let workers run on other nodes, one after the other."""

    nodes: Mapping[WorkerId, str]
    reason: str
    attempt: int
    """The number of the query run that they are workers of."""
    by_policy: bool = False
    answer: Future[list[Moved]] = field(default_factory=Future)
    """For whoever waits."""
    kind = "move"


ChangeRequest = ReplaceRequest | MoveRequest
