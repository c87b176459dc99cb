"""Change requests of users and policies for a running topology, and their results. Plain data."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from penstock.control.arbiter import ChangeSource
from penstock.plan.model import Fit, WorkerId
from penstock.plan.scalable import kept_numbers
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
    workers: int = 0
    """Number of workers of the new form."""
    kept: Mapping[str, int] = field(default_factory=dict)
    """Parallelism of bolts that were scaled at run time and kept it, although the new form declares another."""

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
    """A request to replace the topology by another form of it. Other changes may be carried out first, so the form
    is determined when the request is carried out."""

    topology: Topology | None
    """The new form. None: the form that runs when the request is carried out."""
    reason: str
    pause: bool = False
    """Stop the old form first, so that task slots for one form are enough."""
    placement: SlotPlacement | None = None
    """The nodes of the workers. None: the engine decides."""
    attempt: int | None = None
    """With a placement: the number of the query run whose workers it names."""
    leaves: frozenset[str] = frozenset()
    """Nodes that get no worker of the new form, and are released."""
    parallelism: Mapping[str, int] = field(default_factory=dict)
    """The parallelism of components for which it is to change, in addition to ``topology``."""
    source: ChangeSource = ChangeSource.OPERATOR
    """Who wants it."""
    fit: Fit | None = None
    """What the components are packed into workers by. None: as in the form that runs."""
    declared: Topology | None = None
    """Set if ``topology`` is loaded from a file that may have changed: the topology as the file declared it
    before. Bolts that were scaled at run time keep their parallelism, unless the file changes it."""
    answer: Future[Replaced] = field(default_factory=Future)
    """The result, for a thread that waits for it."""
    since: float = field(default_factory=time.monotonic)
    """When it was requested, on the monotonic clock."""
    kind = "replacement"

    def kept(self, current: Topology) -> dict[str, int]:
        """Return the parallelism that bolts of the current form keep."""
        if self.topology is None or self.declared is None:
            return {}
        return kept_numbers(self.declared, current, self.topology)

    def form(self, current: Topology) -> Topology:
        """Return the new form, if ``current`` is the form that runs now. Raises ``TopologyError`` if the
        parallelism cannot be changed as requested."""
        topology = current if self.topology is None else self.topology
        parallelism = {**self.kept(current), **self.parallelism}
        return topology.scaled(parallelism) if parallelism else topology


@dataclass(frozen=True)
class MoveRequest:
    """A request to move workers to other nodes, one after the other."""

    nodes: Mapping[WorkerId, str]
    """The new node of each worker."""
    reason: str
    attempt: int
    """The number of the query run that the workers belong to."""
    source: ChangeSource = ChangeSource.OPERATOR
    """Who wants it."""
    answer: Future[list[Moved]] = field(default_factory=Future)
    """The results, for a thread that waits for them."""
    kind = "move"


ChangeRequest = ReplaceRequest | MoveRequest
