"""Reads records of a log that were read before: beside the reader that goes forward, and without disturbing it."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from operator import attrgetter

import numpy as np

from penstock.acking.lineage import I64
from penstock.storage.segments import LogReader, Mark, QueueDamaged, SegmentLog

AGAIN_BYTES = 8 << 20  # bytes read again at a time: some fdatasyncs' worth, and little memory
_NEVER = 1 << 62
_RUN = 512  # records per call of the reader, so that large records do not add up


class SecondReader:
    """Finds records by the marks of the reader that goes forward. For use by one thread."""

    def __init__(self, log: SegmentLog, marks: deque[Mark]) -> None:
        """``marks`` grows and shrinks while other threads read and release records."""
        self._log, self._marks = log, marks
        self._reader: LogReader | None = None

    def read(self, positions: I64) -> list[bytes | str]:
        """The records with these numbers, in ascending order: at least one, then as many as about ``AGAIN_BYTES``
        hold. A text instead of a record says why it is no longer there."""
        found: list[bytes | str] = []
        size, missing_until, reason = 0, 0, ""
        # Consecutive numbers have the same difference to their index.
        for run in np.split(positions, np.flatnonzero(np.diff(positions) != 1) + 1):
            at, end = int(run[0]), int(run[-1]) + 1
            while at < end:
                if size >= AGAIN_BYTES:
                    return found
                items: list[bytes] = []
                if at >= missing_until:
                    reader = self._reader_at(at)
                    try:
                        items, following = self._run(reader, at, min(end - at, _RUN))
                        if not items:
                            missing_until, reason = following, "its file is missing or shorter than before"
                    except QueueDamaged as error:
                        missing_until, reason = self._next_mark(max(reader.number, at)), error.problem
                        self.close()
                found += items or [reason]
                size += sum(map(len, items))
                at += max(len(items), 1)
        return found

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    @staticmethod
    def _run(reader: LogReader, at: int, limit: int) -> tuple[list[bytes], int]:
        """Up to ``limit`` records with consecutive numbers from ``at`` on, and the number of a following one."""
        reader.skip_to(at)
        found = reader.read(limit)
        items = [data for index, (number, data) in enumerate(found) if number == at + index]
        reader.put_back(found[len(items) :])  # records between them are missing
        return items, found[len(items)][0] if len(items) < len(found) else _NEVER

    def _reader_at(self, number: int) -> LogReader:
        """A reader that is at this record or not far before it."""
        marks = list(self._marks)
        place = bisect_right(marks, number, key=attrgetter("number"))
        start = marks[place - 1] if place else None
        near = self._reader
        if near is None or near.number > number or (start is not None and start.number > near.number):
            self.close()
            near = self._reader = self._log.reader(number, start)
        return near

    def _next_mark(self, number: int) -> int:
        """The first record after this one that can be found without it."""
        firsts = (each for each in self._log.segments() if each > number)
        marks = (mark.number for mark in list(self._marks) if mark.number > number)
        return min((*firsts, *marks), default=_NEVER)
