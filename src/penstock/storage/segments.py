"""A log of numbered records on a local disk, stored in segment files.

The name of a segment is the number of its first record. A record consists of its length, a CRC and its bytes. Any
number of processes may append. Each append holds a lock on the folder (``flock``, which the kernel releases when
the process dies), so an incomplete record at the end of the log is the result of a crash, and the next append
truncates it. Readers take no lock; they treat an incomplete record as not yet written.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import secrets
import struct
import threading
import time
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from penstock.errors import EnvironmentFault
from penstock.private_folder import make_folders, open_here

SEGMENT_BYTES = 16 << 20  # bytes; opening a segment scans it, which takes about 50 ms for 16 MB
_CHUNK = 1 << 20  # bytes per read call: few system calls, little memory
_MARK_BYTES = 1 << 18  # bytes between two marks of a reader: scanning them takes about 1 ms
_FRAME = struct.Struct("<II")  # length, CRC
_SUFFIX = ".seg"
_LOCK_POLL = 0.0005  # seconds between two attempts; about as long as an append holds the lock
_LOCK_SECONDS = 5.0  # an append takes milliseconds; a longer wait means that the lock's owner is suspended


class QueueDamaged(EnvironmentFault):
    """A stored record is not the one that was written."""


class SegmentLog:
    """The log in one folder. Thread-safe. Records must not be empty."""

    def __init__(self, folder: Path, segment_bytes: int = SEGMENT_BYTES) -> None:
        make_folders(folder)
        self.folder = folder
        self._segment_bytes = segment_bytes
        self._lock = open_here(folder / "lock", os.O_RDWR | os.O_CREAT)
        self._mutex = threading.Lock()  # flock excludes other processes but not other threads
        self._tail = -1  # descriptor of the newest segment; -1 before the first append
        self._first = 0  # number of the first record in that segment
        self._next = 0  # number of the next record to append
        self._size = 0  # bytes of complete records in that segment

    def append(self, payloads: Sequence[bytes], floor: int = 0) -> int:
        """Append records in order and make them durable. Returns the number of the first one, at least ``floor``.

        Steps: (1) take the lock; (2) find the end and truncate an incomplete record; (3) begin a new segment if
        this one is full; (4) write; (5) fdatasync. A crash before (5) leaves a prefix of the records, possibly
        none. Raises ``QueueDamaged`` if the end of the log is damaged, and ``OSError``.
        """
        with self._locked():
            self._find_end(floor)
            if self._size >= self._segment_bytes:
                self._begin_segment(self._next)
            data = b"".join(_FRAME.pack(len(item), zlib.crc32(item)) + item for item in payloads)
            try:
                _write_all(self._tail, data, self._size)
                os.fdatasync(self._tail)
            except OSError:
                self._forget_tail()  # the next append finds out what reached the file
                raise
            first = self._next
            self._next += len(payloads)
            self._size += len(data)
            return first

    def drop_before(self, number: int) -> None:
        """Remove segments whose records all have smaller numbers. Numbering continues: if the newest segment is to
        be removed as well, an empty segment named by the next number is created first."""
        firsts = self.segments()
        if len(firsts) > 1 and firsts[1] <= number:
            with self._locked():
                self._remove(firsts, number)
        if firsts and firsts[-1] < number:
            with self._locked():
                self._find_end(0)
                if self._first < self._next <= number:
                    self._begin_segment(self._next)
                    self._remove(self.segments(), number)

    def end(self, floor: int = 0) -> int:
        """The number of the next record to be appended, at least ``floor``."""
        with self._locked():
            self._find_end(floor)
            return self._next

    def segments(self) -> list[int]:
        """The first numbers of the segments, lowest first."""
        names = (entry.name for entry in os.scandir(self.folder))
        return sorted(int(name.removesuffix(_SUFFIX)) for name in names if name.endswith(_SUFFIX))

    def reader(self, number: int, start: Mark | None = None, marks: deque[Mark] | None = None) -> LogReader:
        return LogReader(self, number, start, marks)

    def path(self, first: int) -> Path:
        return self.folder / f"{first:020d}{_SUFFIX}"

    def close(self) -> None:
        self._forget_tail()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with self._mutex:
            lock(self._lock)
            try:
                yield
            finally:
                fcntl.flock(self._lock, fcntl.LOCK_UN)

    def _find_end(self, floor: int) -> None:
        """Update the fields about the tail to what other processes wrote and a crash left. The caller holds the
        lock."""
        firsts = self.segments()
        if not firsts:
            self._begin_segment(floor)
            return
        if self._tail < 0 or firsts[-1] != self._first:
            self._forget_tail()
            self._first = self._next = firsts[-1]
            self._size = 0
            self._tail = open_here(self.path(self._first), os.O_RDWR)
        length = os.fstat(self._tail).st_size
        if length > self._size:
            begin = self._size
            for _, end in _records(os.pread(self._tail, length - begin, begin)):
                self._next += 1
                self._size = begin + end
        if length > self._size:
            self._check_torn(os.pread(self._tail, length - self._size, self._size))
            os.ftruncate(self._tail, self._size)
        if self._next < floor:  # records were read but lost in a power failure: their numbers stay in use
            self._begin_segment(floor)

    def _check_torn(self, rest: bytes) -> None:
        """Raise ``QueueDamaged`` unless a crash can have caused the incomplete record.

        A crash leaves the beginning of a record, or zeros. If a complete record follows, the bytes were changed
        later, and truncating would lose the records that follow.
        """
        if len(rest) < _FRAME.size:
            return
        length, _ = _FRAME.unpack_from(rest)
        if length and next(_records(rest[_FRAME.size + length :]), None) is not None:
            raise QueueDamaged(
                f"{self.path(self._first)}",
                f"the stored record at byte {self._size} (record {self._next}) is not what was written",
                "The disk has lost data. Move the file away to go on without its remaining records.",
            )

    def _begin_segment(self, first: int) -> None:
        self._forget_tail()
        self._tail = open_here(self.path(first), os.O_RDWR | os.O_CREAT | os.O_EXCL)
        self._first = self._next = first
        self._size = 0
        sync_folder(self.folder)

    def _remove(self, firsts: Sequence[int], number: int) -> None:
        for first, after in itertools.pairwise(firsts):
            if after <= number:
                self.path(first).unlink(missing_ok=True)

    def _forget_tail(self) -> None:
        if self._tail >= 0:
            os.close(self._tail)
            self._tail = -1


class Mark(NamedTuple):
    """Where a record begins."""

    number: int
    segment: int
    """The number of the segment's first record."""
    offset: int


class LogReader:
    """Reads a log from one record on while other processes append to it. For use by one thread."""

    def __init__(
        self, log: SegmentLog, number: int, start: Mark | None = None, marks: deque[Mark] | None = None
    ) -> None:
        """Start at the record with this number, or at the oldest record if that one has been removed. With
        ``start``, a mark that is not behind this record, the records before the mark are not scanned. The reader
        adds marks of what it reads to ``marks``."""
        self._log = log
        self._start, self._marks = start, marks
        self._file = -1
        self._first = 0  # number of the segment's first record
        self._offset = 0  # in the segment, of the first record not in _ready
        self._number = number  # of the first record in _ready, or the next to come
        self._ready: deque[bytes] = deque()

    @property
    def number(self) -> int:
        """The number of the next record."""
        return self._number

    def read(self, limit: int) -> list[tuple[int, bytes]]:
        """Up to ``limit`` following records with their numbers; an empty list if there are none at present. Raises
        ``QueueDamaged`` if the first record to return is damaged."""
        found: list[tuple[int, bytes]] = []
        try:
            while len(found) < limit and self.more():
                for _ in range(min(limit - len(found), len(self._ready))):
                    found.append((self._number, self._ready.popleft()))
                    self._number += 1
        except QueueDamaged:
            if not found:
                raise
        return found

    def skip_to(self, number: int) -> None:
        """Skip the records before this number. Raises ``QueueDamaged`` if one of them is damaged."""
        while self._number < number and self.more():
            for _ in range(min(number - self._number, len(self._ready))):
                self._ready.popleft()
                self._number += 1

    def put_back(self, found: Sequence[tuple[int, bytes]]) -> None:
        """Return the records of the last ``read`` once more."""
        self._ready.extendleft(data for _, data in reversed(found))
        if found:
            self._number = found[0][0]

    def more(self) -> bool:
        """True if a record can be read now."""
        if self._file < 0 and not self._enter_segment():
            return False
        while not self._ready and not self._load():
            later = [first for first in self._log.segments() if first > self._first]
            if not later:
                return False
            if self._load():  # it was appended before the next segment was created
                break
            if self._offset != os.fstat(self._file).st_size:
                raise QueueDamaged(
                    f"{self._log.path(self._first)}",
                    f"the stored record at byte {self._offset} (record {self._number}) is not what was written",
                    "The disk has lost data. Move the file away to go on without its remaining records.",
                )
            try:
                self._open(later[0])
            except FileNotFoundError:  # removed after it was listed: its records are no longer needed
                continue
            self._number = later[0]
        return True

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _enter_segment(self) -> bool:
        """Open the segment that contains the next record and skip the records before it."""
        while self._file < 0:
            firsts = self._log.segments()
            if not firsts:
                return False
            with contextlib.suppress(FileNotFoundError):  # removed after it was listed: list again
                self._open(max((first for first in firsts if first <= self._number), default=firsts[0]))
        wanted, self._number = max(self._number, self._first), self._first
        if self._start is not None and self._start.segment == self._first:
            self._number, self._offset = self._start.number, self._start.offset
        while self._number < wanted and self._load():
            skipped = min(wanted - self._number, len(self._ready))
            for _ in range(skipped):
                self._ready.popleft()
            self._number += skipped
        self._number = wanted
        return True

    def _open(self, first: int) -> None:
        file = open_here(self._log.path(first), os.O_RDONLY)
        self.close()
        self._file = file
        self._first, self._offset = first, 0

    def _load(self) -> bool:
        """Read the next complete records of the segment into ``_ready``. Returns True if there were any."""
        data = os.pread(self._file, _CHUNK, self._offset)
        if len(data) >= _FRAME.size:
            length = _FRAME.size + _FRAME.unpack_from(data)[0]
            if len(data) == _CHUNK < length:
                data = os.pread(self._file, length, self._offset)
        end, here = 0, Mark(self._number + len(self._ready), self._first, self._offset)
        for item, end in _records(data):  # noqa: B007 - the last value of end is needed
            self._ready.append(item)
        if end and self._marks is not None:
            last = self._marks[-1] if self._marks else None
            if last is None or last.segment != here.segment or here.offset - last.offset >= _MARK_BYTES:
                self._marks.append(here)
        self._offset += end
        return end > 0


def sync_folder(folder: str | Path) -> None:
    """Make the creation and replacement of files in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock(descriptor: int, shared: bool = False) -> None:
    """Wait for the lock on an open file. Raises ``TimeoutError`` if it is not free within ``_LOCK_SECONDS``."""
    how = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, how | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError(errno.ETIMEDOUT, "another process holds the lock") from None
            time.sleep(_LOCK_POLL)  # flock has no timeout


def replace_file(path: Path, data: bytes) -> None:
    """Replace the contents of a file atomically; only its owner may read it. After a crash the file has the old or
    the new contents. The new contents are durable on return."""
    # A name that cannot be predicted: no link can be placed there, and two processes never write to the same file.
    fresh = path.with_name(f"{path.name}.{secrets.token_hex(4)}.new")
    descriptor = open_here(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        try:
            _write_all(descriptor, data, 0)
            os.fdatasync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(fresh, path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def _records(data: bytes) -> Iterator[tuple[bytes, int]]:
    """The complete records at the beginning of ``data``, each with the offset of its end."""
    offset, size = 0, _FRAME.size
    while offset + size <= len(data):
        length, crc = _FRAME.unpack_from(data, offset)
        end = offset + size + length
        item = data[offset + size : end]
        if not length or end > len(data) or zlib.crc32(item) != crc:  # length 0: zeros that a crash left
            return
        yield item, end
        offset = end


def _write_all(descriptor: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written
