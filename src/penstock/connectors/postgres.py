"""A sink that writes rows to a PostgreSQL table in one transaction per epoch, which also records the epoch.

Needs psycopg 3: ``pip install "penstock[postgres]"``. Rows are sent with COPY, as text that Arrow writes column by
column: rows are never converted to Python values.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import pyarrow as pa

from penstock.errors import ComponentError, EnvironmentFault, SinkBusy, TopologyError
from penstock.storage import postgres_rows
from penstock.storage.incarnation import superseded
from penstock.storage.staging import StagedSink
from penstock.storage.tables import checked_columns, last_of_each, write_all_but_rejected
from penstock.topology.components import Conf, Context, Failure, Source

if TYPE_CHECKING:
    import psycopg

T = TypeVar("T")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0  # seconds between two attempts; doubled each time
_LOCK_TIMEOUT = 5000  # milliseconds; a process that died may hold its locks for a moment


class _SinkRowRefused(Exception):
    """PostgreSQL refuses rows of a part because of the rows themselves."""


class PostgresSink(StagedSink):
    """Inserts rows into a table, or updates rows whose key exists.

    ``columns`` names the fields to write, or maps fields to columns; without it each field is written to the
    column of the same name. ``mode="upsert"`` requires a ``key``: columns with a primary key or unique constraint.
    If an epoch has several rows with the same key, the last one is written. With ``create`` the table is created
    on the first commit unless it exists, with types that correspond to the Arrow types and with the key as its
    primary key. ``table`` may be ``schema.table``.

    The epoch is stored in the table ``penstock_epochs``, one row per task, in the same database. Topologies of the
    same name must not write to one database at the same time: a task that finds the commit of another run after
    one of its own raises ``ComponentError``. ``synchronous_commit`` must not be off on the server, or a crash of
    the server may lose a committed epoch.

    A row that PostgreSQL will never accept (because of a NUL character or a constraint) becomes a dead letter; all
    others are written. While the server is unreachable the sink retries for ``retry_for`` seconds, during which it
    blocks its worker, and then raises ``SinkBusy``; it is called again until the server is back. A missing table
    or column is treated in the same way.
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
        retry_for: float = 2.0,
    ) -> None:
        where = f"PostgresSink for table '{table}'"
        if mode not in ("insert", "upsert"):
            raise TopologyError(where, f"mode is {mode!r}, neither 'insert' nor 'upsert'")
        if isinstance(key, str) or (mode == "upsert") != bool(key):
            raise TopologyError(
                where,
                f"mode={mode!r} does not fit key={key!r}: 'upsert' needs a sequence of columns as "
                "key, 'insert' has none",
                "Name the columns that tell one row from another: key=('word',).",
            )
        self._dsn = dsn
        self._table = table
        self._columns = checked_columns(where, columns, key)
        self._key = tuple(key)
        self._create = create
        self._retry_for = retry_for
        self._connection: psycopg.Connection | None = None

    def connect(self, conf: Conf, context: Context) -> None:
        try:
            import psycopg
        except ImportError as error:
            raise EnvironmentFault(
                self.where,
                f"the package psycopg 3 cannot be imported ({error})",
                'Install it with: pip install "penstock[postgres]".',
            ) from error
        self._psycopg = psycopg
        self._lost: tuple[type[Exception], ...] = (psycopg.OperationalError, psycopg.InterfaceError)
        self.where += f", table '{self._table}'"
        self._sink = f"{context.topology}/{context.component}/{context.index}"
        self._published_here = False
        self._fields: list[str] | None = None
        self._try(self._create_epochs)

    def write(self, batch: pa.RecordBatch, source: Source) -> None:
        # Checked before the rows are staged: an error during commit would repeat after every restart.
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
        """One attempt. If the connection is lost at COMMIT, the outcome is unknown. Therefore each attempt first
        reads the epoch and locks the task's row, which also excludes a process that was believed dead."""
        with connection.transaction():
            connection.execute(
                "INSERT INTO penstock_epochs VALUES (%s, %s, -1) ON CONFLICT (sink) DO NOTHING",
                (self._sink, self.identity),
            )
            query = "SELECT identity, epoch FROM penstock_epochs WHERE sink = %s FOR UPDATE"
            identity, newest = connection.execute(query, (self._sink,)).fetchone() or ("", -1)
            if identity == self.identity and newest >= epoch:
                return
            if self.incarnation.is_older_than(identity):
                newer = int(identity.split(".")[1])
                raise superseded(self.where, self.incarnation.generation, newer)
            if not self.incarnation.is_same_task(identity) and self._published_here:
                raise ComponentError(
                    self.where,
                    f"another run also writes as '{self._sink}' to this database",
                    "Stop the other one, or give one of them another name.",
                )
            if self._create:
                postgres_rows.create_table(connection.execute, self._table, rows.schema, self._key)
            self._write_all_but_rejected(connection, epoch, rows)
            connection.execute(
                "UPDATE penstock_epochs SET identity = %s, epoch = %s WHERE sink = %s",
                (self.identity, epoch, self._sink),
            )

    def _write_all_but_rejected(self, connection: psycopg.Connection, epoch: int, rows: pa.Table) -> None:
        """Write the rows, and store dead letters for those that PostgreSQL will never accept. This shows only
        here, by the present definition of the table; the epoch must not fail because of them after every
        restart."""
        connection.execute("SET CONSTRAINTS ALL IMMEDIATE")  # a deferred one would fail at COMMIT, without its row

        def write(part: pa.Table) -> None:
            try:
                with connection.transaction():  # a savepoint
                    self.write_rows(connection, part)
            except self._psycopg.Error as error:
                if (error.sqlstate or "")[:2] not in postgres_rows.ROWS_FAULT:
                    raise
                raise _SinkRowRefused(str(self._refused(error))) from error

        rejected = write_all_but_rejected(rows, write, (_SinkRowRefused, pa.ArrowException))
        numbers = pa.array([each.row for each in rejected], pa.int64())
        dead_letters = [tuple(row.values()) for row in rows.take(numbers).to_pylist()]
        failures = [Failure(self.context.component, each.error) for each in rejected]
        # Called without any too: existing dead letters of this epoch belong to an attempt that was not committed.
        self.context.add_dead_letters(dead_letters, failures, once=self.dead_letters_name(epoch))
        if rejected:
            self.context.report(
                ComponentError(
                    self.where,
                    f"{len(rejected)} rows do not fit the table: {rejected[0].error}",
                    "They are among the dead letters: penstock dlq list. All other rows are written.",
                )
            )

    def write_rows(self, connection: psycopg.Connection, rows: pa.Table) -> None:
        """Write rows in the open transaction. A subclass may override this. Called once per epoch; if rows are
        refused, also for parts of the epoch, in order."""
        if not self._key:
            postgres_rows.copy_rows(connection, postgres_rows.identifier(self._table), rows)
            return
        connection.execute(postgres_rows.create_staged(self._table, rows.column_names))
        postgres_rows.copy_rows(connection, postgres_rows.staged(), last_of_each(rows, self._key))
        connection.execute(postgres_rows.upsert_staged(self._table, rows.column_names, self._key))
        connection.execute("DROP TABLE pg_temp.penstock_rows")  # another part may follow

    def _fields_of(self, schema: pa.Schema) -> list[str]:
        """The fields to write, in order. Raises ``ComponentError`` if the input lacks one."""
        fields = list(schema.names if self._columns is None else self._columns)
        wanted = {*fields, *(self._key if self._columns is None else ())}
        if missing := [name for name in wanted if name not in schema.names]:
            raise ComponentError(
                self.where,
                f"the input ({', '.join(schema.names)}) has no field {', '.join(sorted(missing))}",
                "Set columns={field: column} to say which field goes where.",
            )
        return fields

    def _create_epochs(self, connection: psycopg.Connection) -> None:
        with connection.transaction():
            postgres_rows.lock_creation(connection.execute)
            connection.execute(
                "CREATE TABLE IF NOT EXISTS penstock_epochs"
                " (sink text PRIMARY KEY, identity text NOT NULL, epoch bigint NOT NULL)"
            )

    def _try(self, action: Callable[[psycopg.Connection], T]) -> T:
        """Call ``action`` with a live connection. If the connection is lost, repeat it with a new one until
        ``retry_for`` seconds have passed, then raise ``SinkBusy``."""
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
                    raise SinkBusy(
                        f"{self.where} at {postgres_rows.address(self._dsn)}",
                        f"PostgreSQL did not answer within {self._retry_for:g} s ({str(error).strip()})",
                        "Start the server or correct the dsn. No rows are lost: they stay staged.",
                    ) from error
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
            except self._psycopg.Error as error:
                raise self._refused(error) from error

    def _new_connection(self) -> psycopg.Connection:
        connection = postgres_rows.connect(self._dsn)
        connection.execute(f"SET lock_timeout = {_LOCK_TIMEOUT}")
        return connection

    def _refused(self, error: psycopg.Error) -> ComponentError:
        """The error for a refusal, with PostgreSQL's diagnosis: column, constraint and details."""
        diagnosis = error.diag
        named = {
            "column": diagnosis.column_name,
            "constraint": diagnosis.constraint_name,
            "sqlstate": diagnosis.sqlstate,
        }
        details = [f"{what} {name}" for what, name in named.items() if name]
        texts = (diagnosis.message_detail, diagnosis.context, diagnosis.message_hint)
        details += [text for text in texts if text]
        return SinkBusy(
            self.where,
            f"the rows of an epoch do not fit the table: {diagnosis.message_primary or error}"
            + (f" ({'; '.join(details)})" if details else ""),
            "Convert the field in a bolt before the sink, or alter the table.",
        )

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
