"""A store that writes results to an HBase table, by its Thrift server. Needs ``pip install "penstock[hbase]"``.

HBase writes each row atomically, and has no transaction over several: ``fenced.py`` says how every result gets
there nevertheless.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

from penstock.errors import EnvironmentFault, TopologyError
from penstock.persist.fenced import FencedClient
from penstock.persist.plain import plain
from penstock.persist.stores import StoreClient, StoreUnavailable
from penstock.persist.tables import TableStore
from penstock.storage.tables import Columns, Rejected

_BATCH = 1_000  # rows per request
_LONGEST_KEY = 32_767  # bytes
_QUEUES, _STATE = b"penstock_queues", b"q:state"


class HBaseStore(TableStore):
    """A table of HBase, ``table`` or ``namespace:table``; see ``TableStore`` for the options. ``address`` is that
    of a Thrift server, ``host:port``.

    A ``key`` is needed. The row key consists of the values of its columns as text in UTF-8; bytes stay as they
    are, and several values are joined by the bytes 0 and 1. Each column is a cell of the column family ``family``,
    also those of the key: numbers, times and so on as text, bool as ``true`` and ``false``, lists and structs as
    JSON. None deletes the cell. The timestamps of the cells are about the times of the writes, in milliseconds.

    ``create`` creates the table with that column family if it does not exist. ``timeout`` is the maximum time of a
    request in seconds.
    """

    def __init__(
        self,
        address: str,
        table: str,
        *,
        key: Sequence[str],
        family: str = "r",
        columns: Columns = None,
        create: bool = True,
        timeout: float = 30.0,
    ) -> None:
        super().__init__(table, key, columns, create)
        where = f"HBaseStore for table '{table}'"
        if not self.key:
            raise TopologyError(
                where,
                "it has no key, and HBase cannot append a row once",
                "Name the columns that identify a row: key=['word']. Or use PostgresStore.",
            )
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            raise TopologyError(
                where,
                f"address is {address!r}, not that of a Thrift server",
                "Write HBaseStore('host:9090', ...).",
            )
        self.address, self.host, self.port = address, host, int(port)
        self.family, self.timeout = family, timeout

    def check(self, where: str) -> None:
        _library(where)

    def open(self) -> StoreClient:
        return HBaseClient(self)

    def __str__(self) -> str:
        return f"HBase table '{self.table}' at {self.address}"


class HBaseClient(FencedClient):
    """One connection, opened when it is needed, and closed after an error."""

    def __init__(self, store: HBaseStore) -> None:
        super().__init__(str(store), units=1_000, spacing=1)
        self._store = store
        self._library, self._thrift = _library(str(store))
        self._connection: Any = None

    def read_state(self, queue: str) -> str:
        with self._errors():
            found = self._connected().table(_QUEUES).row(queue.encode(), [_STATE])
        return found.get(_STATE, b"").decode()  # type: ignore[no-any-return]

    def swap_state(self, queue: str, before: str, after: str) -> bool:
        with self._errors():
            mutation = self._thrift.Mutation(column=_STATE, value=after.encode())
            expected = before.encode() if before else None
            return bool(
                self._connected().client.checkAndPut(_QUEUES, queue.encode(), _STATE, expected, mutation, {})
            )

    def write_rows(self, rows: pa.Table, version: int) -> list[Rejected]:
        cells, rejected = row_cells(self._store.shaped(rows), self._store.key, self._store.family)
        with self._errors():
            connection = self._connected()
            if self._store.create:
                self._create(self._store.table.encode(), {self._store.family: {"max_versions": 1}})
            with connection.table(self._store.table.encode()).batch(timestamp=version, batch_size=_BATCH) as batch:
                for row, values in cells.items():
                    batch.put(row, {name: value for name, value in values.items() if value is not None})
                    if gone := [name for name, value in values.items() if value is None]:
                        batch.delete(row, gone)
        return rejected

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(Exception):  # it may be broken
                connection.close()

    def _connected(self) -> Any:
        if self._connection is None:
            store = self._store
            self._connection = self._library.Connection(
                store.host, store.port, timeout=round(store.timeout * 1000)
            )
            self._create(_QUEUES, {"q": {"max_versions": 1}})
        return self._connection

    def _create(self, table: bytes, families: dict[str, dict[str, Any]]) -> None:
        if table not in self._connection.tables():
            with contextlib.suppress(self._thrift.AlreadyExists):
                self._connection.create_table(table, families)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn errors of HBase and of the network into ``StoreUnavailable``, and close the connection."""
        import thriftpy2.thrift

        try:
            yield
        except (OSError, thriftpy2.thrift.TException) as error:
            self.close()
            reason = getattr(error, "message", None) or error
            reason = reason.decode(errors="replace") if isinstance(reason, bytes) else str(reason)
            raise StoreUnavailable(
                str(self._store),
                f"HBase did not carry out a request within {self._store.timeout:g} s "
                f"({type(error).__name__}: {reason.splitlines()[0] if reason else ''})",
                "Start it and its Thrift server, or correct the table. The rows wait in the queue.",
            ) from error


def row_cells(
    rows: pa.Table, key: Sequence[str], family: str
) -> tuple[dict[bytes, dict[bytes, bytes | None]], list[Rejected]]:
    """The cells of each row by row key, of the last row with this key; and the rows whose keys HBase refuses."""
    names = [f"{family}:{name}".encode() for name in rows.column_names]
    columns = [_bytes_of(column) for column in rows.columns]
    keys = [columns[rows.column_names.index(name)] for name in key]
    cells: dict[bytes, dict[bytes, bytes | None]] = {}
    rejected = []
    for number, values in enumerate(zip(*columns, strict=True)):
        parts = [column[number] for column in keys]
        row = _joined([part for part in parts if part is not None])
        if None in parts:
            rejected.append(Rejected(number, f"None in the key's column '{key[parts.index(None)]}'"))
        elif not 0 < len(row) <= _LONGEST_KEY:
            rejected.append(Rejected(number, f"the row key has {len(row)} bytes, not 1 to {_LONGEST_KEY}"))
        else:
            cells[row] = dict(zip(names, values, strict=True))
    return cells, rejected


def _joined(parts: Sequence[bytes]) -> bytes:
    """Different parts give different keys: within one of several parts a 0 is followed by 255."""
    if len(parts) == 1:
        return parts[0]
    return b"\0\1".join(part.replace(b"\0", b"\0\xff") for part in parts)


def _bytes_of(column: pa.ChunkedArray) -> list[bytes | None]:
    column = plain(column)
    types, kind = pa.types, column.type
    if not (types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind)):
        column = column.cast(pa.string()).cast(pa.binary())
    values: list[bytes | None] = column.to_pylist()
    return values


def _library(where: str) -> tuple[Any, Any]:
    """The module ``happybase`` and the interface of Thrift. Loaded on first use, so that building a topology does
    not need them."""
    try:
        import happybase
        import Hbase_thrift  # made by happybase when it is imported
    except ImportError as error:
        raise EnvironmentFault(
            where,
            f"the package happybase cannot be imported ({error})",
            'Install it with: pip install "penstock[hbase]".',
        ) from error
    return happybase, Hbase_thrift
