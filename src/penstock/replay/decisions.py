"""The decisions of replay as a pure state machine: events in, instructions out. No queue, thread or clock.

Reading order: To until it is empty, then Eden. When To is empty, everything read from it is done, and From
contains records, the two queues are exchanged. Nothing is read during the exchange, so that failed tuples come
before fresh ones. A failed tuple is stored in From, or as a dead letter after ``max_attempts`` failures, and is
done at its origin only after that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, TypeAlias

from penstock.replay.records import ReplayRecord


class Origin(Enum):
    """The source that a tuple was read from."""

    EDEN = "eden"
    TO = "to"


class ReplayEntry(NamedTuple):
    """A tuple in flight in the topology."""

    origin: Origin
    position: int
    record: ReplayRecord


# Events


@dataclass(frozen=True)
class Arrived:
    """A read has ended. No entries means that the origin has nothing more at present."""

    origin: Origin
    entries: Sequence[ReplayEntry]


@dataclass(frozen=True)
class Taken:
    """The spout has taken this number of entries."""

    count: int


@dataclass(frozen=True)
class Acked:
    """These entries were acked."""

    entries: Sequence[ReplayEntry]


@dataclass(frozen=True)
class Failed:
    """These entries failed. Each comes with the record to be stored for it."""

    entries: Sequence[tuple[ReplayEntry, ReplayRecord]]


@dataclass(frozen=True)
class Stored:
    """The records of the last ``StoreRecords`` are durable."""


@dataclass(frozen=True)
class Swapped:
    """From and To have been exchanged, durably."""


@dataclass(frozen=True)
class QueuesChecked:
    """The queues were checked for unread records: ``to`` and ``from_`` have some. Eden may have some in any
    case."""

    to: bool = False
    from_: bool = False


Event: TypeAlias = Arrived | Taken | Acked | Failed | Stored | Swapped | QueuesChecked


# Instructions


@dataclass(frozen=True)
class Read:
    """For the reading thread: read up to ``limit`` tuples from the origin and report ``Arrived``."""

    origin: Origin
    limit: int


@dataclass(frozen=True)
class Swap:
    """For the swap thread: exchange From and To and report ``Swapped``."""


@dataclass(frozen=True)
class StoreRecords:
    """For the backflow thread: append ``back`` to From, store ``dead`` as dead letters, and report ``Stored``."""

    back: Sequence[ReplayRecord]
    dead: Sequence[ReplayRecord]


@dataclass(frozen=True)
class Done:
    """Mark these positions as done at their origin, at once and before any instruction that follows."""

    origin: Origin
    positions: Sequence[int]


Instruction: TypeAlias = Read | Swap | StoreRecords | Done


class Decisions:
    """The replay state of one task. At any time at most one read and one store are in progress, or one swap. Not
    thread-safe."""

    def __init__(self, max_attempts: int, capacity: int, from_holds: bool) -> None:
        """``capacity`` is the number of entries that may wait for the spout. ``from_holds`` is True if From is not
        empty at the start."""
        self._max_attempts = max_attempts
        self._room = self._capacity = capacity
        self._to_unread = True  # until a read returns nothing
        self._eden_dry = False
        self._from_holds = from_holds
        self._open = {Origin.EDEN: 0, Origin.TO: 0}  # entries read that are neither acked nor stored
        self._reading: Origin | None = None
        self._swapping = False
        self._storing: Sequence[tuple[ReplayEntry, ReplayRecord]] = ()
        self._failed: list[tuple[ReplayEntry, ReplayRecord]] = []

    def handle(self, event: Event) -> list[Instruction]:
        """Apply an event and return the instructions to carry out, in order."""
        result: list[Instruction] = []
        match event:
            case Arrived(origin, entries):
                self._reading = None
                self._room -= len(entries)
                self._open[origin] += len(entries)
                if not entries and origin is Origin.TO:
                    self._to_unread = False
                elif not entries:
                    self._eden_dry = True
            case Taken(count):
                self._room += count
            case Acked(entries):
                result += self._done(entries)
            case Failed(entries):
                self._failed += entries
            case Stored():
                result += self._done([entry for entry, _ in self._storing])
                self._from_holds |= any(not self._is_dead(record) for _, record in self._storing)
                self._storing = ()
            case Swapped():
                self._swapping = False
                self._to_unread, self._from_holds = True, False
            case QueuesChecked(to, from_):
                self._eden_dry = False
                self._to_unread |= to
                self._from_holds |= from_ and not self._swapping
        return result + self._next()

    @property
    def outstanding(self) -> int:
        """The number of entries that were read and are neither acked nor stored."""
        return sum(self._open.values())

    @property
    def settled(self) -> bool:
        """True if every failed tuple is stored in From or as a dead letter."""
        return not self._failed and not self._storing

    def validate(self) -> None:
        """Raise ``AssertionError`` if the state contradicts itself."""
        assert 0 <= self._room <= self._capacity
        assert min(self._open.values()) >= 0
        assert len(self._failed) + len(self._storing) <= self.outstanding
        assert not (self._swapping and self._storing)
        assert not (self._swapping and (self._open[Origin.TO] or self._reading))

    def _next(self) -> list[Instruction]:
        if self._swapping:
            return []
        if self._from_holds and not self._to_unread and not self._open[Origin.TO]:
            if self._storing or self._reading:
                return []  # the exchange waits for the operations in progress, and nothing new starts before it
            self._swapping = True
            return [Swap()]
        result: list[Instruction] = []
        if self._failed and not self._storing:
            self._storing, self._failed = self._failed, []
            dead = [record for _, record in self._storing if self._is_dead(record)]
            back = [record for _, record in self._storing if not self._is_dead(record)]
            result.append(StoreRecords(back, dead))
        if self._room > 0 and self._reading is None and (self._to_unread or not self._eden_dry):
            self._reading = Origin.TO if self._to_unread else Origin.EDEN
            result.append(Read(self._reading, self._room))
        return result

    def _done(self, entries: Sequence[ReplayEntry]) -> list[Instruction]:
        result: list[Instruction] = []
        for origin in Origin:
            positions = [entry.position for entry in entries if entry.origin is origin]
            if positions:
                self._open[origin] -= len(positions)
                result.append(Done(origin, positions))
        return result

    def _is_dead(self, record: ReplayRecord) -> bool:
        return record.attempts >= self._max_attempts
