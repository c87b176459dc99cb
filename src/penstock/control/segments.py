"""Segments of the source data (Sun 2022, algorithm 1, step 4): which tuples were migrated, and which have arrived.

The source data of a subscription are the tuples that one task sends to it, numbered in the order in which they
were sent. The sender cuts them into ranges, and each tuple of a range goes to the task that the grouping assigned
or to another one, by a migration route. ``SegmentLedger`` is the sender's record of the tuples that went another
way. ``ArrivalLedger`` is kept where partials are merged: it knows up to which position of the source data all
partials have arrived, so that a result is not taken for complete while a part of it is still on another way.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

_POSITION_BITS = 40
"""Positions of one generation: a million tuples per second for twelve days."""


_MOST_WAITING = 100_000
"""Ranges behind a gap that are kept for a source: more than inboxes hold, so the gap will not be filled any
more."""


def first_position(generation: int) -> int:
    """The position of the first tuple that a task sends in a generation. It is larger than all positions of
    earlier generations, so that what is left of an earlier one is never taken for tuples of this one."""
    return generation << _POSITION_BITS


def waiting_position(generation: int) -> int:
    """The position of every tuple of an earlier generation that is still to be processed when this generation
    begins. No sender of an earlier generation gets so far."""
    return first_position(generation) - 1


class SourceRange(NamedTuple):
    """Neighbouring tuples of the source data, which were routed together."""

    offset: int
    """The position of the first one."""
    length: int
    """Their number. If the grouping copies tuples, each copy counts."""


@dataclass(frozen=True)
class Segment:
    """Consecutive tuples for ``branch`` that were sent to ``target`` instead."""

    branch: str
    target: str
    offset: int
    """The position of the first of them among all tuples that this sender had for the branch."""
    length: int


class SegmentLedger:
    """A sender's record of migrated tuples (Sun 2022, algorithm 1, step 4). Segments of a branch never overlap,
    and empty segments are not kept. Memory is bounded: the newest ``keep`` segments and the totals of all."""

    def __init__(self, keep: int = 1_000) -> None:
        self._closed: deque[Segment] = deque(maxlen=keep)
        self._open: dict[str, Segment] = {}
        self._ends: dict[str, int] = {}
        self.migrated: dict[str, int] = {}
        """Tuples migrated so far, by the branch they were intended for."""
        self.count = 0
        """The number of non-empty segments so far, including those no longer kept."""

    def open(self, branch: str, target: str, offset: int) -> None:
        """Start a segment: the tuples of the branch from ``offset`` on go to ``target``. Closes the open segment,
        if any."""
        self.close(branch)
        if offset < self._ends.get(branch, 0):
            raise ValueError(
                f"offset {offset} lies in an earlier segment of {branch}, which ends at {self._ends[branch]}"
            )
        self._open[branch] = Segment(branch, target, offset, 0)

    def extend(self, branch: str, rows: int = 1) -> None:
        """Add tuples of the branch to the open segment."""
        if rows < 0 or branch not in self._open:
            raise ValueError(f"{branch!r} has no open segment that can grow by {rows} rows")
        segment = self._open[branch]
        if rows and not segment.length:
            self.count += 1
        self._open[branch] = grown = Segment(branch, segment.target, segment.offset, segment.length + rows)
        self._ends[branch] = grown.offset + grown.length
        self.migrated[branch] = self.migrated.get(branch, 0) + rows

    def close(self, branch: str) -> Segment | None:
        """Record that the tuples of the branch go to the branch again. Returns the closed segment, or None if
        there was none or it was empty."""
        segment = self._open.pop(branch, None)
        if segment is None or not segment.length:
            return None
        self._closed.append(segment)
        return segment

    @property
    def segments(self) -> list[Segment]:
        """The newest closed segments, oldest first, then the open segments that are not empty."""
        return [*self._closed, *(segment for segment in self._open.values() if segment.length)]

    def validate(self) -> None:
        """Check the invariants that hold after every call."""
        ends: dict[str, int] = {}
        for segment in self.segments:
            assert segment.length > 0
            assert segment.offset >= ends.get(segment.branch, 0), f"{segment} overlaps the previous segment"
            ends[segment.branch] = segment.offset + segment.length
        kept = sum(segment.length for segment in self.segments)
        total = sum(self.migrated.values())
        assert kept == total if len(self.segments) == self.count else kept < total


class _Gathered(NamedTuple):
    """What has arrived of a range that is not complete."""

    length: int
    tuples: int
    newest: float | None


Source = tuple[int, str]
"""⟨Sending task, stream⟩: whose data it is."""
LedgerState = list[tuple[Source, int, list[tuple[int, tuple[int, int, float | None]]]]]
"""The content of an ``ArrivalLedger``: for each source the position up to which everything has arrived, and the
ranges behind it."""


class ArrivalLedger:
    """Knows, where partials are merged, up to which position of each source all partials have arrived.

    Partials may overtake each other: those of a migrated segment come from another task than those before it. A
    range is complete when the partials of all its tuples have arrived, and only the complete ranges before the
    first gap count. Memory is bounded: a gap is given up when very much waits behind it. ``validate`` checks the
    invariants.
    """

    def __init__(self, generation: int) -> None:
        self._first = first_position(generation)
        self._ends: dict[Source, int] = {}
        self._waiting: dict[Source, dict[int, _Gathered]] = {}

    def arrived(self, source: Source, data: SourceRange, tuples: int, newest: float | None) -> float | None:
        """The partials of so many tuples of a range have arrived. ``newest`` is the newest time of these tuples;
        None if they have none. Returns the newest time of all ranges that have become complete and have no gap
        before them, or None. Data of an earlier generation is ignored."""
        end = self._ends.setdefault(source, self._first)
        if data.offset < end:
            return None
        waiting = self._waiting.setdefault(source, {})
        before = waiting.get(data.offset, _Gathered(data.length, 0, None))
        waiting[data.offset] = _Gathered(data.length, before.tuples + tuples, _later(before.newest, newest))
        found = None
        if len(waiting) > _MOST_WAITING:
            end = min(waiting)
            waiting[end] = waiting[end]._replace(tuples=waiting[end].length)
        while (first := waiting.get(end)) is not None and first.tuples >= first.length:
            del waiting[end]
            end += first.length
            found = _later(found, first.newest)
        self._ends[source] = end
        return found

    @property
    def newest_waiting(self) -> float | None:
        """The newest time of the ranges that are not complete or have a gap before them."""
        times = [each.newest for ranges in self._waiting.values() for each in ranges.values()]
        return max((time for time in times if time is not None), default=None)

    def end(self, source: Source) -> int:
        """The position up to which all partials have arrived."""
        return self._ends.get(source, self._first)

    @property
    def gaps(self) -> int:
        """The ranges of which some partials have arrived, and which are not complete or have a gap before them."""
        return sum(map(len, self._waiting.values()))

    def to_state(self) -> LedgerState:
        """The content as plain values, for a worker that moves."""
        return [(source, end, list(self._waiting.get(source, {}).items())) for source, end in self._ends.items()]

    def restore(self, state: LedgerState) -> None:
        """Continue from what ``to_state`` of the same generation returned."""
        for source, end, waiting in state:
            self._ends[source] = end
            self._waiting[source] = {offset: _Gathered(*each) for offset, each in waiting}

    def validate(self) -> None:
        """Check the invariants that hold after every call."""
        for source, waiting in self._waiting.items():
            end = self._ends[source]
            assert all(offset >= end for offset in waiting), f"{source} has ranges before its end {end}"
            first = waiting.get(end)
            assert first is None or first.tuples < first.length, f"{source} is complete beyond its end {end}"


def _later(one: float | None, other: float | None) -> float | None:
    return other if one is None else one if other is None else max(one, other)
