"""Rows into a PostgreSQL table: one transaction per epoch, which also records the epoch.

Needs psycopg 3: ``pip install "penstock[postgres]"``. Rows travel by COPY, as text that Arrow writes column by
column: no Python value is made of a row.
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

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0  # s between two attempts; doubled each time
_LOCK_TIMEOUT = 5000  # ms; a process that died may leave its locks behind for a moment


class _SinkRowRefused(Exception):
    """PostgreSQL does not take rows of a part, for a reason of theirs."""


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

    A row that PostgreSQL will never take (a NUL character, a constraint) is a dead letter; all others are written.
    Without the server the sink tries again for ``retry_for`` seconds, in which it blocks its worker, and then says
    that it is away: it is asked again until the server is back. The same holds for a table or column that is
    missing."""

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
        """Write the rows, and make dead letters of those that PostgreSQL will never take. Which they are shows
        only here, against the table as it is now; an epoch must not fail with them at every restart."""
        connection.execute("SET CONSTRAINTS ALL IMMEDIATE")  # else a deferred one shows at COMMIT, without its row

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
        # Also without any: those that there are of this epoch are of an attempt that PostgreSQL did not commit.
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
        """Write rows in the open transaction; for a subclass with statements of its own. Called once for an epoch;
        where rows of it are refused, also for parts of it, in order."""
        if not self._key:
            postgres_rows.copy_rows(connection, postgres_rows.identifier(self._table), rows)
            return
        connection.execute(postgres_rows.create_staged(self._table, rows.column_names))
        postgres_rows.copy_rows(connection, postgres_rows.staged(), last_of_each(rows, self._key))
        connection.execute(postgres_rows.upsert_staged(self._table, rows.column_names, self._key))
        connection.execute("DROP TABLE pg_temp.penstock_rows")  # another part may follow

    def _fields_of(self, schema: pa.Schema) -> list[str]:
        """The fields to write, in order."""
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
                    raise SinkBusy(
                        f"{self.where} at {postgres_rows.address(self._dsn)}",
                        f"PostgreSQL did not answer within {self._retry_for:g} s ({str(error).strip()})",
                        "Start it or correct the dsn. Nothing is lost: the rows stay staged meanwhile.",
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
        """PostgreSQL's own account of what it did not take: its diagnosis has table, column and line."""
        said = error.diag
        named = {"column": said.column_name, "constraint": said.constraint_name, "sqlstate": said.sqlstate}
        details = [f"{what} {name}" for what, name in named.items() if name]
        details += [text for text in (said.message_detail, said.context, said.message_hint) if text]
        return SinkBusy(
            self.where,
            f"the rows of an epoch do not fit the table: {said.message_primary or error}"
            + (f" ({'; '.join(details)})" if details else ""),
            "Convert the field in a bolt before the sink, or alter the table.",
        )

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
