"""The contract of every transactional sink, as one suite over all of them.

A sink takes part by a ``Target``, which defines how to create an instance (as a new process would unpickle it),
how an outside reader reads the visible rows, and which methods its commit calls, so that the suite can crash
between any two.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import queue
import random
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.dataset
import pytest

from penstock import Delivery, Lifecycle, Settings, TopologyBuilder
from penstock.errors import PenstockError, SinkRefused
from penstock.testing import LocalRunner
from penstock.testing.servers.postgres import PostgresServer
from penstock.topology.components import Conf, Context, Source, Spout, SpoutCollector, TransactionalSink
from penstock.topology.streams import OutputDeclarer

Row = tuple[str, int]
SOURCE = Source("words", "default", 7)


class Target:
    """An outside system with one place to write to."""

    steps: tuple[str, ...] = ()
    """The methods that ``commit`` calls, in order."""

    def __init__(self) -> None:
        self.topology = f"t{uuid.uuid4().hex}"  # the targets of all tests share one server

    def sink(self) -> TransactionalSink:
        """A sink instance that writes to this place."""
        module, kind, arguments, options = self.recipe()
        sink: TransactionalSink = getattr(importlib.import_module(module), kind)(*arguments, **options)
        return sink

    def context(
        self, component: str, index: int, folder: str, delivery: str = "exactly_once", generation: int = 1
    ) -> Context:
        return Context(
            topology=self.topology,
            component=component,
            task=1 + index,
            index=index,
            tasks={component: (1, 2)},
            folder=folder,
            delivery=delivery,
            generation=generation,
        )

    def recipe(self) -> list[Any]:
        """Module, class, arguments and keywords, to create the same sink in another process."""
        raise NotImplementedError

    def visible(self) -> list[Row]:
        """The rows that any reader sees, sorted."""
        raise NotImplementedError


class ParquetTarget(Target):
    steps = ("rename", "record")

    def __init__(self, folder: str, partition_by: list[str] | None = None) -> None:
        super().__init__()
        self.folder, self.partition_by = folder, partition_by

    def recipe(self) -> list[Any]:
        return ["penstock.connectors.parquet", "ParquetSink", [self.folder], {"partition_by": self.partition_by}]

    def visible(self) -> list[Row]:
        found = pyarrow.dataset.dataset(self.folder, partitioning="hive" if self.partition_by else None)
        if not found.files:
            return []
        table = found.to_table(columns=["word", "count"])
        return sorted(zip(table["word"].to_pylist(), table["count"].to_pylist(), strict=True))


class PostgresTarget(Target):
    steps = ("published", "publish", "write_rows")

    def __init__(self, server: PostgresServer, **options: Any) -> None:
        super().__init__()
        self.dsn, self.options = server.dsn, options
        self.table = f"words_{uuid.uuid4().hex}"

    def recipe(self) -> list[Any]:
        return ["penstock.connectors.postgres", "PostgresSink", [self.dsn, self.table], self.options]

    def visible(self) -> list[Row]:
        import psycopg

        with psycopg.connect(self.dsn) as connection:
            if connection.execute("SELECT to_regclass(%s)", (self.table,)).fetchone() == (None,):
                return []
            rows = connection.execute(f'SELECT word, count FROM "{self.table}" ORDER BY word, count')
            return [(word, count) for word, count in rows]


class KafkaTarget(Target):
    steps = ("published", "publish", "_transact")

    def __init__(self, server: Any, topic: str) -> None:
        super().__init__()
        self.server, self.topic = server, topic

    def recipe(self) -> list[Any]:
        return ["penstock.connectors.kafka_sink", "KafkaSink", [self.server.bootstrap, self.topic], {}]

    def visible(self) -> list[Row]:
        from tests.contract.kafka_helpers import read

        rows = [json.loads(value) for _, value in read(self.server, self.topic)]
        return sorted((row["word"], row["count"]) for row in rows)


@pytest.fixture(params=["parquet", "parquet_partitioned", "postgres", "postgres_upsert", "kafka"])
def target(request: pytest.FixtureRequest, tmp_path: Any) -> Target:
    if request.param == "parquet":
        return ParquetTarget(str(tmp_path / "out"))
    if request.param == "parquet_partitioned":
        return ParquetTarget(str(tmp_path / "out"), ["word"])
    if request.param == "kafka":
        return KafkaTarget(request.getfixturevalue("kafka"), request.getfixturevalue("topic")(partitions=2))
    server = request.getfixturevalue("postgres")
    if request.param == "postgres":
        return PostgresTarget(server)
    return PostgresTarget(server, mode="upsert", key=["word", "count"])


@pytest.fixture
def start(target: Target, tmp_path: Any) -> Iterator[Any]:
    """Starts a task of the sink as a new process would, with the tokens in its manifest."""
    started: list[TransactionalSink] = []

    def make(
        *tokens: Any,
        index: int = 0,
        component: str = "sink",
        state: str = "state",
        delivery: str = "exactly_once",
        generation: int = 1,
        recover: bool = True,
    ) -> TransactionalSink:
        sink = target.sink()
        folder = str(tmp_path / state / component / str(index)) if state else ""
        sink.prepare({}, target.context(component, index, folder, delivery, generation))
        started.append(sink)
        if recover:
            sink.recover(tokens)
        return sink

    yield make
    for sink in started:
        sink.cleanup()


def batch(rows: list[Row]) -> pa.RecordBatch:
    words, counts = zip(*rows, strict=True)
    return pa.record_batch([pa.array(words), pa.array(counts)], ["word", "count"])


def prepared(sink: TransactionalSink, epoch: int, rows: list[Row]) -> Any:
    """Writes rows and prepares them. Returns the token as it is read from a manifest."""
    sink.write(batch(rows), SOURCE)
    return json.loads(json.dumps(sink.prepare_commit(epoch)))


A: list[Row] = [("ant", 1), ("bee", 2)]
B: list[Row] = [("ape", 3), ("bee", 4)]
C: list[Row] = [("cat", 5)]


def test_nothing_is_visible_before_commit(target: Target, start: Any) -> None:
    sink = start()
    sink.write(batch(A), SOURCE)
    assert target.visible() == []
    token = sink.prepare_commit(1)
    assert target.visible() == []
    sink.commit(token)
    assert target.visible() == A


def test_a_commit_repeated_does_nothing(target: Target, start: Any) -> None:
    sink = start()
    token = prepared(sink, 1, A)
    sink.commit(token)
    sink.commit(token)
    assert target.visible() == A
    start(token).commit(token)
    assert target.visible() == A


def test_an_epoch_without_rows_has_no_token(target: Target, start: Any) -> None:
    sink = start()
    assert sink.prepare_commit(1) is None
    sink.write(batch(A).slice(0, 0), SOURCE)
    assert sink.prepare_commit(2) is None
    sink.commit(prepared(sink, 3, A))
    assert sink.prepare_commit(4) is None
    assert target.visible() == A


def test_recovery_commits_what_the_manifest_holds_and_drops_the_rest(target: Target, start: Any) -> None:
    first = start()
    kept = prepared(first, 1, A)
    prepared(first, 2, B)  # not in the manifest
    first.write(batch(C), SOURCE)  # not even prepared
    second = start(kept)
    assert target.visible() == A
    second.commit(prepared(second, 2, C))
    assert target.visible() == sorted(A + C)


def test_recovery_with_nothing_in_the_manifest_drops_everything(target: Target, start: Any) -> None:
    dropped = prepared(start(), 1, A)
    sink = start()
    assert target.visible() == []
    sink.commit(prepared(sink, 1, B))
    assert target.visible() == B
    assert dropped is not None


def test_epochs_prepared_ahead_are_committed_in_order(target: Target, start: Any) -> None:
    sink = start()
    tokens = [prepared(sink, epoch, rows) for epoch, rows in ((1, A), (2, B), (3, C))]
    for token, expected in zip(tokens, (A, A + B, A + B + C), strict=True):
        sink.commit(token)
        assert target.visible() == sorted(expected)


def test_recovery_of_several_epochs_commits_each_once(target: Target, start: Any) -> None:
    sink = start()
    tokens = [prepared(sink, epoch, rows) for epoch, rows in ((1, A), (2, B), (3, C))]
    sink.commit(tokens[0])
    start(tokens[2], tokens[0], tokens[1])
    assert target.visible() == sorted(A + B + C)
    start(*tokens)
    assert target.visible() == sorted(A + B + C)


def test_tasks_do_not_disturb_each_other(target: Target, start: Any) -> None:
    one, two = start(index=0), start(index=1)
    named_alike = start(index=0, component="sink-0")  # 'sink-0' task 0 and 'sink' task 0 must not be confused
    first, second, third = prepared(one, 1, A), prepared(two, 1, B), prepared(named_alike, 1, C)
    one = start(index=0)  # recovers and removes its own files
    assert target.visible() == []
    two.commit(second)
    named_alike.commit(third)
    assert target.visible() == sorted(B + C)
    one.commit(prepared(one, 1, A))
    assert target.visible() == sorted(A + B + C)
    assert first["rows"] == 2


def test_a_run_from_scratch_counts_epochs_anew_and_adds_to_the_old(target: Target, start: Any) -> None:
    old = start(state="old")
    for epoch in (1, 2, 3):
        old.commit(prepared(old, epoch, [("old", epoch)]))
    new = start(state="new")
    for epoch in (1, 2):
        new.commit(prepared(new, epoch, [("new", epoch)]))
    assert target.visible() == [("new", 1), ("new", 2), ("old", 1), ("old", 2), ("old", 3)]


def test_a_process_that_counts_from_one_again_loses_nothing(target: Target, start: Any) -> None:
    """With at-least-once delivery each process counts its own commits, and the folder is kept."""
    for n in range(3):
        sink = start(delivery="at_least_once", generation=n)
        for epoch in (1, 2):
            sink.commit(prepared(sink, epoch, [("w", 10 * n + epoch)]))
    assert target.visible() == [("w", n) for n in (1, 2, 11, 12, 21, 22)]


def test_without_a_folder_a_task_commits_all_the_same(target: Target, start: Any) -> None:
    """With at-most-once delivery nothing survives the process, and nothing has to."""
    for n in range(2):
        sink = start(state="", delivery="at_most_once", generation=0)
        for k in (1, 2, 3):
            sink.commit(prepared(sink, k, [("w", 10 * n + k)]))
    assert target.visible() == [("w", n) for n in (1, 2, 3, 11, 12, 13)]


def test_commits_run_beside_writes(target: Target, start: Any) -> None:
    """With exactly-once delivery the two methods are called by different threads."""
    sink = start()
    tokens: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def commit() -> None:
        while (token := tokens.get()) is not None:
            sink.commit(token)

    with ThreadPoolExecutor(1) as beside:
        done = beside.submit(commit)
        for epoch in range(1, 21):
            tokens.put(prepared(sink, epoch, [("w", 2 * epoch), ("v", 2 * epoch + 1)]))
        tokens.put(None)
        done.result()
    assert [count for _, count in sorted(target.visible(), key=lambda row: row[1])] == list(range(2, 42))


def test_a_stalled_process_that_goes_on_takes_no_rows_from_its_successor(target: Target, start: Any) -> None:
    """With at-least-once delivery each process numbers its commits by its own clock: a larger number of another
    process does not mean that this commit is done."""
    stalled = start(delivery="at_least_once", generation=1)
    stalled.commit(prepared(stalled, 1000, A))
    successor = start(delivery="at_least_once", generation=2)
    token = prepared(successor, 2000, B)
    with contextlib.suppress(SinkRefused):  # it may also report that it is superseded
        stalled.commit(prepared(stalled, 3000, [("late", 9)]))
    successor.commit(token)
    assert [row for row in target.visible() if row[0] != "late"] == sorted(A + B)
    successor.commit(prepared(successor, 4000, C))
    assert [row for row in target.visible() if row[0] != "late"] == sorted(A + B + C)


def test_two_processes_with_the_same_number_write_both(target: Target, start: Any) -> None:
    """A worker that moves continues in another process of the same query run, whose clock may be behind."""
    first = start(delivery="at_least_once", generation=1)
    first.commit(prepared(first, 1000, A))
    second = start(delivery="at_least_once", generation=1)
    for number, rows in ((1000, B), (1001, C)):
        second.commit(prepared(second, number, rows))
    assert target.visible() == sorted(A + B + C)


def test_a_superseded_start_that_opens_late_removes_nothing(target: Target, start: Any) -> None:
    newest = start(generation=3)
    token = prepared(newest, 7, B)
    with pytest.raises(SinkRefused, match="query run 2 is outdated: run 3 has opened this task"):
        start(generation=2)
    newest.commit(token)
    assert target.visible() == B


def test_a_superseded_start_that_recovers_late_removes_nothing(target: Target, start: Any) -> None:
    """It was the newest process when it began, and stalled between ``prepare`` and ``recover``."""
    late = start(generation=2, recover=False)
    newest = start(generation=3)
    token = prepared(newest, 7, B)
    late.recover([])
    newest.commit(token)
    assert target.visible() == B


def test_a_newer_start_removes_what_older_ones_staged(target: Target, start: Any) -> None:
    dropped = prepared(start(generation=1), 1, A)
    newest = start(generation=2)
    with pytest.raises(PenstockError):
        newest.commit(dropped)
    newest.commit(prepared(newest, 2, B))
    assert target.visible() == B


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("step", [0, 1, 2])
def test_a_crash_in_any_gap_of_commit_and_recovery_publish_once(
    target: Target, start: Any, step: int, after: bool
) -> None:
    if step >= len(target.steps):
        pytest.skip("this commit has fewer steps")
    sink = start()
    sink.commit(prepared(sink, 1, A))
    token = prepared(sink, 2, B)
    prepared(sink, 3, C)
    crash_at(sink, target.steps[step], after)
    with pytest.raises(Crash):
        sink.commit(token)
    again = start(token)
    assert target.visible() == sorted(A + B)
    again.commit(prepared(again, 3, C))
    start(token).commit(token)
    assert target.visible() == sorted(A + B + C)


def test_a_crash_while_recovering_is_recovered_from(target: Target, start: Any, tmp_path: Any) -> None:
    sink = start()
    tokens = [prepared(sink, 1, A), prepared(sink, 2, B)]
    for step in target.steps:
        halted = target.sink()
        crash_at(halted, step, after=True)
        halted.prepare({}, target.context("sink", 0, str(tmp_path / "state" / "sink" / "0")))
        with pytest.raises(Crash):
            halted.recover(tokens)
    start(*tokens)
    assert target.visible() == sorted(A + B)


def test_a_process_killed_anywhere_loses_and_doubles_nothing(target: Target, tmp_path: Any) -> None:
    """A real process is killed with kill -9 many times; its manifests determine which rows must be visible."""
    manifest = tmp_path / "manifest.json"
    folder = str(tmp_path / "state")
    job = {"recipe": target.recipe(), "topology": target.topology, "folder": folder, "manifest": str(manifest)}
    draw = random.Random(5)
    for _ in range(6):
        command = [sys.executable, "-m", "tests.contract.sink_process", json.dumps(job)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for _ in range(draw.randrange(3, 40)):
                assert process.stdout.readline(), "the process ended by itself"
            process.send_signal(signal.SIGKILL)
    state = json.loads(manifest.read_text())
    sink = target.sink()
    sink.prepare({}, target.context("sink", 0, folder))
    sink.recover(state["tokens"])
    sink.cleanup()
    assert state["position"] > 20
    assert target.visible() == sorted((f"w{n % 3}", n) for n in range(state["position"]))


class Numbers(Spout):
    """Emits ⟨word, n⟩ for each n below the limit, and resumes at its position after a restart."""

    def __init__(self, limit: int) -> None:
        self._limit = limit

    def declare_output_fields(self, declarer: OutputDeclarer) -> None:
        declarer.declare("word", "count")

    def open(self, conf: Conf, context: Context, collector: SpoutCollector) -> None:
        self._collector = collector
        self._next = context.state.value("next", 0)

    def next_tuple(self) -> None:
        if self._next.value < self._limit:
            self._collector.emit((f"w{self._next.value % 3}", self._next.value))
            self._next.value += 1


@pytest.mark.parametrize("step", ["announced", "written", "collected", "committed", "notified"])
def test_in_a_topology_that_dies_at_any_step_of_a_commit(target: Target, tmp_path: Any, step: str) -> None:
    def run(limit: int, crash_at: str) -> LocalRunner:
        builder = TopologyBuilder()
        builder.set_spout("numbers", Numbers(limit))
        builder.set_bolt("sink", target.sink(), 2).shuffle_grouping("numbers")
        settings = Settings(
            delivery=Delivery("exactly_once", on_error="stop"), lifecycle=Lifecycle(crash_at=crash_at)
        )
        runner = LocalRunner(builder.build(target.topology, settings), folder=str(tmp_path / "state"), die=die)
        runner.run_until_idle()
        return runner

    def die() -> NoReturn:
        raise Crash

    first = run(100, f"{step}:2")
    first.commit()
    assert target.visible() == sorted((f"w{n % 3}", n) for n in range(100))
    for spout in first.component("numbers"):
        spout._limit = 150
    first.run_until_idle()
    with pytest.raises(Crash):
        first.commit()
    second = run(200, "")
    second.commit()
    second.close()
    assert target.visible() == sorted((f"w{n % 3}", n) for n in range(200))


class Crash(BaseException):
    """Stands for the end of the process."""


def crash_at(sink: Any, step: str, after: bool) -> None:
    """Ends the process before or after the next call of a method."""
    method = getattr(sink, step)

    def crash(*arguments: Any) -> None:
        if after:
            method(*arguments)
        raise Crash

    setattr(sink, step, crash)
