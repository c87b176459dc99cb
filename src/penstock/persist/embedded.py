"""The default queue, on a local disk and without a server.

Entries are on disk (``fdatasync``) when they have been put; they survive a kill of any process and a power
failure. All tasks of the component and its processor must see the same folder: on one machine, or on a shared file
system that supports ``flock``. Use ``RedisQueue`` for workers on several machines without such a file system.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import struct
import time
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

from penstock.errors import EnvironmentFault
from penstock.persist.names import safe
from penstock.persist.queues import PersistentQueue, QueueClient, QueueUnavailable, superseded
from penstock.private_folder import make_folders, open_here
from penstock.storage.segments import SEGMENT_BYTES, LogReader, SegmentLog, lock, replace_file

_LEAST_SEGMENT = 64 << 10  # bytes; smaller segments would mean too many files
_FRAME = 8  # bytes that a segment needs for a record besides its contents
_SLOT = struct.Struct("<QQQI")  # a position: record, segment, bytes before it in the segment; CRC
_SLOT_BYTES = 4096  # each slot has its own disk block, so an incomplete write cannot affect the other


class EmbeddedQueue(PersistentQueue):
    """A log in ``folder``, or in the topology's state directory. Up to ``max_bytes`` of results may wait; they
    take slightly more space on disk."""

    def __init__(self, folder: str | None = None, max_bytes: int = 1 << 30) -> None:
        self.folder = folder if folder is None or "://" in folder else os.path.abspath(folder)
        self.max_bytes = max_bytes

    def check(self, where: str, folder: str) -> None:
        path = self._path(folder)
        if path and "://" not in path:
            return
        raise EnvironmentFault(
            where,
            f"the embedded queue needs a folder on a local path, not '{path}'"
            if path
            else "the embedded queue needs a folder on a local path, and has none",
            "Give it one: EmbeddedQueue(folder=...), or set delivery.state_dir. Or use "
            "RedisQueue, which needs none.",
        )

    def open(self, name: str, folder: str) -> EmbeddedClient:
        # A segment has at most a sixteenth of max_bytes: processed files are removed before they take much space.
        segment_bytes = max(_LEAST_SEGMENT, min(SEGMENT_BYTES, self.max_bytes // 16))
        return EmbeddedClient(name, Path(self._path(folder)) / f"queue-{safe(name)}", segment_bytes)

    def __str__(self) -> str:
        return f"on local disk in {self.folder}" if self.folder else "on local disk"

    def _path(self, folder: str) -> str:
        return (self.folder or folder).removeprefix("file://")


class EmbeddedClient(QueueClient):
    """The log in one folder, and these files, each with its own lock:

    - ``position``: the number of the oldest record not released, its segment, and the number of bytes before it in
      that segment. A new position overwrites the older of two slots. After a crash the other slot is intact, and
      releasing records needs no additional space, which matters on a full disk.
    - ``incarnation-...``: the last incarnation of a writer, and ``id``, the id of the queue. These files are
      replaced atomically.
    """

    def __init__(self, name: str, folder: Path, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._name, self._folder, self._segment_bytes = name, folder, segment_bytes
        self._reader: LogReader | None = None
        self._read: deque[tuple[int, int]] = deque()  # numbers and sizes of records read and not released

    def id(self) -> str:
        path = self._folder / "id"
        with self._io_errors("read its id"), self._locked("id"):
            if not path.exists():
                replace_file(path, secrets.token_hex(8).encode())
            return path.read_text()

    def register(self, writer: str) -> int:
        with self._io_errors("register a writer"), self._locked("incarnations"):
            incarnation = max(self._incarnation(writer) + 1, int(time.time() * 1000))
            replace_file(self._incarnation_file(writer), b"%d" % incarnation)
            return incarnation

    def put(self, entries: Sequence[bytes], writer: str = "", incarnation: int = 0) -> None:
        with self._io_errors("append"):
            log = self._log
            if not writer:
                log.append(entries, self._position()[0])
                return
            with self._locked("incarnations", shared=True):  # excludes register(), but not other calls of put()
                if self._incarnation(writer) > incarnation:
                    raise superseded(f"queue '{self._name}' in {self._folder}", writer)
                log.append(entries, self._position()[0])

    def waiting(self) -> int:
        with self._io_errors("determine how much is waiting"):
            _, first, done = self._position()
            sizes = self._segment_sizes()
            # All segments from that one on, less the released part of it. The segment may have been removed since.
            begun = min(done, sizes.get(first, 0))
            return sum(size for segment, size in sizes.items() if segment >= first) - begun

    def read(self, limit: int) -> list[tuple[int, bytes]]:
        with self._io_errors("read"):
            if self._reader is None:
                self._reader = self._log.reader(self._position()[0])
            found = self._reader.read(limit)
        self._read.extend((number, _FRAME + len(data)) for number, data in found)
        return found

    def rewind(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        self._read.clear()

    def release(self, position: int) -> None:
        """Steps: (1) write the position; (2) remove the segments whose records all lie before it."""
        with self._io_errors("release"):
            log = self._log  # created before the lock is taken, because its creation takes the same lock
            with self._locked():
                number, segment, done = self._position()
                if position >= number:
                    beyond = position + 1
                    first = max((each for each in log.segments() if each <= beyond), default=beyond)
                    passed = sum(size for each, size in self._read if max(number, first) <= each <= position)
                    done = passed + (done if segment == first else 0)
                    self._write_position(beyond, first, done)
            log.drop_before(position + 1)
        while self._read and self._read[0][0] <= position:
            self._read.popleft()

    @property
    def losses(self) -> int:
        return 0

    def close(self) -> None:
        self.rewind()
        if "_log" in self.__dict__:
            self._log.close()

    @cached_property
    def _log(self) -> SegmentLog:
        with self._locked():
            if not self._position_file.exists():
                replace_file(self._position_file, bytes(2 * _SLOT_BYTES))
        return SegmentLog(self._folder, self._segment_bytes)

    @property
    def _position_file(self) -> Path:
        return self._folder / "position"

    def _slots(self) -> list[tuple[int, int, int]]:
        """The contents of the two slots; zeros for a slot that is new or incomplete."""
        data = self._position_file.read_bytes() if self._position_file.exists() else b""
        found = []
        for offset in (0, _SLOT_BYTES):
            slot = data[offset : offset + _SLOT.size]
            *values, crc = _SLOT.unpack(slot) if len(slot) == _SLOT.size else (0, 0, 0, 0)
            found.append(tuple(values) if crc == zlib.crc32(slot[:-4]) else (0, 0, 0))
        return found

    def _position(self) -> tuple[int, int, int]:
        """The oldest record not released, its segment, and the bytes before it in the segment."""
        return max(self._slots())

    def _write_position(self, number: int, segment: int, done: int) -> None:
        slots = self._slots()
        packed = struct.pack("<QQQ", number, segment, done)
        file = open_here(self._position_file, os.O_WRONLY)
        try:
            os.pwrite(file, packed + struct.pack("<I", zlib.crc32(packed)), slots.index(min(slots)) * _SLOT_BYTES)
            os.fdatasync(file)
        finally:
            os.close(file)

    def _segment_sizes(self) -> dict[int, int]:
        sizes = {}
        for first in self._log.segments():
            with contextlib.suppress(FileNotFoundError):  # removed after it was listed
                sizes[first] = self._log.path(first).stat().st_size
        return sizes

    def _incarnation_file(self, writer: str) -> Path:
        return self._folder / f"incarnation-{safe(writer)}"

    def _incarnation(self, writer: str) -> int:
        path = self._incarnation_file(writer)
        return int(path.read_bytes()) if path.exists() else 0

    @contextlib.contextmanager
    def _locked(self, what: str = "position", shared: bool = False) -> Iterator[None]:
        """Hold the named lock, exclusively or shared with other readers. Raises ``TimeoutError``."""
        make_folders(self._folder)
        file = open_here(self._folder / f"{what}.lock", os.O_RDWR | os.O_CREAT)
        try:
            lock(file, shared)
            yield
        finally:
            os.close(file)

    @contextlib.contextmanager
    def _io_errors(self, action: str) -> Iterator[None]:
        """Turn ``OSError`` into ``QueueUnavailable``."""
        try:
            yield
        except OSError as error:
            raise QueueUnavailable(
                f"queue '{self._name}' in {self._folder}",
                f"the queue cannot {action} ({error})",
                "Free disk space or repair the disk; the queue then continues by itself.",
            ) from error
