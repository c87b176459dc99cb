"""Stores the load samples of the load monitor in SQLite or PostgreSQL (``pip install "penstock[postgres]"``).

A separate thread writes them. If the database is too slow, load samples are dropped and counted, so that it never
delays the topology.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import sqlite3
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from penstock.driver.load_sample import MonitorSample
from penstock.errors import EnvironmentFault, SettingError
from penstock.private_folder import make_folders, open_here
from penstock.redaction import described
from penstock.state.store import StateStore
from penstock.storage import postgres_rows

log = logging.getLogger("penstock.monitor")

_QUEUE_LENGTH = 8
"""Load samples that may wait to be written: 4 minutes of an outage with the default interval of 30 s. Not more,
since a load sample of thousands of executors has megabytes of streams."""
_LOCK_TIMEOUT = 5.0
"""Seconds that SQLite waits for another program's write lock. Then the load sample is dropped. Readers take no
write lock."""
_CLOSE_TIMEOUT = 5.0
"""Seconds that the end of a topology waits for load samples that are not written yet: enough for a healthy
database, and short enough not to annoy users."""

_TABLES = {
    "penstock_load_samples": ("ended", "seconds"),
    "penstock_executor_loads": (
        "ended",
        "executor",
        "component",
        "node",
        "cpu",
        "memory",
        "bytes_in",
        "bytes_out",
    ),
    "penstock_stream_loads": ("ended", "source", "target", "tuples", "bytes"),
    "penstock_node_loads": ("ended", "node", "cpu", "memory", "bandwidth", "other_cpu", "other_memory"),
}
"""Columns of each table, after ``topology``. ``ended`` is in seconds since 1970; loads are in cores, bytes, tuples
per second and bytes per second."""
_KEYS = {
    "penstock_load_samples": "topology, ended",
    "penstock_executor_loads": "topology, ended, executor",
    "penstock_stream_loads": "topology, ended, source, target",
    "penstock_node_loads": "topology, ended, node",
}
_TEXTS = ("topology", "executor", "component", "node", "source", "target")


Statement = tuple[str, Sequence[Sequence[Any]] | None]
"""An SQL statement and the rows to execute it for, with ``?`` for each value. None: execute it once, without
values."""


class Database(Protocol):
    """A connection to a database. Only the thread of the store calls it."""

    def run(self, statements: Iterable[Statement]) -> None:
        """Execute the statements in one transaction. Connects first if there is no connection."""

    def close(self) -> None: ...


class LoadStore:
    """Writes load samples on a thread of its own. ``put`` may be called by any thread."""

    def __init__(self, database: Database, keep: float) -> None:
        """``keep``: seconds after which a load sample is deleted."""
        self.written = self.dropped = 0
        self.error = ""
        """Why the newest load sample was not written; empty if it was."""
        self._database, self._keep = database, keep
        self._queue: queue.Queue[MonitorSample | None] = queue.Queue(_QUEUE_LENGTH)
        self._created = False
        self._thread = threading.Thread(target=self._work, name="load-store", daemon=True)
        self._thread.start()

    def put(self, sample: MonitorSample) -> None:
        """Queue a load sample. Never waits: if the queue is full, the load sample is dropped."""
        try:
            self._queue.put_nowait(sample)
        except queue.Full:
            self._drop(f"{_QUEUE_LENGTH} load samples are waiting to be written")

    def close(self) -> None:
        """Write the queued load samples and end the thread; gives up after a few seconds."""
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=_CLOSE_TIMEOUT)
        self._thread.join(_CLOSE_TIMEOUT)

    def flush(self) -> None:
        """Wait until all queued load samples are written or dropped. For tests and programs that read the
        tables."""
        self._queue.join()

    def _work(self) -> None:
        while True:
            sample = self._queue.get()
            try:
                if sample is None:
                    return
                self._write(sample)
            finally:
                self._queue.task_done()
                if sample is None:
                    self._database.close()

    def _write(self, sample: MonitorSample) -> None:
        try:
            if not self._created:
                self._database.run([(_create(table), None) for table in _TABLES])
                self._created = True
            self._database.run([*_inserts(sample), *_prunes(sample, self._keep)])
        except Exception as error:  # database drivers raise any type; the topology must go on
            self._database.close()
            self._drop(described(error))
            return
        self.written += 1
        self.error = ""

    def _drop(self, why: str) -> None:
        self.dropped += 1
        if not self.error:  # logged once per outage
            log.warning("a load sample could not be stored: %s", why)
        self.error = why


def open_store(target: str, folder: str, keep: float) -> LoadStore | None:
    """Return the store that the setting ``monitor.store`` names, or None if load samples are not stored.
    ``folder`` is the state directory. The database need not be reachable yet. Raises ``SettingError`` for an
    invalid setting, and ``EnvironmentFault`` if the database driver is not installed."""
    if target in ("off", "memory"):
        return None
    if target.startswith(("postgresql://", "postgres://", "${")):
        return LoadStore(Postgres(target), keep)
    if target == "sqlite":
        if "://" in folder:
            raise SettingError(
                "setting monitor.store",
                f"sqlite needs delivery.state_dir on a local disk, but delivery.state_dir is {folder}",
                "Set monitor.store to a file on a local disk, or to a database such as postgresql://…",
            )
        StateStore(folder).check_owner()
        target = os.path.join(folder, "load.sqlite")
    elif "://" in target or not os.path.splitext(target)[1]:
        raise SettingError(
            "setting monitor.store",
            f"{target!r} is neither off, memory, sqlite, a file name with a suffix, nor postgresql://…",
            "Try sqlite.",
        )
    return LoadStore(SQLite(target), keep)


class SQLite:
    """A SQLite file in WAL mode, so that readers and the writer do not block each other. Commits are not flushed
    to disk: a power failure may lose the newest load samples, but does not damage the file."""

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(path)
        self._connection: sqlite3.Connection | None = None

    def run(self, statements: Iterable[Statement]) -> None:
        if self._connection is None:
            make_folders(Path(self.path).parent)
            # Creates the file readable by its owner only. SQLite gives its journal files the same mode.
            os.close(open_here(Path(self.path), os.O_RDWR | os.O_CREAT))
            self._connection = sqlite3.connect(self.path, timeout=_LOCK_TIMEOUT, isolation_level=None)
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute("PRAGMA synchronous = NORMAL")
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            for statement, rows in statements:
                if rows is None:
                    self._connection.execute(statement)
                else:
                    self._connection.executemany(statement, rows)
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise

    def close(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(sqlite3.Error):
                self._connection.close()
            self._connection = None


class Postgres:
    """A PostgreSQL database. The constructor raises ``EnvironmentFault`` if psycopg is not installed."""

    def __init__(self, dsn: str) -> None:
        try:
            import psycopg  # noqa: F401 - checks that it is installed
        except ImportError as error:
            raise EnvironmentFault(
                "setting monitor.store",
                f"the package psycopg 3 cannot be imported ({error})",
                'Install it with: pip install "penstock[postgres]".',
            ) from error
        self._dsn = dsn
        self._connection: Any = None

    def run(self, statements: Iterable[Statement]) -> None:
        if self._connection is None:
            self._connection = postgres_rows.connect(self._dsn)
        with self._connection.transaction(), self._connection.cursor() as cursor:
            postgres_rows.lock_creation(
                cursor.execute
            )  # other topologies may create the same tables at this moment
            for statement, rows in statements:
                if rows is None:
                    cursor.execute(statement)
                else:
                    cursor.executemany(statement.replace("?", "%s"), rows)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _create(table: str) -> str:
    columns = ("topology", *_TABLES[table])
    types = ", ".join(f"{name} {'TEXT' if name in _TEXTS else 'DOUBLE PRECISION'} NOT NULL" for name in columns)
    return f"CREATE TABLE IF NOT EXISTS {table} ({types}, PRIMARY KEY ({_KEYS[table]}))"


def _inserts(sample: MonitorSample) -> list[Statement]:
    rows: dict[str, list[tuple[Any, ...]]] = {
        "penstock_load_samples": [(sample.seconds,)],
        "penstock_executor_loads": [
            (each.executor, each.component, each.node, each.cpu, each.memory, each.bytes_in, each.bytes_out)
            for each in sample.executors
        ],
        "penstock_stream_loads": [
            (each.source, each.target, each.tuples, each.bytes) for each in sample.streams if each.tuples
        ],
        "penstock_node_loads": [
            (
                each.node,
                each.used.cpu,
                each.used.memory,
                each.used.bandwidth,
                each.other.cpu,
                each.other.memory,
            )
            for each in sample.nodes
        ],
    }
    return [
        (
            f"INSERT INTO {table} (topology, {', '.join(columns)}) "
            f"VALUES ({', '.join('?' * (len(columns) + 1))}) ON CONFLICT DO NOTHING",
            [(sample.topology, sample.ended, *row) for row in rows[table]],
        )
        for table, columns in _TABLES.items()
        if rows[table]
    ]


def _prunes(sample: MonitorSample, keep: float) -> list[Statement]:
    before = [(sample.topology, sample.ended - keep)]
    return [(f"DELETE FROM {table} WHERE topology = ? AND ended < ?", before) for table in _TABLES]
