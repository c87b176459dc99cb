"""A queue of parcels that keeps the oldest in memory and the rest on disk.

The reader of Spark's channel must never stop: a frame that it does not take delays all frames behind it,
including those for other tasks. It therefore puts frames for which there is no room here. The disk is used in
segments, each of which is deleted when it has been read, so that a queue that never becomes empty does not grow
for ever.
"""

from __future__ import annotations

import os
import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from typing import BinaryIO

import pyarrow as pa

from penstock.errors import PenstockError
from penstock.worker.parcel import Parcel

_SEGMENT = 16 * 1024 * 1024
"""Bytes of a segment. A segment that is partly read occupies all of its space, so it should be small; it holds
about a hundred full frames, so that files are not created often."""


class Spill:
    """A first-in, first-out queue of frames. Not thread-safe: its owner has a lock. A parcel with a batch
    instead of a frame cannot be added."""

    def __init__(self, memory: int) -> None:
        self.rows = 0
        self.bytes = 0
        """Bytes of all parcels, in memory and on disk."""
        self.rows_on_disk = 0
        """A counter instead of a sum over the parcels, because another thread reads it without the lock."""
        self._memory = memory
        self._in_memory = 0
        self._head: deque[Parcel] = deque()
        self._segments: deque[_SpillFile] = deque()

    def __bool__(self) -> bool:
        return bool(self._head or self._segments)

    def add(self, parcel: Parcel) -> None:
        """Append a parcel. Raises ``PenstockError`` if it cannot be written to disk."""
        size = parcel.frame.size
        if not self._segments and self._in_memory + size <= self._memory:
            self._in_memory += size
            self._head.append(parcel)
        else:
            self._to_disk(parcel)
            self.rows_on_disk += parcel.header.rows
        self.rows += parcel.header.rows
        self.bytes += size

    def first(self) -> Parcel | None:
        """The oldest parcel; None if the queue is empty."""
        if not self._head and self._segments:
            segment = self._segments[0]
            parcel = segment.read()
            self.rows_on_disk -= parcel.header.rows
            self._in_memory += parcel.frame.size
            self._head.append(parcel)
            if not segment:
                self._segments.popleft().close()
        return self._head[0] if self._head else None

    def drop(self) -> None:
        """Remove the oldest parcel. ``first`` must have returned it before."""
        parcel = self._head.popleft()
        size = parcel.frame.size
        self.rows -= parcel.header.rows
        self.bytes -= size
        self._in_memory -= size

    def view(self) -> SpillView:
        """The parcels that wait now, without reading what is on disk. The caller closes the view."""
        return SpillView(list(self._head), [segment.view() for segment in self._segments])

    def close(self) -> None:
        """Delete the temporary files."""
        while self._segments:
            self._segments.popleft().close()

    def _to_disk(self, parcel: Parcel) -> None:
        try:
            begun = bool(self._segments) and self._segments[-1].size < _SEGMENT
            segment = self._segments[-1] if begun else _SpillFile()
            segment.write(parcel)
            if not begun:
                self._segments.append(segment)  # after the write, because an empty segment cannot be read
        except OSError as error:
            raise PenstockError(
                "waiting frames",
                f"more than {self._memory:,} bytes wait, but they cannot be written to a temporary file ({error})",
                "Free space in the temporary folder, lower flow.overflow_bytes, or speed up the receiving "
                "component.",
            ) from error


class SpillView:
    """The parcels that waited in a ``Spill`` at one moment. It stays valid when the queue goes on, and may be read
    once, on another thread."""

    def __init__(self, head: Sequence[Parcel] = (), files: Sequence[_FileView] = ()) -> None:
        self._head, self._files = head, files

    def __iter__(self) -> Iterator[Parcel]:
        """The parcels, oldest first; one of those on disk is in memory at a time."""
        yield from self._head
        for file in self._files:
            yield from file

    def close(self) -> None:
        """Release the files."""
        for file in self._files:
            file.close()


class _FileView:
    """The parcels of a file that are not yet read. It has a descriptor of its own, because the queue closes the
    file when it has read it."""

    def __init__(self, descriptor: int, begin: int, parcels: Sequence[Parcel], sizes: Sequence[int]) -> None:
        self._descriptor: int | None = descriptor
        self._begin, self._parcels, self._sizes = begin, parcels, sizes

    def __iter__(self) -> Iterator[Parcel]:
        assert self._descriptor is not None
        at = self._begin
        for parcel, size in zip(self._parcels, self._sizes, strict=True):
            frame = os.pread(self._descriptor, size, at)
            yield Parcel(parcel.header, pa.py_buffer(frame), parcel.lineage)
            at += size

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class _SpillFile:
    """One temporary file. It has no name, so it disappears with the process."""

    def __init__(self) -> None:
        self.size = 0
        self._file: BinaryIO = tempfile.TemporaryFile(prefix="penstock-spill-")  # noqa: SIM115 - closed by close
        self._parcels: deque[Parcel] = deque()
        """The parcels in the file, without their content."""
        self._sizes: deque[int] = deque()
        self._read = 0

    def __bool__(self) -> bool:
        return bool(self._parcels)

    def write(self, parcel: Parcel) -> None:
        self._file.seek(self.size)
        self._file.write(parcel.frame)
        self._file.flush()
        self.size += parcel.frame.size
        self._sizes.append(parcel.frame.size)
        self._parcels.append(Parcel(parcel.header, pa.py_buffer(b""), parcel.lineage))

    def read(self) -> Parcel:
        parcel, size = self._parcels.popleft(), self._sizes.popleft()
        self._file.seek(self._read)
        self._read += size
        return Parcel(parcel.header, pa.py_buffer(self._file.read(size)), parcel.lineage)

    def view(self) -> _FileView:
        return _FileView(os.dup(self._file.fileno()), self._read, list(self._parcels), list(self._sizes))

    def close(self) -> None:
        self._file.close()
