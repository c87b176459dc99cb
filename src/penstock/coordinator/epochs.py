"""Which epochs are under way, and what is to be done next. Events in, instructions out: no clock, no IO."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from penstock.plan.model import SlotId

_MOST_OPEN = 2  # epochs under way; more would only wait for each other


@dataclass(frozen=True)
class Begin:
    """Announce the epoch's end to the first stage (exactly once), or cut the spouts (at least once)."""

    epoch: int


@dataclass(frozen=True)
class CutBolts:
    """All spouts are cut: cut the bolts (at least once)."""

    epoch: int


@dataclass(frozen=True)
class Commit:
    """Every slot's snapshot is written: write the manifest and tell the slots."""

    epoch: int
    tasks: dict[str, Any]


@dataclass(frozen=True)
class Abandon:
    """A snapshot could not be written; what belongs to the epoch goes with the next."""

    epoch: int
    errors: tuple[str, ...]


Instruction = Begin | CutBolts | Commit | Abandon


@dataclass
class _Open:
    cut: set[SlotId] = field(default_factory=set)
    tasks: dict[str, Any] = field(default_factory=dict)
    answered: dict[SlotId, int] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)


class EpochKeeper:
    """The epochs of one start of a topology. Epochs may overlap and are committed in order."""

    def __init__(
        self,
        slots: Iterable[SlotId],
        spout_slots: Iterable[SlotId],
        aligned: bool,
        committed: int,
        interval: float,
    ) -> None:
        self.published = committed
        """The newest epoch that all sinks have made visible."""
        self._slots, self._spouts, self._aligned = frozenset(slots), frozenset(spout_slots), aligned
        self._interval = interval
        self._next = committed + 1
        self._open: dict[int, _Open] = {}
        self._due: float | None = None
        self._told: dict[SlotId, int] = {}

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

    def cut(self, slot: SlotId, epoch: int) -> list[Instruction]:
        """At least once: the slot's spouts are cut."""
        state = self._open.get(epoch)
        if state is None or slot in state.cut:
            return []
        state.cut.add(slot)
        return [CutBolts(epoch)] if state.cut == self._spouts else []

    def snapped(self, slot: SlotId, epoch: int, tasks: dict[str, Any]) -> list[Instruction]:
        """The slot has written a snapshot; at least once a slot of the first stage writes two."""
        state = self._open.get(epoch)
        if state is not None:
            state.tasks |= tasks
        return self._answer(slot, epoch)

    def failed(self, slot: SlotId, epoch: int, error: str) -> list[Instruction]:
        """The slot could not write its snapshot."""
        state = self._open.get(epoch)
        if state is not None:
            state.errors.append(f"slot {slot}: {error}")
        return self._answer(slot, epoch)

    def told(self, slot: SlotId, epoch: int) -> None:
        """The slot's sinks have made the epoch visible."""
        self._told[slot] = epoch
        if self._told.keys() >= self._slots:
            self.published = min(self._told[one] for one in self._slots)

    def _answer(self, slot: SlotId, epoch: int) -> list[Instruction]:
        state = self._open.get(epoch)
        if state is None:
            return []
        state.answered[slot] = state.answered.get(slot, 0) + 1
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
            return state.answered.keys() == self._slots
        return all(state.answered.get(slot, 0) >= 1 + (slot in self._spouts) for slot in self._slots)
