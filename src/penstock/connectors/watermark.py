"""The low-water mark of acks that come in any order: the position below which everything is done."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_FIRST_SIZE = 1 << 14  # flags; about what a busy spout has under way


class LowWater:
    """Offsets under way in one partition, one flag each from the mark to the end.

    Offsets are added in ascending order; what is left out between two calls counts as done (a compacted topic and
    one with transactions have such holes). Both calls cost a few nanoseconds an offset, however long the oldest
    stays unacked; memory is one byte for each offset from the mark to the end.
    """

    def __init__(self, start: int) -> None:
        self._done = np.zeros(_FIRST_SIZE, np.bool_)
        self._base = start  # the offset of the flag at 0
        self._head = start
        self._end = start

    @property
    def mark(self) -> int:
        """The lowest offset not acked; the end if all are. Reading resumes here after a crash."""
        return self._head

    @property
    def end(self) -> int:
        """The offset after the last one added."""
        return self._end

    def add(self, first: int, count: int) -> None:
        """``count`` offsets from ``first`` on are under way. ``first`` is not below the end."""
        if first < self._end:
            raise ValueError(f"offsets are added in ascending order, but {first} came after {self._end - 1}")
        if self._head == self._end:
            self._head = self._base = self._end = first  # nothing under way: no hole to step over
        self._make_room(first + count)
        self._done[self._end - self._base : first - self._base] = True
        self._done[first - self._base : first + count - self._base] = False
        self._end = first + count

    def ack(self, offsets: npt.NDArray[np.int64]) -> None:
        """These are done. One that is below the mark, or was acked already, changes nothing."""
        if not len(offsets):
            return
        if offsets.max() >= self._end:
            raise ValueError(f"only added offsets are acked, but {offsets.max()} is not below {self._end}")
        if offsets.min() < self._head:
            offsets = offsets[offsets >= self._head]
        self._done[offsets - self._base] = True
        under_way = self._done[self._head - self._base : self._end - self._base]
        # argmin stops at the first False: the cost is what the mark moves, not what is under way
        if len(under_way) and under_way[0]:
            first = int(under_way.argmin())
            self._head = self._end if under_way[first] else self._head + first

    def _make_room(self, end: int) -> None:
        """Flags up to ``end``: move what is under way to the front, into a larger array where it fills half."""
        if end - self._base <= len(self._done):
            return
        needed = 2 * (end - self._head)
        fresh = self._done if needed <= len(self._done) else np.zeros(max(needed, _FIRST_SIZE), np.bool_)
        live = self._done[self._head - self._base : self._end - self._base]
        fresh[: len(live)] = live.copy() if fresh is self._done else live
        self._done, self._base = fresh, self._head
