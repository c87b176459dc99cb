"""The load of a topology during one interval: the input of the scaling policies. Inert."""

from __future__ import annotations

from dataclasses import dataclass

_MAX_DEMAND_FACTOR = 2.0
"""A factor. A spout with a backlog emits as fast as it is permitted to. If it was held back for almost the whole
load sample, more tuples are certain to come, but not how many. Demand is therefore raised by at most this factor;
two steps then make four."""

_HELD_BACK = 0.05
"""Share of a load sample. A spout that waited for less is not held back, because frames are sent as a whole and
sometimes wait briefly."""

_BACKLOG = 0.1
"""Share of an inbox. More queued tuples are a backlog; fewer are normal between two frames."""

_CATCHING_UP = 1.1
"""Ratio of emitted to offered tuples. Above it a spout is working off earlier tuples; smaller differences come
from the times at which both are measured."""


@dataclass(frozen=True)
class TaskLoad:
    """One task of a bolt in a load sample. Tasks that share an executor and fused bolts are combined into one,
    because they share its time."""

    processed: float
    busy: float
    """Seconds in the code of the component."""
    arrived: float
    emitted: float
    queued: int = 0
    """Tuples in its inbox at the end of the sample."""
    capacity: int = 1
    """Tuples that the inbox holds."""


@dataclass(frozen=True)
class BoltLoad:
    name: str
    inputs: tuple[str, ...]
    """The components whose tuples it receives."""
    tasks: tuple[TaskLoad, ...]
    """By index. Halving to n tasks gives the keys of task i to task i mod n."""
    fixed: bool = False
    """The bolt is not scaled: the user excluded it, its grouping (global, all, direct or the user's own) does not
    distribute the load over tasks, or it is fused with a spout."""
    share: float | None = None
    """Tuples that arrived per tuple that its inputs emitted, over several load samples: in a single one they
    differ by what waits in between. None: unknown."""

    @property
    def arrived(self) -> float:
        return sum(task.arrived for task in self.tasks)

    @property
    def processed(self) -> float:
        return sum(task.processed for task in self.tasks)

    @property
    def emitted(self) -> float:
        return sum(task.emitted for task in self.tasks)


@dataclass(frozen=True)
class SpoutLoad:
    name: str
    emitted: float
    """Tuples, including replays."""
    failed: int = 0
    """Tuples that timed out."""
    held_back: float = 0.0
    """Share of the load sample in which it had something to emit and was not permitted to (pending limit or
    backpressure), 0 to 1."""
    offered: float | None = None
    """Tuples that arrived at the source during the load sample, if known (from a lag, or from the rate before
    backpressure). Only this distinguishes load from backlog while the spout is held back."""

    @property
    def demand(self) -> float:
        """Tuples that it would have emitted in this load sample without a backlog and without being held back."""
        if self.offered is not None:
            return self.offered
        return self.emitted / max(1.0 - self.held_back, 1.0 / _MAX_DEMAND_FACTOR)

    @property
    def behind(self) -> bool:
        catches_up = self.offered is not None and self.emitted > _CATCHING_UP * self.offered
        return self.held_back > _HELD_BACK or catches_up


@dataclass(frozen=True)
class LoadSample:
    """The load of the topology from ``time - seconds`` to ``time``. Counts are those of this interval. The graph
    has no cycle."""

    time: float
    seconds: float
    spouts: tuple[SpoutLoad, ...]
    bolts: tuple[BoltLoad, ...]
    latency: float | None = None
    """Mean seconds from emit to ack of the completed tuples. None if there were none."""
    late: int = 0
    """Without acks: tuples that reached the end of the topology later than the time-out."""

    @property
    def failed(self) -> int:
        """X_i in Lu 2020."""
        return sum(spout.failed for spout in self.spouts) + self.late

    @property
    def backlog(self) -> bool:
        """True if tuples are being worked off, so that the processed tuples do not show the arriving load."""
        full = any(task.queued > _BACKLOG * task.capacity for bolt in self.bolts for task in bolt.tasks)
        return full or any(spout.behind for spout in self.spouts)
