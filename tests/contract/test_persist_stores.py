"""The contract of every store of the delayed persistent queue, as one suite over all of them.

A store takes part by a ``Target``, which defines how a user creates it and how an outside reader reads the visible
rows.
"""

from __future__ import annotations

import contextlib
import datetime
import decimal
import math
import multiprocessing
import os
import pickle
import random
import resource
import signal
import sqlite3
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest

from penstock.persist.parquet import ParquetStore
from penstock.persist.postgres import PostgresStore
from penstock.persist.sqlite import SQLiteStore
from penstock.persist.stores import Overtaken, Store, StoreClient, StoreUnavailable
from penstock.storage.tables import Rejected
from penstock.testing.servers.postgres import PostgresServer, _children

psycopg = pytest.importorskip("psycopg")

Row = tuple[Any, ...]
KINDS = ("sqlite", "postgres", "parquet")
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([__name__])


class Target:
    """A place to write to; ``columns`` are the columns that ``visible`` shows."""

    columns: Sequence[str] = ("word", "count")

    def store(self, **options: Any) -> Store:
        raise NotImplementedError

    def visible(self) -> list[Row]:
        """The rows that any reader sees, in the order in which they were appended; with a key, sorted."""
        raise NotImplementedError


class SQLiteTarget(Target):
    def __init__(self, folder: Path, table: str) -> None:
        self.path, self.table = folder / "new" / "folders" / "results.db", table

    def store(self, **options: Any) -> Store:
        return SQLiteStore(self.path, self.table, **{"timeout": 1.0, **options})

    def execute(self, statement: str) -> list[Row]:
        with contextlib.closing(sqlite3.connect(self.path)) as connection, connection:
            return connection.execute(statement).fetchall()

    def visible(self) -> list[Row]:
        names = ", ".join(quoted(name) for name in self.columns)
        tables = [name for (name,) in self.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return self.execute(f"SELECT {names} FROM {quoted(self.table)}") if self.table in tables else []


class PostgresTarget(Target):
    """A separate schema, because the tests share the server."""

    def __init__(self, server: PostgresServer, table: str) -> None:
        self.server, self.table = server, table
        self.schema = f"s{uuid.uuid4().hex}"
        self.dsn = f"{server.dsn} options='-c search_path={self.schema}'"
        self.execute(f"CREATE SCHEMA {self.schema}")

    def store(self, **options: Any) -> Store:
        return PostgresStore(self.dsn, self.table, **options)

    def execute(self, statement: str, values: Sequence[Any] | None = None) -> list[Row]:
        with psycopg.connect(self.dsn) as connection:
            cursor = connection.execute(statement, values)
            return cursor.fetchall() if cursor.description else []

    def visible(self) -> list[Row]:
        if self.execute("SELECT to_regclass(%s)", (quoted(self.table),)) == [(None,)]:
            return []
        names = ", ".join(quoted(name) for name in self.columns)
        return self.execute(f"SELECT {names} FROM {quoted(self.table)} ORDER BY ctid")


class ParquetTarget(Target):
    def __init__(self, folder: Path) -> None:
        self.folder = folder / "new" / "folder"

    def store(self, **options: Any) -> Store:
        options.pop("timeout", None)  # this store waits for nobody
        return ParquetStore(self.folder, **options)

    def visible(self) -> list[Row]:
        if not self.folder.exists():
            return []
        files = sorted(pyarrow.dataset.dataset(self.folder, format="parquet").files)
        return [
            tuple(row[name] for name in self.columns) for file in files for row in pq.read_table(file).to_pylist()
        ]


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


@pytest.fixture
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Any]:
    """A target of some kind, with its own place."""

    def target(kind: str, table: str = "") -> Target:
        table = table or f"t{uuid.uuid4().hex}"
        if kind == "sqlite":
            return SQLiteTarget(tmp_path, table)
        if kind == "postgres":
            return PostgresTarget(request.getfixturevalue("postgres"), table)
        return ParquetTarget(tmp_path)

    return target


@pytest.fixture(params=KINDS)
def target(request: pytest.FixtureRequest, make: Any) -> Target:
    made: Target = make(request.param)
    return made


@pytest.fixture
def opened() -> Iterator[Callable[[Store], StoreClient]]:
    """Opens a store as the processor does, from a pickle."""
    clients = []

    def open_it(store: Store) -> StoreClient:
        store.check("here")
        clients.append(pickle.loads(pickle.dumps(store)).open())
        return clients[-1]

    yield open_it
    for client in clients:
        client.close()


def words(*rows: tuple[Any, Any]) -> pa.Table:
    return pa.table({"word": [word for word, _ in rows], "count": [count for _, count in rows]})


def no_reject(rejected: Sequence[Rejected]) -> None:
    raise AssertionError(f"rejected: {rejected}")


def write(client: StoreClient, rows: pa.Table, before: str, after: str, queue: str = "q") -> list[Rejected]:
    """Writes rows and returns those that were rejected."""
    calls: list[Sequence[Rejected]] = []
    client.write(queue, rows, before, after, calls.append)
    assert len(calls) <= 1
    return list(calls[0]) if calls else []


# -- rows and progress


def test_rows_and_progress_are_written_together(target: Target, opened: Any) -> None:
    client = opened(target.store())
    assert client.progress("q") == ""
    client.write("q", words(("a", 1), ("b", 2)), "", "one", no_reject)
    assert target.visible() == [("a", 1), ("b", 2)]
    assert client.progress("q") == "one"
    client.write("q", words(("a", 3)), "one", "two", no_reject)
    assert target.visible() == [("a", 1), ("b", 2), ("a", 3)]
    assert opened(target.store()).progress("q") == "two"


def test_no_rows_change_the_progress_alone(target: Target, opened: Any) -> None:
    client = opened(target.store())
    client.write("q", pa.table({}), "", "one", no_reject)
    client.write("q", words(("a", 1)).slice(0, 0), "one", "two", no_reject)
    assert client.progress("q") == "two"
    assert target.visible() == []
    client.write("q", words(("a", 1)), "two", "three", no_reject)
    client.write("q", pa.table({}), "three", "four", no_reject)
    assert (target.visible(), client.progress("q")) == ([("a", 1)], "four")


def test_queues_have_a_progress_each_and_share_the_rows(target: Target, opened: Any) -> None:
    names = ["t/c", 'it\'s "odd" ⟨ü⟩', "../%2F_-.", "Q"]
    client = opened(target.store())
    for number, name in enumerate(names):
        client.write(name, words((name, number)), "", f"p{number}", no_reject)
    again = opened(target.store())
    assert [again.progress(name) for name in names] == [f"p{number}" for number in range(4)]
    assert again.progress("q") == ""
    assert target.visible() == [(name, number) for number, name in enumerate(names)]


def test_who_was_overtaken_writes_nothing(target: Target, opened: Any) -> None:
    one, two = opened(target.store()), opened(target.store())
    assert (one.progress("q"), two.progress("q")) == ("", "")
    one.write("q", words(("a", 1)), "", "one", no_reject)
    for before in ("", "zero"):
        with pytest.raises(Overtaken, match=r"another processor also writes for 'q'"):
            two.write("q", words(("a", 1)), before, "one", no_reject)
    assert target.visible() == [("a", 1)]
    assert two.progress("q") == "one"
    two.write("q", words(("b", 2)), "one", "two", no_reject)
    with pytest.raises(Overtaken):
        one.write("q", pa.table({}), "one", "two", no_reject)
    assert target.visible() == [("a", 1), ("b", 2)]


def test_of_two_at_the_same_moment_one_writes(target: Target, opened: Any) -> None:
    rounds, together = 40, threading.Barrier(2, timeout=60)
    # The file is created before, because two processes that create it at the same time may both have to retry.
    assert opened(target.store()).progress("q") == ""

    def work() -> list[str]:
        client, outcomes = target.store(timeout=30).open(), []
        for number in range(rounds):
            before = client.progress("q")
            together.wait()
            try:
                client.write("q", words(("w", 2 * number), ("w", 2 * number + 1)), before, f"{number}", no_reject)
                outcomes.append("written")
            except Overtaken:
                outcomes.append("overtaken")
            together.wait()
        client.close()
        return outcomes

    with ThreadPoolExecutor(2) as beside:
        one, two = (beside.submit(work) for _ in range(2))
        pairs = list(zip(one.result(), two.result(), strict=True))
    assert [sorted(pair) for pair in pairs] == [["overtaken", "written"]] * rounds
    assert target.visible() == [("w", n) for n in range(2 * rounds)]


def take_turns(store: Store, queue: str, rounds: int) -> None:
    """Writes repeatedly, as one of several processors: after an error it reads the queue's progress."""
    client = store.open()
    while True:
        with contextlib.suppress(Overtaken, StoreUnavailable):
            before = client.progress(queue)
            while (done := int(before or 0)) < rounds:
                rows = words((queue, 2 * done), (queue, 2 * done + 1))
                client.write(queue, rows, before, str(done + 1), no_reject)
                before = str(done + 1)
            client.close()
            return


def test_processes_write_each_row_once_two_for_a_queue(target: Target) -> None:
    """Two queues write to one place, each by two processes."""
    processes = [FORKS.Process(target=take_turns, args=(target.store(), queue, 30)) for queue in "vwvw"]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    for queue in "vw":
        assert [row for row in target.visible() if row[0] == queue] == [(queue, n) for n in range(60)]


# -- append and upsert


def test_of_each_key_the_row_put_last_is_there(target: Target, opened: Any) -> None:
    client = opened(target.store(key=["word"]))
    client.write("q", words(("a", 1), ("b", 1), ("a", 2), ("a", 3), ("c", 1)), "", "one", no_reject)
    assert sorted(target.visible()) == [("a", 3), ("b", 1), ("c", 1)]
    client.write("q", words(("b", 5), ("d", 1), ("b", 4), ("a", 9), ("a", 0)), "one", "two", no_reject)
    assert sorted(target.visible()) == [("a", 0), ("b", 4), ("c", 1), ("d", 1)]
    again = opened(target.store(key=["word"]))
    again.write("q", words(("c", None)), "two", "three", no_reject)
    assert sorted(target.visible(), key=str) == [("a", 0), ("b", 4), ("c", None), ("d", 1)]


def test_one_key_ten_thousand_times(target: Target, opened: Any) -> None:
    client = opened(target.store(key=["word"]))
    client.write("q", words(*(("a", n) for n in range(10_000))), "", "one", no_reject)
    assert target.visible() == [("a", 9999)]


def test_a_key_of_several_columns_and_of_all_columns(make: Any, opened: Any) -> None:
    for kind in KINDS:
        target = make(kind)
        client = opened(target.store(key=["count", "word"]))
        client.write("q", words(("a", 1), ("a", 2), ("a", 1)), "", "one", no_reject)
        client.write("q", words(("b", 1), ("a", 2)), "one", "two", no_reject)
        assert sorted(target.visible()) == [("a", 1), ("a", 2), ("b", 1)], kind


def test_a_key_of_lists_is_slow_but_right(target: Target, opened: Any) -> None:
    """Arrow does not group by them, and not every database supports a nested value as a key."""
    client = opened(target.store(key=["word"]))
    lists = pa.table({"word": [[1], [2], [1]], "count": [1, 2, 3]})
    if isinstance(target, ParquetTarget):
        with pytest.raises(StoreUnavailable, match="list"):
            client.write("q", lists, "", "one", no_reject)
        return
    client.write("q", lists, "", "one", no_reject)
    assert sorted(count for _, count in target.visible()) == [2, 3]


# -- rejected rows


def half(rows: Sequence[tuple[str, float]]) -> pa.Table:
    """The column has integers since the first write, so a value with a fraction is rejected."""
    return words(*((word, float(count)) for word, count in rows))


GOOD = [(f"w{n}", n) for n in range(10)]


@pytest.mark.parametrize("key", [(), ("word",)], ids=["append", "upsert"])
@pytest.mark.parametrize("bad", [[0], [5], [9], [0, 9], [3, 4, 7], list(range(10))], ids=str)
def test_rejected_rows_are_left_out_and_all_others_are_in(
    target: Target, opened: Any, bad: list[int], key: tuple[str, ...]
) -> None:
    client = opened(target.store(key=key))
    client.write("q", words(("first", 0)), "", "one", no_reject)
    rows = [(word, count + 0.5 if count in bad else count) for word, count in GOOD]
    rejected = write(client, half(rows), "one", "two")
    assert [each.row for each in rejected] == bad
    assert all(each.error for each in rejected)
    assert sorted(target.visible()) == sorted([("first", 0), *(row for row in GOOD if row[1] not in bad)])
    assert client.progress("q") == "two"
    client.write("q", words(("last", 99)), "two", "three", no_reject)
    assert ("last", 99) in target.visible()


def test_many_rejected_rows_are_found_among_many(target: Target, opened: Any) -> None:
    client = opened(target.store())
    client.write("q", words(("first", 0)), "", "one", no_reject)
    draw = random.Random(3)
    bad = sorted(draw.sample(range(3000), 60))
    rows = [("w", n + 0.5 if n in bad else n) for n in range(3000)]
    assert [each.row for each in write(client, half(rows), "one", "two")] == bad
    assert [count for _, count in target.visible()] == [0] + [n for n in range(3000) if n not in bad]


def test_before_a_rejected_row_an_earlier_one_of_its_key_counts(target: Target, opened: Any) -> None:
    client = opened(target.store(key=["word"]))
    client.write("q", words(("a", 0), ("b", 0)), "", "one", no_reject)
    rejected = write(client, half([("a", 1), ("b", 1), ("a", 2), ("a", 2.5), ("b", 1.5)]), "one", "two")
    assert [each.row for each in rejected] == [3, 4]
    assert sorted(target.visible()) == [("a", 2), ("b", 1)]


def test_a_row_without_a_key_is_rejected(target: Target, opened: Any) -> None:
    client = opened(target.store(key=["word"]))
    assert [each.row for each in write(client, words(("a", 1), (None, 2), ("b", 3), (None, 4)), "", "one")] == [
        1,
        3,
    ]
    assert sorted(target.visible()) == [("a", 1), ("b", 3)]


def test_an_integer_key_of_none_is_not_numbered_by_the_store(target: Target, opened: Any) -> None:
    target.columns = ("number", "count")
    client = opened(target.store(key=["number"]))
    rows = pa.table({"number": pa.array([7, None], pa.int64()), "count": [1, 2]})
    rejected = write(client, rows, "", "one")
    assert [(each.row, each.error) for each in rejected] == [(1, "None in the key's column 'number'")]
    assert target.visible() == [(7, 1)]


def test_rejected_rows_are_told_before_anything_is_visible(target: Target, opened: Any) -> None:
    client, reader = opened(target.store()), opened(target.store())
    client.write("q", words(("a", 0)), "", "one", no_reject)
    seen = []

    def reject(rejected: Sequence[Rejected]) -> None:
        seen.append((target.visible(), reader.progress("q")))

    client.write("q", half([("b", 1), ("c", 1.5)]), "one", "two", reject)
    assert seen == [([("a", 0)], "one")]
    assert target.visible() == [("a", 0), ("b", 1)]


def test_nothing_is_written_when_the_rejected_rows_cannot_be_kept(target: Target, opened: Any) -> None:
    client = opened(target.store())
    client.write("q", words(("a", 0)), "", "one", no_reject)

    def reject(rejected: Sequence[Rejected]) -> None:
        raise OSError("no space for dead letters")

    rows = half([("b", 1), ("c", 1.5)])
    with pytest.raises(OSError, match="no space for dead letters"):
        client.write("q", rows, "one", "two", reject)
    assert (target.visible(), client.progress("q")) == ([("a", 0)], "one")
    assert len(write(client, rows, "one", "two")) == 1
    assert target.visible() == [("a", 0), ("b", 1)]


# -- a process killed during a write


ROWS, KEYS = 20, 7  # of the process that is killed: rows per write, and different keys


def written_by(number: int) -> list[tuple[str, float]]:
    """The rows of write ``number``; after the first write some are bad."""
    rows = range(number * ROWS, (number + 1) * ROWS)
    return [(f"w{n % KEYS}", n + 0.5 if number and n % 9 == 4 else n) for n in rows]


def keep_writing(store: Store, heard: Connection) -> None:
    client = store.open()
    before = client.progress("q")
    while True:
        done = int(before or 0)
        rows = half(written_by(done)) if done else words(*written_by(done))
        heard.send(("writing", done))
        client.write("q", rows, before, str(done + 1), lambda _, done=done: heard.send(("rejecting", done)))
        before = str(done + 1)
        heard.send(("written", done + 1))


@pytest.mark.parametrize("key", [(), ("word",)], ids=["append", "upsert"])
def test_a_writer_killed_anywhere_leaves_whole_writes(target: Target, opened: Any, key: tuple[str, ...]) -> None:
    """kill -9 during a write, repeatedly. After each kill, rows and progress agree, and nothing that was
    acknowledged is missing."""
    store = target.store(key=key)
    draw = random.Random(11)
    expected: list[tuple[str, float]] = []
    number = 0
    for _ in range(15):
        ours, theirs = FORKS.Pipe(duplex=False)
        process = FORKS.Process(target=keep_writing, args=(store, theirs))
        process.start()
        theirs.close()
        for _ in range(draw.randrange(1, 9)):
            said, at_least = ours.recv()
        process.join(draw.uniform(0, 0.012))  # for a random moment, to hit any step of the next write
        process.kill()
        process.join()
        with contextlib.suppress(EOFError):
            while True:
                said, at_least = ours.recv()
        progress = opened(store).progress("q")
        done = int(progress or 0)
        assert at_least <= done <= at_least + (said != "written"), (said, at_least)
        for each in range(number, done):
            expected += [(word, count) for word, count in written_by(each) if count == int(count)]
        number = done
        if key:
            assert sorted(target.visible()) == sorted(dict(expected).items())
        else:
            assert target.visible() == expected
    assert number > 15


# -- values


MOMENT = datetime.datetime(2024, 2, 29, 12, 30, 15, 123456)
VALUES = {
    "text": pa.array(["", "tab\t, line\n, \\N, \\., \"quotes\", 'x' ⟨ü⟩ 🎈", None]),
    "large": pa.array(["x", "y", None], pa.large_string()),
    "yes": pa.array([True, False, None]),
    "number": pa.array([-(2**63), 2**63 - 1, None]),
    "small": pa.array([0, 255, None], pa.uint8()),
    "real": pa.array([0.1, -math.inf, None]),
    "single": pa.array([0.5, math.inf, None], pa.float32()),
    "money": pa.array([decimal.Decimal("1.50"), decimal.Decimal("-3.25"), None]),
    "day": pa.array([MOMENT.date(), datetime.date(1, 1, 1), None]),
    "time": pa.array([MOMENT.time(), datetime.time(0), None]),
    "local": pa.array([MOMENT, datetime.datetime(1970, 1, 1), None]),
    "berlin": pa.array([MOMENT.replace(tzinfo=datetime.UTC), None, None], pa.timestamp("us", "Europe/Berlin")),
    "lasts": pa.array([datetime.timedelta(days=1, microseconds=1), datetime.timedelta(0), None]),
    "bytes": pa.array([b"\x00\\\xff", b"", None]),
    "list": pa.array([[1, 2], [], None]),
    "struct": pa.array([{"a": "ü", "b": [None]}, {"a": None, "b": None}, None]),
    "coded": pa.array(["a", "a", None]).dictionary_encode(),
    'odd "name", select; --': pa.array([1, 2, None]),
}
IN_SQLITE = {
    "yes": [1, 0, None],
    "money": ["1.50", "-3.25", None],
    "day": ["2024-02-29", "0001-01-01", None],
    "time": ["12:30:15.123456", "00:00:00.000000", None],
    "local": ["2024-02-29 12:30:15.123456", "1970-01-01 00:00:00.000000", None],
    "berlin": ["2024-02-29 12:30:15.123456Z", None, None],
    "lasts": [86_400_000_001, 0, None],
    "list": ["[1, 2]", "[]", None],
    "struct": ['{"a": "\\u00fc", "b": [null]}', '{"a": null, "b": null}', None],
}


@pytest.mark.parametrize("key", [(), ('odd "name", select; --', "text")], ids=["append", "upsert"])
def test_every_type_arrives(target: Target, opened: Any, key: tuple[str, ...]) -> None:
    target.columns = tuple(VALUES)
    client = opened(target.store(key=key))
    rows = pa.table(VALUES).slice(0, 2 if key else 3)
    client.write("q", rows, "", "one", no_reject)
    found = sorted(target.visible(), key=lambda row: str(row[0]) or " ")
    assert len(found) == rows.num_rows
    for place, (name, column) in enumerate(VALUES.items()):
        values = IN_SQLITE.get(name) if isinstance(target, SQLiteTarget) else None
        values = (values or column.to_pylist())[: rows.num_rows]
        order = sorted(range(rows.num_rows), key=lambda n: str(VALUES["text"][n].as_py()) or " ")
        assert [row[place] for row in found] == [values[n] for n in order], name


def test_nan_is_nan_where_there_is_one(target: Target, opened: Any) -> None:
    opened(target.store()).write("q", words(("a", math.nan)), "", "one", no_reject)
    ((_, found),) = target.visible()
    assert found is None if isinstance(target, SQLiteTarget) else math.isnan(found)


def test_a_nul_character_is_kept_or_its_row_rejected(target: Target, opened: Any) -> None:
    rejected = write(opened(target.store()), words(("a", 1), ("x\0y", 2), ("b", 3)), "", "one")
    if isinstance(target, PostgresTarget):  # PostgreSQL does not support this character
        assert [each.row for each in rejected] == [1]
        assert target.visible() == [("a", 1), ("b", 3)]
    else:
        assert rejected == []
        assert target.visible() == [("a", 1), ("x\0y", 2), ("b", 3)]


def test_a_field_of_nothing_but_none_gets_its_values_later(target: Target, opened: Any) -> None:
    client = opened(target.store())
    client.write("q", words(("a", None)), "", "one", no_reject)
    client.write("q", words(("b", "x")), "one", "two", no_reject)
    client.write("q", words(("c", None)), "two", "three", no_reject)
    if isinstance(target, ParquetTarget):  # merges the schemas, as a reader does for a field that was added later
        files = sorted(pyarrow.dataset.dataset(target.folder, format="parquet").files)
        rows = pa.concat_tables(map(pq.read_table, files), promote_options="default")
        assert rows.to_pydict() == {"word": ["a", "b", "c"], "count": [None, "x", None]}
    else:
        assert target.visible() == [("a", None), ("b", "x"), ("c", None)]


def test_columns_may_come_in_another_order_and_be_missing(target: Target, opened: Any) -> None:
    client = opened(target.store())
    client.write("q", words(("a", 1)), "", "one", no_reject)
    client.write("q", pa.table({"count": [2], "word": ["b"]}), "one", "two", no_reject)
    client.write("q", pa.table({"word": ["c"]}), "two", "three", no_reject)
    assert target.visible() == [("a", 1), ("b", 2), ("c", None)]


@pytest.mark.parametrize("table", ['it\'s "odd", select; --', "Ünï cödé", "%s {} %(x)s"])
@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
@pytest.mark.parametrize("key", [(), ('a "b"',)], ids=["append", "upsert"])
def test_tables_and_columns_may_have_any_name(
    make: Any, opened: Any, kind: str, table: str, key: tuple[str, ...]
) -> None:
    target = make(kind, f"{table}{uuid.uuid4().hex}")
    target.columns = ('a "b"', "%s {}")
    client = opened(target.store(key=key))
    client.write("q", pa.table({'a "b"': ["x"], "%s {}": [1]}), "", "one", no_reject)
    client.write("q", pa.table({'a "b"': ["y"], "%s {}": [2]}), "one", "two", no_reject)
    assert sorted(target.visible()) == [("x", 1), ("y", 2)]


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_columns_choose_and_rename(make: Any, opened: Any, kind: str) -> None:
    target = make(kind)
    target.columns = ("term", "n")
    client = opened(target.store(columns={"count": "n", "word": "term"}, key=["term"]))
    rows = words(("a", 1)).append_column("other", pa.array([9]))
    client.write("q", rows, "", "one", no_reject)
    client.write("q", words(("a", 2)), "one", "two", no_reject)
    assert target.visible() == [("a", 2)]
    with pytest.raises(StoreUnavailable, match=r"the rows \(word\) have no field count"):
        client.write("q", pa.table({"word": ["b"]}), "two", "three", no_reject)
    assert client.progress("q") == "two"


# -- unavailable stores


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_a_field_the_table_lacks_waits_for_the_operator(make: Any, opened: Any, kind: str) -> None:
    target = make(kind)
    client = opened(target.store())
    client.write("q", words(("a", 1)), "", "one", no_reject)
    rows = words(("b", 2)).append_column("novel", pa.array([3]))
    with pytest.raises(StoreUnavailable, match=r"column.*novel.*wait in the queue"):
        client.write("q", rows, "one", "two", no_reject)
    assert (target.visible(), client.progress("q")) == ([("a", 1)], "one")
    target.execute(f"ALTER TABLE {quoted(target.table)} ADD COLUMN novel INTEGER")
    client.write("q", rows, "one", "two", no_reject)
    assert target.visible() == [("a", 1), ("b", 2)]


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_a_missing_table_and_a_key_without_a_constraint_wait_for_the_operator(
    make: Any, opened: Any, kind: str
) -> None:
    target = make(kind)
    client = opened(target.store(key=["word"], create=False))
    with pytest.raises(StoreUnavailable, match=target.table):
        client.write("q", words(("a", 1)), "", "one", no_reject)
    target.execute(f"CREATE TABLE {quoted(target.table)} (word TEXT, count INTEGER)")
    with pytest.raises(StoreUnavailable, match=r"ON CONFLICT"):
        client.write("q", words(("a", 1)), "", "one", no_reject)
    target.execute(f"CREATE UNIQUE INDEX {quoted('i' + target.table)} ON {quoted(target.table)} (word)")
    client.write("q", words(("a", 1), ("a", 2)), "", "one", no_reject)
    assert [each.row for each in write(client, words(("b", 1), (None, 2)), "one", "two")] == [1]
    assert sorted(target.visible()) == [("a", 2), ("b", 1)]


def test_a_key_the_rows_lack_waits_for_the_operator(target: Target, opened: Any) -> None:
    client = opened(target.store(key=["word"]))
    with pytest.raises(StoreUnavailable, match=r"the rows (?:have the fields )?\(count\)"):
        client.write("q", pa.table({"count": [1]}), "", "one", no_reject)
    assert client.progress("q") == ""


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_a_lock_held_by_another_program_is_waited_for_and_then_the_store_is_away(
    make: Any, opened: Any, kind: str
) -> None:
    target = make(kind)
    client = opened(target.store(timeout=0.3))
    client.write("q", words(("a", 1)), "", "one", no_reject)
    with contextlib.ExitStack() as stack:
        if kind == "sqlite":
            other = stack.enter_context(contextlib.closing(sqlite3.connect(target.path, isolation_level=None)))
            other.execute("BEGIN IMMEDIATE")
        else:
            other = stack.enter_context(psycopg.connect(target.dsn))
            other.execute(f"LOCK TABLE {target.table}")
        for _ in range(2):
            begin = time.monotonic()
            with pytest.raises(StoreUnavailable, match=r"locked|timeout"):
                client.write("q", words(("b", 2)), "one", "two", no_reject)
            assert 0.2 < time.monotonic() - begin < 5
    client.write("q", words(("b", 2)), "one", "two", no_reject)
    assert target.visible() == [("a", 1), ("b", 2)]


@contextlib.contextmanager
def files_no_larger_than(size: int) -> Iterator[None]:
    """Writes beyond this size fail, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("kind", ["sqlite", "parquet"])
@pytest.mark.parametrize("key", [(), ("word",)], ids=["append", "upsert"])
def test_a_full_disk_leaves_nothing_and_is_tried_again(
    make: Any, opened: Any, kind: str, key: tuple[str, ...]
) -> None:
    target = make(kind)
    client = opened(target.store(key=key))
    client.write("q", words(("a", 1)), "", "one", no_reject)
    draw = random.Random(1)
    many = [(f"{draw.random()}", n) for n in range(30_000)]
    with files_no_larger_than(100_000):
        for _ in range(2):
            with pytest.raises(StoreUnavailable, match=r"disk I/O error|full|File too large"):
                client.write("q", words(*many), "one", "two", no_reject)
            assert target.visible() == [("a", 1)]
            assert client.progress("q") == "one"
    if kind == "parquet":
        assert [path.name for path in target.folder.rglob("*.staged")] == []
    client.write("q", words(*many), "one", "two", no_reject)
    assert len(target.visible()) == 30_001


@contextlib.contextmanager
def without_rights(path: Path) -> Iterator[None]:
    """This process may not write there; since root may, it becomes the user nobody for a while."""
    mode = path.stat().st_mode
    path.chmod(0o500)
    if os.geteuid() == 0:
        os.seteuid(65534)
        try:
            yield
        finally:
            os.seteuid(0)
    else:
        yield
    path.chmod(mode)


@pytest.mark.parametrize("kind", ["sqlite", "parquet"])
def test_missing_rights_on_the_folder_wait_for_the_operator(
    make: Any, opened: Any, kind: str, tmp_path: Path
) -> None:
    target = make(kind)
    client = opened(target.store())
    with without_rights(tmp_path):
        for _ in range(2):
            with pytest.raises(StoreUnavailable, match=r"unable to open|PermissionError|Permission denied"):
                client.write("q", words(("a", 1)), "", "one", no_reject)
            with pytest.raises(StoreUnavailable, match=str(tmp_path)):
                client.progress("q")
    client.write("q", words(("a", 1)), "", "one", no_reject)
    assert target.visible() == [("a", 1)]


def test_a_path_that_is_something_else_is_named(tmp_path: Path, opened: Any) -> None:
    (tmp_path / "file").write_text("this is not a database, nor a folder; " * 100)
    for store, said in (
        (SQLiteStore(tmp_path / "file", "t"), "file is not a database"),
        (SQLiteStore(tmp_path, "t"), "unable to open database file"),
        (SQLiteStore(tmp_path / "file" / "x.db", "t"), "unable to open database file"),
        (ParquetStore(tmp_path / "file"), "Not a directory|FileExistsError"),
    ):
        with pytest.raises(StoreUnavailable, match=said):
            opened(store).write("q", words(("a", 1)), "", "one", no_reject)


# -- unavailable PostgreSQL servers


@pytest.fixture
def table(make: Any) -> PostgresTarget:
    made: PostgresTarget = make("postgres")
    return made


def test_a_server_killed_in_mid_write_and_started_again(table: PostgresTarget, opened: Any) -> None:
    client = opened(table.store(key=["word"]))
    client.write("q", words(("a", 0)), "", "one", no_reject)
    rows = half([("b", 1), ("c", 1.5)])
    try:
        with pytest.raises(
            StoreUnavailable, match=r"at 127\.0\.0\.1:\d+/postgres: PostgreSQL did not accept the rows"
        ):
            client.write("q", rows, "one", "two", lambda _: table.server.kill())
        for _ in range(2):
            with pytest.raises(StoreUnavailable, match="refused"):
                client.progress("q")
    finally:
        table.server.restart()
    assert client.progress("q") == "one"
    assert len(write(client, rows, "one", "two")) == 1
    assert sorted(table.visible()) == [("a", 0), ("b", 1)]


@contextlib.contextmanager
def paused(pids: Sequence[int]) -> Iterator[None]:
    def tell(number: signal.Signals) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # a session that was just ending when it was stopped
                os.kill(pid, number)

    tell(signal.SIGSTOP)
    try:
        yield
    finally:
        tell(signal.SIGCONT)


@pytest.mark.parametrize("whole", [False, True], ids=["session", "server"])
def test_a_server_that_hangs_is_left_in_time_and_gone_back_to(
    table: PostgresTarget, opened: Any, whole: bool
) -> None:
    store = PostgresStore(table.dsn + " connect_timeout=2", table.table, timeout=0.5)
    client = opened(store)
    client.write("q", words(("a", 1)), "", "one", no_reject)
    assert table.server._server is not None
    pids = [pid for (pid,) in table.execute("SELECT pid FROM pg_stat_activity WHERE query LIKE 'COMMIT%'")]
    assert pids
    if whole:
        pids = [table.server._server.pid, *_children(table.server._server.pid)]
    with paused(pids):
        begin = time.monotonic()
        with pytest.raises(StoreUnavailable, match=r"within 0\.5 s per statement \(no answer"):
            client.write("q", words(("b", 2)), "one", "two", no_reject)
        assert time.monotonic() - begin < 2
        if whole:
            begin = time.monotonic()
            with pytest.raises(StoreUnavailable):
                client.progress("q")
            assert time.monotonic() - begin < 5
    assert client.progress("q") == "one"
    client.write("q", words(("b", 2)), "one", "two", no_reject)
    assert table.visible() == [("a", 1), ("b", 2)]


def test_a_server_that_hangs_in_the_middle_of_copy_is_left_in_time(table: PostgresTarget, opened: Any) -> None:
    """The session is suspended after it has taken the lock: the client hangs while it sends."""
    client = opened(table.store(timeout=1.0))
    client.write("q", words(("a", 0)), "", "one", no_reject)
    query = "SELECT pid FROM pg_stat_activity WHERE query LIKE 'COMMIT%'"
    ((pid,),) = table.execute(query)
    table.execute(
        "CREATE OR REPLACE FUNCTION stop_here() RETURNS trigger LANGUAGE plpgsql AS $$"
        " BEGIN PERFORM pg_advisory_xact_lock(4711); RETURN NEW; END $$"
    )
    table.execute(
        f"CREATE TRIGGER stop_here BEFORE INSERT ON {table.table} FOR EACH ROW EXECUTE FUNCTION stop_here()"
    )
    many = words(*((f"{n:0100}", n) for n in range(100_000)))  # more than the buffers of the sockets hold
    with psycopg.connect(table.dsn) as other:
        other.execute("SELECT pg_advisory_xact_lock(4711)")
        waiting = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"

        def stop() -> None:
            while table.execute(waiting) != [(1,)]:
                pass
            os.kill(pid, signal.SIGSTOP)

        stopper = threading.Thread(target=stop)
        stopper.start()
        begin = time.monotonic()
        try:
            with pytest.raises(StoreUnavailable):
                client.write("q", many, "one", "two", no_reject)
        finally:
            stopper.join()
            os.kill(pid, signal.SIGCONT)
        assert time.monotonic() - begin < 4
    assert client.progress("q") == "one"
    client.write("q", words(("b", 1)), "one", "two", no_reject)
    assert table.visible() == [("a", 0), ("b", 1)]


def test_a_processor_that_stands_still_in_mid_write_gives_way(table: PostgresTarget, opened: Any) -> None:
    one, two = opened(table.store(timeout=0.5)), opened(table.store(timeout=0.5))
    one.write("q", words(("a", 0)), "", "one", no_reject)
    rows = half([("b", 1), ("c", 1.5)])
    attempts = []

    def stand_still(_: Sequence[Rejected]) -> None:
        while not attempts or attempts[-1]:
            try:
                write(two, rows, "one", "two")
                attempts.append("")
            except StoreUnavailable as error:
                attempts.append(str(error))

    with pytest.raises(StoreUnavailable):
        one.write("q", rows, "one", "two", stand_still)
    assert len(attempts) < 5
    with pytest.raises(Overtaken):
        one.write("q", rows, "one", "two", no_reject)
    assert table.visible() == [("a", 0), ("b", 1)]


@pytest.mark.parametrize(
    ("state", "rejected"),
    [
        *((state, True) for state in ("22001", "22P02", "23502", "23514", "44000", "54000", "P0001")),
        *((state, False) for state in ("08006", "28000", "3D000", "40001", "40P01", "42501", "42P01")),
        *((state, False) for state in ("53100", "53200", "53300", "55P03", "57014", "57P01", "58030", "XX000")),
    ],
)
def test_what_postgresql_says_tells_a_bad_row_from_a_bad_day(
    table: PostgresTarget, opened: Any, state: str, rejected: bool
) -> None:
    client = opened(table.store())
    client.write("q", words(("a", 1)), "", "one", no_reject)
    name = f"refuse_{state}".lower()
    table.execute(
        f"CREATE OR REPLACE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        f" IF NEW.word = 'bad' THEN RAISE EXCEPTION 'not this one' USING ERRCODE = '{state}'; END IF;"
        " RETURN NEW; END $$"
    )
    table.execute(f"CREATE TRIGGER x BEFORE INSERT ON {table.table} FOR EACH ROW EXECUTE FUNCTION {name}()")
    rows = words(("b", 2), ("bad", 3), ("c", 4))
    if rejected:
        ((row, error),) = [(each.row, each.error) for each in write(client, rows, "one", "two")]
        assert (row, error.splitlines()[0]) == (1, "not this one")
        assert table.visible() == [("a", 1), ("b", 2), ("c", 4)]
        return
    with pytest.raises(StoreUnavailable, match=rf"\(not this one(.|\n)*SQLSTATE {state}"):
        client.write("q", rows, "one", "two", no_reject)
    assert table.visible() == [("a", 1)]
    table.execute(f"DROP TRIGGER x ON {table.table}")
    client.write("q", rows, "one", "two", no_reject)
    assert table.visible() == [("a", 1), ("b", 2), ("bad", 3), ("c", 4)]


def test_a_key_too_long_for_an_index_is_rejected(table: PostgresTarget, opened: Any) -> None:
    draw = random.Random(2)
    long = "".join(draw.choices("abcdefghijklmnopqrstuvwxyz0123456789", k=20_000))
    rejected = write(opened(table.store(key=["word"])), words(("a", 1), (long, 2), ("b", 3)), "", "one")
    assert [each.row for each in rejected] == [1]
    assert sorted(table.visible()) == [("a", 1), ("b", 3)]


def test_keys_that_only_the_column_calls_equal_are_written_in_order(table: PostgresTarget, opened: Any) -> None:
    table.execute(f"CREATE TABLE {table.table} (word bigint PRIMARY KEY, count bigint)")
    client = opened(table.store(key=["word"]))
    client.write("q", words(("1", 1), ("2", 2), ("01", 3), ("001", 4)), "", "one", no_reject)
    assert sorted(table.visible()) == [(1, 4), (2, 2)]


def test_missing_rights_on_a_table_wait_for_the_operator(table: PostgresTarget, opened: Any) -> None:
    role = f"role_{uuid.uuid4().hex}"
    table.execute(f"CREATE ROLE {role} LOGIN; GRANT ALL ON SCHEMA {table.schema} TO {role}")
    table.execute(f"CREATE TABLE {table.table} (word text, count bigint)")
    client = opened(PostgresStore(table.dsn.replace("user=postgres", f"user={role}"), table.table))
    with pytest.raises(StoreUnavailable, match=rf"permission denied for table {table.table}.*SQLSTATE 42501"):
        client.write("q", words(("a", 1)), "", "one", no_reject)
    table.execute(f"GRANT INSERT ON {table.table} TO {role}")
    client.write("q", words(("a", 1)), "", "one", no_reject)
    assert table.visible() == [("a", 1)]


def test_a_widened_column_takes_at_once_what_it_refused(table: PostgresTarget, opened: Any) -> None:
    """The temporary table has the columns that the table has now."""
    client = opened(table.store(key=["word"]))
    client.write("q", pa.table({"word": ["a"], "count": pa.array([1], pa.int32())}), "", "one", no_reject)
    rows = words(("b", 2**40))
    assert [each.row for each in write(client, rows, "one", "two")] == [0]
    table.execute(f"ALTER TABLE {table.table} ALTER COLUMN count TYPE bigint")
    client.write("q", rows, "two", "three", no_reject)
    assert sorted(table.visible()) == [("a", 1), ("b", 2**40)]


def test_text_is_utf8_whatever_the_database_has(table: PostgresTarget, opened: Any) -> None:
    name = f"latin_{uuid.uuid4().hex}"
    with psycopg.connect(table.server.dsn, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0")
    dsn = table.server.dsn.replace("dbname=postgres", f"dbname={name}")
    client = opened(PostgresStore(dsn, "words"))
    assert [each.row for each in write(client, words(("ü", 1), ("⟨⟩", 2)), "", "one")] == [1]
    client.close()
    with psycopg.connect(dsn, client_encoding="utf8") as connection:
        assert connection.execute("SELECT * FROM words").fetchall() == [("ü", 1)]


def test_a_committed_write_is_durable_also_where_commits_are_not(table: PostgresTarget, opened: Any) -> None:
    client = opened(PostgresStore(f"{table.dsn[:-1]} -c synchronous_commit=off'", table.table))
    client.write("q", words(("a", 1)), "", "one", no_reject)
    assert client._session.execute("SHOW synchronous_commit").fetchone() == ("on",)
    table.server.restart()
    assert table.visible() == [("a", 1)]


def test_a_table_in_a_schema_of_its_own(table: PostgresTarget, opened: Any) -> None:
    table.execute(f'CREATE SCHEMA "Own{table.table}"')
    client = opened(PostgresStore(table.dsn, f"Own{table.table}.words", key=["word"]))
    client.write("q", words(("a", 1)), "", "one", no_reject)
    client.write("q", words(("a", 2)), "one", "two", no_reject)
    assert table.execute(f'SELECT * FROM "Own{table.table}".words') == [("a", 2)]
