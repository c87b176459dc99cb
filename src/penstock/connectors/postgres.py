"""Rows into a PostgreSQL table: one transaction per epoch, which also records the epoch.

Needs psycopg 3: ``pip install "penstock[postgres]"``. Rows travel by COPY, as text that Arrow writes column by
column: no Python value is made of a row.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from penstock.connectors.staging import StagedSink
from penstock.errors import ComponentError, EnvironmentFault, TopologyError
from penstock.topology.components import Conf, Context, Source

if TYPE_CHECKING:
    import psycopg

T = TypeVar("T")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0  # s between two attempts; doubled each time
_COPY_ROWS = 65_536  # rows turned into text at a time: a few MB, far below Arrow's 2 GB for a column of strings
_LOCK_TIMEOUT = 5000  # ms; a process that died may leave its locks behind for a moment
_DEFAULTS = {  # where the dsn says nothing: a host that vanishes without a word is noticed within 15 s
    "connect_timeout": 5,
    "keepalives_idle": 5,
    "keepalives_interval": 5,
    "keepalives_count": 2,
    "tcp_user_timeout": 15_000,
}
_LOCK = 0x70656E73746F636B  # "penstock": serialises the creation of tables, which IF NOT EXISTS does not


class PostgresSink(StagedSink):
    """Inserts rows into a table, or updates those whose key is there already.

    ``columns`` names the fields to write, or maps fields to columns; without it each field goes to the column of
    its name. ``mode="upsert"`` needs a ``key``, columns with a primary key or unique constraint on them; of
    several rows with one key in an epoch the last is written. ``create`` makes the table on the first commit
    if it is not there, with types after the Arrow ones and the key as its primary key. ``table`` may be
    ``schema.table``.

    The epoch is kept in the table ``penstock_epochs``, a row per task, beside the sink's own tables. Topologies of
    one name must not write to one database at the same time: a task that finds another's commit after one of its
    own raises. The server's ``synchronous_commit`` must not be off, or its crash may lose a committed epoch.

    Without the server the sink tries again for ``retry_for`` seconds, then raises. It blocks its slot for as
    long, so the default stays below ``heartbeat_timeout``.
    """

    def __init__(
        self,
        dsn: str,
        table: str,
        *,
        columns: Sequence[str] | Mapping[str, str] | None = None,
        mode: str = "insert",
        key: Sequence[str] = (),
        create: bool = True,
        retry_for: float = 15.0,
    ) -> None:
        where = f"PostgresSink for table '{table}'"
        if mode not in ("insert", "upsert"):
            raise TopologyError(where, "mode is 'insert' or 'upsert'", repr(mode))
        if isinstance(key, str) or (mode == "upsert") != bool(key):
            raise TopologyError(
                where,
                "mode='upsert' has a key, a sequence of columns, and mode='insert' has none",
                f"mode={mode!r}, key={key!r}",
                "Name the columns that tell one row from another: key=('word',).",
            )
        if isinstance(columns, str):
            raise TopologyError(where, "columns is a sequence or a mapping", repr(columns))
        if columns is not None and not isinstance(columns, Mapping):
            columns = {name: name for name in columns}
        if columns is not None and not set(key) <= set(columns.values()):
            raise TopologyError(
                where, "the key's columns are among the columns", f"key={tuple(key)!r}, columns={columns!r}"
            )
        self._dsn = dsn
        self._table = table
        self._columns: Mapping[str, str] | None = columns
        self._key = tuple(key)
        self._create = create
        self._retry_for = retry_for
        self._connection: psycopg.Connection | None = None

    def connect(self, conf: Conf, context: Context) -> None:
        try:
            import psycopg
        except ImportError as error:
            raise EnvironmentFault(
                self.where, "PostgresSink needs psycopg 3", str(error), 'pip install "penstock[postgres]"'
            ) from error
        self._psycopg = psycopg
        self._lost: tuple[type[Exception], ...] = (psycopg.OperationalError, psycopg.InterfaceError)
        self.where += f", table '{self._table}'"
        self._sink = f"{context.topology}/{context.component}/{context.index}"
        self._published_here = False
        self._fields: list[str] | None = None
        self._try(self._create_epochs)

    def write(self, batch: pa.RecordBatch, source: Source) -> None:
        # Before the rows are staged: what shows only in commit would show again at every restart.
        if self._fields is None:
            self._fields = self._fields_of(batch.schema)
        super().write(batch, source)

    def published(self) -> int:
        query = "SELECT epoch FROM penstock_epochs WHERE sink = %s AND identity = %s"
        row = self._try(lambda connection: connection.execute(query, (self._sink, self.identity)).fetchone())
        return -1 if row is None else int(row[0])

    def publish(self, epoch: int, rows: pa.Table) -> None:
        rows = rows.select(self._fields_of(rows.schema))
        if self._columns is not None:
            rows = rows.rename_columns([self._columns[name] for name in rows.column_names])
        self._try(lambda connection: self._publish(connection, epoch, rows))
        self._published_here = True

    def cleanup(self) -> None:
        self._disconnect()
        super().cleanup()

    def _publish(self, connection: psycopg.Connection, epoch: int, rows: pa.Table) -> None:
        """One attempt. A connection lost at COMMIT leaves open whether it was done, so each attempt asks again,
        with the task's row locked: also against a process that was thought dead."""
        with connection.transaction():
            connection.execute(
                "INSERT INTO penstock_epochs VALUES (%s, %s, -1) ON CONFLICT (sink) DO NOTHING",
                (self._sink, self.identity),
            )
            query = "SELECT identity, epoch FROM penstock_epochs WHERE sink = %s FOR UPDATE"
            identity, newest = connection.execute(query, (self._sink,)).fetchone() or ("", -1)
            if identity == self.identity and newest >= epoch:
                return
            if identity != self.identity and self._published_here:
                raise ComponentError(
                    self.where,
                    f"one topology at a time writes as '{self._sink}' to a database",
                    "a commit of another run in between",
                    "Stop the other one, or give one of them another name.",
                )
            if self._create:
                self._create_table(connection, rows.schema)
            self.write_rows(connection, rows)
            connection.execute(
                "UPDATE penstock_epochs SET identity = %s, epoch = %s WHERE sink = %s",
                (self.identity, epoch, self._sink),
            )

    def write_rows(self, connection: psycopg.Connection, rows: pa.Table) -> None:
        """Write an epoch's rows in the open transaction; for a subclass with statements of its own."""
        from psycopg import sql

        if not self._key:
            _copy(connection, _identifier(self._table), rows)
            return
        staged = sql.Identifier("pg_temp", "penstock_rows")
        key, columns = _identifiers(self._key), _identifiers(rows.column_names)
        connection.execute(
            sql.SQL("CREATE TEMP TABLE penstock_rows ON COMMIT DROP AS SELECT {} FROM {} WITH NO DATA").format(
                columns, _identifier(self._table)
            )
        )
        _copy(connection, staged, _last_of_each(rows, self._key))
        others = [name for name in rows.column_names if name not in self._key]
        action: sql.Composable = sql.SQL("NOTHING")
        if others:
            updates = [sql.SQL("{0} = EXCLUDED.{0}").format(sql.Identifier(name)) for name in others]
            action = sql.SQL("UPDATE SET {}").format(sql.SQL(", ").join(updates))
        # In the key's order: two tasks that update the same rows then wait for each other in turn, not crosswise.
        connection.execute(
            sql.SQL("INSERT INTO {} ({}) SELECT {} FROM {} ORDER BY {} ON CONFLICT ({}) DO {}").format(
                _identifier(self._table), columns, columns, staged, key, key, action
            )
        )

    def _fields_of(self, schema: pa.Schema) -> list[str]:
        """The fields to write, in order."""
        fields = list(schema.names if self._columns is None else self._columns)
        wanted = {*fields, *(self._key if self._columns is None else ())}
        if missing := [name for name in wanted if name not in schema.names]:
            raise ComponentError(
                self.where,
                f"the input has the fields {', '.join(sorted(wanted))}",
                f"({', '.join(schema.names)}), without {', '.join(sorted(missing))}",
                "Set columns={field: column} to say which field goes where.",
            )
        return fields

    def _create_epochs(self, connection: psycopg.Connection) -> None:
        with connection.transaction():
            connection.execute("SELECT pg_advisory_xact_lock(%s)", (_LOCK,))
            connection.execute(
                "CREATE TABLE IF NOT EXISTS penstock_epochs"
                " (sink text PRIMARY KEY, identity text NOT NULL, epoch bigint NOT NULL)"
            )

    def _create_table(self, connection: psycopg.Connection, schema: pa.Schema) -> None:
        from psycopg import sql

        table = _identifier(self._table)
        found = connection.execute("SELECT to_regclass(%s)", (table.as_string(connection),)).fetchone()
        if found is not None and found[0] is not None:
            return
        connection.execute("SELECT pg_advisory_xact_lock(%s)", (_LOCK,))
        columns = [
            sql.SQL("{} {}").format(sql.Identifier(field.name), sql.SQL(postgres_type(field.type)))
            for field in schema
        ]
        if self._key:
            columns.append(sql.SQL("PRIMARY KEY ({})").format(_identifiers(self._key)))
        connection.execute(
            sql.SQL("CREATE TABLE IF NOT EXISTS {} ({})").format(table, sql.SQL(", ").join(columns))
        )

    def _try(self, action: Callable[[psycopg.Connection], T]) -> T:
        """Do it on a live connection; when that is lost, again on a new one until ``retry_for`` has passed."""
        first_loss: float | None = None
        pause = _FIRST_PAUSE
        while True:
            try:
                if self._connection is None:
                    self._connection = self._new_connection()
                return action(self._connection)
            except self._lost as error:
                self._disconnect()
                now = time.monotonic()
                first_loss = now if first_loss is None else first_loss
                if now + pause > first_loss + self._retry_for:
                    raise ComponentError(
                        f"{self.where} at {_address(self._dsn)}",
                        f"PostgreSQL answers within {self._retry_for:g} s",
                        str(error).strip(),
                        "Start it or mend the dsn; nothing is lost, the rows are staged until it is there.",
                    ) from error
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
            except self._psycopg.Error as error:
                raise self._refused(error) from error

    def _new_connection(self) -> psycopg.Connection:
        from psycopg.conninfo import conninfo_to_dict

        options: dict[str, Any] = {**_DEFAULTS, **conninfo_to_dict(self._dsn)}
        connection = self._psycopg.connect(**options, autocommit=True)
        connection.execute(f"SET lock_timeout = {_LOCK_TIMEOUT}")
        return connection

    def _refused(self, error: psycopg.Error) -> ComponentError:
        """PostgreSQL's own account of what it did not take: its diagnosis has table, column and line."""
        said = error.diag
        named = {"column": said.column_name, "constraint": said.constraint_name, "sqlstate": said.sqlstate}
        details = [f"{what} {name}" for what, name in named.items() if name]
        details += [text for text in (said.message_detail, said.context, said.message_hint) if text]
        return ComponentError(
            self.where,
            "the rows of an epoch fit the table's columns, types and constraints",
            f"{said.message_primary or error}" + (f" ({'; '.join(details)})" if details else ""),
            "Convert the field in a bolt before the sink, or alter the table; then start the topology again.",
        )

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _last_of_each(rows: pa.Table, key: Sequence[str]) -> pa.Table:
    """The last row of each key: one statement cannot update a row twice, and less travels."""
    numbered = rows.select(key).append_column("", pa.array(range(rows.num_rows), pa.int64()))
    last = numbered.group_by(list(key)).aggregate([("", "max")])["_max"]
    return rows if len(last) == rows.num_rows else rows.take(last)


def _copy(connection: psycopg.Connection, table: Any, rows: pa.Table) -> None:
    from psycopg import sql

    statement = sql.SQL("COPY {} ({}) FROM STDIN").format(table, _identifiers(rows.column_names))
    with connection.cursor() as cursor, cursor.copy(statement) as copy:
        for text in copy_text(rows):
            copy.write(text)


def copy_text(rows: pa.Table) -> Iterator[memoryview]:
    """The rows in the text format of COPY."""
    for start in range(0, rows.num_rows, _COPY_ROWS):
        chunk = rows.slice(start, _COPY_ROWS).combine_chunks()
        columns = [_text(column.combine_chunks()) for column in chunk.columns]
        lines = pc.binary_join_element_wise(*columns, "\t", null_handling="replace", null_replacement="\\N")
        lines = pc.binary_join_element_wise(lines, "\n", "")
        offsets = memoryview(lines.buffers()[1]).cast("i")
        yield memoryview(lines.buffers()[2])[offsets[lines.offset] : offsets[lines.offset + len(lines)]]


def _text(column: pa.Array) -> pa.Array:
    """A column as strings that PostgreSQL reads back, escaped for COPY."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        column = column.dictionary_decode()
        kind = column.type
    if pa.types.is_nested(kind):
        values = [None if value is None else json.dumps(value, default=str) for value in column.to_pylist()]
        column = pa.array(values, pa.string())
    elif _is_binary(kind):
        values = [None if value is None else "\\x" + value.hex() for value in column.to_pylist()]
        column = pa.array(values, pa.string())
    elif pa.types.is_duration(kind):
        micros = column.cast(pa.duration("us")).cast(pa.int64()).cast(pa.string())
        return pc.binary_join_element_wise(micros, "microseconds", " ")
    elif not _is_string(kind):
        return column.cast(pa.string())  # digits, signs, points and colons: nothing to escape
    column = column.cast(pa.string())
    if pc.any(pc.match_substring_regex(column, r"[\\\t\n\r]")).as_py():
        for character, escape in (("\\", r"\\"), ("\t", r"\t"), ("\n", r"\n"), ("\r", r"\r")):
            column = pc.replace_substring(column, character, escape)
    return column


def postgres_type(kind: pa.DataType) -> str:
    """The PostgreSQL type that holds every value of an Arrow type. What is nested becomes ``jsonb``."""
    if pa.types.is_dictionary(kind):
        return postgres_type(kind.value_type)
    if pa.types.is_decimal(kind):
        return f"numeric({kind.precision}, {kind.scale})"
    if pa.types.is_timestamp(kind):
        return "timestamp with time zone" if kind.tz else "timestamp"
    for matches, name in _TYPES:
        if matches(kind):
            return name
    return "text"


def _is_string(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _is_binary(kind: pa.DataType) -> bool:
    types = pa.types
    return any(
        test(kind)
        for test in (types.is_binary, types.is_large_binary, types.is_fixed_size_binary, types.is_binary_view)
    )


_TYPES: tuple[tuple[Callable[[pa.DataType], bool], str], ...] = (
    (pa.types.is_boolean, "boolean"),
    (lambda kind: kind in (pa.int8(), pa.int16(), pa.uint8()), "smallint"),
    (lambda kind: kind in (pa.int32(), pa.uint16()), "integer"),
    (lambda kind: kind in (pa.int64(), pa.uint32()), "bigint"),
    (pa.types.is_uint64, "numeric(20)"),
    (lambda kind: kind in (pa.float16(), pa.float32()), "real"),
    (pa.types.is_float64, "double precision"),
    (pa.types.is_date, "date"),
    (pa.types.is_time, "time"),
    (pa.types.is_duration, "interval"),
    (_is_binary, "bytea"),
    (pa.types.is_nested, "jsonb"),
)


def _identifier(table: str) -> Any:
    from psycopg import sql

    return sql.Identifier(*table.split("."))


def _identifiers(names: Sequence[str]) -> Any:
    from psycopg import sql

    return sql.SQL(", ").join(map(sql.Identifier, names))


def _address(dsn: str) -> str:
    """Where the server is, without the password."""
    from psycopg.conninfo import conninfo_to_dict

    parts = conninfo_to_dict(dsn)
    return f"{parts.get('host', 'the local socket')}:{parts.get('port', 5432)}/{parts.get('dbname', '')}"
