"""A store that writes results to a folder of Parquet files, on a local disk or behind an fsspec URL.

The folder contains a chain of numbered commits in ``_penstock/commits``; the newest one holds the progress of each
queue. Readers of Parquet folders ignore names with a leading underscore.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import posixpath
import re
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.credentials import has_references
from penstock.errors import EnvironmentFault, StateError, TopologyError
from penstock.filesystems import open_url
from penstock.persist.stores import (
    Overtaken,
    Reject,
    Store,
    StoreClient,
    StoreUnavailable,
    checked_key,
)
from penstock.persist.tables import NullInKey, refuse_null_keys
from penstock.redaction import redacted
from penstock.state.store import TEMPORARY, StateStore, is_missing
from penstock.storage.parquet_folder import ParquetFolder, hive_partitions
from penstock.storage.tables import Rejected, last_of_each, write_all_but_rejected
from penstock.texts import parse_json

_OWN = "_penstock"
_COMMITS = "commits"
_STAGED = "staged"
_KEYED = "rows.parquet"
_STAGED_FILE = re.compile(rf"{_OWN}/{_STAGED}/\d{{15,}}-[0-9a-f]{{8}}-\d+\.staged")
_TARGET_FILE = re.compile(rf"{re.escape(_KEYED)}|\d{{15,}}-[0-9a-f]{{8}}\.parquet")
_SAME = (  # sets of Arrow types that differ only in their memory layout
    {pa.string(), pa.large_string(), pa.string_view()},
    {pa.binary(), pa.large_binary(), pa.binary_view()},
)


class ParquetStore(Store):
    """A folder of Parquet files. ``partition_by`` names the fields whose values become folders
    (``day=2024-01-01/``), in the layout of Hive, Spark and ``pyarrow.dataset``.

    Without a ``key`` each write adds one file, or one file per partition. With a key each partition is a single
    file, ``rows.parquet``, which a write replaces by a file with the new rows merged in: readers find one row per
    key, and the cost of a write is that of the whole partition. A key requires a folder on a file system, where a
    file can be replaced atomically, and ``partition_by`` must be part of the key.

    The type of a field is that of its first value other than None. All files use the same type, so that the folder
    can be read as one table. A value that can be converted without change (2.0 in a field of integers) is
    converted; a row with any other value is rejected. New fields are added; earlier files lack them.

    The files of one write become visible one after the other. Two processors may write to the folder at the same
    time, provided that ``StateStore.create`` is exclusive on its file system.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        key: Sequence[str] = (),
        partition_by: Sequence[str] | None = None,
        compression: str = "zstd",
    ) -> None:
        url = os.fspath(folder)
        where = f"ParquetStore for {url}"
        if isinstance(partition_by, str):
            raise TopologyError(
                where, f"partition_by is {partition_by!r}, not a sequence of fields", f"Write [{partition_by!r}]."
            )
        self.key = checked_key(where, key)
        self.partition_by = tuple(partition_by or ())
        self.compression = compression
        if self.key and "://" in url and not url.startswith("file://"):
            raise TopologyError(
                where,
                f"with a key ({self.key!r}) the folder must be a local path, because an object "
                "store does not replace a file in one step",
                "Leave the key out and take the last row of each when reading, or use PostgresStore.",
            )
        if self.key and not set(self.partition_by) <= set(self.key):
            raise TopologyError(
                where,
                f"partition_by={self.partition_by!r} is not part of key={self.key!r}, so a row "
                "could change its partition",
                "Add the field to the key, or leave it out of partition_by.",
            )
        self.url = url if "://" in url or url.startswith("${") else os.path.abspath(url)

    def check(self, where: str) -> None:
        try:
            if not has_references(self.url):
                open_url(self.url)
        except (ValueError, ImportError) as error:
            raise EnvironmentFault(
                f"{where}, ParquetStore for {self.url}",
                f"folder is neither a local path nor a URL that fsspec knows ({error})",
                "Install the package that fsspec names for it.",
            ) from error

    def open(self) -> StoreClient:
        return _ParquetClient(self)

    def __str__(self) -> str:
        return f"Parquet files in {redacted(self.url)}"


@dataclass(frozen=True)
class _Commit:
    """One commit to the folder. Its record is created once and never changed; the newest record is never
    removed."""

    number: int
    queues: dict[str, str]
    """The progress of each queue."""
    files: list[tuple[str, str]]
    """For each new file, where it was staged and its target, both relative to the folder."""
    schema: pa.Schema
    """The schema of all rows so far, without the fields of ``partition_by``."""

    @property
    def name(self) -> str:
        return f"{_COMMITS}/{self.number:015d}.json"

    def encode(self) -> bytes:
        schema = base64.b64encode(self.schema.serialize().to_pybytes()).decode()
        return json.dumps({"queues": self.queues, "files": self.files, "schema": schema}).encode()

    @classmethod
    def decode(cls, name: str, data: bytes) -> _Commit:
        """Records are not signed, and they determine which files are renamed. Therefore only names that this store
        itself uses are accepted; any other raises ``StateError``."""
        content = parse_json(data)
        schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(content["schema"])))
        files = [(str(staged), str(target)) for staged, target in content["files"]]
        for staged, target in files:
            if not _STAGED_FILE.fullmatch(staged) or not _is_target(target):
                raise StateError(
                    f"record {_OWN}/{name}",
                    f"it would move {staged!r} to {target!r}, which is not one of this store's files",
                    "Find out who wrote it. Nothing was moved; restore the record from a backup.",
                )
        return cls(int(posixpath.basename(name).partition(".")[0]), content["queues"], files, schema)


def _is_target(name: str) -> bool:
    """True if the name is that of a file of rows, in the folder or in one of its partitions."""
    *folders, file = name.split("/")
    return bool(_TARGET_FILE.fullmatch(file)) and all("=" in folder for folder in folders)


class _ParquetClient(StoreClient):
    """A write takes four steps: (1) stage complete and durable files under names that readers ignore; (2) create
    the record of the next commit, which contains the queue's progress and the names of the files; (3) rename the
    files;
    (4) remove what earlier commits and attempts left. The write is committed by step 2. The next client repeats
    steps 3 and 4 if necessary.

    Step 2 is also the compare-and-set: of all clients that read commit n, one creates n + 1. Step 4 removes
    earlier records, so a client that was suspended may create a number that existed before. It then finds a newer
    record and knows that it has not written. Files staged for n + 1 are kept until that commit is made, since a
    live process may have staged them.
    """

    def __init__(self, store: ParquetStore) -> None:
        self._store = store
        self._folder = ParquetFolder(store.url)
        self._own = StateStore(f"{store.url}/{_OWN}")
        self._settled = -1
        """The newest commit whose files are known to be renamed."""

    def progress(self, queue: str) -> str:
        with self._io():
            newest = self._newest()
            self._settle(newest)
        return newest.queues.get(queue, "")

    def write(self, queue: str, rows: pa.Table, before: str, after: str, reject: Reject) -> None:
        reported: list[Rejected] = []
        while True:  # repeats only if another queue's write to the folder came first
            with self._io():
                newest = self._newest()
                if newest.queues.get(queue, "") != before:
                    raise Overtaken(str(self._store), f"another processor also writes for '{queue}'")
                self._settle(newest)
            fitting, rejected = self._fitting(rows, newest.schema)
            if rejected and rejected != reported:
                reject(rejected)
                reported = rejected
            with self._io():
                number = newest.number + 1
                files = self._stage(number, fitting)
                commit = _Commit(number, {**newest.queues, queue: after}, files, self._content(fitting.schema))
                if self._record(commit):
                    self._settle(commit)
                    return

    def close(self) -> None:
        """Does nothing: no file is open between calls."""

    def _newest(self) -> _Commit:
        while names := self._names(_COMMITS, ".json"):
            try:
                return _Commit.decode(names[-1], self._own.read(names[-1]))
            except StateError as error:
                if not is_missing(error):  # a missing one is no longer the newest
                    raise
        return _Commit(0, {}, [], pa.schema([]))

    def _fitting(self, rows: pa.Table, known: pa.Schema) -> tuple[pa.Table, list[Rejected]]:
        """The rows converted to the schema of all rows written before, and the rows that cannot be converted."""
        if not rows.num_rows:
            return known.empty_table(), []
        wanted = {*self._store.key, *self._store.partition_by}
        missing = sorted(wanted - set(rows.column_names))
        if missing or set(self._store.partition_by) >= set(rows.column_names):
            raise StoreUnavailable(
                str(self._store),
                f"the rows have the fields ({', '.join(rows.column_names)}), but "
                f"{', '.join(sorted(wanted))} and one that is not for partitions are needed",
                "Partition by fields of the rows. The rows wait in the queue.",
            )
        schema = _widened(known, rows.schema)
        for name in self._store.partition_by:
            if name not in schema.names:  # all values are None
                schema = schema.append(pa.field(name, pa.string()))
        parts: list[pa.Table] = []

        def fit(part: pa.Table) -> None:
            refuse_null_keys(part, self._store.key)
            parts.append(pa.table([_column(part, field) for field in schema], schema))

        rejected = write_all_but_rejected(rows, fit, (NullInKey, pa.ArrowException))
        return pa.concat_tables(parts) if parts else schema.empty_table(), rejected

    def _content(self, schema: pa.Schema) -> pa.Schema:
        return pa.schema([field for field in schema if field.name not in self._store.partition_by])

    def _stage(self, number: int, rows: pa.Table) -> list[tuple[str, str]]:
        """Step 1. Returns each staged file with its target."""
        if not rows.num_rows:
            return []
        files = []
        token = secrets.token_hex(4)  # two attempts at one number never share a file name
        try:
            for index, (folder, part) in enumerate(hive_partitions(rows, self._store.partition_by)):
                staged = f"{_OWN}/{_STAGED}/{number:015d}-{token}-{index}.staged"
                target = posixpath.join(folder, _KEYED if self._store.key else f"{number:015d}-{token}.parquet")
                files.append((staged, target))
                self._write(staged, self._merged(target, part) if self._store.key else part)
        except BaseException:
            self._discard(files)
            raise
        return files

    def _merged(self, target: str, rows: pa.Table) -> pa.Table:
        """The new contents of a partition's file."""
        path = self._folder.path(target)
        files = self._folder.files
        if files.exists(path):
            with files.open(path, "rb") as file:
                rows = pa.concat_tables([pq.read_table(file), rows], promote_options="default")
        return last_of_each(rows, [name for name in self._store.key if name not in self._store.partition_by])

    def _write(self, name: str, rows: pa.Table) -> None:
        folder, path = self._folder, self._folder.path(name)
        folder.make(posixpath.dirname(path))
        with folder.files.open(path, "wb") as file:
            pq.write_table(rows, file, compression=self._store.compression)
            if folder.is_local:
                file.flush()
                os.fsync(file.fileno())
        folder.sync(posixpath.dirname(path))

    def _record(self, commit: _Commit) -> bool:
        """Step 2. Returns False if another client has made this commit."""
        created = self._own.create(commit.name, commit.encode())
        if created and self._newest().number == commit.number:
            return True
        if created:
            self._own.remove(commit.name)
        self._discard(commit.files)
        return False

    def _settle(self, commit: _Commit) -> None:
        """Steps 3 and 4, for the newest commit."""
        if self._settled == commit.number:
            return
        if self._settled < 0:
            self._own.sweep(_COMMITS)
        for staged, target in commit.files:
            self._rename(self._folder.path(staged), self._folder.path(target))
        for name in self._names(_COMMITS, ".json"):
            if name < commit.name:
                self._own.remove(name)
        for name in self._names(_STAGED, ".staged"):
            if int(posixpath.basename(name).partition("-")[0]) <= commit.number:
                self._own.remove(name)
        self._settled = commit.number

    def _rename(self, staged: str, target: str) -> None:
        """Rename a staged file, unless that was done before. In that case a reader may have moved the target, so
        it is not checked."""
        if self._folder.files.exists(staged):
            with contextlib.suppress(FileNotFoundError):  # another client has renamed it
                self._folder.rename(staged, target)

    def _names(self, folder: str, suffix: str) -> list[str]:
        """The names in a folder, sorted. Raises ``OSError`` if the folder cannot be read: if it were taken for an
        empty one, the numbering would start again."""
        files = self._folder.files
        files.invalidate_cache()  # other processes write here
        try:
            found = files.ls(self._folder.path(f"{_OWN}/{folder}"), detail=False)
        except FileNotFoundError:
            return []
        names = sorted(posixpath.basename(path) for path in found if path.endswith(suffix))
        return [f"{folder}/{name}" for name in names if not name.startswith(TEMPORARY)]

    def _discard(self, files: list[tuple[str, str]]) -> None:
        for staged, _ in files:
            with contextlib.suppress(OSError):
                self._folder.files.rm_file(self._folder.path(staged))

    @contextlib.contextmanager
    def _io(self) -> Iterator[None]:
        """Turn an error of the file system into ``StoreUnavailable``, so that the processor tries again."""
        try:
            yield
        except (OSError, pa.ArrowException, StateError) as error:
            raise StoreUnavailable(
                str(self._store),
                f"the folder cannot be written to ({type(error).__name__}: {error})",
                "Check free space and permissions. The rows wait in the queue.",
            ) from error


def _widened(known: pa.Schema, new: pa.Schema) -> pa.Schema:
    """The known schema, completed by the types of fields that had none and by new fields."""
    fields = {field.name: field.type for field in known if not pa.types.is_null(field.type)}
    for field in new:
        kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
        if not pa.types.is_null(kind):
            fields.setdefault(field.name, kind)
    # Rows whose values are all None keep their columns; otherwise no column would be left.
    return pa.schema(list((fields or {field.name: field.type for field in new}).items()))


def _column(rows: pa.Table, field: pa.Field) -> pa.ChunkedArray:
    """The values of a field, cast to its type. Raises ``pa.ArrowException`` if a value would change."""
    if field.name not in rows.column_names:
        return pa.nulls(rows.num_rows, field.type)
    column = rows[field.name]
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    kind = column.type
    if kind != field.type and not pa.types.is_null(kind) and not _alike(kind, field.type):
        raise pa.ArrowTypeError(f"field '{field.name}' is of type {field.type} in all earlier rows, not {kind}")
    return column.cast(field.type)


def _alike(one: pa.DataType, other: pa.DataType) -> bool:
    """True if Arrow's safe cast from ``one`` to ``other`` either changes no value or raises."""
    types = pa.types
    if types.is_integer(other) and (types.is_integer(one) or types.is_floating(one)):
        return True
    if types.is_timestamp(one) and types.is_timestamp(other):
        return (one.tz is None) == (other.tz is None)
    if any({one, other} <= same for same in _SAME):
        return True
    if types.is_decimal(one) and not types.is_decimal(other):
        return False
    try:
        both = pa.unify_schemas([pa.schema([("", kind)]) for kind in (one, other)], promote_options="permissive")
    except pa.ArrowException:
        return False
    return bool(both.field(0).type == other)
