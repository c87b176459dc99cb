"""A file whose writer never sees a disk that is full or a folder that cannot be written to.

What is written stays in memory until ``drain`` has it on disk. ``drain`` and ``finish`` may raise ``OSError``, and
go on where they stopped when they are called again.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from typing import Any

from fsspec import AbstractFileSystem

from penstock.errors import SinkRefused


class PatientFile:
    """A new file; the methods that a Parquet writer calls are ``write``, ``tell``, ``flush`` and ``close``. On a
    file system that is not local the bytes go to a temporary file first, and ``finish`` uploads it."""

    def __init__(self, files: AbstractFileSystem, path: str, local: bool) -> None:
        self._files, self._path, self._local = files, path, local
        self._parts: list[bytes] = []
        self._end = self._on_disk = 0
        self._descriptor: int | None = None
        self._spool = ""
        self.closed = False

    def write(self, data: Any) -> int:
        """Keep the bytes. Never fails."""
        part = bytes(data)
        self._parts.append(part)
        self._end += len(part)
        return len(part)

    def tell(self) -> int:
        return self._end

    def flush(self) -> None:
        """Nothing: ``drain`` does that."""

    def close(self) -> None:
        """No more is written. ``finish`` makes it durable."""
        self.closed = True

    def drain(self) -> None:
        """Bring what is in memory to the disk."""
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
        """Make the file complete and durable. May be called again when it was. Raises ``SinkRefused`` where the
        disk lost what it had taken."""
        self.drain()
        if self._descriptor is not None:
            self._sync(self._descriptor)
            if not self._local:
                self._files.put_file(self._spool, self._path)
            self._close_file()

    def _sync(self, descriptor: int) -> None:
        """Not tried again: after a failed fsync Linux forgets which pages are not on disk, and the next succeeds
        without them."""
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
        """Somebody has removed it, with what it held."""
        return self._local and self._on_disk > 0 and not os.path.exists(self._path)

    def discard(self) -> None:
        """Remove it, as far as that is possible."""
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
