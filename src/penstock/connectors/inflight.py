"""Records that were emitted and not yet acked: kept so that a failed record can be emitted again, or only their
offsets."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.connectors.watermark import LowWater
from penstock.replay.progress import ReadProgress

Offsets = npt.NDArray[np.int64]


@dataclass
class _EmittedRows:
    """Records that were emitted together. They are released together, when the last of them is acked."""

    offsets: Offsets
    rows: pa.RecordBatch
    left: int


class InFlight:
    """The records of one partition that are emitted and not acked, and the low-water mark below them.

    A slow record keeps only the records that were emitted in the same batch. Memory is therefore proportional to
    the number of unacked records, which ``delivery.max_spout_pending`` bounds. Used by the task's thread.
    """

    def __init__(self, start: int) -> None:
        self._low = LowWater(start)
        self._segments: list[_EmittedRows] = []
        self._firsts: list[int] = []

    @property
    def mark(self) -> int:
        """Every record below this offset is acked."""
        return self._low.mark

    @property
    def kept(self) -> int:
        """The number of records in memory."""
        return sum(segment.rows.num_rows for segment in self._segments)

    def add(self, offsets: Offsets, rows: pa.RecordBatch) -> None:
        """Add rows that were emitted; ``offsets`` are ascending."""
        first, last = int(offsets[0]), int(offsets[-1])
        if last - first + 1 == len(offsets):
            self._low.add(first, len(offsets))
        else:  # the offsets have gaps: add each contiguous run
            for run in np.split(offsets, np.flatnonzero(np.diff(offsets) != 1) + 1):
                self._low.add(int(run[0]), len(run))
        self._segments.append(_EmittedRows(offsets, rows, len(offsets)))
        self._firsts.append(first)

    def ack(self, offsets: Offsets) -> None:
        """Mark records as done. Each offset is acked once."""
        self._low.ack(offsets)
        if len(self._segments) == 1:
            self._segments[0].left -= len(offsets)
        else:
            places = np.searchsorted(np.array(self._firsts), offsets, "right") - 1
            for place, count in enumerate(np.bincount(places, minlength=len(self._segments)).tolist()):
                self._segments[place].left -= count
        if any(segment.left <= 0 for segment in self._segments):
            self._segments = [segment for segment in self._segments if segment.left > 0]
            self._firsts = [int(segment.offsets[0]) for segment in self._segments]

    def row(self, offset: int) -> pa.RecordBatch:
        """The row of an offset that is in flight, as a batch of one row."""
        segment = self._segments[bisect_right(self._firsts, offset) - 1]
        return segment.rows.slice(int(np.searchsorted(segment.offsets, offset)), 1)


class PositionsInFlight:
    """As ``InFlight``, without the records: a failed record is read again. Memory is about 9 bytes per record
    from the mark on, however long the gaps between the offsets are."""

    def __init__(self, start: int) -> None:
        self._progress = ReadProgress(start)

    @property
    def mark(self) -> int:
        return self._progress.position

    def add(self, offsets: Offsets, rows: pa.RecordBatch) -> None:
        self._progress.read(offsets, int(offsets[-1]) + 1)

    def ack(self, offsets: Offsets) -> None:
        self._progress.done(offsets)
