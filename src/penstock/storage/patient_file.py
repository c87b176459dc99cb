"""A file whose writer is not affected by a full disk or a folder that cannot be written to.

Written bytes stay in memory until ``drain`` has moved them to disk. ``drain`` and ``finish`` may raise
``OSError``; a repeated call continues where the failed one stopped.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from typing import Any

from fsspec import AbstractFileSystem

from penstock.errors import SinkRefused


class PatientFile:
    """A new file with the methods that a Parquet writer calls: ``write``, ``tell``, ``flush`` and ``close``.

    If the file system is not local, the bytes go to a temporary file first and ``finish`` uploads it. Not
    thread-safe.
    """

    def __init__(self, files: AbstractFileSystem, path: str, local: bool) -> None:
        self._files, self._path, self._local = files, path, local
        self._parts: list[bytes] = []
        self._end = self._on_disk = 0
        self._descriptor: int | None = None
        self._spool = ""
        self.closed = False

    def write(self, data: Any) -> int:
        """Keep the bytes in memory. Never fails."""
        part = bytes(data)
        self._parts.append(part)
        self._end += len(part)
        return len(part)

    def tell(self) -> int:
        return self._end

    def flush(self) -> None:
        """Does nothing; ``drain`` writes to the disk."""

    def close(self) -> None:
        """End writing. ``finish`` makes the file durable."""
        self.closed = True

    def drain(self) -> None:
        """Write the bytes in memory to the disk. Raises ``OSError``; call it again to continue."""
        while self._parts:
            descriptor = self._open()
            part = self._parts[0]
            written = os.pwrite(descriptor, part, self._on_disk)
            self._on_disk += written
            if written < len(part):
                self._parts[0] = part[written:]
            else:
                self._parts.pop(0)

    def finish(self) -> None:
        """Complete the file and make it durable. Calling it again is harmless. Raises ``SinkRefused`` if the disk
        lost bytes that it had accepted."""
        self.drain()
        if self._descriptor is not None:
            self._sync(self._descriptor)
            if not self._local:
                self._files.put_file(self._spool, self._path)
            self._close_file()

    def _sync(self, descriptor: int) -> None:
        """A failed fsync is not repeated: Linux then forgets which pages are not on disk, and the next fsync
        succeeds without them."""
        try:
            os.fsync(descriptor)
        except OSError as error:
            raise SinkRefused(
                f"file {self._path}",
                f"it cannot be written to the disk ({type(error).__name__}: {error})",
                "The rows are written again from the last commit. Check the disk.",
            ) from error

    @property
    def is_lost(self) -> bool:
        """True if someone removed the file after bytes were written to it."""
        return self._local and self._on_disk > 0 and not os.path.exists(self._path)

    def discard(self) -> None:
        """Remove the file; errors of the file system are ignored."""
        self._close_file()
        self._parts = []
        with contextlib.suppress(OSError):
            self._files.rm_file(self._path)

    def _open(self) -> int:
        if self._descriptor is None:
            if self._local:
                self._descriptor = os.open(self._path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644)
            else:
                self._descriptor, self._spool = tempfile.mkstemp(prefix="penstock-parquet-")
        return self._descriptor

    def _close_file(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        if self._spool:
            with contextlib.suppress(OSError):
                os.unlink(self._spool)
            self._spool = ""
