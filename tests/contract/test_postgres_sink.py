"""PostgresSink against a real PostgreSQL: servers killed during a commit, types, upserts, rejected rows."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import sys
import threading
import uuid
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from penstock.connectors.postgres import PostgresSink
from penstock.errors import ComponentError, EnvironmentFault, TopologyError
from penstock.testing.servers.postgres import PostgresServer
from penstock.topology.components import Context, Source

psycopg = pytest.importorskip("psycopg")

SOURCE = Source("words", "default", 7)


@pytest.fixture
def server(postgres: PostgresServer) -> PostgresServer:
    return postgres


@pytest.fixture
def table() -> str:
    return f"table_{uuid.uuid4().hex}"


@pytest.fixture
def start(tmp_path: Any) -> Iterator[Any]:
    """Starts a task with this sink, as a new process would."""
    started = []
    topology = uuid.uuid4().hex

    def make(
        sink: PostgresSink, *tokens: Any, index: int = 0, state: str = "state", recover: bool = True
    ) -> PostgresSink:
        folder = str(tmp_path / state / str(index))
        context = Context(
            topology, "sink", 1 + index, index, {"sink": (1, 2)}, folder=folder, delivery="exactly_once"
        )
        sink.prepare({}, context)
        started.append(sink)
        if recover:
            sink.recover(tokens)
        return sink

    yield make
    for sink in started:
        sink.cleanup()


def query(server: PostgresServer, text: str) -> list[Any]:
    with psycopg.connect(server.dsn) as connection:
        return list(connection.execute(text).fetchall())


def execute(server: PostgresServer, text: str) -> None:
    with psycopg.connect(server.dsn) as connection:
        connection.execute(text)


def write(sink: PostgresSink, **columns: Any) -> None:
    sink.write(pa.record_batch({name: pa.array(values) for name, values in columns.items()}), SOURCE)


def committed(sink: PostgresSink, epoch: int, **columns: Any) -> None:
    write(sink, **columns)
    sink.commit(sink.prepare_commit(epoch))


class KilledInMidTransaction(PostgresSink):
    """The server is killed after it received the rows of an epoch, before it committed them; then it is
    restarted."""

    server: PostgresServer
    kills = 2

    def write_rows(self, connection: Any, rows: pa.Table) -> None:
        super().write_rows(connection, rows)
        if self.kills:
            self.kills -= 1
            self.server.restart()


class KilledAfterCommit(PostgresSink):
    """The server is killed after it committed and before it answered, so the sink does not know the outcome."""

    server: PostgresServer
    kills = 1

    def _publish(self, connection: Any, epoch: int, rows: pa.Table) -> None:
        super()._publish(connection, epoch, rows)
        if self.kills:
            self.kills -= 1
            self.server.restart()
            connection.execute("SELECT 1")  # raises, because the connection is lost


@pytest.mark.parametrize("kind", [KilledInMidTransaction, KilledAfterCommit])
@pytest.mark.parametrize("options", [{}, {"mode": "upsert", "key": ["word"]}], ids=["insert", "upsert"])
def test_a_server_killed_in_mid_commit_and_started_again_has_the_rows_once(
    server: PostgresServer, table: str, start: Any, kind: Any, options: Any
) -> None:
    sink = kind(server.dsn, table, retry_for=15, **options)
    sink.server = server
    start(sink)
    committed(sink, 1, word=["a", "b"], count=[1, 2])
    assert sink.kills == 0
    committed(sink, 2, word=["c"], count=[3])
    assert query(server, f"SELECT * FROM {table} ORDER BY word") == [("a", 1), ("b", 2), ("c", 3)]


def test_a_server_that_stays_away_is_reported_and_nothing_is_lost(
    server: PostgresServer, table: str, start: Any
) -> None:
    sink = start(PostgresSink(server.dsn + " password=geheim", table, retry_for=0.2))
    write(sink, word=["a"], count=[1])
    token = sink.prepare_commit(1)
    server.kill()
    try:
        with pytest.raises(ComponentError) as caught:
            sink.commit(token)
    finally:
        server.restart()
    message = str(caught.value)
    assert message.startswith(f"component 'sink' (task 1), table '{table}' at 127.0.0.1:")
    assert "PostgreSQL did not answer within 0.2 s" in message
    assert "No rows are lost" in message
    assert "geheim" not in message
    start(PostgresSink(server.dsn, table), token)
    assert query(server, f"SELECT * FROM {table}") == [("a", 1)]


def test_a_server_that_comes_late_is_waited_for(server: PostgresServer, table: str, start: Any) -> None:
    sink = start(PostgresSink(server.dsn, table, retry_for=60))
    write(sink, word=["a"], count=[1])
    token = sink.prepare_commit(1)
    server.kill()
    starter = threading.Thread(target=server.restart)
    starter.start()
    sink.commit(token)
    starter.join()
    assert query(server, f"SELECT * FROM {table}") == [("a", 1)]


def test_every_type_arrives_as_it_was(server: PostgresServer, table: str, start: Any) -> None:
    moment = datetime.datetime(2024, 2, 29, 12, 30, 15, 123456)
    in_utc = moment.replace(tzinfo=datetime.UTC)
    rows = {
        "text": pa.array(["", "tab\t, line\n, return\r, \\N, \\., \"quotes\", 'x' ⟨ü⟩", None]),
        "lone": pa.array(["a\n\\.\nb", "\\N", "\\"]),
        "large": pa.array(["x", "y", None], pa.large_string()),
        "yes": pa.array([True, False, None]),
        "tiny": pa.array([-128, 127, None], pa.int8()),
        "number": pa.array([-(2**63), 2**63 - 1, None]),
        "unsigned": pa.array([0, 2**64 - 1, None], pa.uint64()),
        "real": pa.array([0.1, float("inf"), None]),
        "money": pa.array([decimal.Decimal("1.50"), decimal.Decimal("-3.25"), None]),
        "day": pa.array([moment.date(), datetime.date(1, 1, 1), None]),
        "time": pa.array([moment.time(), datetime.time(0), None]),
        "local": pa.array([moment, datetime.datetime(1970, 1, 1), None]),
        "utc": pa.array([in_utc, in_utc, None]),
        "berlin": pa.array([in_utc, in_utc, None], pa.timestamp("us", "Europe/Berlin")),
        "lasts": pa.array([datetime.timedelta(days=1, microseconds=1), datetime.timedelta(0), None]),
        "bytes": pa.array([b"\x00\\\xff", b"", None]),
        "list": pa.array([[1, 2], [], None]),
        "struct": pa.array([{"a": "\\ \t", "b": [None]}, {"a": None, "b": None}, None]),
        "coded": pa.array(["a", "a", None]).dictionary_encode(),
        "nothing": pa.array([None, None, None]),
        'odd "name", select': pa.array([1, 2, None]),
    }
    sink = start(PostgresSink(server.dsn, table))
    sink.write(pa.record_batch(rows), SOURCE)
    sink.commit(sink.prepare_commit(1))
    found = query(server, f"SELECT * FROM {table}")
    for number, (name, column) in enumerate(rows.items()):
        assert [row[number] for row in found] == column.to_pylist(), name


def test_fields_of_one_type_now_and_another_then_share_a_column(
    server: PostgresServer, table: str, start: Any
) -> None:
    sink = start(PostgresSink(server.dsn, table))
    write(sink, x=[None, None])
    write(sink, x=[1, 2])
    write(sink, x=[0.5])
    sink.commit(sink.prepare_commit(1))
    assert query(server, f"SELECT x FROM {table}") == [(None,), (None,), (1.0,), (2.0,), (0.5,)]


def test_upsert_writes_the_last_row_of_each_key(server: PostgresServer, table: str, start: Any) -> None:
    sink = start(PostgresSink(server.dsn, table, mode="upsert", key=["word"]))
    committed(sink, 1, word=["a", "b", "a"], count=[1, 1, 2], note=["x", "y", None])
    committed(sink, 2, word=["a", "c"], count=[3, 1], note=["z", "z"])
    assert query(server, f"SELECT * FROM {table} ORDER BY word") == [("a", 3, "z"), ("b", 1, "y"), ("c", 1, "z")]


def test_upsert_of_nothing_but_the_key_keeps_one_row_each(server: PostgresServer, table: str, start: Any) -> None:
    sink = start(PostgresSink(server.dsn, table, mode="upsert", key=["word"]))
    committed(sink, 1, word=["a", "b", "a"])
    committed(sink, 2, word=["a", "c"])
    assert query(server, f"SELECT * FROM {table} ORDER BY word") == [("a",), ("b",), ("c",)]


def test_tasks_that_update_the_same_rows_do_not_lock_each_other_out(
    server: PostgresServer, table: str, start: Any
) -> None:
    """Two sinks upsert many keys in opposite orders at the same time. Without a fixed order they would
    deadlock."""
    keys = list(range(2000))
    sinks = [start(PostgresSink(server.dsn, table, mode="upsert", key=["k"]), index=index) for index in (0, 1)]

    def work(sink: PostgresSink, order: list[int]) -> None:
        for epoch in range(1, 6):
            committed(sink, epoch, k=order, v=order)

    threads = [
        threading.Thread(target=work, args=(sink, order))
        for sink, order in zip(sinks, (keys, keys[::-1]), strict=True)
    ]
    deadlocks = "SELECT deadlocks FROM pg_stat_database WHERE datname = 'postgres'"
    before = query(server, deadlocks)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert query(server, f"SELECT count(*), sum(v) FROM {table}") == [(2000, sum(keys))]
    assert [sink.published() for sink in sinks] == [5, 5]
    for sink in sinks:
        sink.cleanup()  # a session reports its statistics when it ends
    assert query(server, deadlocks) == before


def test_columns_choose_and_rename(server: PostgresServer, table: str, start: Any) -> None:
    execute(server, f"CREATE TABLE {table} (term text, n bigint, source text DEFAULT 'penstock')")
    sink = start(PostgresSink(server.dsn, table, columns={"count": "n", "word": "term"}))
    committed(sink, 1, word=["a"], other=[9], count=[1])
    assert query(server, f"SELECT * FROM {table}") == [("a", 1, "penstock")]


def test_a_table_in_a_schema_of_its_own(server: PostgresServer, table: str, start: Any) -> None:
    execute(server, 'CREATE SCHEMA IF NOT EXISTS "Own"')
    sink = start(PostgresSink(server.dsn, f"Own.{table}", mode="upsert", key=["Word"]))
    committed(sink, 1, Word=["a", "a"], count=[1, 2])
    committed(sink, 2, Word=["a"], count=[3])
    assert query(server, f'SELECT * FROM "Own".{table}') == [("a", 3)]


def test_the_epoch_is_recorded_beside_the_rows(server: PostgresServer, table: str, start: Any) -> None:
    sink = start(PostgresSink(server.dsn, table))
    assert sink.published() == -1
    committed(sink, 4, word=["a"])
    assert sink.published() == 4
    found = query(
        server, f"SELECT identity, epoch FROM penstock_epochs WHERE sink = '{sink.context.topology}/sink/0'"
    )
    assert found == [(sink.identity, 4)]


def refusal(sink: PostgresSink, **columns: Any) -> str:
    write(sink, **columns)
    token = sink.prepare_commit(1)
    with pytest.raises(ComponentError) as caught:
        sink.commit(token)
    return str(caught.value)


@pytest.fixture
def dead() -> list[tuple[Any, str]]:
    """Dead letters: rows and errors."""
    return []


def rejecting(sink: PostgresSink, dead: list[tuple[Any, str]]) -> PostgresSink:
    """Collects the dead letters of the sink."""

    def add(rows: Any, failures: Any, *, once: str) -> None:
        dead.extend((row, failure.error) for row, failure in zip(rows, failures, strict=True))

    sink.context = dataclasses.replace(sink.context, add_dead_letters=add)
    return sink


def test_a_value_of_the_wrong_type_is_a_dead_letter_that_names_table_and_column(
    server: PostgresServer, table: str, start: Any, dead: Any
) -> None:
    execute(server, f"CREATE TABLE {table} (word text, count bigint)")
    sink = rejecting(start(PostgresSink(server.dsn, table)), dead)
    committed(sink, 1, word=["a", "b", "c"], count=["1", "two", "3"])
    assert query(server, f"SELECT * FROM {table} ORDER BY word") == [("a", 1), ("c", 3)]
    ((row, message),) = dead
    assert row == ("b", "two")
    assert f"table '{table}': the rows of an epoch do not fit the table" in message
    assert 'invalid input syntax for type bigint: "two"' in message
    assert "column count" in message
    assert "alter the table" in message


@pytest.mark.parametrize("mode", ["insert", "upsert"])
def test_rows_that_postgresql_never_takes_are_dead_letters_and_no_restart_fails(
    server: PostgresServer, table: str, start: Any, dead: Any, mode: str
) -> None:
    """A NUL character, a missing value, a violated constraint, and a constraint checked at COMMIT. The epoch is
    committed, so every run has to publish it."""
    execute(server, f"CREATE TABLE {table}_words (word text PRIMARY KEY); INSERT INTO {table}_words VALUES ('a')")
    execute(
        server,
        f"CREATE TABLE {table} (n bigint PRIMARY KEY, word text NOT NULL CONSTRAINT known REFERENCES {table}_words"
        " DEFERRABLE INITIALLY DEFERRED, count bigint CONSTRAINT positive CHECK (count > 0))",
    )
    key = {"mode": "upsert", "key": ["n"]} if mode == "upsert" else {}
    sink = start(PostgresSink(server.dsn, table, **key))
    write(sink, n=range(8), word=["a", "a\0", "a", None, "a", "a", "unknown", "a"], count=[1, 1, 1, 1, 0, 1, 1, 1])
    token = sink.prepare_commit(1)
    restarted = rejecting(start(PostgresSink(server.dsn, table, **key), recover=False), dead)
    restarted.recover([token])
    assert [n for (n,) in query(server, f"SELECT n FROM {table} ORDER BY n")] == [0, 2, 5, 7]
    assert sorted(row[0] for row, _ in dead) == [1, 3, 4, 6]
    why = {row[0]: error for row, error in dead}
    assert "0x00" in why[1]
    assert "column word" in why[3]
    assert "constraint positive" in why[4]
    assert "constraint known" in why[6]


def test_keys_that_postgresql_calls_equal_are_one_row_the_last(
    server: PostgresServer, table: str, start: Any
) -> None:
    sink = start(PostgresSink(server.dsn, table, mode="upsert", key=["x"]))
    committed(sink, 1, x=[0.0, -0.0, 1.0], n=[1, 2, 3])
    committed(sink, 2, x=[-0.0, 0.0, float("nan"), float("nan")], n=[4, 5, 6, 7])
    assert sorted(n for (n,) in query(server, f"SELECT n FROM {table}")) == [3, 5, 7]


def test_an_unknown_column_a_missing_table_and_a_missing_key(
    server: PostgresServer, table: str, start: Any
) -> None:
    assert "does not exist" in refusal(start(PostgresSink(server.dsn, table, create=False)), word=["a"])
    execute(server, f"CREATE TABLE {table} (word text)")
    assert 'column "count"' in refusal(start(PostgresSink(server.dsn, table)), word=["a"], count=[1])
    keyed = PostgresSink(server.dsn, table, mode="upsert", key=["word"])
    assert "no unique or exclusion constraint" in refusal(start(keyed), word=["a"])


def test_a_field_that_is_not_in_the_input_is_missed_before_anything_is_staged(
    server: PostgresServer, table: str, start: Any
) -> None:
    sink = start(PostgresSink(server.dsn, table, columns=["word", "total"]))
    with pytest.raises(ComponentError, match=r"the input \(word, count\) has no field total"):
        write(sink, word=["a"], count=[1])
    assert sink.prepare_commit(1) is None


def test_a_second_run_under_the_same_name_is_noticed(server: PostgresServer, table: str, start: Any) -> None:
    one = start(PostgresSink(server.dsn, table), state="one")
    two = start(PostgresSink(server.dsn, table), state="two")
    committed(one, 1, word=["a"])
    committed(two, 1, word=["b"])
    with pytest.raises(ComponentError, match=r"another run also writes as"):
        committed(one, 2, word=["c"])


def test_without_psycopg_the_extra_is_named(monkeypatch: Any, tmp_path: Any) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(EnvironmentFault, match=r'pip install "penstock\[postgres\]"'):
        PostgresSink("host=x", "t").prepare({}, Context("t", "sink", 1, 0, {"sink": (1,)}, folder=str(tmp_path)))


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"mode": "merge"}, "mode is 'merge', neither 'insert' nor 'upsert'"),
        ({"mode": "upsert"}, "mode='upsert' does not fit"),
        ({"key": ["word"]}, "mode='insert' does not fit"),
        ({"mode": "upsert", "key": "word"}, r"Name the columns that tell one row from another: key=\('word',\)"),
        ({"columns": "word"}, "columns is 'word', neither a sequence nor a mapping"),
        ({"columns": ["n"], "mode": "upsert", "key": ["word"]}, "names columns that are not among"),
    ],
)
def test_what_cannot_work_is_refused_where_it_is_written(options: Any, rule: str) -> None:
    with pytest.raises(TopologyError, match=rule):
        PostgresSink("host=x", "words", **options)
