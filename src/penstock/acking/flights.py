"""Acks inside one worker. If no tuple that stems from a spout task can leave its worker, ledgers of XORed ids are
not needed: the worker counts.

A *flight* is a small number of messages that a spout task emitted together. It counts the parcels with tuples that
stem from it, and the streams in which such tuples wait to be passed on. When nothing is left, all its messages are
complete, except those that have failed. So the ack of a message may wait for the others in its flight.

Which message a tuple stems from is asked only if the tuple fails. A *trace* can tell: it records how the rows of a
parcel were made from the rows of earlier parcels, but computes nothing until then.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from penstock.acking.lineage import I64

MOST_MESSAGES = 256
"""Messages of one flight. With more, the ack of a message could wait for much slower ones; with fewer, counting
would take longer than the bookkeeping it replaces."""


class Flight:
    """Messages of one spout task with consecutive numbers."""

    __slots__ = ("_failed", "_first", "_length", "_log", "_lost", "_open", "task")

    def __init__(self, log: FlightLog, task: int, first: int, length: int) -> None:
        self.task = task
        self._log, self._first, self._length = log, first, length
        self._open = 0
        self._failed: set[int] | None = None
        self._lost = False

    def hold(self) -> None:
        """One more parcel, or stream with waiting rows, stems from the flight."""
        self._open += 1

    def release(self) -> None:
        """The inverse of ``hold``."""
        self._open -= 1
        assert self._open >= 0, "a flight was released more often than held"
        if not self._open and not self._lost:
            self._log.complete.append(self)

    def lose(self) -> None:
        """Some tuples were dropped because they are too old. The flight never completes; the spout emits its
        messages again after their time-out."""
        self._lost = True

    def fail(self, number: int, component: str, error: str) -> None:
        """A message has failed. Only the first failure counts."""
        if self._failed is None:
            self._failed = set()
        if number not in self._failed:
            self._failed.add(number)
            self._log.failed.append(FailedMessage(self.task, number, component, error))

    def numbers(self) -> I64:
        """The numbers of the messages that have not failed."""
        every = np.arange(self._first, self._first + self._length)
        return every if self._failed is None else every[~np.isin(every, list(self._failed))]


class FailedMessage(NamedTuple):
    """A message of a spout task that has failed, and why."""

    task: int
    number: int
    component: str
    error: str


class FlightLog:
    """The flights that ended and the messages that failed since the spouts were told. One per worker."""

    def __init__(self) -> None:
        self.complete: list[Flight] = []
        self.failed: list[FailedMessage] = []

    def take(self) -> tuple[list[FailedMessage], list[Flight]]:
        taken = self.failed, self.complete
        self.failed, self.complete = [], []
        return taken


class Trace(ABC):
    """What the rows of a parcel stem from."""

    flights: tuple[Flight, ...]
    """All flights that a row stems from, once each."""
    tracked: bool
    """True if every row stems from a message."""

    @abstractmethod
    def messages_of(self, row: int) -> Iterable[tuple[Flight, int]]:
        """The messages that a row stems from: the flight and number of each."""

    @abstractmethod
    def messages(self) -> Iterable[tuple[Flight, int]]:
        """The messages that any of its rows stems from, once each."""

    def hold(self) -> None:
        for flight in self.flights:
            flight.hold()

    def release(self) -> None:
        for flight in self.flights:
            flight.release()

    def lose(self) -> None:
        for flight in self.flights:
            flight.lose()

    def fail_row(self, row: int, component: str, error: str) -> None:
        for flight, number in self.messages_of(row):
            flight.fail(number, component, error)

    def take(self, rows: slice | I64) -> Trace:
        """The trace of some of the rows."""
        return ChosenRows(self, rows)


class EmittedRows(Trace):
    """Rows that a spout task emitted."""

    def __init__(self, numbers: Sequence[int | None], flights: Sequence[tuple[Flight, int]]) -> None:
        """``numbers``: the message of each row; None if it is not tracked. ``flights``: each flight and the
        number behind its last message, in order."""
        self.flights = tuple(flight for flight, _ in flights)
        self.tracked = None not in numbers
        self._numbers, self._ends = numbers, [end for _, end in flights]

    def messages_of(self, row: int) -> Iterable[tuple[Flight, int]]:
        number = self._numbers[row]
        return () if number is None else ((self.flights[bisect_right(self._ends, number)], number),)

    def messages(self) -> Iterable[tuple[Flight, int]]:
        return _messages_of(self, range(len(self._numbers)))


class MadeRows(Trace):
    """Rows that a bolt emitted while it executed rows of one parcel. ``ends[i]``: number of rows that were there
    after row ``first + i`` of the parcel. None instead of ``ends``: every row stems from the whole parcel."""

    def __init__(self, parent: Trace, first: int, ends: Sequence[int] | None, begin: int, rows: int) -> None:
        """``begin``: number of rows before these. ``rows``: number of these rows. With ``ends`` None, ``first``
        is the number of rows in the parcel."""
        self.flights, self.tracked = parent.flights, parent.tracked
        self.begin, self.rows = begin, rows
        self._parent, self._first, self._ends = parent, first, ends
        self._messages: Iterable[tuple[Flight, int]] | None = None

    def messages_of(self, row: int) -> Iterable[tuple[Flight, int]]:
        if self._ends is None:
            return self.messages()
        return self._parent.messages_of(self._first + bisect_right(self._ends, self.begin + row))

    def messages(self) -> Iterable[tuple[Flight, int]]:
        if self._messages is None:
            self._messages = (
                self._parent.messages()
                if self._ends is None
                else _messages_of(self._parent, range(self._first, self._first + len(self._ends)))
            )
        return self._messages


class JoinedRows(Trace):
    """Rows of several traces, one behind the other. A None among them stands for rows that are not tracked."""

    def __init__(self, parts: Sequence[tuple[Trace | None, int]]) -> None:
        """``parts``: each trace and its number of rows."""
        found = dict.fromkeys(flight for part, _ in parts if part is not None for flight in part.flights)
        self.flights = tuple(found)
        self.tracked = all(part is not None and part.tracked for part, _ in parts)
        self._parts = [part for part, _ in parts]
        self._ends = np.cumsum([rows for _, rows in parts]).tolist()

    def messages_of(self, row: int) -> Iterable[tuple[Flight, int]]:
        place = bisect_right(self._ends, row)
        part = self._parts[place]
        return () if part is None else part.messages_of(row - (self._ends[place - 1] if place else 0))

    def messages(self) -> Iterable[tuple[Flight, int]]:
        return {each for part in self._parts if part is not None for each in part.messages()}


class ChosenRows(Trace):
    """Some rows of another trace. It may claim flights that none of its rows stem from: then their messages
    complete a little later."""

    def __init__(self, whole: Trace, rows: slice | I64) -> None:
        self.flights, self.tracked = whole.flights, whole.tracked
        self._whole, self._rows = whole, rows

    def messages_of(self, row: int) -> Iterable[tuple[Flight, int]]:
        rows = self._rows
        return self._whole.messages_of((rows.start or 0) + row if isinstance(rows, slice) else int(rows[row]))

    def messages(self) -> Iterable[tuple[Flight, int]]:
        rows = self._rows
        if not isinstance(rows, slice):
            return _messages_of(self._whole, map(int, rows))
        if rows.stop is None:
            return self._whole.messages()
        return _messages_of(self._whole, range(rows.start or 0, rows.stop))


def _messages_of(trace: Trace, rows: Iterable[int]) -> frozenset[tuple[Flight, int]]:
    """The messages of some rows of a trace. Rows that stem from a whole parcel share one collection, which is
    added once."""
    found: set[tuple[Flight, int]] = set()
    before: object = None
    for row in rows:
        messages = trace.messages_of(row)
        if messages is not before:
            found.update(messages)
            before = messages
    return frozenset(found)


def joined(parts: Sequence[tuple[Trace | None, int]]) -> Trace | None:
    """One trace for rows of several; None if none of them is tracked."""
    tracked = [part for part, _ in parts if part is not None]
    if not tracked:
        return None
    return tracked[0] if len(parts) == 1 else JoinedRows(parts)
