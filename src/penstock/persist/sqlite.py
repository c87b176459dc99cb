"""The default store: a table in an SQLite file, without further packages."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa

from penstock.errors import TopologyError
from penstock.persist.stores import Overtaken, Reject, StoreClient, StoreUnavailable
from penstock.persist.tables import NullInKey, TableStore, refuse_null_keys
from penstock.storage.tables import Columns, last_of_each, write_all_but_rejected

_STRICT = sqlite3.sqlite_version_info >= (3, 37)  # older versions store any value in any column
_CODES = 0xFF  # the bits of an SQLite error code that contain the primary code

_REFUSED = (  # errors caused by a row itself
    sqlite3.IntegrityError,  # a constraint, or a type in a strict table
    sqlite3.DataError,  # a value that is too long
    OverflowError,  # an integer with more than 64 bits
    NullInKey,
    pa.ArrowException,
)
_HINTS = {
    sqlite3.SQLITE_BUSY: "Another program holds the file's write lock: let it commit.",
    sqlite3.SQLITE_LOCKED: "Another program holds the file's write lock: let it commit.",
    sqlite3.SQLITE_FULL: "Free some space there.",
    sqlite3.SQLITE_READONLY: "Give the processor's user the right to write there.",
    sqlite3.SQLITE_CANTOPEN: "Give the processor's user the right to write in the folder.",
    sqlite3.SQLITE_NOTADB: "Give the store a file of its own.",
    sqlite3.SQLITE_ERROR: "Alter the table, or choose fields with columns.",
}


class SQLiteStore(TableStore):
    """A table in a file on a local disk; see ``TableStore`` for the options. Missing folders are created. The file
    uses WAL mode: readers see complete writes, and neither wait for the processor nor delay it.

    The table that ``create`` creates is strict: a value of another type is rejected unless it can be converted
    without loss. bool, integers, float, str and bytes are stored unchanged; dates and times as ISO text, in UTC if
    they have a time zone; durations as microseconds; decimals as text with all digits; lists and structs as JSON.
    NaN becomes NULL, since SQLite has no NaN. An unsigned integer greater than 2⁶³ − 1 is rejected.

    ``timeout`` is the time in seconds to wait for the write lock of another program.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        table: str,
        *,
        key: Sequence[str] = (),
        columns: Columns = None,
        create: bool = True,
        timeout: float = 5.0,
    ) -> None:
        super().__init__(table, key, columns, create)
        path = os.fspath(path)
        if path == ":memory:" or path.startswith("file:") or "://" in path:
            raise TopologyError(
                f"SQLiteStore for table '{table}'",
                f"path is {path!r}, not a file on a local disk that outlives the processor",
                "Use PostgresStore for several machines.",
            )
        self.path = os.path.abspath(path)  # resolved on the driver: the processor has another working directory
        self.timeout = timeout

    def check(self, where: str) -> None:
        """Always succeeds: SQLite is part of Python."""

    def open(self) -> StoreClient:
        return _SQLiteClient(self)

    def __str__(self) -> str:
        return f"SQLite table '{self.table}' in {self.path}"


class _SQLiteClient(StoreClient):
    def __init__(self, store: SQLiteStore) -> None:
        self._store = store
        self._connection: sqlite3.Connection | None = None
        self._file: tuple[int, int] | None = None

    def progress(self, queue: str) -> str:
        with self._connected() as connection:
            return _progress(connection, queue)

    def write(self, queue: str, rows: pa.Table, before: str, after: str, reject: Reject) -> None:
        with self._connected() as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                if _progress(connection, queue) != before:
                    raise Overtaken(str(self._store), f"another processor also writes for '{queue}'")
                if rows.num_rows:
                    rows = self._store.shaped(rows)
                    if self._store.create:
                        connection.execute(_create(self._store, rows.schema))
                    rejected = write_all_but_rejected(rows, lambda part: self._insert(connection, part), _REFUSED)
                    if rejected:
                        reject(rejected)
                connection.execute(
                    "INSERT INTO penstock_queues VALUES (?, ?)"
                    " ON CONFLICT (queue) DO UPDATE SET progress = excluded.progress",
                    (queue, after),
                )
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:  # SQLite may have rolled back already
                    connection.execute("ROLLBACK")
                raise

    def close(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(sqlite3.Error):
                self._connection.close()
            self._connection = None

    def _insert(self, connection: sqlite3.Connection, rows: pa.Table) -> None:
        """Insert all of the rows, or none."""
        key, names = self._store.key, rows.column_names
        columns = ", ".join(map(_quoted, names))
        statement = f"INSERT INTO {_quoted(self._store.table)} ({columns}) VALUES ({', '.join('?' * len(names))})"
        if key:
            refuse_null_keys(rows, key)
            rows = last_of_each(rows, key)
            updates = ", ".join(f"{_quoted(name)} = excluded.{_quoted(name)}" for name in names if name not in key)
            statement += f" ON CONFLICT ({', '.join(map(_quoted, key))}) DO "
            statement += f"UPDATE SET {updates}" if updates else "NOTHING"
        connection.execute("SAVEPOINT part")
        try:
            connection.executemany(statement, zip(*map(_values, rows.columns), strict=True))
        except _REFUSED:
            connection.execute("ROLLBACK TO part")
            connection.execute("RELEASE part")
            raise
        connection.execute("RELEASE part")

    @contextlib.contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        """The connection, opened if necessary. Errors other than those of a row become ``StoreUnavailable``."""
        try:
            if self._connection is not None and _file_id(self._store.path) != self._file:
                self.close()  # the file was deleted or replaced: nobody would see writes to the open one
            if self._connection is None:
                self._connection = _connect(self._store.path, self._store.timeout)
                self._file = _file_id(self._store.path)
            yield self._connection
        except sqlite3.Error as error:
            self.close()
            code = getattr(error, "sqlite_errorcode", 0) & _CODES
            raise StoreUnavailable(
                str(self._store),
                f"the file cannot be written to ({type(error).__name__}: {error})",
                _HINTS.get(code, "Check the file, its folder and its disk.") + " The rows wait in the queue.",
            ) from error


def _file_id(path: str) -> tuple[int, int] | None:
    """The identity of the file at the path; None if there is none."""
    with contextlib.suppress(OSError):
        found = os.stat(path)
        return found.st_dev, found.st_ino
    return None


def _connect(path: str, timeout: float) -> sqlite3.Connection:
    with contextlib.suppress(OSError):  # SQLite then reports that it cannot open the file
        os.makedirs(os.path.dirname(path), exist_ok=True)
    connection = sqlite3.connect(path, timeout=timeout, isolation_level=None)
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")  # a committed write survives a power failure
        connection.execute("CREATE TABLE IF NOT EXISTS penstock_queues (queue TEXT PRIMARY KEY, progress TEXT)")
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def _progress(connection: sqlite3.Connection, queue: str) -> str:
    found = connection.execute("SELECT progress FROM penstock_queues WHERE queue = ?", (queue,)).fetchone()
    return "" if found is None else str(found[0])


def _create(store: SQLiteStore, schema: pa.Schema) -> str:
    columns = [f"{_quoted(field.name)} {_type(field.type)}" for field in schema]
    options = ["STRICT"] if _STRICT else []
    if store.key:
        columns.append(f"PRIMARY KEY ({', '.join(map(_quoted, store.key))})")
        options.append("WITHOUT ROWID")  # rows are stored in the primary key's tree: half the work for an upsert
    return f"CREATE TABLE IF NOT EXISTS {_quoted(store.table)} ({', '.join(columns)}) {', '.join(options)}"


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _type(kind: pa.DataType) -> str:
    """The column type for the values that ``_values`` returns for an Arrow type."""
    types = pa.types
    if types.is_dictionary(kind):
        return _type(kind.value_type)
    if types.is_null(kind):
        return "ANY"
    if types.is_boolean(kind) or types.is_integer(kind) or types.is_duration(kind):
        return "INTEGER"
    if types.is_floating(kind):
        return "REAL"
    return "BLOB" if _is_binary(kind) else "TEXT"


def _values(column: pa.ChunkedArray) -> Iterable[Any]:
    """The column as values that SQLite accepts."""
    types, kind = pa.types, column.type
    if types.is_dictionary(kind):
        return _values(column.cast(kind.value_type))
    if types.is_nested(kind):
        return [None if value is None else json.dumps(value, default=str) for value in column.to_pylist()]
    if types.is_duration(kind):
        column = column.cast(pa.duration("us"), safe=False).cast(pa.int64())
    elif types.is_timestamp(kind) and kind.tz:
        column = column.cast(pa.timestamp(kind.unit, "UTC")).cast(pa.string())
    elif types.is_floating(kind):
        column = column.cast(pa.float64())
    elif not (types.is_boolean(kind) or types.is_integer(kind) or types.is_null(kind) or _is_binary(kind)):
        column = column.cast(pa.string())
    values: list[Any] = column.to_pylist()
    return values


def _is_binary(kind: pa.DataType) -> bool:
    types = pa.types
    return any(
        test(kind)
        for test in (types.is_binary, types.is_large_binary, types.is_fixed_size_binary, types.is_binary_view)
    )
