"""Windows of the load monitor in a database: SQLite, or PostgreSQL with ``pip install "penstock[postgres]"``.

Written by a thread of its own. What does not get through in time is dropped, counted and told: a slow database
holds up nothing.
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

_WAITING = (
    8  # load samples: minutes of an outage. A load sample of thousands of executors has megabytes of streams
)
_PATIENCE = 5.0  # seconds SQLite waits for another program's write lock
_LAST = 5.0  # seconds the end of a topology waits for what is not written yet

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
"""Each with ``topology`` before. Cores, bytes, tuples and bytes a second; ``ended`` in seconds since 1970."""
_KEYS = {
    "penstock_load_samples": "topology, ended",
    "penstock_executor_loads": "topology, ended, executor",
    "penstock_stream_loads": "topology, ended, source, target",
    "penstock_node_loads": "topology, ended, node",
}
_TEXTS = ("topology", "executor", "component", "node", "source", "target")


Statement = tuple[str, Sequence[Sequence[Any]] | None]
"""With the rows it is run for, ``?`` for each value; None: once, without any."""


class Database(Protocol):
    """Called by the store's thread only."""

    def run(self, statements: Iterable[Statement]) -> None:
        """All of them in one transaction. Connects where it must."""

    def close(self) -> None: ...


class LoadStore:
    """``put`` never waits. ``keep``: seconds after which a load sample is deleted."""

    def __init__(self, database: Database, keep: float) -> None:
        self.written = self.dropped = 0
        self.error = ""
        """Why the last load sample that was not written was not; empty once one is."""
        self._database, self._keep = database, keep
        self._queue: queue.Queue[MonitorSample | None] = queue.Queue(_WAITING)
        self._created = False
        self._thread = threading.Thread(target=self._work, name="load-store", daemon=True)
        self._thread.start()

    def put(self, sample: MonitorSample) -> None:
        try:
            self._queue.put_nowait(sample)
        except queue.Full:
            self._drop(f"{_WAITING} load samples wait to be written")

    def close(self) -> None:
        """Writes what waits, for a few seconds."""
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=_LAST)
        self._thread.join(_LAST)

    def flush(self) -> None:
        """Wait until all that was put is written or dropped; for tests and programs that read the tables."""
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
        except Exception as error:  # whatever a driver raises; the topology must not care
            self._database.close()
            self._drop(described(error))
            return
        self.written += 1
        self.error = ""

    def _drop(self, why: str) -> None:
        self.dropped += 1
        if not self.error:  # said once an outage
            log.warning("the load monitor's load sample is not kept: %s", why)
        self.error = why


def open_store(target: str, folder: str, keep: float) -> LoadStore | None:
    """As the setting ``monitor`` says; None: nothing is kept. ``folder`` is the state directory. The database need
    not be up yet. Raises what will not get better by waiting."""
    if target in ("off", "memory"):
        return None
    if target.startswith(("postgresql://", "postgres://", "${")):
        return LoadStore(Postgres(target), keep)
    if target == "sqlite":
        if "://" in folder:
            raise SettingError(
                "setting monitor.store",
                f"sqlite needs delivery.state_dir on a local disk, and that is {folder}",
                "Name a file, or a database as postgresql://…",
            )
        StateStore(folder).check_owner()
        target = os.path.join(folder, "load.sqlite")
    elif "://" in target or not os.path.splitext(target)[1]:
        raise SettingError(
            "setting monitor.store",
            f"{target!r} is neither off, memory, sqlite, a file with a suffix nor postgresql://…",
            "Try sqlite.",
        )
    return LoadStore(SQLite(target), keep)


class SQLite:
    """A file in WAL mode: readers neither wait nor hold up. Not flushed to disk at each commit: a power cut may
    take the newest load samples along, and nothing else."""

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(path)
        self._connection: sqlite3.Connection | None = None

    def run(self, statements: Iterable[Statement]) -> None:
        if self._connection is None:
            make_folders(Path(self.path).parent)
            # For its owner alone; SQLite gives the files beside it the same mode.
            os.close(open_here(Path(self.path), os.O_RDWR | os.O_CREAT))
            self._connection = sqlite3.connect(self.path, timeout=_PATIENCE, isolation_level=None)
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
    def __init__(self, dsn: str) -> None:
        try:
            import psycopg  # noqa: F401 - whether it is there
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
            postgres_rows.lock_creation(cursor.execute)  # short, and other topologies create the same tables
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
