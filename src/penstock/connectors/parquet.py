"""Rows into Parquet files that appear whole or not at all.

Rows are written as they come, to files in ``_staged`` inside the target folder; a commit renames them. Readers
that pass over names with a leading underscore (Spark, ``pyarrow.dataset``) or look for ``*.parquet`` never see
an unfinished file.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import posixpath
import urllib.parse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.implementations.local import LocalFileSystem

from penstock.errors import ComponentError, PenstockError, SinkBusy, SinkRefused, TopologyError
from penstock.filesystems import open_url
from penstock.state.failures import is_passing
from penstock.state.store import StateStore
from penstock.storage import incarnation
from penstock.storage.patient_file import PatientFile
from penstock.storage.staging import RowBuffer
from penstock.texts import parse_json
from penstock.topology.components import Conf, Context, Source, TransactionalSink

ROW_GROUP_BYTES = 32 << 20  # rows kept in memory before they become a row group; readers like theirs large
_MAX_OPEN = 64  # partitions written at a time; each holds a descriptor and its file's footer
_RECORD = "committed"
_STAGED = ".staged"
_NULL = "__HIVE_DEFAULT_PARTITION__"


@dataclass
class _OpenFile:
    """A staged file while it is written."""

    name: str
    folder: str
    """Of its partition, inside the target folder; empty without partitions."""
    file: PatientFile
    writer: Any
    schema: pa.Schema


class ParquetSink(TransactionalSink):
    """A folder of Parquet files, one per task, epoch and partition:
    ``<topology>-<component>-<index>-<identity>-<epoch>-<process>-<number>.parquet``.

    ``folder`` is a path or fsspec URL that all nodes reach. ``partition_by`` names the fields whose values become
    folders (``day=2024-01-01/``), as Hive, Spark and ``pyarrow.dataset`` read them. The identity is new for each
    run from scratch, so runs into one folder add to each other.

    Commit of an epoch, in numbered steps: (1) rename each staged file, unless that was done before; (2) record the
    epoch in the task's folder below ``_staged``. A rename is atomic on a file system; on an object store it is a
    copy, visible once complete, and a delete. An epoch with several files appears file by file.
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
        self._fs, path = open_url(self._url)
        self._folder = path.rstrip("/")
        self._local = isinstance(self._fs, LocalFileSystem)
        own = StateStore(context.folder) if context.folder else None
        self.incarnation = incarnation.begin(context, own, self.where)
        self.identity = self.incarnation.identity
        # A folder per task, its parts quoted: what recover clears is then never another's. Generations count in
        # one state directory, so a topology of this name with another one has a folder of its own below that.
        task = (context.topology, context.component, str(context.index))
        below = posixpath.join("_staged", *(urllib.parse.quote(part, "") for part in task))
        if own is not None:
            below = posixpath.join(below, self.incarnation.task)
        self._stage = posixpath.join(self._folder, below)
        with self._io():
            self._make_folder(self._stage)
            self._device = os.stat(self._folder).st_dev if self._local else 0
        self._records = StateStore(posixpath.join(self._url, below))
        self._stem = "-".join(urllib.parse.quote(part, "") for part in task)
        self._buffer = RowBuffer(self.where)
        self._open: dict[str, _OpenFile] = {}
        self._closed: list[_OpenFile] = []
        self._rows = 0
        self._renamed: set[str] = set()
        """Staged files of commits under way that this process has renamed."""
        self._number = 0
        self._newest = -1
        self._prepared: dict[int, list[str]] = {}
        self._finishing: list[_OpenFile] = []
        """Files that have all their rows, and are not complete on disk."""
        self._checked: pa.Schema | None = None

    def recover(self, tokens: Sequence[Any]) -> None:
        for token in sorted(filter(None, tokens), key=lambda token: int(token["epoch"])):
            self.commit(token)
            self._newest = max(self._newest, token["epoch"])
        with self._io():
            self._fs.invalidate_cache()  # an earlier process wrote there
            for path in self._fs.ls(self._stage, detail=False):
                if path.endswith(_STAGED) and self.incarnation.may_remove(path):
                    with contextlib.suppress(FileNotFoundError):
                        self._fs.rm_file(path)
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
        """Where the folder cannot be written to now, the epoch stays as it is: called again, this goes on."""
        try:
            self._write_row_groups()
            with self._io():
                for folder in list(self._open):
                    self._close(folder)
                self._look_after_stage()
                self._finish()
                self._sync_folder(self._stage)
        except SinkBusy:
            raise
        except ComponentError:
            self._discard()
            raise
        if not self._closed:
            return None
        # After a fall-back an epoch's number comes again: stay above what was published.
        self._newest = max(epoch, self._newest + 1)
        # The process too: no other may ever give a file this name.
        stem = f"{self._stem}-{self.incarnation.task}-{self._newest:015d}-{self.incarnation.process}"
        files = [
            [file.name, posixpath.join(file.folder, f"{stem}-{number}.parquet")]
            for number, file in enumerate(self._closed)
        ]
        token = {"epoch": self._newest, "files": files, "rows": self._rows}
        self._prepared[self._newest] = [file.name for file in self._closed]
        self._closed, self._rows = [], 0
        return token

    def commit(self, token: Any) -> None:
        if token is None or self._recorded() >= token["epoch"]:
            return
        with self._io():
            for staged, name in token["files"]:
                if staged not in self._renamed:
                    self.rename(posixpath.join(self._stage, staged), posixpath.join(self._folder, name))
                    self._renamed.add(staged)
        self.record(token["epoch"])
        self._renamed.difference_update(staged for staged, _ in token["files"])
        self._prepared.pop(token["epoch"], None)
        # Epochs commit in order: one before this that could not be committed never will be.
        for epoch in [epoch for epoch in list(self._prepared) if epoch < token["epoch"]]:
            for name in self._prepared.pop(epoch):
                with contextlib.suppress(OSError):  # half of them may be renamed
                    self._fs.rm_file(posixpath.join(self._stage, name))

    def rename(self, staged: str, target: str) -> None:
        """Step 1 for one file. Another process of the task may do the same at the same time: then one of the two
        finds the staged file gone, and the target there."""
        self._make_folder(posixpath.dirname(target))
        try:
            if self._local:
                os.replace(staged, target)
                self._sync_folder(posixpath.dirname(target))
            else:
                self._fs.invalidate_cache()
                self._fs.mv(staged, target)
        except FileNotFoundError:
            if self._fs.exists(target):
                return
            # Exactly once the epoch is committed and its rows are gone: asking again would hide that.
            raise (SinkRefused if self.incarnation.epochs else ComponentError)(
                self.where,
                (f"a staged file was lost before it was committed: there is neither {staged} nor {target}"),
                "All nodes must reach the same folder, and nothing else may change what is in _staged.",
            ) from None

    def record(self, epoch: int) -> None:
        """Step 2. From here on readers may move or delete the files: a repeated commit does not look for them."""
        if self._recorded() >= epoch:  # a later process of this task was quicker: never set it back
            return
        self._records.write(_RECORD, json.dumps({"identity": self.identity, "epoch": epoch}).encode())

    def cleanup(self) -> None:
        self._discard()

    def _recorded(self) -> int:
        """The newest number committed under this identity; -1 for none."""
        if _RECORD not in self._records.list():
            return -1
        record = parse_json(self._records.read(_RECORD))
        return int(record["epoch"]) if record["identity"] == self.identity else -1

    def _check_types(self, batch: pa.RecordBatch) -> None:
        """Raise now what would be raised when the rows are written: then it could not be said of which."""
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
        """Everything in memory to the files' writers, and from there to disk."""
        if self._buffer.rows:
            rows = self._buffer.table()
            try:
                for folder, part in list(hive_partitions(rows, self._partition_by)):
                    self._file(folder, part.schema).writer.write_table(part)
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
            for file in (*self._open.values(), *self._finishing):
                try:
                    file.file.drain()
                except FileNotFoundError:
                    self._look_after_stage()
                    file.file.drain()

    def _file(self, folder: str, schema: pa.Schema) -> _OpenFile:
        """The open file of a partition, made if there is none. It is on disk when there is something to write."""
        file = self._open.get(folder)
        if file is not None and file.schema == schema:
            return file
        if file is not None:  # a type was widened: a file has one schema
            self._close(folder)
        elif len(self._open) == _MAX_OPEN:
            self._close(next(iter(self._open)))
            with contextlib.suppress(OSError):  # it is tried again; meanwhile it needs no descriptor of ours
                self._finish()
        name = f"{self.incarnation.prefix}-{self._number}{_STAGED}"
        self._number += 1
        staged = PatientFile(self._fs, posixpath.join(self._stage, name), self._local)
        writer = pq.ParquetWriter(staged, schema, compression=self._compression)
        self._open[folder] = _OpenFile(name, folder, staged, writer, schema)
        return self._open[folder]

    def _close(self, folder: str) -> None:
        """The file has all its rows."""
        file = self._open.pop(folder)
        file.writer.close()
        self._finishing.append(file)

    def _finish(self) -> None:
        """Make files complete and durable. Raises ``OSError``; called again, it goes on."""
        while self._finishing:
            self._finishing[0].file.finish()
            self._closed.append(self._finishing.pop(0))

    def _look_after_stage(self) -> None:
        """Make the folder for staged files again where somebody has removed it. Raises ``SinkRefused`` where rows
        went with it: they come again from the last commit. While the target folder itself is missing, or another
        file system is in its place, this raises ``OSError``: it may only not be mounted."""
        if not self._local:
            return
        if os.stat(self._folder).st_dev != self._device:
            raise OSError(f"another file system is mounted at {self._folder} than at the start")
        staged = (*self._open.values(), *self._finishing, *self._closed)
        if lost := [file.name for file in staged if file.file.is_lost]:
            raise SinkRefused(
                self.where,
                f"{len(lost)} staged files were removed from {self._stage} before they were "
                f"committed, for example {lost[0]}",
                "Their rows are written again from the last commit. Nothing else may change what is in _staged.",
            )
        self._make_folder(self._stage)

    def _make_folder(self, path: str) -> None:
        """Make a folder inside the target folder, each level durable in the one above."""
        if self._fs.isdir(path):
            return
        self._fs.makedirs(path, exist_ok=True)
        while len(path) > len(self._folder):
            path = posixpath.dirname(path)
            self._sync_folder(path)

    def _sync_folder(self, path: str) -> None:
        if self._local:
            sync_folder(path)

    def _discard(self) -> None:
        """Forget the open epoch. What would not go to disk may refuse again here; ``recover`` removes the rest."""
        for file in self._open.values():
            with contextlib.suppress(OSError, ValueError, pa.ArrowException):
                file.writer.close()
        for file in (*self._open.values(), *self._finishing, *self._closed):
            with contextlib.suppress(OSError):
                file.file.discard()
        self._buffer.clear()
        self._open, self._finishing, self._closed, self._rows = {}, [], [], 0

    @contextlib.contextmanager
    def _io(self) -> Iterator[None]:
        """What the file system refuses: it is asked again until it does not."""
        try:
            yield
        except PenstockError:
            raise
        except Exception as error:  # clients of object stores have exceptions of their own
            if not isinstance(error, OSError) and not is_passing(error):
                raise
            raise SinkBusy(
                self.where,
                f"the folder cannot be written to ({type(error).__name__}: {error})",
                "Check space and permissions there. Nothing is lost, and the sink goes on as soon as it can.",
            ) from error


def hive_partitions(rows: pa.Table, fields: Sequence[str]) -> Iterator[tuple[str, pa.Table]]:
    """The rows of each partition, in order and without the fields, with the partition's folder; without fields all
    rows, and no folder."""
    if not fields:
        yield "", rows
        return
    values = rows.select(fields)
    values = values.cast(pa.schema([(name, pa.string()) for name in fields]))
    values = values.append_column("", pa.array(range(rows.num_rows), pa.int64()))
    groups = values.group_by(list(fields), use_threads=False).aggregate([("", "list")])
    content = rows.drop_columns(list(fields))
    for group in groups.to_batches():
        indices = group.column("_list")
        for index, key in zip(indices, group.select(fields).to_pylist(), strict=True):
            folders = (
                f"{urllib.parse.quote(name, '')}={_NULL if value is None else urllib.parse.quote(value, '')}"
                for name, value in key.items()
            )
            yield "/".join(folders), content.take(index.values)


def _has_text(kind: pa.DataType) -> bool:
    """Every value of the type can be cast to a text."""
    types = pa.types
    return bool(types.is_string(kind) or (types.is_primitive(kind) and not types.is_duration(kind)))


def _has_seconds(kind: pa.DataType) -> bool:
    """Parquet stores times in seconds as milliseconds, and not every one fits. Also inside lists and structs."""
    if pa.types.is_timestamp(kind):
        return bool(kind.unit == "s")
    return any(_has_seconds(kind.field(index).type) for index in range(kind.num_fields))


def sync_folder(path: str) -> None:
    """Make names durable: on a file system a file's own sync leaves them out."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
