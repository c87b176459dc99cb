"""The delayed persistent queue without a topology and without Spark: rows per second into each store, in bulk and
row by row, and throughput of the queues."""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import os
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.book import made_lines
from benchmarks.harness import Results, median, say
from penstock.clock import SystemClock
from penstock.errors import EnvironmentFault
from penstock.persist.embedded import EmbeddedQueue
from penstock.persist.entries import pack
from penstock.persist.memcached import MemcachedQueue
from penstock.persist.memory import MemoryQueue
from penstock.persist.parquet import ParquetStore
from penstock.persist.postgres import PostgresStore
from penstock.persist.processor import drained
from penstock.persist.queues import ENTRY_BYTES, PersistentQueue
from penstock.persist.spec import ProcessorSpec
from penstock.persist.sqlite import SQLiteStore
from penstock.persist.stores import Store
from penstock.testing.servers.memcached import MemcachedServer
from penstock.testing.servers.postgres import PostgresServer
from penstock.testing.servers.redis import RedisServer

ENTRY_ROWS = 1_000  # rows a writer puts at a time; a bolt under full load puts 16,384
_PATIENCE = 600.0  # seconds; far more than any run needs
_SMALL = 2_048  # bytes of an entry whose put is measured

Row = tuple[str, int, float]


# ---- stores --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """A kind of store: creates new tables or folders, and writes rows one by one as a plain user would."""

    name: str
    keyed: bool
    store: Callable[[str], Store]
    """Creates a store with a new name."""
    one_by_one: Callable[[str, Sequence[Row]], float]
    """Writes rows to the place with this name, each durably on its own. Returns the seconds."""

    def __str__(self) -> str:
        return f"{self.name}, {'upsert' if self.keyed else 'append'}"


def measure_stores(results: Results, options: argparse.Namespace) -> None:
    """Compare writing through the queue with one transaction per row, by turns. The time through the queue is the
    sum of putting the rows into an embedded queue and of a processor that empties it."""
    many, few = (20_000, 200) if options.quick else (200_000, 2_000)
    repeats = options.repeats or (1 if options.quick else 5)
    ratios: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="penstock-stores-") as root, contextlib.ExitStack() as servers:
        dsn = None
        try:
            dsn = servers.enter_context(PostgresServer()).dsn
        except EnvironmentFault as error:
            say(f"  without PostgreSQL: {error}")
        for target in targets(Path(root), dsn):
            bulk, single = [], []
            for number in range(repeats):
                name = f"t{number}_{'upsert' if target.keyed else 'append'}"
                bulk.append(many / delayed(Path(root) / f"{target}-{number}", target.store(f"bulk_{name}"), many))
                single.append(few / target.one_by_one(f"single_{name}", list(itertools.islice(rows(), few))))
                say(f"  {target}, repeat {number + 1}: {bulk[-1]:,.0f} rows/s, row by row {single[-1]:,.0f}")
            each = [ours / theirs for ours, theirs in zip(bulk, single, strict=True)]
            ratios[str(target)] = median(each)
            times = " ".join(f"{ratio:.0f}" for ratio in each)
            results.row(
                what=str(target), case="delayed", **{"rows/s": median(bulk), "×": median(each)}, turns=times
            )
            results.row(what=str(target), case="row by row", **{"rows/s": median(single)})
    if dsn is not None:
        worst = min(ratios["PostgreSQL, upsert"], ratios["PostgreSQL, append"])
        results.bar("delayed.vs_row_by_row", worst, "× row by row into PostgreSQL, the lower of upsert and append")


def targets(root: Path, dsn: str | None) -> Iterator[Target]:
    """All stores; those of PostgreSQL only if there is a server."""
    partial = functools.partial
    for key in (("word",), ()):
        keyed = bool(key)
        yield Target("SQLite", keyed, partial(_sqlite_store, root, key), partial(_sqlite_rows, root, keyed))
        if dsn is not None:
            store, one_by_one = partial(_postgres_store, dsn, key), partial(_postgres_rows, dsn, keyed)
            yield Target("PostgreSQL", keyed, store, one_by_one)
    # One file per row cannot have keys.
    yield Target("Parquet", False, lambda name: ParquetStore(root / name), partial(_parquet_rows, root))


def _sqlite_store(root: Path, key: Sequence[str], name: str) -> Store:
    return SQLiteStore(root / f"{name}.db", "results", key=key)


def _postgres_store(dsn: str, key: Sequence[str], name: str) -> Store:
    return PostgresStore(dsn, name, key=key)


def delayed(folder: Path, store: Store, count: int) -> float:
    """Seconds for this many rows through the queue into the store."""
    spec = ProcessorSpec("bench", "persist", EmbeddedQueue(), store, str(folder), str(folder), 1.0, 10_000, 60.0)
    clock, source = SystemClock(), rows()
    tables = [_table(list(itertools.islice(source, ENTRY_ROWS))) for _ in range(count // ENTRY_ROWS)]
    begun = time.perf_counter()
    writer = spec.queue.open(spec.name, spec.folder)
    incarnation = writer.register("bench/0")
    for number, table in enumerate(tables):
        writer.put([pack("bench/0", incarnation, number, table)])
    writer.close()
    processor = spec.processor(clock)
    if not drained(processor, clock.monotonic() + _PATIENCE, clock, time.sleep):
        raise SystemExit(f"{store}: not all rows written after {_PATIENCE:g} s: {processor.status.trouble}")
    took = time.perf_counter() - begun
    processor.close()
    if processor.status.written != len(tables) * ENTRY_ROWS:
        raise SystemExit(f"{store}: {processor.status}")
    return took


def rows() -> Iterator[Row]:
    """⟨word, count, time⟩ of a word count, endless."""
    words = " ".join(made_lines()).split(" ")
    counts: dict[str, int] = {}
    for word in itertools.cycle(words):
        counts[word] = counts.get(word, 0) + 1
        yield word, counts[word], time.time()


def _table(part: Sequence[Row]) -> pa.Table:
    words, counts, at = zip(*part, strict=True)
    return pa.table({"word": words, "count": counts, "time": at})


_UPSERT = " ON CONFLICT (word) DO UPDATE SET count = excluded.count, time = excluded.time"


def _sqlite_rows(root: Path, keyed: bool, name: str, part: Sequence[Row]) -> float:
    connection = sqlite3.connect(root / f"{name}.db", isolation_level=None)  # each statement is a transaction
    connection.execute("PRAGMA journal_mode = WAL")  # as in SQLiteStore: the fastest durable mode
    connection.execute("PRAGMA synchronous = FULL")
    key = "PRIMARY KEY" if keyed else ""
    connection.execute(f"CREATE TABLE results (word TEXT {key}, count INTEGER, time REAL)")
    statement = "INSERT INTO results VALUES (?, ?, ?)" + (_UPSERT if keyed else "")
    begun = time.perf_counter()
    for row in part:
        connection.execute(statement, row)
    took = time.perf_counter() - begun
    connection.close()
    return took


def _postgres_rows(dsn: str, keyed: bool, name: str, part: Sequence[Row]) -> float:
    import psycopg

    with psycopg.connect(dsn, autocommit=True) as connection:
        key = "PRIMARY KEY" if keyed else ""
        connection.execute(f"CREATE TABLE {name} (word text {key}, count bigint, time double precision)")
        statement = f"INSERT INTO {name} VALUES (%s, %s, %s)" + (_UPSERT if keyed else "")
        begun = time.perf_counter()
        for row in part:
            connection.execute(statement, row, prepare=True)
        return time.perf_counter() - begun


def _parquet_rows(root: Path, name: str, part: Sequence[Row]) -> float:
    folder = root / name
    folder.mkdir()
    begun = time.perf_counter()
    for number, row in enumerate(part):
        with open(folder / f"{number}.parquet", "wb") as file:
            pq.write_table(_table([row]), file)
            file.flush()
            os.fsync(file.fileno())
    return time.perf_counter() - begun


# ---- queues --------------------------------------------------------------------------------------------


def measure_queues(results: Results, options: argparse.Namespace) -> None:
    """Duration of a put of 2 KB, during which a bolt waits; and MB per second with large entries, in and out."""
    puts, large = (200, 16) if options.quick else (5_000, 48)  # 24 MB: memcached's queue holds 32
    repeats = options.repeats or (1 if options.quick else 3)
    with contextlib.ExitStack() as stack:
        root = stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-queues-"))
        servers = stack.enter_context(queue_servers())
        queues: dict[str, PersistentQueue] = {"embedded": EmbeddedQueue(), "memory": MemoryQueue(), **servers}
        if "memcached" in servers:
            three = [stack.enter_context(MemcachedServer()).address for _ in range(3)]
            queues |= {
                "memcached x3": MemcachedQueue(three),
                "memcached x3, twice": MemcachedQueue(three, copies=2),
            }
        found: dict[str, list[tuple[float, ...]]] = {name: [] for name in queues}
        for number in range(repeats):
            for name, mrwq in queues.items():
                found[name].append(queue_speed(mrwq, f"{root}/{number}-{name}", puts, large))
                p50, p95, into, out = found[name][-1]
                say(f"  {name}, repeat {number + 1}: put p50 {p50:.2f} ms, {into:,.0f} MB/s in, {out:,.0f} out")
            shutil.rmtree(MemoryQueue().open(f"{number}-memory", f"{root}/{number}-memory")._folder.parent)
    for name, values in found.items():
        p50, p95, into, out = (median(list(each)) for each in zip(*values, strict=True))
        results.row(
            what="put of 2 KB", case=name, **{"p50 ms": p50, "p95 ms": p95, "MB/s in": into, "MB/s out": out}
        )
        results.bar(f"queue.{name.replace(', ', '.').replace(' ', '.')}.put_p50_ms", p50, "ms for 2 KB")


def queue_speed(mrwq: PersistentQueue, folder: str, puts: int, large: int) -> tuple[float, float, float, float]:
    """p50 and p95 of the put latency in ms; then, with this many entries of the largest size, MB/s put, and MB/s
    read and released."""
    client = mrwq.open(os.path.basename(folder), folder)
    entry, took = os.urandom(_SMALL), []
    for _ in range(puts):
        begun = time.perf_counter()
        client.put([entry])
        took.append(time.perf_counter() - begun)
    _empty(mrwq, folder)
    entry = os.urandom(ENTRY_BYTES)
    begun = time.perf_counter()
    for _ in range(large):
        client.put([entry])
    into = time.perf_counter() - begun
    client.close()
    out = _empty(mrwq, folder)
    p50, p95 = np.percentile(took, [50, 95]) * 1000
    megabytes = large * ENTRY_BYTES / 1e6
    return float(p50), float(p95), megabytes / into, megabytes / out


def _empty(mrwq: PersistentQueue, folder: str) -> float:
    """Read and release all entries. Returns the seconds."""
    client = mrwq.open(os.path.basename(folder), folder)
    begun = time.perf_counter()
    while found := client.read(32):
        client.release(found[-1][0])
    took = time.perf_counter() - begun
    client.close()
    return took


@contextlib.contextmanager
def queue_servers() -> Iterator[dict[str, PersistentQueue]]:
    """Queues by name, on servers started for them. Prints which servers are not available."""
    from penstock.persist.redis import RedisQueue

    queues: dict[str, PersistentQueue] = {}
    with contextlib.ExitStack() as stack:
        try:
            queues["redis"] = RedisQueue(stack.enter_context(RedisServer()).url)
            queues["memcached"] = MemcachedQueue(stack.enter_context(MemcachedServer()).address)
        except EnvironmentFault as error:
            say(f"  without the queues that need a server: {error}")
        yield queues
