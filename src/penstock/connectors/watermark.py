"""The low-water mark of acks that arrive in any order: all offsets below it are done."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_FIRST_SIZE = 1 << 14  # flags; about the number of offsets that a busy spout has in flight


class LowWater:
    """The offsets in flight in one partition, with one flag each from the mark to the end.

    Offsets are added in ascending order. Offsets that are skipped between two calls count as done: compacted
    topics and topics with transactions have such gaps. Both methods take a few nanoseconds per offset, however
    long the oldest offset stays unacked. Memory is one byte per offset from the mark to the end.
    """

    def __init__(self, start: int) -> None:
        self._done = np.zeros(_FIRST_SIZE, np.bool_)
        self._base = start  # the offset of flag 0
        self._head = start
        self._end = start

    @property
    def mark(self) -> int:
        """The lowest offset not acked, or the end if all are acked. Reading resumes here after a crash."""
        return self._head

    @property
    def end(self) -> int:
        """The offset after the last one added."""
        return self._end

    def add(self, first: int, count: int) -> None:
        """Add ``count`` offsets from ``first`` on. Raises ``ValueError`` if ``first`` is below the end."""
        if first < self._end:
            raise ValueError(f"offsets are added in ascending order, but {first} came after {self._end - 1}")
        if self._head == self._end:
            self._head = self._base = self._end = first  # nothing is in flight, so there is no gap to mark
        self._make_room(first + count)
        self._done[self._end - self._base : first - self._base] = True
        self._done[first - self._base : first + count - self._base] = False
        self._end = first + count

    def ack(self, offsets: npt.NDArray[np.int64]) -> None:
        """Mark offsets as done. An offset below the mark, or acked before, has no effect. Raises ``ValueError``
        for an offset that was not added."""
        if not len(offsets):
            return
        if offsets.max() >= self._end:
            raise ValueError(f"only added offsets are acked, but {offsets.max()} is not below {self._end}")
        if offsets.min() < self._head:
            offsets = offsets[offsets >= self._head]
        self._done[offsets - self._base] = True
        in_flight = self._done[self._head - self._base : self._end - self._base]
        # argmin stops at the first False: the cost is proportional to how far the mark moves.
        if len(in_flight) and in_flight[0]:
            first = int(in_flight.argmin())
            self._head = self._end if in_flight[first] else self._head + first

    def _make_room(self, end: int) -> None:
        """Make room for flags up to ``end``: move the live flags to the front, into a larger array if they fill
        more than half of it."""
        if end - self._base <= len(self._done):
            return
        needed = 2 * (end - self._head)
        fresh = self._done if needed <= len(self._done) else np.zeros(max(needed, _FIRST_SIZE), np.bool_)
        live = self._done[self._head - self._base : self._end - self._base]
        fresh[: len(live)] = live.copy() if fresh is self._done else live
        self._done, self._base = fresh, self._head
