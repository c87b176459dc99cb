"""A sink that writes Parquet files, each of which appears completely or not at all.

Rows are written to files in ``_staged`` inside the target folder; a commit renames them. Readers that ignore names
with a leading underscore (Spark, ``pyarrow.dataset``) or look for ``*.parquet`` never see an incomplete file.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import posixpath
import urllib.parse
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.connectors.parquet_files import STAGED_SUFFIX, StagedFiles
from penstock.errors import ComponentError, PenstockError, SinkBusy, SinkRefused, TopologyError
from penstock.state.failures import is_passing
from penstock.state.store import StateStore
from penstock.storage import incarnation
from penstock.storage.parquet_folder import ParquetFolder
from penstock.storage.staging import RowBuffer
from penstock.texts import parse_json
from penstock.topology.components import Conf, Context, Source, TransactionalSink

ROW_GROUP_BYTES = 32 << 20  # bytes of rows in memory before they become a row group: readers prefer large ones
_RECORD = "committed"


class ParquetSink(TransactionalSink):
    """A folder of Parquet files, one per task, epoch and partition:
    ``<topology>-<component>-<index>-<identity>-<epoch>-<process>-<number>.parquet``.

    ``folder`` is a path or fsspec URL that all nodes can reach. ``partition_by`` names the fields whose values
    become folders (``day=2024-01-01/``), in the layout of Hive, Spark and ``pyarrow.dataset``. Each run from
    scratch has a new identity, so several runs into one folder add files to it.

    The commit of an epoch takes two steps: (1) rename each staged file unless it was renamed before; (2) record
    the epoch in the task's folder below ``_staged``. A rename is atomic on a file system; an object store makes a
    copy, which is visible once it is complete, and deletes the source. The files of one epoch appear one after the
    other.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        partition_by: Sequence[str] | None = None,
        compression: str = "zstd",
    ) -> None:
        if isinstance(partition_by, str):
            raise TopologyError(
                f"ParquetSink for {folder}",
                f"partition_by is {partition_by!r}, not a sequence of fields",
                f"Write partition_by=[{partition_by!r}].",
            )
        self._url = os.fspath(folder)
        self._partition_by = tuple(partition_by or ())
        self._compression = compression

    def prepare(self, conf: Conf, context: Context) -> None:
        self.where = f"component '{context.component}' (task {context.task}), folder {self._url}"
        self.folder = ParquetFolder(self._url)
        own = StateStore(context.folder) if context.folder else None
        self.incarnation = incarnation.begin(context, own, self.where)
        self.identity = self.incarnation.identity
        # Each task has its own folder with quoted names, so recover() never removes files of another task.
        # Generations are counted per state directory, so the identity of the task is a further level.
        task = (context.topology, context.component, str(context.index))
        below = posixpath.join("_staged", *(urllib.parse.quote(part, "") for part in task))
        if own is not None:
            below = posixpath.join(below, self.incarnation.task)
        self._stage = self.folder.path(below)
        with self._io():
            self.folder.make(self._stage)
            self._files = StagedFiles(
                self.folder, self._stage, self.incarnation.prefix, self._compression, self.where
            )
        self._records = StateStore(posixpath.join(self._url, below))
        self._stem = "-".join(urllib.parse.quote(part, "") for part in task)
        self._buffer = RowBuffer(self.where)
        self._rows = 0
        self._renamed: set[str] = set()
        """Staged files of unfinished commits that this process has renamed."""
        self._newest = -1
        self._prepared: dict[int, list[str]] = {}
        self._checked: pa.Schema | None = None

    def recover(self, tokens: Sequence[Any]) -> None:
        for token in sorted(filter(None, tokens), key=lambda token: int(token["epoch"])):
            self.commit(token)
            self._newest = max(self._newest, token["epoch"])
        files = self.folder.files
        with self._io():
            files.invalidate_cache()  # an earlier process wrote there
            for path in files.ls(self._stage, detail=False):
                if path.endswith(STAGED_SUFFIX) and self.incarnation.may_remove(path):
                    with contextlib.suppress(FileNotFoundError):
                        files.rm_file(path)
        self._newest = max(self._newest, self._recorded())

    def write(self, batch: pa.RecordBatch, source: Source) -> None:
        missing = [name for name in self._partition_by if name not in batch.schema.names]
        if missing or len(self._partition_by) >= batch.num_columns:
            raise ComponentError(
                self.where,
                f"the input has the fields ({', '.join(batch.schema.names)}), but partition_by "
                f"needs ({', '.join(self._partition_by)}) and one more",
                "Partition by fields of the input.",
            )
        if self._buffer.bytes >= ROW_GROUP_BYTES:
            self._write_row_groups()
        self._drain()
        self._check_types(self._buffer.plain(batch, source))
        self._buffer.add(batch, source)

    def prepare_commit(self, epoch: int) -> Any:
        """If the folder cannot be written to, this raises ``SinkBusy`` and keeps the epoch; call it again to
        continue."""
        try:
            self._write_row_groups()
            with self._io():
                self._files.finish()
        except SinkBusy:
            raise
        except ComponentError:
            self._discard()
            raise
        complete = self._files.take()
        if not complete:
            return None
        # After a fallback to an earlier epoch its number is used again: stay above what was published.
        self._newest = max(epoch, self._newest + 1)
        # The name contains the process, so that no other process can ever create a file of this name.
        stem = f"{self._stem}-{self.incarnation.task}-{self._newest:015d}-{self.incarnation.process}"
        files = [
            [file.name, posixpath.join(file.folder, f"{stem}-{number}.parquet")]
            for number, file in enumerate(complete)
        ]
        token = {"epoch": self._newest, "files": files, "rows": self._rows}
        self._prepared[self._newest] = [file.name for file in complete]
        self._rows = 0
        return token

    def commit(self, token: Any) -> None:
        if token is None or self._recorded() >= token["epoch"]:
            return
        with self._io():
            for staged, name in token["files"]:
                if staged not in self._renamed:
                    self.rename(posixpath.join(self._stage, staged), self.folder.path(name))
                    self._renamed.add(staged)
        self.record(token["epoch"])
        self._renamed.difference_update(staged for staged, _ in token["files"])
        self._prepared.pop(token["epoch"], None)
        # Epochs commit in order: an earlier one that could not be committed never will be.
        for epoch in [epoch for epoch in list(self._prepared) if epoch < token["epoch"]]:
            for name in self._prepared.pop(epoch):
                with contextlib.suppress(OSError):  # some of them may have been renamed
                    self.folder.files.rm_file(posixpath.join(self._stage, name))

    def rename(self, staged: str, target: str) -> None:
        """Step 1 for one file. Another process of the task may rename the file at the same time; this is no error
        as long as the target exists."""
        try:
            self.folder.rename(staged, target)
        except FileNotFoundError:
            if self.folder.files.exists(target):
                return
            # With exactly-once delivery the epoch is committed and its rows are lost: a retry would hide that.
            raise (SinkRefused if self.incarnation.epochs else ComponentError)(
                self.where,
                f"a staged file was lost before it was committed: neither {staged} nor {target} exists",
                "All nodes must reach the same folder, and no other program may change its _staged folder.",
            ) from None

    def record(self, epoch: int) -> None:
        """Step 2. From now on readers may move or delete the files: a repeated commit does not look for them."""
        if self._recorded() >= epoch:  # a later process of this task has recorded a newer epoch: keep that
            return
        self._records.write(_RECORD, json.dumps({"identity": self.identity, "epoch": epoch}).encode())

    def cleanup(self) -> None:
        self._discard()

    def _recorded(self) -> int:
        """The newest number committed under this identity; -1 if there is none."""
        if _RECORD not in self._records.list():
            return -1
        record = parse_json(self._records.read(_RECORD))
        return int(record["epoch"]) if record["identity"] == self.identity else -1

    def _check_types(self, batch: pa.RecordBatch) -> None:
        """Raise ``ComponentError`` if the rows cannot be written. An error at the time when a row group is written
        could not be attributed to a batch."""
        by_text = [name for name in self._partition_by if not _has_text(batch.schema.field(name).type)]
        try:
            for name in by_text:
                batch.column(name).cast(pa.string())
            if batch.schema != self._checked:
                pq.ParquetWriter(io.BytesIO(), batch.schema, compression=self._compression).close()
                self._checked = batch.schema
            if any(_has_seconds(field.type) for field in batch.schema):
                pq.write_table(pa.Table.from_batches([batch]), io.BytesIO(), compression="none")
        except pa.ArrowException as error:
            raise ComponentError(
                self.where,
                f"a field's type cannot be written or partitioned by ({type(error).__name__}: {error})",
                "Partition by texts, numbers or times; convert the field in a bolt before the sink.",
            ) from error

    def _write_row_groups(self) -> None:
        """Pass all rows in memory to the Parquet writers, and write their output to disk."""
        if self._buffer.rows:
            rows = self._buffer.table()
            try:
                self._files.write(rows, self._partition_by)
            except pa.ArrowException as error:
                raise ComponentError(
                    self.where,
                    f"the rows cannot be written as Parquet ({type(error).__name__}: {error})",
                    "Convert the fields in a bolt before the sink.",
                ) from error
            self._buffer.clear()
            self._rows += rows.num_rows
        self._drain()

    def _drain(self) -> None:
        with self._io():
            self._files.drain()

    def _discard(self) -> None:
        """Forget the open epoch."""
        self._files.discard()
        self._buffer.clear()
        self._rows = 0

    @contextlib.contextmanager
    def _io(self) -> Iterator[None]:
        """Turn an error of the file system into ``SinkBusy``, so that the caller tries again."""
        try:
            yield
        except PenstockError:
            raise
        except Exception as error:  # clients of object stores have their own exceptions
            if not isinstance(error, OSError) and not is_passing(error):
                raise
            raise SinkBusy(
                self.where,
                f"the folder cannot be written to ({type(error).__name__}: {error})",
                "Check free space and permissions. No rows are lost; the sink continues as soon as it can write.",
            ) from error


def _has_text(kind: pa.DataType) -> bool:
    """True if every value of the type can be cast to a string."""
    types = pa.types
    return bool(types.is_string(kind) or (types.is_primitive(kind) and not types.is_duration(kind)))


def _has_seconds(kind: pa.DataType) -> bool:
    """True if the type, or a type nested in it, has times in seconds. Parquet stores these as milliseconds, and
    some values do not fit."""
    if pa.types.is_timestamp(kind):
        return bool(kind.unit == "s")
    return any(_has_seconds(kind.field(index).type) for index in range(kind.num_fields))
