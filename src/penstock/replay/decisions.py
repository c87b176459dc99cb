"""What replay decides, and nothing else: events in, instructions out. No queue, thread or clock in here.

Reading order (SPEC 2.5): To until it is empty, then Eden. When To is empty and all that was read from it is done,
and From holds something, the two are exchanged; nothing is read meanwhile, so that what failed comes back before
fresh data. What failed goes to From, or after ``max_attempts`` to the dead letters, and only then counts as done
where it was read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, TypeAlias

from penstock.replay.records import ReplayRecord


class Origin(Enum):
    """Where a tuple was read."""

    EDEN = "eden"
    TO = "to"


class ReplayEntry(NamedTuple):
    """A tuple on its way through the topology."""

    origin: Origin
    position: int
    record: ReplayRecord


# Events


@dataclass(frozen=True)
class Arrived:
    """A read has ended. No entries: there is nothing more at that origin for now."""

    origin: Origin
    entries: Sequence[ReplayEntry]


@dataclass(frozen=True)
class Taken:
    """So many of the entries that were read have gone to the spout."""

    count: int


@dataclass(frozen=True)
class Acked:
    """Done with."""

    entries: Sequence[ReplayEntry]


@dataclass(frozen=True)
class Failed:
    """Each entry with the record that is to come back in its place."""

    entries: Sequence[tuple[ReplayEntry, ReplayRecord]]


@dataclass(frozen=True)
class Stored:
    """What the last ``StoreRecords`` named is durable."""


@dataclass(frozen=True)
class Swapped:
    """From and To are exchanged, durably."""


@dataclass(frozen=True)
class QueuesChecked:
    """Someone looked whether there is anything unread: Eden is worth a read, To or From hold something."""

    to: bool = False
    from_: bool = False


Event: TypeAlias = Arrived | Taken | Acked | Failed | Stored | Swapped | QueuesChecked


# Instructions


@dataclass(frozen=True)
class Read:
    """Read up to ``limit`` tuples there; answer with ``Arrived``. To the reading thread."""

    origin: Origin
    limit: int


@dataclass(frozen=True)
class Swap:
    """Exchange From and To; answer with ``Swapped``. To the swap thread."""


@dataclass(frozen=True)
class StoreRecords:
    """Append the first to From and the second to the dead letters; answer with ``Stored``. To the backflow
    thread."""

    back: Sequence[ReplayRecord]
    dead: Sequence[ReplayRecord]


@dataclass(frozen=True)
class Done:
    """These are done with at their origin; at once, before any instruction that follows."""

    origin: Origin
    positions: Sequence[int]


Instruction: TypeAlias = Read | Swap | StoreRecords | Done


class Decisions:
    """The state of one task's replay. At most one read and one store are under way at a time, or one swap."""

    def __init__(self, max_attempts: int, capacity: int, from_holds: bool) -> None:
        """``capacity`` is how many entries may wait for the spout; ``from_holds``: From is not empty at the
        start."""
        self._max_attempts = max_attempts
        self._room = self._capacity = capacity
        self._to_unread = True  # until a read says otherwise
        self._eden_dry = False
        self._from_holds = from_holds
        self._open = {Origin.EDEN: 0, Origin.TO: 0}  # read, and neither acked nor stored
        self._reading: Origin | None = None
        self._swapping = False
        self._storing: Sequence[tuple[ReplayEntry, ReplayRecord]] = ()
        self._failed: list[tuple[ReplayEntry, ReplayRecord]] = []

    def handle(self, event: Event) -> list[Instruction]:
        """Take in what happened; what is to be done now, in this order."""
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
        """Entries that were read and are neither acked nor stored."""
        return sum(self._open.values())

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
                return []  # the exchange waits for what is under way, and nothing new begins before it
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
