"""The decisions of replay as a pure state machine: events in, instructions out. No queue, thread or clock.

Reading order: To until it is empty, then Eden. When To is empty, everything read from it is done, and From
contains records, the two queues are exchanged. Nothing is read during the exchange, so that failed tuples come
before fresh ones. A failed tuple is read again from its place, stored in From, or as a dead letter after
``max_attempts`` failures, and is done at its origin only after that.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

from penstock.acking.lineage import I64
from penstock.replay.places import Origin, by_origin
from penstock.replay.records import ReplayRecord
from penstock.topology.components import Failure

MOST_STORED = 1 << 16
"""Tuples of one ``StoreFailed``. More than a spout task usually has in flight: what fails together, as in a
replacement, is in From before the queues are exchanged, and so comes before fresh tuples."""

_ASSUMED_SIZE = 16_384.0  # bytes of a tuple until some have been read: the first read fetches a few hundred


class ReplayEntry(NamedTuple):
    """A tuple that was read, until the spout has emitted it."""

    place: int
    record: ReplayRecord


@dataclass(frozen=True)
class FailedTuples:
    """Tuples that failed together, for the same reason."""

    places: I64
    failure: Failure
    at: float
    """Wall-clock time."""
    hopeless: bool = False
    """They become dead letters whatever their attempts."""


# Events


@dataclass(frozen=True)
class Arrived:
    """A read has ended. 0 means that the origin has nothing more at present."""

    origin: Origin
    count: int
    size: float = 0.0
    """Mean size of these tuples in bytes."""


@dataclass(frozen=True)
class Taken:
    """The spout has taken this number of entries."""

    count: int


@dataclass(frozen=True)
class Acked:
    """The tuples at these places were acked."""

    places: I64


@dataclass(frozen=True)
class Failed:
    """These tuples failed."""

    tuples: FailedTuples


@dataclass(frozen=True)
class Stored:
    """Tuples of the last ``StoreFailed`` are durable elsewhere, ``back`` of them in From. There may be several
    such events until all are."""

    places: I64
    back: int


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
class StoreFailed:
    """For the backflow thread: read these tuples again, append them to From or store them as dead letters
    (``is_dead``), and report ``Stored``."""

    tuples: Sequence[FailedTuples]


@dataclass(frozen=True)
class Done:
    """Mark these positions as done at their origin, at once and before any instruction that follows."""

    origin: Origin
    positions: I64


Instruction: TypeAlias = Read | Swap | StoreFailed | Done


def after_failure(record: ReplayRecord, tuples: FailedTuples) -> ReplayRecord:
    """The record to store for a failed tuple. ``record`` is what was read again; the error of a damaged one is
    kept beside that of the failure."""
    failure = tuples.failure
    if record.damaged:
        failure = Failure(failure.component, "; ".join(filter(None, (failure.error, record.error))))
    return record.failed(failure, tuples.at)


def is_dead(record: ReplayRecord, tuples: FailedTuples, max_attempts: int) -> bool:
    """Whether a failed tuple becomes a dead letter. ``record`` is what ``after_failure`` returned."""
    return record.damaged or tuples.hopeless or record.attempts >= max_attempts


class Decisions:
    """The replay state of one task. At any time at most one read and one store are in progress, or one swap. Not
    thread-safe."""

    def __init__(self, capacity: int, from_holds: bool, byte_capacity: float = math.inf) -> None:
        """``capacity`` is the number of entries that may wait for the spout, ``byte_capacity`` their size.
        ``from_holds`` is True if From is not empty at the start."""
        self._room = self._capacity = capacity
        self._byte_capacity, self._size = byte_capacity, _ASSUMED_SIZE
        self._to_unread = True  # until a read returns nothing
        self._eden_dry = False
        self._from_holds = from_holds
        self._open = {Origin.EDEN: 0, Origin.TO: 0}  # tuples read that are neither acked nor stored
        self._reading: Origin | None = None
        self._swapping = False
        self._storing = 0  # tuples of the last StoreFailed that are not durable yet
        self._failed: deque[FailedTuples] = deque()

    def handle(self, event: Event) -> list[Instruction]:
        """Apply an event and return the instructions to carry out, in order."""
        result: list[Instruction] = []
        match event:
            case Arrived(origin, count, size):
                self._reading = None
                if count:
                    self._size = max(1.0, size)
                self._room -= count
                self._open[origin] += count
                if not count and origin is Origin.TO:
                    self._to_unread = False
                elif not count:
                    self._eden_dry = True
            case Taken(count):
                self._room += count
            case Acked(places):
                result += self._done(places)
            case Failed(tuples):
                self._failed.append(tuples)
            case Stored(places, back):
                result += self._done(places)
                self._storing -= len(places)
                self._from_holds |= back > 0
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
        """The number of tuples that were read and are neither acked nor stored."""
        return sum(self._open.values())

    @property
    def settled(self) -> bool:
        """True if every failed tuple is stored in From or as a dead letter."""
        return not self._failed and not self._storing

    def validate(self) -> None:
        """Raise ``AssertionError`` if the state contradicts itself."""
        assert 0 <= self._room <= self._capacity
        assert min(self._open.values()) >= 0
        assert self._storing >= 0
        assert sum(len(each.places) for each in self._failed) + self._storing <= self.outstanding
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
            result.append(StoreFailed(self._take_failed()))
        if self._reading is None and (self._to_unread or not self._eden_dry) and (limit := self._read_limit()) > 0:
            self._reading = Origin.TO if self._to_unread else Origin.EDEN
            result.append(Read(self._reading, limit))
        return result

    def _read_limit(self) -> int:
        """How many tuples may be read now. The size of a tuple is that of the last ones that were read. One tuple
        may always be read if none waits, however large it is."""
        waiting = self._capacity - self._room
        fitting = self._byte_capacity / self._size - waiting
        return int(min(self._room, fitting if waiting else max(1, fitting)))

    def _take_failed(self) -> list[FailedTuples]:
        """Up to ``MOST_STORED`` of the tuples that failed first, which are being stored from now on."""
        taken: list[FailedTuples] = []
        while self._failed and self._storing < MOST_STORED:
            first, room = self._failed.popleft(), MOST_STORED - self._storing
            if len(first.places) > room:
                self._failed.appendleft(replace(first, places=first.places[room:]))
                first = replace(first, places=first.places[:room])
            taken.append(first)
            self._storing += len(first.places)
        return taken

    def _done(self, places: I64) -> list[Instruction]:
        result: list[Instruction] = []
        for origin, positions in by_origin(places):
            self._open[origin] -= len(positions)
            result.append(Done(origin, positions))
        return result
