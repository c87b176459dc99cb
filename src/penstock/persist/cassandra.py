"""A store that writes results to a Cassandra table. Needs ``pip install "penstock[cassandra]"``.

Cassandra has no transaction over several partitions: ``fenced.py`` says how every result gets there nevertheless.
Rows are sent as prepared inserts, many at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

from penstock.credentials import resolved
from penstock.errors import EnvironmentFault, TopologyError
from penstock.persist.fenced import FencedClient
from penstock.persist.plain import plain
from penstock.persist.stores import StoreClient, StoreUnavailable
from penstock.persist.tables import NullInKey, TableStore, refuse_null_keys
from penstock.redaction import hide
from penstock.storage.tables import Columns, Rejected, last_of_each, write_all_but_rejected

_PORT = 9042
_AT_ONCE = 128  # inserts under way
_SPACING = 1_000  # microseconds between two versions: rows of a key may be refused so often, one after another
_ROW = "\0row"  # column with the index of a row in the write
_QUEUES = "penstock_queues"

_ARROW = {  # by type of Cassandra; a value that does not fit exactly is rejected
    "ascii": pa.string(),
    "text": pa.string(),
    "varchar": pa.string(),
    "bigint": pa.int64(),
    "int": pa.int32(),
    "smallint": pa.int16(),
    "tinyint": pa.int8(),
    "double": pa.float64(),
    "float": pa.float32(),
    "boolean": pa.bool_(),
    "blob": pa.binary(),
    "date": pa.date32(),
    "time": pa.time64("ns"),
    "timestamp": pa.timestamp("ms"),
}


class CassandraStore(TableStore):
    """A table of Cassandra, ``keyspace.table``; see ``TableStore`` for the options. The keyspace must exist.

    A ``key`` is needed: its first column is the partition key, the others are clustering columns. A row replaces
    the row with the same key; the write times that Cassandra records are about the times of the writes. ``hosts``
    are ``host`` or ``host:port``, and the port must be the same for all. ``consistency`` is that of the rows;
    progress is recorded with QUORUM and SERIAL. ``password`` may be a reference: ``${NAME}``, ``${file:PATH}``.

    The table that ``create`` creates has the types that correspond to the Arrow types; times of day with more than
    milliseconds, lists and structs become text, durations microseconds. ``timeout`` is the maximum time of a
    request in seconds.
    """

    def __init__(
        self,
        hosts: str | Sequence[str],
        table: str,
        *,
        key: Sequence[str],
        columns: Columns = None,
        create: bool = True,
        timeout: float = 10.0,
        consistency: str = "QUORUM",
        user: str = "",
        password: str = "",
    ) -> None:
        super().__init__(table, key, columns, create)
        where = f"CassandraStore for table '{table}'"
        self.keyspace, dot, self.name = table.partition(".")
        if not dot or not self.keyspace or not self.name:
            raise TopologyError(
                where, f"table is {table!r}, not a keyspace and a table", "Write 'keyspace.table'."
            )
        if not self.key:
            raise TopologyError(
                where,
                "it has no key, and Cassandra cannot append a row once",
                "Name the columns that identify a row: key=['word']. Or use PostgresStore.",
            )
        self.hosts = (hosts,) if isinstance(hosts, str) else tuple(hosts)
        self.timeout, self.consistency, self.user, self.password = timeout, consistency, user, password

    def check(self, where: str) -> None:
        library = _library(where)
        _addresses(where, self.hosts)
        if not hasattr(library.ConsistencyLevel, self.consistency):
            raise TopologyError(where, f"consistency is {self.consistency!r}", "Write 'QUORUM' or 'LOCAL_QUORUM'.")

    def open(self) -> StoreClient:
        return CassandraClient(self)

    def __str__(self) -> str:
        return f"Cassandra table '{self.table}' at {', '.join(self.hosts)}"


class CassandraClient(FencedClient):
    """One session, opened when it is needed, and closed after an error."""

    def __init__(self, store: CassandraStore) -> None:
        super().__init__(str(store), units=1_000_000, spacing=_SPACING)
        self._store = store
        self._library = _library(str(store))
        self._cluster: Any = None
        self._session: Any = None
        self._inserts: dict[tuple[str, ...], Any] = {}

    def read_state(self, queue: str) -> str:
        with self._errors():
            statement = f"SELECT state FROM {self._queues} WHERE queue = %s"
            found = self._connected().execute(self._serial(statement), (queue,)).one()
        return "" if found is None else str(found.state)

    def swap_state(self, queue: str, before: str, after: str) -> bool:
        with self._errors():
            values: tuple[str, ...] = (after, queue)
            if before:
                statement = f"UPDATE {self._queues} SET state = %s WHERE queue = %s IF state = %s"
                values = (*values, before)
            else:
                statement = f"INSERT INTO {self._queues} (state, queue) VALUES (%s, %s) IF NOT EXISTS"
            return bool(self._connected().execute(self._serial(statement), values).was_applied)

    def write_rows(self, rows: pa.Table, version: int) -> list[Rejected]:
        rows = self._store.shaped(rows)
        with self._errors():
            session = self._connected()
            if self._store.create:
                session.execute(create_table(self._store, rows.schema))
            insert = self._prepared(session, tuple(rows.column_names))
        kinds = [_ARROW.get(column.type.typename) for column in insert.column_metadata[:-1]]
        pending, rejected = fitting(rows, kinds, self._store.key)
        for turn in range(_SPACING):
            refused = self._send(insert, last_of_each(pending, self._store.key), version + turn)
            rejected += refused
            pending = _others_of_their_keys(pending, self._store.key, [each.row for each in refused])
            if not pending.num_rows:
                break
        return sorted(rejected, key=lambda each: each.row)

    def close(self) -> None:
        cluster, self._cluster, self._session = self._cluster, None, None
        self._inserts.clear()
        if cluster is not None:
            cluster.shutdown()

    def _send(self, insert: Any, rows: pa.Table, version: int) -> list[Rejected]:
        """Insert rows with different keys. Returns those that Cassandra refuses."""
        numbers = rows[_ROW].to_pylist()
        columns = [rows[name].to_pylist() for name in rows.column_names if name != _ROW]
        bound, places, refused = [], [], []
        for number, values in zip(numbers, zip(*columns, strict=True), strict=True):
            try:
                bound.append((insert.bind((*values, version)), ()))
                places.append(number)
            except Exception as error:  # whatever the driver raises for a value of a wrong type
                refused.append(Rejected(number, f"{type(error).__name__}: {error}"))
        with self._errors():
            run = self._library.concurrent.execute_concurrent
            done = run(self._connected(), bound, concurrency=_AT_ONCE, raise_on_first_error=False)
            for number, (succeeded, answer) in zip(places, done, strict=True):
                if succeeded:
                    continue
                if not isinstance(answer, self._library.InvalidRequest):
                    raise answer
                refused.append(Rejected(number, str(answer)))
        return refused

    @property
    def _queues(self) -> str:
        return f"{quoted(self._store.keyspace)}.{_QUEUES}"

    def _serial(self, statement: str) -> Any:
        """A statement that reads or replaces the state: it sees what any other one has replaced."""
        level = self._library.ConsistencyLevel
        reads = statement.startswith("SELECT")
        return self._library.query.SimpleStatement(
            statement,
            consistency_level=level.SERIAL if reads else level.QUORUM,
            serial_consistency_level=level.SERIAL,
        )

    def _prepared(self, session: Any, columns: tuple[str, ...]) -> Any:
        if columns not in self._inserts:
            names, marks = ", ".join(map(quoted, columns)), ", ".join("?" * len(columns))
            insert = session.prepare(
                f"INSERT INTO {quoted(self._store.keyspace)}.{quoted(self._store.name)} ({names}) VALUES ({marks})"
                " USING TIMESTAMP ?"
            )
            insert.consistency_level = getattr(self._library.ConsistencyLevel, self._store.consistency)
            self._inserts[columns] = insert
        return self._inserts[columns]

    def _connected(self) -> Any:
        if self._session is None:
            self._cluster = self._make_cluster()
            session = self._cluster.connect()
            session.execute(f"CREATE TABLE IF NOT EXISTS {self._queues} (queue text PRIMARY KEY, state text)")
            self._session = session
        return self._session

    def _make_cluster(self) -> Any:
        store, library = self._store, self._library
        hosts, port = _addresses(str(store), store.hosts)
        auth = None
        if store.user:
            password = resolved(store.password, str(store))
            hide(password)
            auth = library.auth.PlainTextAuthProvider(store.user, password)
        profile = library.cluster.ExecutionProfile(
            library.policies.TokenAwarePolicy(library.policies.RoundRobinPolicy()), request_timeout=store.timeout
        )
        return library.cluster.Cluster(
            hosts,
            port,
            auth_provider=auth,
            execution_profiles={library.cluster.EXEC_PROFILE_DEFAULT: profile},
            connect_timeout=store.timeout,
            control_connection_timeout=store.timeout,
        )

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn errors of Cassandra and of the network into ``StoreUnavailable``, and close the session."""
        try:
            yield
        except (OSError, self._library.DriverException, self._library.cluster.NoHostAvailable) as error:
            self.close()
            raise StoreUnavailable(
                str(self._store),
                f"Cassandra did not carry out a request within {self._store.timeout:g} s "
                f"({type(error).__name__}: {error})",
                "Start it, or correct the keyspace, the table or the permissions. The rows wait in the queue.",
            ) from error


def create_table(store: CassandraStore, schema: pa.Schema) -> str:
    columns = [f"{quoted(field.name)} {cql_type(field.type)}" for field in schema]
    key = ", ".join(map(quoted, store.key))
    return (
        f"CREATE TABLE IF NOT EXISTS {quoted(store.keyspace)}.{quoted(store.name)} "
        f"({', '.join(columns)}, PRIMARY KEY ({key}))"
    )


def cql_type(kind: pa.DataType) -> str:
    """The type of Cassandra that keeps the values of an Arrow type."""
    types = pa.types
    if types.is_dictionary(kind):
        return cql_type(kind.value_type)
    if types.is_decimal(kind):
        return "decimal"
    if types.is_time(kind):
        return "time"
    if types.is_timestamp(kind):
        return "timestamp" if kind.unit in ("s", "ms") else "text"
    if types.is_duration(kind):
        return "bigint"
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
        return "blob"
    simple = {
        "bool": "boolean",
        "int8": "tinyint",
        "int16": "smallint",
        "int32": "int",
        "int64": "bigint",
        "uint8": "smallint",
        "uint16": "int",
        "uint32": "bigint",
        "uint64": "varint",
        "halffloat": "float",
        "float": "float",
        "double": "double",
        "date32[day]": "date",
        "date64[ms]": "date",
    }
    return simple.get(str(kind), "text")


def fitting(
    rows: pa.Table, kinds: Sequence[pa.DataType | None], key: Sequence[str]
) -> tuple[pa.Table, list[Rejected]]:
    """The rows with their columns cast to these types (None: as they are) and a column with their indices; and the
    rows that have no key or cannot be cast without changing a value."""
    columns = [plain(column) for column in rows.columns]
    numbered = pa.table([*columns, pa.array(range(rows.num_rows), pa.int64())], names=[*rows.column_names, _ROW])
    parts: list[pa.Table] = []

    def cast(part: pa.Table) -> None:
        refuse_null_keys(part, key)
        made = [
            column if kind is None else column.cast(kind)
            for column, kind in zip(part.columns, [*kinds, None], strict=True)
        ]
        parts.append(pa.table(made, names=part.column_names))

    rejected = write_all_but_rejected(numbered, cast, (NullInKey, pa.ArrowException))
    return (pa.concat_tables(parts) if parts else numbered.slice(0, 0)), rejected


def _others_of_their_keys(rows: pa.Table, key: Sequence[str], refused: Sequence[int]) -> pa.Table:
    """The rows with the same keys as those with these indices, which were refused, without these."""
    taken = set(refused)
    keys = list(zip(*(rows[name].to_pylist() for name in key), strict=True))
    numbers = rows[_ROW].to_pylist()
    wanted = {each for each, number in zip(keys, numbers, strict=True) if number in taken}
    places = [at for at, each in enumerate(keys) if each in wanted and numbers[at] not in taken]
    return rows.take(pa.array(places, pa.int64()))


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _addresses(where: str, hosts: Sequence[str]) -> tuple[list[str], int]:
    """The hosts and their port."""
    names, ports = [], set()
    for host in hosts:
        name, _, port = host.rpartition(":") if ":" in host else (host, "", str(_PORT))
        names.append(name)
        ports.add(port)
    if not names or "" in names or len(ports) != 1 or not next(iter(ports)).isdigit():
        raise TopologyError(
            f"{where}, CassandraStore",
            f"hosts is {tuple(hosts)!r}, not hosts of Cassandra with one port",
            "Write CassandraStore(['node1:9042', 'node2:9042'], ...).",
        )
    return names, int(ports.pop())


def _library(where: str) -> Any:
    """The module ``cassandra``. Loaded on first use, so that building a topology does not need it."""
    try:
        import cassandra
        import cassandra.auth
        import cassandra.cluster
        import cassandra.concurrent
        import cassandra.policies
        import cassandra.query
    except ImportError as error:
        raise EnvironmentFault(
            where,
            f"the package cassandra-driver cannot be imported ({error})",
            'Install it with: pip install "penstock[cassandra]".',
        ) from error
    return cassandra
