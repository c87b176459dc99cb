"""A store that writes results to a PostgreSQL table. Needs psycopg 3: ``pip install "penstock[postgres]"``.

Rows are sent with COPY, as text that Arrow writes column by column; with a key, through a temporary table.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from penstock.errors import EnvironmentFault, TopologyError
from penstock.persist.stores import Overtaken, Reject, StoreClient, StoreUnavailable
from penstock.persist.tables import NullInKey, TableStore, refuse_null_keys
from penstock.storage import postgres_rows
from penstock.storage.tables import Columns, last_of_each, write_all_but_rejected

if TYPE_CHECKING:
    import psycopg

_CHECKS = 10  # checks of the watchdog per timeout: a hanging connection is closed at most a tenth of it too late
_OWN_SHARE = 0.8  # share of the timeout after which the server itself ends a statement, with a meaningful error


class PostgresStore(TableStore):
    """A table of PostgreSQL, ``table`` or ``schema.table``; see ``TableStore`` for the options.

    ``timeout`` is the maximum time of a statement in seconds. After it a server that hangs is disconnected, and a
    processor that hangs during a write loses its lock to its successor.

    The progress of each queue is stored in the table ``penstock_queues``, found by the same search path.
    """

    def __init__(
        self,
        dsn: str,
        table: str,
        *,
        key: Sequence[str] = (),
        columns: Columns = None,
        create: bool = True,
        timeout: float = 30.0,
    ) -> None:
        super().__init__(table, key, columns, create)
        self.dsn = dsn
        self.timeout = timeout

    def check(self, where: str) -> None:
        try:
            import psycopg  # noqa: F401 - checks that it is installed
        except ImportError as error:
            raise EnvironmentFault(
                where,
                f"the package psycopg 3 cannot be imported ({error})",
                'Install it with: pip install "penstock[postgres]".',
            ) from error
        try:
            postgres_rows.check_dsn(self.dsn)
        except EnvironmentFault as error:
            raise TopologyError(
                f"{where}, PostgresStore for table '{self.table}'",
                f"dsn is not a connection string of PostgreSQL: {error.problem}",
                error.hint,
            ) from None

    def open(self) -> StoreClient:
        return _PostgresClient(self)

    def __str__(self) -> str:
        return f"PostgreSQL table '{self.table}' at {postgres_rows.address(self.dsn)}"


class _StoreRowRefused(Exception):
    """PostgreSQL refuses rows of a part because of the rows themselves."""


class _PostgresClient(StoreClient):
    def __init__(self, store: PostgresStore) -> None:
        self._store = store
        self._session: _Session | None = None

    def progress(self, queue: str) -> str:
        with self._connected() as session:
            return session.progress(queue) or ""

    def write(self, queue: str, rows: pa.Table, before: str, after: str, reject: Reject) -> None:
        """Steps, in one transaction: (1) lock the queue's progress and compare it; (2) write the rows in as few
        parts as possible, each within a savepoint; (3) pass rejected rows to ``reject``; (4) store the new
        progress. If the connection is lost at COMMIT, the outcome is unknown; the next call finds it out in step
        1."""
        with self._connected() as session:
            session.execute("BEGIN")
            if session.locked_progress(queue) != before:
                raise Overtaken(str(self._store), f"another processor also writes for '{queue}'")
            if rows.num_rows:
                self._write_rows(session, self._store.shaped(rows), reject)
            session.execute("UPDATE penstock_queues SET progress = %s WHERE queue = %s", (after, queue))
            session.execute("COMMIT")

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None

    def _write_rows(self, session: _Session, rows: pa.Table, reject: Reject) -> None:
        table, key, columns = self._store.table, self._store.key, rows.column_names
        if self._store.create:
            postgres_rows.create_table(session.execute, table, rows.schema, key)
        target = postgres_rows.staged() if key else postgres_rows.identifier(table)
        if key:
            session.execute(postgres_rows.create_staged(table, columns))
            upsert = postgres_rows.upsert_staged(table, columns, key)

        def write(part: pa.Table) -> None:
            with session.savepoint():
                if not key:
                    session.copy(target, part)
                    return
                refuse_null_keys(part, key)
                session.copy(target, last_of_each(part, key))
                session.execute(upsert)
                if part.num_rows < rows.num_rows:  # another part follows
                    session.execute("TRUNCATE pg_temp.penstock_rows")

        if rejected := write_all_but_rejected(rows, write, (_StoreRowRefused, NullInKey, pa.ArrowException)):
            reject(rejected)

    @contextlib.contextmanager
    def _connected(self) -> Iterator[_Session]:
        """The session, opened if necessary. After an error it is closed, which also ends its transaction."""
        import psycopg

        try:
            if self._session is None:
                self._session = _Session(self._store)
            yield self._session
        except psycopg.Error as error:
            reason = str(error).strip() + (f" (SQLSTATE {error.sqlstate})" if error.sqlstate else "")
            if self._session is not None and self._session.hung:
                reason = "no answer"
            self.close()
            raise StoreUnavailable(
                str(self._store),
                f"PostgreSQL did not accept the rows within {self._store.timeout:g} s per statement ({reason})",
                "Start the server, or correct the table, the permissions or the dsn. The rows wait in the queue.",
            ) from error
        except BaseException:
            self.close()
            raise


class _Session:
    """A connection on which every statement ends within the timeout, even if the server hangs."""

    def __init__(self, store: PostgresStore) -> None:
        self._connection = postgres_rows.connect(store.dsn)
        self._watch = _Watch(self._connection.fileno(), store.timeout)
        try:
            # The second limit ends a transaction whose processor hangs, because its successor waits for the lock.
            for limit in ("statement_timeout", "idle_in_transaction_session_timeout"):
                milliseconds = str(round(1000 * _OWN_SHARE * store.timeout))
                self.execute("SELECT set_config(%s, %s, false)", (limit, milliseconds))
            # Committed entries are released from the queue, so a commit has to survive a crash of the server.
            self.execute(
                "SELECT set_config('synchronous_commit', 'on', false)"
                " WHERE current_setting('synchronous_commit') = 'off'"
            )
            self._create_queues()
        except BaseException:
            self.close()
            raise

    @property
    def hung(self) -> bool:
        """True if the connection was closed because the server did not answer."""
        return self._watch.expired

    def execute(self, statement: Any, parameters: Sequence[Any] = ()) -> psycopg.Cursor:
        with self._watch:
            return self._connection.execute(statement, parameters or None)

    def copy(self, table: Any, rows: pa.Table) -> None:
        with self._watch:
            postgres_rows.copy_rows(self._connection, table, rows)

    @contextlib.contextmanager
    def savepoint(self) -> Iterator[None]:
        """Undo everything inside if it raises. Raises ``_StoreRowRefused`` if a row is at fault."""
        import psycopg

        self.execute("SAVEPOINT part")
        try:
            yield
        except psycopg.Error as error:
            if (error.sqlstate or "")[:2] not in postgres_rows.ROWS_FAULT:
                raise
            self._undo()
            raise _StoreRowRefused(str(error)) from error
        except (NullInKey, pa.ArrowException):
            self._undo()
            raise
        self.execute("RELEASE part")

    def progress(self, queue: str, lock: str = "") -> str | None:
        found = self.execute(f"SELECT progress FROM penstock_queues WHERE queue = %s {lock}", (queue,)).fetchone()
        return None if found is None else str(found[0])

    def locked_progress(self, queue: str) -> str:
        """The progress of the queue, locked until the transaction ends."""
        found = self.progress(queue, "FOR UPDATE")
        if found is None:
            self.execute("INSERT INTO penstock_queues VALUES (%s, '') ON CONFLICT (queue) DO NOTHING", (queue,))
            found = self.progress(queue, "FOR UPDATE")
        return found or ""

    def close(self) -> None:
        self._watch.close()
        self._connection.close()

    def _undo(self) -> None:
        self.execute("ROLLBACK TO part")
        self.execute("RELEASE part")

    def _create_queues(self) -> None:
        if self.execute("SELECT to_regclass('penstock_queues')").fetchone() == (None,):
            self.execute("BEGIN")
            postgres_rows.lock_creation(self.execute)
            self.execute(
                "CREATE TABLE IF NOT EXISTS penstock_queues (queue text PRIMARY KEY, progress text NOT NULL)"
            )
            self.execute("COMMIT")


class _Watch:
    """Closes a connection when the server has not answered in time, on a separate thread: a suspended server keeps
    the connection alive, and psycopg would wait for it."""

    def __init__(self, descriptor: int, timeout: float) -> None:
        self._socket = socket.socket(fileno=os.dup(descriptor))  # a copy, which psycopg cannot close
        self._timeout = timeout
        self._due: float | None = None
        self.expired = False
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="penstock-postgres-watch", daemon=True).start()

    def __enter__(self) -> None:
        self._due = time.monotonic() + self._timeout

    def __exit__(self, *_: object) -> None:
        self._due = None

    def close(self) -> None:
        self._closed.set()

    def _run(self) -> None:
        with self._socket:
            while not self._closed.wait(self._timeout / _CHECKS):
                due = self._due
                if due is not None and time.monotonic() > due:
                    self.expired = True
                    with contextlib.suppress(OSError):  # already closed
                        self._socket.shutdown(socket.SHUT_RDWR)
                    return
