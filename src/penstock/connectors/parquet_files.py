"""The staged Parquet files of one task: rows are appended to them until their epoch is prepared for commit."""

from __future__ import annotations

import contextlib
import os
import posixpath
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.errors import SinkRefused
from penstock.storage.parquet_folder import ParquetFolder, hive_partitions
from penstock.storage.patient_file import PatientFile

STAGED_SUFFIX = ".staged"
_MAX_OPEN = 64  # files written at a time; each holds a descriptor and the footer of its file in memory


@dataclass
class StagedFile:
    """A staged file while it is written."""

    name: str
    folder: str
    """The folder of its partition, relative to the target folder; empty without partitions."""
    file: PatientFile
    writer: Any
    schema: pa.Schema


class StagedFiles:
    """The files of the open epoch. A file goes through three stages: it is open, then it has all its rows, then it
    is complete on disk. Methods are called by the sink's thread and may raise ``OSError``; the same call can then
    be repeated and continues where it stopped."""

    def __init__(self, folder: ParquetFolder, stage: str, prefix: str, compression: str, where: str) -> None:
        """``stage`` is the path of the folder for staged files; it exists. ``prefix`` begins the name of each
        file."""
        self._folder, self._stage, self._prefix = folder, stage, prefix
        self._compression, self._where = compression, where
        self._device = os.stat(folder.root).st_dev if folder.is_local else 0
        self._open: dict[str, StagedFile] = {}
        self._full: list[StagedFile] = []
        """Files that have all their rows and are not complete on disk."""
        self._complete: list[StagedFile] = []
        self._number = 0

    @property
    def open_count(self) -> int:
        return len(self._open)

    def write(self, rows: pa.Table, partition_by: Sequence[str]) -> None:
        """Append rows as row groups, in memory. Raises ``pa.ArrowException`` for values that Parquet cannot
        store."""
        for folder, part in list(hive_partitions(rows, partition_by)):
            self._file(folder, part.schema).writer.write_table(part)

    def drain(self) -> None:
        """Write to disk what the Parquet writers left in memory."""
        for file in (*self._open.values(), *self._full):
            try:
                file.file.drain()
            except FileNotFoundError:
                self._restore_stage()
                file.file.drain()

    def finish(self) -> None:
        """Complete all files and make them durable."""
        for folder in list(self._open):
            self._close(folder)
        self._restore_stage()
        self._finish()
        self._folder.sync(self._stage)

    def take(self) -> list[StagedFile]:
        """The complete files. They no longer belong to this object."""
        files, self._complete = self._complete, []
        return files

    def discard(self) -> None:
        """Remove the files of the open epoch. Errors are ignored: ``recover`` removes what is left."""
        for file in self._open.values():
            with contextlib.suppress(OSError, ValueError, pa.ArrowException):
                file.writer.close()
        for file in (*self._open.values(), *self._full, *self._complete):
            with contextlib.suppress(OSError):
                file.file.discard()
        self._open, self._full, self._complete = {}, [], []

    def _file(self, folder: str, schema: pa.Schema) -> StagedFile:
        """The open file of a partition. Creates one if necessary; it appears on disk with its first bytes."""
        file = self._open.get(folder)
        if file is not None and file.schema == schema:
            return file
        if file is not None:  # a type was widened, and a file has one schema
            self._close(folder)
        elif len(self._open) == _MAX_OPEN:
            self._close(next(iter(self._open)))
            with contextlib.suppress(OSError):  # finish() tries again
                self._finish()
        name = f"{self._prefix}-{self._number}{STAGED_SUFFIX}"
        self._number += 1
        staged = PatientFile(self._folder.files, posixpath.join(self._stage, name), self._folder.is_local)
        writer = pq.ParquetWriter(staged, schema, compression=self._compression)
        self._open[folder] = StagedFile(name, folder, staged, writer, schema)
        return self._open[folder]

    def _close(self, folder: str) -> None:
        file = self._open.pop(folder)
        file.writer.close()
        self._full.append(file)

    def _finish(self) -> None:
        while self._full:
            self._full[0].file.finish()
            self._complete.append(self._full.pop(0))

    def _restore_stage(self) -> None:
        """Create the folder for staged files again if someone has removed it. Raises ``SinkRefused`` if staged
        rows were removed with it; they are then replayed from the last commit. Raises ``OSError`` while the target
        folder is missing or another file system is mounted there, because the right one may be mounted later."""
        if not self._folder.is_local:
            return
        if os.stat(self._folder.root).st_dev != self._device:
            raise OSError(f"another file system is mounted at {self._folder.root} than when the sink was opened")
        staged = (*self._open.values(), *self._full, *self._complete)
        if lost := [file.name for file in staged if file.file.is_lost]:
            raise SinkRefused(
                self._where,
                f"{len(lost)} staged files were removed from {self._stage} before they were "
                f"committed, for example {lost[0]}",
                "Their rows are written again from the last commit. No other program may change _staged.",
            )
        self._folder.make(self._stage)
