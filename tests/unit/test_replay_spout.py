"""ReplaySpout with the embedded queues and real threads."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import replace

import pytest

from penstock.errors import EnvironmentFault, FieldTypeError, SettingError, TopologyError
from penstock.replay import DiskQueue, QueueEden, ReplayRecord, ReplaySpout
from penstock.replay.embedded import open_beside
from penstock.replay.queues import QueuesBusy
from penstock.topology.components import Context, Failure
from penstock.topology.streams import OutputDeclarer

DEADLINE = 20.0  # seconds; the machine may be busy


class Collected:
    """Stands for the runtime: keeps what was emitted."""

    def __init__(self):
        self.rows = []

    def room(self):
        return 1_000_000

    def emit_batch(self, columns, stream="default", msg_ids=None):
        rows = list(zip(*columns, strict=True))
        assert len(rows) == len(msg_ids)
        self.rows += zip(msg_ids, rows, strict=True)


class Bench:
    """One task of a ReplaySpout that reads a queue the test appends to."""

    def __init__(self, folder, max_attempts=3):
        self.folder = folder
        self.context = Context(
            "shop", "lines", 1, 0, {"lines": (1,)}, delivery="at_least_once", folder=str(folder / "task")
        )
        self.source = DiskQueue(folder / "eden")
        self.max_attempts = max_attempts
        self.start()

    def start(self):
        self.spout = ReplaySpout(QueueEden(self.folder / "eden", ("line",)), max_attempts=self.max_attempts)
        self.out = Collected()
        self.spout.open({}, self.context, self.out)
        self.spout.activate()

    def feed(self, *values):
        self.source.append([ReplayRecord((value,)) for value in values])

    def await_rows(self, count):
        """Calls next_batch until ``count`` tuples were emitted; returns them."""
        end = time.monotonic() + DEADLINE
        while len(self.out.rows) < count:
            self.spout.next_batch()
            if self.spout._replayer is not None:
                self.spout._replayer.wait(0.01)
            assert time.monotonic() < end, f"only {self.out.rows}"
        rows, self.out.rows = self.out.rows, []
        return rows

    def await_stored(self):
        """Waits until the backflow thread has stored all failures and nothing is in flight."""
        end = time.monotonic() + DEADLINE
        while self.spout._replayer.outstanding:
            self.spout._replayer.wait(0.01)
            assert time.monotonic() < end

    def dead(self):
        return [dead_letter.record for dead_letter in open_beside(self.folder / "task" / "replay").dead.read_all()]


@pytest.fixture
def bench(tmp_path):
    bench = Bench(tmp_path)
    yield bench
    bench.spout.close()
    bench.source.close()


def test_fields_are_those_of_the_source(bench):
    declarer = OutputDeclarer("lines")
    bench.spout.declare_output_fields(declarer)
    assert declarer.streams["default"].field_names == ("line",)


def test_acked_tuples_are_not_read_again(bench):
    bench.feed("a", "b", "c")
    rows = bench.await_rows(3)
    assert [row for _, row in rows] == [("a",), ("b",), ("c",)]
    bench.spout.ack_many([rows[0][0], rows[2][0]])
    bench.spout.before_snapshot()
    bench.spout.close()
    bench.start()
    assert [row for _, row in bench.await_rows(2)] == [("b",), ("c",)]


def test_a_failed_tuple_comes_back_and_ends_as_a_dead_letter(bench):
    bench.feed("bad")
    for attempt in range(3):
        [(id, row)] = bench.await_rows(1)
        assert row == ("bad",)
        bench.spout.fail(id, Failure("split", f"boom {attempt}"))
    bench.feed("good")
    [(id, row)] = bench.await_rows(1)
    assert row == ("good",)
    bench.spout.ack(id)
    bench.await_stored()
    [dead_letter] = bench.dead()
    assert (dead_letter.payload, dead_letter.attempts, dead_letter.error, dead_letter.component) == (
        ("bad",),
        3,
        "boom 2",
        "split",
    )
    assert dead_letter.first_failed > 0


def test_what_failed_comes_before_what_was_not_read_yet(bench):
    bench.feed(1, 2, 3)
    rows = bench.await_rows(3)
    bench.spout.fail(rows[1][0], Failure("", "timed out"))
    [(back, row)] = bench.await_rows(1)
    assert row == (2,)
    bench.spout.ack_many([rows[0][0], rows[2][0], back])
    bench.await_stored()
    bench.spout.before_snapshot()
    bench.spout.close()
    bench.start()
    bench.feed(4)
    assert [row for _, row in bench.await_rows(1)] == [(4,)]


def test_a_failure_is_not_lost_by_a_close(bench):
    bench.feed("x")
    [(id, _)] = bench.await_rows(1)
    bench.spout.fail(id, Failure("split", "boom"))
    bench.spout.close()
    bench.start()
    bench.feed("y")
    first, second = bench.await_rows(2)
    assert (first[1], second[1]) == (("x",), ("y",))
    bench.spout.fail_many([first[0]], Failure("split", "boom"))
    bench.spout.ack(second[0])
    [(id, _)] = bench.await_rows(1)
    bench.spout.fail(id, Failure("split", "boom"))
    bench.await_stored()
    assert [record.attempts for record in bench.dead()] == [3]


def test_it_is_settled_when_what_failed_is_safely_in_from(bench):
    woken = threading.Event()
    bench.spout.close()
    bench.context = replace(bench.context, wake=woken.set)
    bench.start()
    assert bench.spout.settled()
    bench.feed(*range(20))
    rows = bench.await_rows(20)
    release = threading.Event()
    queue = bench.spout._replayer._sources.queues.from_
    append = queue.append

    def slowly(records):
        assert release.wait(DEADLINE)
        append(records)

    queue.append = slowly
    woken.clear()
    bench.spout.fail_many([id for id, _ in rows], Failure("", "the topology is being replaced"))
    assert not bench.spout.settled()
    release.set()
    end = time.monotonic() + DEADLINE
    while not bench.spout.settled():
        assert woken.wait(DEADLINE), "the worker is told"
        woken.clear()
        assert time.monotonic() < end
    other = open_beside(bench.folder / "task" / "replay")
    found = [record for queue in (other.from_, other.to) for _, record in queue.read(100)]
    assert sorted(record.payload[0] for record in found) == list(range(20))
    other.close()


def test_deactivated_and_drained_it_hands_over_to_another_process(bench, tmp_path):
    bench.feed("a", "b")
    rows = bench.await_rows(2)
    old = bench.spout
    bench.start()  # a second process of the same task
    bench.spout.next_batch()
    assert bench.spout._replayer is None  # the other process still has the queues open
    old.deactivate()
    old.fail(rows[0][0], Failure("split", "boom"))
    bench.spout.next_batch()
    assert bench.spout._replayer is None
    old.ack(rows[1][0])
    end = time.monotonic() + DEADLINE
    while not old.settled():
        time.sleep(0.001)  # the threads of the replayer are real
        assert time.monotonic() < end
    assert old._replayer is None
    assert [row for _, row in bench.await_rows(1)] == [("a",)]


def test_waiting_for_the_queues_ends_with_an_error(bench):
    bench.await_rows(0)
    bench.spout.next_batch()
    other = ReplaySpout(QueueEden(bench.folder / "eden", ("line",)))
    other.open({}, bench.context, Collected())
    other._waiting_since = -1e9
    with pytest.raises(QueuesBusy, match="another process holds this task's replay queues"):
        other.next_batch()


@pytest.mark.parametrize("part", ["before_snapshot", "close"])
def test_a_close_that_fails_leaves_the_queues_to_the_next_process(bench, monkeypatch, part):
    def fails():
        raise OSError("No space left on device")

    bench.feed("a")
    bench.start()
    [(id, _)] = bench.await_rows(1)
    monkeypatch.setattr(bench.spout._source, part, fails)
    bench.spout.ack(id)
    with pytest.raises(OSError, match="No space"):
        bench.spout.deactivate()
    monkeypatch.undo()
    bench.spout.activate()
    bench.feed("b")
    assert [row for _, row in bench.await_rows(1)][-1] == ("b",)


def test_a_source_that_is_away_at_first_does_not_keep_the_queues(tmp_path, monkeypatch):
    bench = Bench(tmp_path)
    bench.feed("a")
    real = bench.spout._source.open

    def away(conf, context):
        monkeypatch.setattr(bench.spout._source, "open", real)
        raise OSError("the server is away")

    monkeypatch.setattr(bench.spout._source, "open", away)
    with pytest.raises(OSError, match="away"):
        bench.spout.next_batch()
    assert [row for _, row in bench.await_rows(1)] == [("a",)]
    bench.spout.close()


@pytest.mark.parametrize("delivery", ["at_most_once", "exactly_once"])
def test_replay_belongs_to_at_least_once(tmp_path, delivery):
    spout = ReplaySpout(QueueEden(tmp_path, ("line",)))
    context = Context("shop", "lines", 1, 0, {"lines": (1,)}, delivery=delivery, folder=str(tmp_path))
    with pytest.raises(SettingError, match=f"and it is {delivery}. Set delivery=at_least_once"):
        spout.open({}, context, Collected())


@pytest.mark.parametrize(
    ("folder", "text"),
    [
        ("", "need a folder that survives"),
        ("s3://bucket/task", "need a local path, not 's3://bucket/task'. .*Kafka"),
    ],
)
def test_the_embedded_queues_need_a_local_folder(tmp_path, folder, text):
    spout = ReplaySpout(QueueEden(tmp_path, ("line",)))
    context = Context("shop", "lines", 1, 0, {"lines": (1,)}, delivery="at_least_once", folder=folder)
    with pytest.raises(EnvironmentFault, match=text):
        spout.open({}, context, Collected())


def test_a_source_that_is_no_eden_is_refused():
    with pytest.raises(TopologyError, match=r"be an Eden, not 'orders.txt'. Write .*FileEden\('orders.txt'\)"):
        ReplaySpout("orders.txt")


def test_max_attempts_is_at_least_one(tmp_path):
    with pytest.raises(SettingError, match="at least one attempt, not 0"):
        ReplaySpout(QueueEden(tmp_path, ("line",)), max_attempts=0)


def spoil(queue, *items):
    """Appends raw bytes to a queue."""
    queue._log.append(items)


@pytest.mark.parametrize("where", ["source", "from"])
def test_a_damaged_record_is_set_aside_alone(tmp_path, where):
    reported, given_up = [], []
    bench = Bench(tmp_path)
    bench.spout.close()
    bench.context = replace(bench.context, report=reported.append, gave_up=given_up.append)
    bench.start()
    beside = open_beside(tmp_path / "task" / "replay")
    queue = bench.source if where == "source" else beside.from_
    queue.append([ReplayRecord(("a",)), ReplayRecord(("b",))])
    spoil(queue, b"J{bad json", b'J[["x","one too many"],[],0,"","",0]', b"P" + b"cos\nsystem\n.")
    queue.append([ReplayRecord(("c",))])
    rows = bench.await_rows(3)
    assert [values for _, values in rows] == [("a",), ("b",), ("c",)]
    bench.spout.ack_many([id for id, _ in rows])
    bad, wide, foreign = bench.dead()
    assert (bad.payload, bad.damaged, bad.attempts) == ((b"J{bad json",), True, 1)
    assert "JSONDecodeError" in bad.error
    assert (wide.payload, wide.error) == (("x", "one too many"), "2 values for 1 fields")
    assert "not signed" in foreign.error
    bench.spout.next_batch()
    assert sum(given_up) == 3
    assert "3 records cannot be read back as they were written; the first: JSONDecodeError" in str(reported[0])
    bench.spout.before_snapshot()
    state = bench.context.state
    assert (state.value("eden").value if where == "source" else state.value("replay.from").value) == 6
    beside.close()
    bench.spout.close()
    bench.source.close()


def test_only_damaged_records_are_no_end_of_the_queue(bench):
    spoil(bench.source, *[b"J{"] * 5000)
    bench.feed("behind them")
    assert [values for _, values in bench.await_rows(1)] == [("behind them",)]
    assert len(bench.dead()) == 5000


def test_dead_letters_that_cannot_be_written_lose_no_record(bench, monkeypatch):
    monkeypatch.setattr("penstock.replay.replayer._RETRY_PAUSE", 0.01)
    bench.feed("a")
    bench.await_rows(1)
    dead = bench.spout._replayer._sources.queues.dead
    add, failures = dead.add, [OSError("disk full"), OSError("disk full")]

    def fails_twice(records):
        if failures:
            raise failures.pop()
        add(records)

    monkeypatch.setattr(dead, "add", fails_twice)
    spoil(bench.source, b"J{")
    bench.feed("b")
    end = time.monotonic() + DEADLINE
    while not bench.out.rows and time.monotonic() < end:
        with contextlib.suppress(OSError):
            bench.spout.next_batch()
        bench.spout._replayer.wait(0.01)
    assert [values for _, values in bench.out.rows] == [("b",)]
    assert [record.payload for record in bench.dead()] == [(b"J{",)]


def test_a_value_that_does_not_fit_its_field_is_set_aside_alone(bench, monkeypatch):
    def emit_batch(columns, stream="default", msg_ids=None):
        if any(value == 3 for value in columns[0]):
            raise FieldTypeError(
                "stream 'default' of 'lines'", "field 'line' is declared string, and a column does not fit (3)"
            )
        keep(columns, stream, msg_ids)

    keep = bench.out.emit_batch
    bench.out.emit_batch = emit_batch
    bench.feed("a", 3, "b")
    assert [values for _, values in bench.await_rows(2)] == [("a",), ("b",)]
    end = time.monotonic() + DEADLINE
    while not bench.dead() and time.monotonic() < end:
        bench.spout._replayer.wait(0.01)
    [record] = bench.dead()
    assert record.payload == (3,)
    assert "cannot be emitted: stream 'default' of 'lines'" in record.error
