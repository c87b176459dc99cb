"""A log of numbered records on local disk, in segment files.

A segment's name is the number of its first record; a record is its length, a CRC and its bytes. Any number of
processes may append: each append holds a lock on the folder (``flock``, which the kernel drops when a process
dies), so what is incomplete at the end when the lock is taken was torn by a crash, and is cut off. Readers take
no lock: to them an incomplete record is one that has not come yet.
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

from penstock.errors import EnvironmentFault
from penstock.private_folder import make_folders, open_here

SEGMENT_BYTES = 16 << 20  # a segment is scanned when it is opened: 16 MB take some 50 ms
_CHUNK = 1 << 20  # bytes a reader takes at a time
_FRAME = struct.Struct("<II")  # length, crc
_SUFFIX = ".seg"
_LOCK_POLL = 0.0005  # s; about as long as an append holds it
_LOCK_SECONDS = (
    5.0  # an append takes milliseconds; a process that was stopped while it holds the lock holds others
)


class QueueDamaged(EnvironmentFault):
    """What was stored does not read back as it was written."""


class SegmentLog:
    """The log of one folder. Threads may share it; records are never empty."""

    def __init__(self, folder: Path, segment_bytes: int = SEGMENT_BYTES) -> None:
        make_folders(folder)
        self.folder = folder
        self._segment_bytes = segment_bytes
        self._lock = open_here(folder / "lock", os.O_RDWR | os.O_CREAT)
        self._mutex = threading.Lock()  # flock keeps out processes, not threads
        self._tail = -1  # descriptor of the newest segment, once appended to
        self._first = 0  # number of its first record
        self._next = 0  # number the next record gets
        self._size = 0  # bytes of whole records in it

    def append(self, payloads: Sequence[bytes], floor: int = 0) -> int:
        """Add records in order; returns the number of the first, which is at least ``floor``.

        (1) take the lock; (2) find the end, cutting off a torn record; (3) begin a new segment if this one is
        full; (4) write; (5) fdatasync. A crash before (5) leaves some first part of the records, or none.
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
                self._forget_tail()  # what reached the file is found by the next append
                raise
            first = self._next
            self._next += len(payloads)
            self._size += len(data)
            return first

    def drop_before(self, number: int) -> None:
        """Remove segments whose records all have smaller numbers. The numbering goes on: where that is the newest
        segment too, an empty one that carries the next number takes its place first."""
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
        """The number that the next record gets, at least ``floor``."""
        with self._locked():
            self._find_end(floor)
            return self._next

    def segments(self) -> list[int]:
        """The first numbers of the segments, lowest first."""
        names = (entry.name for entry in os.scandir(self.folder))
        return sorted(int(name.removesuffix(_SUFFIX)) for name in names if name.endswith(_SUFFIX))

    def reader(self, number: int) -> LogReader:
        return LogReader(self, number)

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
        """Bring the tail up to date with what others did, and with what a crash left. Holds the lock."""
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
        if self._next < floor:  # records that were read but did not survive a power cut: their numbers stay used
            self._begin_segment(floor)

    def _check_torn(self, rest: bytes) -> None:
        """A crash leaves the beginning of a record, or zeros. One that has another behind it was not torn but has
        changed since: to cut it off would lose what follows."""
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


class LogReader:
    """Reads a log from one record on, while others append to it."""

    def __init__(self, log: SegmentLog, number: int) -> None:
        """Begins at the record of that number, or at the oldest there is."""
        self._log = log
        self._file = -1
        self._first = 0  # number of the segment's first record
        self._offset = 0  # in the segment, of the first record not in _ready
        self._number = number  # of the first record in _ready, or the next to come
        self._ready: deque[bytes] = deque()

    @property
    def number(self) -> int:
        """Of the next record."""
        return self._number

    def read(self, limit: int) -> list[tuple[int, bytes]]:
        """Up to ``limit`` records that follow, with their numbers; fewer or none when there are no more now. What
        cannot be read back raises, once it is the first."""
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

    def put_back(self, found: Sequence[tuple[int, bytes]]) -> None:
        """Have the records of the last ``read`` read again."""
        self._ready.extendleft(data for _, data in reversed(found))
        if found:
            self._number = found[0][0]

    def more(self) -> bool:
        """True if a record is there to read."""
        if self._file < 0 and not self._enter_segment():
            return False
        while not self._ready and not self._load():
            later = [first for first in self._log.segments() if first > self._first]
            if not later:
                return False
            if self._load():  # it was appended before the new segment began
                break
            if self._offset != os.fstat(self._file).st_size:
                raise QueueDamaged(
                    f"{self._log.path(self._first)}",
                    f"the stored record at byte {self._offset} (record {self._number}) is not what was written",
                    "The disk has lost data. Move the file away to go on without its remaining records.",
                )
            try:
                self._open(later[0])
            except FileNotFoundError:  # removed since it was listed: its records were done with
                continue
            self._number = later[0]
        return True

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _enter_segment(self) -> bool:
        """Open the segment that holds the next record, and skip what comes before it."""
        while self._file < 0:
            firsts = self._log.segments()
            if not firsts:
                return False
            with contextlib.suppress(FileNotFoundError):  # removed since it was listed: look again
                self._open(max((first for first in firsts if first <= self._number), default=firsts[0]))
        wanted, self._number = max(self._number, self._first), self._first
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
        """Take the next whole records of the segment into ``_ready``; True if there were any."""
        data = os.pread(self._file, _CHUNK, self._offset)
        if len(data) >= _FRAME.size:
            length = _FRAME.size + _FRAME.unpack_from(data)[0]
            if len(data) == _CHUNK < length:
                data = os.pread(self._file, length, self._offset)
        end = 0
        for item, end in _records(data):  # noqa: B007 - the last end is wanted
            self._ready.append(item)
        self._offset += end
        return end > 0


def sync_folder(folder: Path) -> None:
    """Make names that were created or replaced in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock(descriptor: int, shared: bool = False) -> None:
    """Wait for the lock on an open file. Raises ``OSError`` if it is not free within some seconds."""
    how = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, how | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError(errno.ETIMEDOUT, "another process holds the lock") from None
            time.sleep(_LOCK_POLL)  # flock has no time-out of its own


def replace_file(path: Path, data: bytes) -> None:
    """Give a file, for its owner alone, new contents in one step: after a crash it has the old ones or these,
    durably."""
    # A name that nobody can foresee: no link is in its place, and two processes never write to one file.
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
    """The whole records at the start of ``data``, each with where it ends; stops at one that is not whole."""
    offset, size = 0, _FRAME.size
    while offset + size <= len(data):
        length, crc = _FRAME.unpack_from(data, offset)
        end = offset + size + length
        item = data[offset + size : end]
        if not length or end > len(data) or zlib.crc32(item) != crc:  # no length: zeros that a crash left
            return
        yield item, end
        offset = end


def _write_all(descriptor: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written
