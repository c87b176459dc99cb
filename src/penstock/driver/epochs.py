"""Which epochs are under way, and what is to be done next. Events in, instructions out: no clock, no IO."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from penstock.plan.model import WorkerId
from penstock.protocol.task_states import SavedTask

_MOST_OPEN = 2  # epochs under way; more would only wait for each other


@dataclass(frozen=True)
class Begin:
    """Announce the epoch's end to the first stage (exactly once), or snapshot the spouts (at least once)."""

    epoch: int


@dataclass(frozen=True)
class SnapshotBolts:
    """All spouts are snapshotted: snapshot the bolts (at least once)."""

    epoch: int


@dataclass(frozen=True)
class Commit:
    """Every worker's snapshot is written: write the manifest and tell the workers."""

    epoch: int
    tasks: dict[str, SavedTask]


@dataclass(frozen=True)
class Abandon:
    """A snapshot could not be written; what belongs to the epoch goes with the next."""

    epoch: int
    errors: tuple[str, ...]


Instruction = Begin | SnapshotBolts | Commit | Abandon


@dataclass
class _Open:
    snapshotted: set[WorkerId] = field(default_factory=set)
    tasks: dict[str, SavedTask] = field(default_factory=dict)
    answered: dict[WorkerId, int] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)


class EpochKeeper:
    """The epochs of one query run. Epochs may overlap and are committed in order."""

    def __init__(
        self,
        workers: Iterable[WorkerId],
        spout_workers: Iterable[WorkerId],
        aligned: bool,
        committed: int,
        interval: float,
    ) -> None:
        self.published = committed
        """The newest epoch that all sinks have made visible."""
        self._workers, self._spouts, self._aligned = frozenset(workers), frozenset(spout_workers), aligned
        self._interval = interval
        self._next = committed + 1
        self._open: dict[int, _Open] = {}
        self._due: float | None = None
        self._published_by: dict[WorkerId, int] = {}

    def tick(self, now: float) -> list[Instruction]:
        """Called from time to time."""
        if self._due is None:
            self._due = now + self._interval
        if now < self._due:
            return []
        return self.begin(now)

    def begin(self, now: float) -> list[Instruction]:
        """Begin to end an epoch now, if not too many are under way."""
        if len(self._open) >= (_MOST_OPEN if self._aligned else 1):
            return []
        self._due = now + self._interval
        epoch, self._next = self._next, self._next + 1
        self._open[epoch] = _Open()
        return [Begin(epoch)]

    def is_open(self, epoch: int) -> bool:
        """The epoch is under way."""
        return epoch in self._open

    @property
    def any_open(self) -> bool:
        return bool(self._open)

    @property
    def newest(self) -> int:
        """The epoch begun last."""
        return self._next - 1

    def spouts_snapshotted(self, worker: WorkerId, epoch: int) -> list[Instruction]:
        """At least once: the worker's spouts are snapshotted."""
        state = self._open.get(epoch)
        if state is None or worker in state.snapshotted:
            return []
        state.snapshotted.add(worker)
        return [SnapshotBolts(epoch)] if state.snapshotted == self._spouts else []

    def snapshot_written(self, worker: WorkerId, epoch: int, tasks: dict[str, SavedTask]) -> list[Instruction]:
        """The worker has written a snapshot; at least once a worker of the first stage writes two."""
        state = self._open.get(epoch)
        if state is not None:
            state.tasks |= tasks
        return self._answer(worker, epoch)

    def snapshot_failed(self, worker: WorkerId, epoch: int, error: str) -> list[Instruction]:
        """The worker could not write its snapshot."""
        state = self._open.get(epoch)
        if state is not None:
            state.errors.append(f"worker {worker}: {error}")
        return self._answer(worker, epoch)

    def epoch_published(self, worker: WorkerId, epoch: int) -> None:
        """The worker's sinks have made the epoch visible."""
        self._published_by[worker] = epoch
        if self._published_by.keys() >= self._workers:
            self.published = min(self._published_by[one] for one in self._workers)

    def _answer(self, worker: WorkerId, epoch: int) -> list[Instruction]:
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
                instructions.append(Commit(number, state.tasks))
        return instructions

    def _complete(self, state: _Open) -> bool:
        if self._aligned:
            return state.answered.keys() == self._workers
        return all(state.answered.get(worker, 0) >= 1 + (worker in self._spouts) for worker in self._workers)
