"""Tracks the epochs in progress and decides what happens next. Takes events and returns instructions, without
clock or IO."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from penstock.plan.model import WorkerId
from penstock.protocol.task_states import OvertakenTuples, SavedTask

_MOST_OPEN = 2
"""Epochs in progress at once with exactly-once delivery: workers snapshot one while they write the one before.
Commits are in order, so further epochs would only wait."""


@dataclass(frozen=True)
class StartCommit:
    """Tell the first stage to end the epoch (exactly once) or to snapshot its spouts (at least once)."""

    epoch: int


@dataclass(frozen=True)
class Overtake:
    """Tell all workers to end the epoch and all earlier ones at once: the marker overtakes the tuples that wait
    (exactly once only)."""

    epoch: int


@dataclass(frozen=True)
class SnapshotBolts:
    """Tell the workers to snapshot their bolts, since all spouts are snapshotted (at least once only)."""

    epoch: int


@dataclass(frozen=True)
class WriteManifest:
    """Write the manifest and notify the workers, since every worker has written its snapshot."""

    epoch: int
    tasks: dict[str, SavedTask]
    overtaken: dict[str, OvertakenTuples] = field(default_factory=dict)
    """The tuples that the marker overtook, by the key of the task for which they wait."""


@dataclass(frozen=True)
class Abandon:
    """Do not commit the epoch, since a worker could not write its snapshot. The next commit includes the epoch."""

    epoch: int
    errors: tuple[str, ...]


Instruction = StartCommit | Overtake | SnapshotBolts | WriteManifest | Abandon


@dataclass
class _OpenEpoch:
    """An epoch in progress. ``answered`` counts the snapshots that each worker has written or failed to write."""

    overtakes_at: float
    """When the marker overtakes the tuples that wait, if the epoch has not been committed by then."""
    overtakes: bool = False
    snapshotted: set[WorkerId] = field(default_factory=set)
    tasks: dict[str, SavedTask] = field(default_factory=dict)
    overtaken: list[tuple[WorkerId, dict[str, OvertakenTuples]]] = field(default_factory=list)
    answered: dict[WorkerId, int] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)


class EpochKeeper:
    """The epochs of one query run. Epochs may overlap and are committed in order. Not thread-safe.

    Events about an epoch that is not in progress are ignored.
    """

    def __init__(
        self,
        workers: Iterable[WorkerId],
        spout_workers: Iterable[WorkerId],
        aligned: bool,
        committed: int,
        interval: float,
        published: int = 0,
        overtake_after: float = math.inf,
    ) -> None:
        """``spout_workers``: the workers of the first stage. ``aligned``: markers separate the epochs (exactly
        once). ``committed``: the epoch that the query run starts from. ``interval``: seconds between two
        epochs. ``published``: the newest epoch that is known to be published when the query run starts; it may be
        less than ``committed``. ``overtake_after``: seconds after which the marker of an epoch overtakes the
        tuples that wait."""
        self.published = published
        """The newest epoch that all sinks are known to have published."""
        self._workers, self._spouts, self._aligned = frozenset(workers), frozenset(spout_workers), aligned
        self._interval, self._overtake_after = interval, overtake_after
        self._next = committed + 1
        self._open: dict[int, _OpenEpoch] = {}
        self._due: float | None = None
        self._published_by: dict[WorkerId, int] = {}

    def tick(self, now: float) -> list[Instruction]:
        """Begin an epoch if the interval has passed, and let markers overtake in epochs that take too long. Called
        periodically, with times of one clock."""
        if self._due is None:
            self._due = now + self._interval
        begun = [] if now < self._due else self._begin(now, self._overtake_after)
        return begun + self._overtake(now)

    def start_commit(self, now: float, patience: float | None = None) -> list[Instruction]:
        """Begin the next epoch now, unless too many are in progress. ``patience``: seconds after which its marker
        overtakes the tuples that wait; None: as usual, infinity: never. It applies to the epochs in progress, too,
        if they would take longer, because they are committed before."""
        if patience is None:
            patience = self._overtake_after
        for state in self._open.values():
            state.overtakes_at = min(state.overtakes_at, now + patience)
        return self._begin(now, patience) + self._overtake(now)

    def _begin(self, now: float, patience: float) -> list[Instruction]:
        if len(self._open) >= (_MOST_OPEN if self._aligned else 1):
            return []
        self._due = now + self._interval
        epoch, self._next = self._next, self._next + 1
        self._open[epoch] = _OpenEpoch(now + patience)
        return [StartCommit(epoch)]

    def _overtake(self, now: float) -> list[Instruction]:
        """Let the marker overtake in each epoch whose time has come. Earlier epochs end before it."""
        due = [epoch for epoch, state in self._open.items() if now >= state.overtakes_at and not state.overtakes]
        if not due or not self._aligned:
            return []
        for epoch, state in self._open.items():
            state.overtakes = state.overtakes or epoch <= max(due)
        return [Overtake(max(due))]

    def is_open(self, epoch: int) -> bool:
        """Whether the epoch is in progress."""
        return epoch in self._open

    @property
    def any_open(self) -> bool:
        """Whether any epoch is in progress."""
        return bool(self._open)

    @property
    def newest(self) -> int:
        """The newest epoch that has begun."""
        return self._next - 1

    def spouts_snapshotted(self, worker: WorkerId, epoch: int) -> list[Instruction]:
        """The worker has snapshotted its spouts (at least once only)."""
        state = self._open.get(epoch)
        if state is None or worker in state.snapshotted:
            return []
        state.snapshotted.add(worker)
        return [SnapshotBolts(epoch)] if state.snapshotted == self._spouts else []

    def snapshot_written(
        self,
        worker: WorkerId,
        epoch: int,
        tasks: dict[str, SavedTask],
        overtaken: dict[str, OvertakenTuples] | None = None,
    ) -> list[Instruction]:
        """The worker has written a snapshot. With at-least-once delivery a worker of the first stage writes two:
        of its spouts and of its bolts."""
        state = self._open.get(epoch)
        if state is not None:
            state.tasks |= tasks
            if overtaken:
                state.overtaken.append((worker, overtaken))
        return self._record_answer(worker, epoch)

    def snapshot_failed(self, worker: WorkerId, epoch: int, error: str) -> list[Instruction]:
        """The worker could not write its snapshot."""
        state = self._open.get(epoch)
        if state is not None:
            state.errors.append(f"worker {worker}: {error}")
        return self._record_answer(worker, epoch)

    def epoch_published(self, worker: WorkerId, epoch: int) -> None:
        """The worker's sinks have published the epoch."""
        self._published_by[worker] = epoch
        if self._published_by.keys() >= self._workers:
            self.published = min(self._published_by[each] for each in self._workers)

    def _record_answer(self, worker: WorkerId, epoch: int) -> list[Instruction]:
        state = self._open.get(epoch)
        if state is None:
            return []
        state.answered[worker] = state.answered.get(worker, 0) + 1
        instructions: list[Instruction] = []
        for number in sorted(self._open):
            state = self._open[number]
            if not self._complete(state):
                break  # epochs are committed in order
            del self._open[number]
            if state.errors:
                instructions.append(Abandon(number, tuple(state.errors)))
            else:
                instructions.append(WriteManifest(number, state.tasks, _in_order(state.overtaken)))
        return instructions

    def _complete(self, state: _OpenEpoch) -> bool:
        if self._aligned:
            return state.answered.keys() == self._workers
        return all(state.answered.get(worker, 0) >= 1 + (worker in self._spouts) for worker in self._workers)


def _in_order(overtaken: list[tuple[WorkerId, dict[str, OvertakenTuples]]]) -> dict[str, OvertakenTuples]:
    """Put together what several workers have stored for the same tasks. What waited nearer to its task was sent
    earlier, so the latest stage comes first."""
    found: dict[str, OvertakenTuples] = {}
    for _, tuples in sorted(overtaken, key=lambda each: (-each[0].stage, each[0].index)):
        for key, more in tuples.items():
            known = found.get(key, OvertakenTuples([], []))
            found[key] = OvertakenTuples(known.parts + more.parts, sorted({*known.streams, *more.streams}))
    return found
