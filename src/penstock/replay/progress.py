"""Tracks how far a source has been read and processed, and thereby the position that may be stored."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import takewhile


class ReadProgress:
    """The position of one source. It passes a record only when that record and all before it are done.

    Positions increase from read to read but may have gaps (bytes of a file, offsets of a Kafka topic).
    """

    def __init__(self, start: int) -> None:
        self._open: deque[int] = deque()
        self._done: set[int] = set()
        self._end = start

    def read(self, positions: Iterable[int], end: int) -> None:
        """Records at these positions were read; the next one will be at ``end`` or later."""
        self._open.extend(positions)
        self._end = end

    def done(self, positions: Iterable[int]) -> None:
        """These records are done, in any order. A position that is not open (done before, or never read) is
        ignored."""
        self._done.update(positions)
        passed = list(takewhile(self._done.__contains__, self._open))
        if len(passed) == len(self._open):
            self._open.clear()
            self._done.clear()
        else:
            for _ in passed:
                self._open.popleft()
            self._done.difference_update(passed)

    @property
    def position(self) -> int:
        """Where a restart resumes: the first record that is not done, or the end of what was read."""
        return self._open[0] if self._open else self._end

    @property
    def end(self) -> int:
        """Where the next read begins."""
        return self._end

    @property
    def finished(self) -> bool:
        """True if everything that was read is done."""
        return not self._open
