"""Stores of the delayed persistent queue: settings that are rejected, and the steps of the Parquet store."""

from __future__ import annotations

import json
import os
import pickle
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest

from penstock.errors import EnvironmentFault, TopologyError
from penstock.persist.parquet import ParquetStore
from penstock.persist.postgres import PostgresStore
from penstock.persist.sqlite import SQLiteStore
from penstock.persist.stores import Overtaken, StoreClient, StoreUnavailable
from penstock.storage.tables import Rejected


def no_reject(rejected: Sequence[Rejected]) -> None:
    raise AssertionError(f"rejected: {rejected}")


def write(client: StoreClient, before: str, after: str, **columns: Any) -> list[int]:
    """Writes rows and returns the indices of those that were rejected."""
    places: list[int] = []
    table = pa.table({name: pa.array(values) for name, values in columns.items()})
    client.write("q", table, before, after, lambda rejected: places.extend(each.row for each in rejected))
    return places


def read(folder: Path, *names: str) -> list[tuple[Any, ...]]:
    rows = pyarrow.dataset.dataset(folder, format="parquet", partitioning="hive").to_table().to_pylist()
    return [tuple(row[name] for name in names) for row in rows]


# -- rejected settings


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: SQLiteStore("x.db", "t", key="word"), r"key is 'word', not a sequence of different fields"),
        (lambda: SQLiteStore("x.db", "t", key=["a", "a"]), r"not a sequence of different fields"),
        (lambda: SQLiteStore("x.db", "t", columns="word"), r"columns is 'word', neither a sequence nor a mapping"),
        (lambda: PostgresStore("host=x", "t", columns={"a": "b"}, key=["a"]), r"names columns that are not among"),
        (lambda: SQLiteStore(":memory:", "t"), r"path is ':memory:', not a file on a local disk"),
        (lambda: SQLiteStore("s3://bucket/x.db", "t"), r"Use PostgresStore for several machines"),
        (
            lambda: ParquetStore("out", partition_by="day"),
            r"partition_by is 'day', not a sequence.* Write \['day'\]",
        ),
        (lambda: ParquetStore("s3://b/out", key=["a"]), r"does not replace a file in one step"),
        (lambda: ParquetStore("out", key=["a"], partition_by=["b"]), r"is not part of key="),
        (
            lambda: PostgresStore("no dsn", "t").check("component 'c'"),
            r"component 'c'.*dsn is not a connection string",
        ),
    ],
)
def test_what_cannot_work_is_refused_at_once(make: Any, problem: str) -> None:
    with pytest.raises(TopologyError, match=problem):
        make()


def test_relative_paths_are_the_drivers(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    stores = [SQLiteStore("a/x.db", "t"), ParquetStore("b")]
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for store in stores:
        write(pickle.loads(pickle.dumps(store)).open(), "", "one", n=[1])
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "elsewhere"]
    assert os.listdir(tmp_path / "elsewhere") == []


def test_stores_name_themselves_without_passwords() -> None:
    assert str(SQLiteStore("/x/y.db", "t")) == "SQLite table 't' in /x/y.db"
    assert str(ParquetStore("/x/y")) == "Parquet files in /x/y"
    store = PostgresStore("postgresql://me:geheim@db.example:5433/results", "t")
    assert str(store) == "PostgreSQL table 't' at db.example:5433/results"


def test_a_missing_library_is_named(monkeypatch: Any) -> None:
    with pytest.raises(EnvironmentFault, match=r"component 'c'.*Protocol not known: nowhere"):
        ParquetStore("nowhere://x").check("component 'c'")
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(EnvironmentFault, match=r'pip install "penstock\[postgres\]"'):
        PostgresStore("host=x", "t").check("component 'c'")


# -- SQLite


def test_an_integer_of_more_than_63_bits_is_rejected(tmp_path: Path) -> None:
    client = SQLiteStore(tmp_path / "x.db", "t").open()
    columns = {"n": pa.array([1, 2**64 - 1, 2**63 - 1], pa.uint64())}
    assert write(client, "", "one", **columns) == [1]
    client.close()


def test_readers_neither_wait_nor_hold_up(tmp_path: Path) -> None:
    import sqlite3

    client = SQLiteStore(tmp_path / "x.db", "t", timeout=0.1).open()
    write(client, "", "one", n=[1])
    reader = sqlite3.connect(tmp_path / "x.db", isolation_level=None, timeout=0.1)
    reader.execute("BEGIN")
    assert reader.execute("SELECT n FROM t").fetchall() == [(1,)]
    write(client, "one", "two", n=[2])
    assert reader.execute("SELECT n FROM t").fetchall() == [(1,)]
    reader.execute("COMMIT")
    assert reader.execute("SELECT n FROM t").fetchall() == [(1,), (2,)]
    reader.close()
    client.close()


# -- Parquet


class Crash(BaseException):
    """Stands for the end of the process."""


STEPS = ("_stage", "_record", "_rename")


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("key", [(), ("day", "n")], ids=["append", "upsert"])
def test_a_crash_in_any_gap_leaves_a_whole_write(
    tmp_path: Path, monkeypatch: Any, step: str, after: bool, key: tuple[str, ...]
) -> None:
    store = ParquetStore(tmp_path, key=key, partition_by=["day"])
    client: Any = store.open()
    write(client, "", "one", day=["mo", "tu"], n=[1, 2], v=[0, 0])
    original = getattr(client, step)

    def crash(*arguments: Any) -> Any:
        if after:
            original(*arguments)
        raise Crash

    monkeypatch.setattr(client, step, crash)
    with pytest.raises(Crash):
        write(client, "one", "two", day=["mo", "we", "mo"], n=[1, 3, 4], v=[1, 1, 1])
    done = (step, after) in {("_record", True), ("_rename", False), ("_rename", True)}
    again = store.open()
    assert again.progress("q") == ("two" if done else "one")
    if not done:
        assert sorted(read(tmp_path, "day", "n")) == [("mo", 1), ("tu", 2)]
        write(again, "one", "two", day=["mo", "we", "mo"], n=[1, 3, 4], v=[1, 1, 1])
    rows = [("mo", 1, 1), ("mo", 4, 1), ("tu", 2, 0), ("we", 3, 1)]
    assert sorted(read(tmp_path, "day", "n", "v")) == (rows if key else sorted([*rows, ("mo", 1, 0)]))
    write(again, "two", "three", day=["tu"], n=[9], v=[9])
    own = sorted(str(path.relative_to(tmp_path)) for path in (tmp_path / "_penstock").rglob("*") if path.is_file())
    assert own == ["_penstock/commits/000000000000003.json"]


_HERE = "_penstock/staged/000000000000002-0123abcd-0.staged"


@pytest.mark.parametrize(
    ("staged", "target"),
    [
        ("evil", "rows.parquet"),
        ("_penstock/staged/../../evil", "rows.parquet"),
        ("{outside}/evil", "rows.parquet"),
        (_HERE, "{outside}/rows.parquet"),
        (_HERE, "../rows.parquet"),
        (_HERE, "a=1/../../rows.parquet"),
        (_HERE, "a=1//rows.parquet"),
        (_HERE, ".bashrc"),
        (_HERE, "_penstock/commits/000000000000009.json"),
        (_HERE, "_penstock/rows.parquet"),
        (_HERE, ""),
        (_HERE, 3),
    ],
)
def test_a_record_of_somebody_else_moves_no_file(tmp_path: Path, staged: str, target: Any) -> None:
    """Records are not signed: anyone who can write to the folder can create one. All paths here stay in the test's
    own folder, even if the record is obeyed."""
    outside, folder = tmp_path / "outside", tmp_path / "some" / "where" / "out"
    outside.mkdir()
    (outside / "evil").write_text("theirs")
    staged = staged.format(outside=outside)
    target = target.format(outside=outside) if isinstance(target, str) else target
    store = ParquetStore(folder)
    write(store.open(), "", "one", n=[1])
    (folder / _HERE).write_text("theirs")
    (folder / "evil").write_text("theirs")
    [record] = (folder / "_penstock" / "commits").iterdir()
    made = json.loads(record.read_text()) | {"files": [[staged, target]]}
    record.with_name("000000000000002.json").write_text(json.dumps(made))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(StoreUnavailable, match=r"it would move .*, which is not one of this store's files"):
        store.open().progress("q")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_record_may_move_files_into_any_partition(tmp_path: Path) -> None:
    odd = ["..", "a/b", "", None, "ü"]
    store = ParquetStore(tmp_path, partition_by=["day", "a b"])
    write(store.open(), "", "one", day=odd, **{"a b": odd}, n=[1, 2, 3, 4, 5])
    assert store.open().progress("q") == "one"
    assert sorted(read(tmp_path, "n")) == [(1,), (2,), (3,), (4,), (5,)]


def test_readers_pass_over_what_is_staged(tmp_path: Path, monkeypatch: Any) -> None:
    client: Any = ParquetStore(tmp_path).open()
    write(client, "", "one", n=[1])
    seen = []
    record = client._record

    def look(commit: Any) -> Any:
        assert list(tmp_path.rglob("*.staged"))
        seen.append((read(tmp_path, "n"), len(list(tmp_path.rglob("*.parquet")))))
        return record(commit)

    monkeypatch.setattr(client, "_record", look)
    write(client, "one", "two", n=[2])
    assert seen == [([(1,)], 1)]


def test_a_processor_that_slept_through_several_writes_has_not_written(tmp_path: Path) -> None:
    """The number it needs next was used and removed meanwhile, so it is free again."""
    store = ParquetStore(tmp_path)
    slow, quick = store.open(), store.open()
    write(slow, "", "one", n=[1])

    def sleep(_: Sequence[Rejected]) -> None:
        for number in (2, 3, 4):
            write(quick, "one" if number == 2 else f"p{number - 1}", f"p{number}", n=[number])

    with pytest.raises(Overtaken):
        slow.write("q", pa.table({"n": [2, 2.5]}), "one", "p2", sleep)
    assert read(tmp_path, "n") == [(1,), (2,), (3,), (4,)]
    assert slow.progress("q") == store.open().progress("q") == "p4"
    assert len(list((tmp_path / "_penstock").rglob("*.json"))) == 1
    assert list(tmp_path.rglob("*.staged")) == []


def test_files_of_a_process_at_work_are_left_alone(tmp_path: Path, monkeypatch: Any) -> None:
    store = ParquetStore(tmp_path)
    slow: Any = store.open()
    write(slow, "", "one", n=[1])
    record = slow._record

    def look_in_between(commit: Any) -> Any:
        assert store.open().progress("q") == "one"  # completes the commit and removes the files
        return record(commit)

    monkeypatch.setattr(slow, "_record", look_in_between)
    write(slow, "one", "two", n=[2])
    assert read(tmp_path, "n") == [(1,), (2,)]


def test_a_write_of_another_queue_in_between_is_no_trouble(tmp_path: Path) -> None:
    store = ParquetStore(tmp_path, key=["n"])
    one, two = store.open(), store.open()
    write(one, "", "one", n=[1], v=["a"])
    calls = []

    def other(rejected: Sequence[Rejected]) -> None:
        calls.append([each.row for each in rejected])
        if len(calls) == 1:
            two.write("other", pa.table({"n": [1, 7], "v": ["x", "y"]}), "", "o", no_reject)

    one.write("q", pa.table({"n": [2, 2.5], "v": ["b", "c"]}), "one", "two", other)
    assert calls == [[1]]
    assert sorted(read(tmp_path, "n", "v")) == [(1, "x"), (2, "b"), (7, "y")]
    assert (one.progress("q"), one.progress("other")) == ("two", "o")


def test_what_one_committed_and_did_not_finish_the_next_finishes_whatever_its_queue(
    tmp_path: Path, monkeypatch: Any
) -> None:
    store = ParquetStore(tmp_path)
    one: Any = store.open()
    two = store.open()
    assert two.progress("other") == ""

    def crash(*arguments: Any) -> None:
        raise Crash

    monkeypatch.setattr(one, "_rename", crash)
    with pytest.raises(Crash):
        write(one, "", "one", n=[1])
    two.write("other", pa.table({"n": [2]}), "", "o", no_reject)
    assert read(tmp_path, "n") == [(1,), (2,)]
    assert two.progress("q") == "one"


def test_a_reader_may_take_files_away(tmp_path: Path) -> None:
    client = ParquetStore(tmp_path).open()
    write(client, "", "one", n=[1])
    for path in tmp_path.glob("*.parquet"):
        path.unlink()
    assert ParquetStore(tmp_path).open().progress("q") == "one"
    write(client, "one", "two", n=[2])
    assert read(tmp_path, "n") == [(2,)]


def test_partitions_are_folders_also_of_none_and_of_odd_values(tmp_path: Path) -> None:
    client = ParquetStore(tmp_path, partition_by=["day"]).open()
    write(client, "", "one", day=["a/b", None, "a/b"], n=[1, 2, 3])
    write(client, "one", "two", day=pa.nulls(1), n=[4])
    assert sorted(read(tmp_path, "n", "day")) == [(1, "a/b"), (2, None), (3, "a/b"), (4, None)]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "_penstock",
        "day=__HIVE_DEFAULT_PARTITION__",
        "day=a%2Fb",
    ]
    with pytest.raises(StoreUnavailable, match=r"the rows have the fields \(n\), but day"):
        write(client, "two", "three", n=[1])
    with pytest.raises(StoreUnavailable, match=r"the rows have the fields \(day\), but"):
        write(client, "two", "three", day=["x"])


def test_a_key_of_the_partition_alone_keeps_a_row_in_each(tmp_path: Path) -> None:
    client = ParquetStore(tmp_path, key=["day"], partition_by=["day"]).open()
    write(client, "", "one", day=["mo", "tu", "mo"], n=[1, 2, 3])
    write(client, "one", "two", day=["tu"], n=[4])
    assert sorted(read(tmp_path, "day", "n")) == [("mo", 3), ("tu", 4)]


def test_a_new_field_is_added_and_the_folder_still_reads_as_one(tmp_path: Path) -> None:
    client = ParquetStore(tmp_path, key=["n"]).open()
    write(client, "", "one", n=[1])
    write(client, "one", "two", n=[2], note=["x"])
    write(client, "two", "three", n=[3])
    assert sorted(read(tmp_path, "n", "note")) == [(1, None), (2, "x"), (3, None)]


@pytest.mark.parametrize(
    ("first", "then", "rejected"),
    [
        (pa.array([1]), pa.array([2.0, 2.5, float("nan"), None]), [1, 2]),
        (pa.array([0.5]), pa.array([1, 2**53 + 1]), [1]),
        (pa.array([1], pa.int8()), pa.array([127, 128]), [1]),
        (pa.array([1]), pa.array(["2"]), [0]),
        (pa.array(["x"]), pa.array([2]), [0]),
        (pa.array([True]), pa.array([1, 2]), [0, 1]),
        (pa.array([0.5], pa.float32()), pa.array([0.1]), [0]),
        (pa.array(["x"]), pa.array(["y", None]).dictionary_encode(), []),
        (pa.array(["x"]), pa.array(["y"], pa.large_string()), []),
        (pa.array([[1]]), pa.array([[]]), []),
        (pa.array([[1]]), pa.array([["x"]]), [0]),
        (pa.array([{"a": 1}]), pa.array([{"a": 1, "b": 2}]), [0]),
        (pa.array([0], pa.timestamp("ms")), pa.array([1000, 1001], pa.timestamp("us")), [1]),
        (pa.array([0], pa.timestamp("us")), pa.array([0], pa.timestamp("us", "UTC")), [0]),
    ],
)
def test_a_field_keeps_its_type_and_no_value_changes(
    tmp_path: Path, first: pa.Array, then: pa.Array, rejected: list[int]
) -> None:
    client = ParquetStore(tmp_path).open()
    write(client, "", "one", x=first)
    assert write(client, "one", "two", x=then) == rejected
    kept = [value for row, value in enumerate(then.to_pylist()) if row not in rejected]
    found = pyarrow.dataset.dataset(tmp_path, format="parquet").to_table()["x"]
    assert found.type == first.type
    assert found.to_pylist() == first.to_pylist() + kept


def test_rejected_rows_say_why(tmp_path: Path) -> None:
    client = ParquetStore(tmp_path).open()
    write(client, "", "one", x=[1])
    said: list[Rejected] = []
    client.write("q", pa.table({"x": ["y"]}), "one", "two", said.extend)
    assert said == [Rejected(0, "field 'x' is of type int64 in all earlier rows, not string")]


def test_other_file_systems(tmp_path: Path) -> None:
    import fsspec

    url = f"memory://{uuid.uuid4().hex}/out"
    store = ParquetStore(url, partition_by=["day"])
    store.check("here")
    client = pickle.loads(pickle.dumps(store)).open()
    write(client, "", "one", day=["mo", "tu"], n=[1, 2])
    write(client, "one", "two", day=["mo"], n=[3])
    with pytest.raises(Overtaken):
        write(store.open(), "one", "two", day=["mo"], n=[3])
    assert store.open().progress("q") == "two"
    files = sorted(fsspec.filesystem("memory").find(url))
    visible = [path for path in files if path.endswith(".parquet")]
    assert len(files) == len(visible) + 1
    with fsspec.open(f"memory://{visible[0]}") as file:
        assert pq.read_table(file).to_pydict() == {"n": [1]}
