"""Tracks how far a source has been read and processed, and thereby the position that may be stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Positions: TypeAlias = Sequence[int] | npt.NDArray[np.int64]

_FIRST_SIZE = 256  # records: a task may read thousands of files, and each has a progress of its own


class ReadProgress:
    """The position of one source. It passes a record only when that record and all before it are done.

    Positions increase from read to read but may have gaps (bytes of a file, offsets of a Kafka topic). Memory is 9
    bytes for each record from the first that is not done to the last that was read, and as much again in reserve.
    """

    def __init__(self, start: int) -> None:
        self._positions = np.zeros(_FIRST_SIZE, np.int64)
        self._is_done = np.zeros(_FIRST_SIZE, np.bool_)
        self._head = self._tail = 0  # the records that count are at these places of both arrays
        self._end = start

    def read(self, positions: Positions, end: int) -> None:
        """Records at these positions were read; the next one will be at ``end`` or later."""
        if isinstance(positions, range):  # would be converted number by number
            positions = np.arange(positions.start, positions.stop, positions.step)
        found = np.asarray(positions, np.int64)
        self._make_room(len(found))
        after = self._tail + len(found)
        self._positions[self._tail : after] = found
        self._is_done[self._tail : after] = False
        self._tail, self._end = after, end

    def done(self, positions: Positions) -> None:
        """These records are done, in any order. A position that is not open (done before, or never read) is
        ignored."""
        wanted = np.asarray(positions, np.int64)
        known = self._positions[self._head : self._tail]
        if not len(wanted) or not len(known):
            return
        places = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
        is_done = self._is_done[self._head : self._tail]
        is_done[places[known[places] == wanted]] = True
        if is_done[0]:
            first = int(is_done.argmin())  # stops at the first False: the cost is how far the position moves
            self._head = self._tail if is_done[first] else self._head + first

    @property
    def position(self) -> int:
        """Where a restart resumes: the first record that is not done, or the end of what was read."""
        return self._end if self.finished else int(self._positions[self._head])

    @property
    def end(self) -> int:
        """Where the next read begins."""
        return self._end

    @property
    def finished(self) -> bool:
        """True if everything that was read is done."""
        return self._head == self._tail

    def _make_room(self, more: int) -> None:
        """Make room for more records: move those that count to the front, of larger arrays if they need more than
        half of the room."""
        if self._tail + more <= len(self._positions):
            return
        live = slice(self._head, self._tail)
        count = self._tail - self._head
        size = _FIRST_SIZE
        while size < 2 * (count + more):
            size *= 2
        positions, is_done = np.zeros(size, np.int64), np.zeros(size, np.bool_)
        positions[:count], is_done[:count] = self._positions[live], self._is_done[live]
        self._positions, self._is_done = positions, is_done
        self._head, self._tail = 0, count
