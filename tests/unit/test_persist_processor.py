"""The processor with a real queue, a real store, and a simulated clock."""

import itertools
import sqlite3
import threading
from pathlib import Path

import pyarrow as pa
import pytest

from penstock.clock import SimulatedClock
from penstock.persist import EmbeddedQueue, SQLiteStore
from penstock.persist.dead_letters import DeadLetterRow, DeadLetterRows, send_rows_back
from penstock.persist.entries import EntryDamaged, pack
from penstock.persist.policy import Flushing, Patience
from penstock.persist.processor import Processor, drained
from penstock.persist.queues import QueueUnavailable
from penstock.persist.stores import StoreUnavailable
from penstock.replay.dead_letters import DiskDeadLetterStore, send_back
from penstock.replay.embedded import open_beside
from penstock.replay.records import ReplayRecord


class Killed(BaseException):
    """Stands for the end of the process."""


class Bench:
    """One queue, one store, and any number of processors one after another."""

    def __init__(self, folder, key=("word",), period=1.0, rows=100):
        self.folder, self.clock = Path(folder), SimulatedClock(1000.0)
        self.queue = EmbeddedQueue(str(self.folder / "queue"))
        self.store = SQLiteStore(str(self.folder / "results.db"), "results", key=key)
        self.period, self.rows = period, rows
        self.writer = self.queue.open("t/persist", "")
        self._numbers = itertools.count(1)
        self.incarnation = self.writer.register("persist/0")

    def put(self, *pairs, incarnation=None, number=None, writer="persist/0"):
        number = next(self._numbers) if number is None else number
        table = pa.table({"word": [word for word, _ in pairs], "n": [n for _, n in pairs]})
        self.writer.put([pack(writer, incarnation or self.incarnation, number, table)])
        return number

    def processor(self, crash=lambda step: None, store=None):
        return Processor(
            "t/persist",
            self.queue.open("t/persist", ""),
            (store or self.store).open(),
            DeadLetterRows(self.folder / "dead", "persist"),
            Flushing(self.period, self.rows),
            self.clock,
            crash,
        )

    def drain(self, processor):
        assert drained(processor, self.clock.monotonic() + 100, self.clock, self.clock.advance)

    def stored(self):
        with sqlite3.connect(self.folder / "results.db") as connection:
            order = "word" if self.store.key else "rowid"
            return connection.execute(f"SELECT word, n FROM results ORDER BY {order}").fetchall()

    def dead_letters(self):
        return [dead_letter.record for dead_letter in DiskDeadLetterStore(self.folder / "dead").read_all()]


@pytest.fixture
def bench(tmp_path):
    return Bench(tmp_path)


def test_algorithm_3_writes_on_the_period_or_on_the_length():
    flushing = Flushing(period=2.0, rows=10)
    assert not flushing.due(5.0, 0)
    assert flushing.due(5.0, 1)  # nothing was written before
    flushing.on_written(5.0)
    assert not flushing.due(6.9, 9)
    assert flushing.due(6.9, 10)
    assert flushing.due(7.0, 1)
    assert not flushing.due(100.0, 0)


def test_pauses_double_up_to_a_limit_and_begin_anew_after_a_success():
    patience, pauses = Patience(), []
    for _ in range(10):
        patience.failed(50.0)
        pauses.append(round(patience.wait(50.0), 3))
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0, 10.0]
    for _ in range(2_000):  # an outage of hours
        patience.failed(50.0)
    assert patience.wait(50.0) == 10.0
    patience.succeeded()
    assert patience.wait(50.0) == 0
    patience.failed(60.0)
    assert patience.wait(60.0) == pytest.approx(0.1)


def test_the_first_row_is_written_at_once_and_the_next_after_the_period(bench):
    processor = bench.processor()
    bench.put(("a", 1))
    processor.turn()
    assert bench.stored() == [("a", 1)]
    bench.put(("b", 2))
    bench.clock.advance(0.99)
    processor.turn()
    assert bench.stored() == [("a", 1)]
    bench.clock.advance(0.02)
    processor.turn()
    assert bench.stored() == [("a", 1), ("b", 2)]
    assert processor.status.written == 2


def test_enough_rows_are_written_without_waiting(bench):
    processor = bench.processor()
    bench.put(("a", 1))
    processor.turn()
    bench.put(*((f"w{n}", n) for n in range(99)))
    processor.turn()
    assert len(bench.stored()) == 1
    bench.put(("last", 1))
    processor.turn()
    assert len(bench.stored()) == 101


def test_a_key_has_the_row_that_was_put_last(bench):
    processor = bench.processor()
    bench.put(("a", 1), ("b", 1), ("a", 2))
    bench.put(("a", 3))
    bench.drain(processor)
    bench.put(("b", 9), ("a", 4))
    bench.drain(processor)
    assert bench.stored() == [("a", 4), ("b", 9)]


def test_what_was_written_is_released(bench):
    processor = bench.processor()
    bench.put(("a", 1))
    assert bench.writer.waiting() > 0
    bench.drain(processor)
    assert bench.writer.waiting() == 0
    assert processor.empty


@pytest.mark.parametrize("step", ["rejected", "written", "released"])
def test_a_crash_in_any_gap_doubles_and_loses_nothing(tmp_path, step):
    """Rows are appended, so a repeated write would be visible."""
    bench = Bench(tmp_path, key=())
    bench.put(("a", 1), ("b", 2))
    with sqlite3.connect(bench.folder / "results.db") as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS results (word TEXT, n INTEGER CHECK (n <> 13)) STRICT")
    bench.put(("bad", 13), ("c", 3))

    def die(reached):
        if reached == step:
            raise Killed

    with pytest.raises(Killed):
        bench.drain(bench.processor(die))
    bench.put(("d", 4))
    bench.drain(bench.processor())
    assert bench.stored() == [("a", 1), ("b", 2), ("c", 3), ("d", 4)]
    assert [record.payload[1] for record in bench.dead_letters()] == [{"word": "bad", "n": 13}]


def test_an_entry_that_was_put_twice_is_written_once(tmp_path):
    bench = Bench(tmp_path, key=())
    number = bench.put(("a", 1))
    bench.put(("a", 1), number=number)  # the writer did not learn that it had arrived
    bench.put(("b", 2))
    processor = bench.processor()
    bench.drain(processor)
    assert bench.stored() == [("a", 1), ("b", 2)]
    assert processor.status.again == 1
    bench.put(("a", 1), number=number)
    bench.drain(processor)
    assert len(bench.stored()) == 2


def test_what_a_replaced_worker_puts_later_is_not_written(tmp_path):
    bench = Bench(tmp_path, key=())
    old = bench.incarnation
    bench.put(("old", 1))
    new = bench.writer.register("persist/0")
    assert new > old
    bench.put(("new", 1), incarnation=new, number=1)
    bench.put(("zombie", 1), incarnation=old, number=7)
    bench.put(("other task", 1), incarnation=old, number=1, writer="persist/1")
    bench.drain(bench.processor())
    assert bench.stored() == [("old", 1), ("new", 1), ("other task", 1)]


def test_two_processors_at_once_write_everything_once(tmp_path):
    bench = Bench(tmp_path, key=())
    one, other = bench.processor(), bench.processor()
    for n in range(20):
        bench.put((f"w{n}", n))
        (one if n % 3 else other).turn(flush=True)
        bench.clock.advance(0.5)
        other.turn(flush=n % 2 == 0)
    bench.drain(one)
    bench.drain(other)
    assert bench.stored() == [(f"w{n}", n) for n in range(20)]


def test_types_that_do_not_go_together_are_written_one_after_another(tmp_path):
    bench = Bench(tmp_path, key=())
    with sqlite3.connect(bench.folder / "results.db") as connection:
        connection.execute("CREATE TABLE results (word, n)")
    bench.put(("a", 1))
    bench.put(("b", "two"))
    bench.put(("c", 3))
    bench.put(("d", None))
    bench.drain(bench.processor())
    assert bench.stored() == [("a", 1), ("b", "two"), ("c", 3), ("d", None)]


class AwayStore(SQLiteStore):
    """Refuses the first few writes."""

    refusals = 3

    def open(self):
        client = super().open()
        write, left = client.write, itertools.count()

        def refusing(*args):
            if next(left) < self.refusals:
                raise StoreUnavailable("the store", "it does not answer")
            write(*args)

        client.write = refusing
        return client


def test_a_store_that_is_away_is_tried_again_with_growing_pauses(bench):
    processor = bench.processor(store=AwayStore(str(bench.folder / "results.db"), "results", key=["word"]))
    bench.put(("a", 1))
    waits = []
    for _ in range(3):
        processor.turn()
        assert "the store" in processor.status.trouble
        waits.append(round(processor.wait(), 3))
        processor.turn()  # too soon: the store is not called
        assert processor.status.attempts == len(waits)
        bench.clock.advance(processor.wait() + 1e-6)
    assert waits == [0.1, 0.2, 0.4]
    processor.turn()
    assert processor.status.trouble == ""
    assert bench.stored() == [("a", 1)]


def test_a_queue_that_is_away_keeps_what_is_in_hand(bench, monkeypatch):
    processor = bench.processor()
    bench.put(("first", 0))
    processor.turn()
    bench.put(("a", 1))
    processor.turn()  # pending, but not due

    def away(*args):
        raise QueueUnavailable("the queue", "it does not answer")

    monkeypatch.setattr(processor._queue, "read", away)
    bench.clock.advance(2)
    processor.turn()
    assert "the queue" in processor.status.trouble
    monkeypatch.undo()
    bench.clock.advance(2)
    processor.turn()
    assert bench.stored() == [("a", 1), ("first", 0)]


def test_a_rejected_row_is_a_dead_letter_and_comes_back_when_it_is_sent(bench):
    with sqlite3.connect(bench.folder / "results.db") as connection:
        connection.execute("CREATE TABLE results (word TEXT PRIMARY KEY, n INTEGER CHECK (n <> 13))")
    bench.put(("a", 1), ("bad", 13), ("b", 2))
    processor = bench.processor()
    bench.drain(processor)
    assert bench.stored() == [("a", 1), ("b", 2)]
    assert (processor.status.written, processor.status.rejected) == (2, 1)
    (record,) = bench.dead_letters()
    assert record.component == "persist"
    assert "CHECK" in record.error
    with sqlite3.connect(bench.folder / "results.db") as connection:
        connection.execute("ALTER TABLE results RENAME TO old")
        connection.execute("CREATE TABLE results (word TEXT PRIMARY KEY, n INTEGER)")
    dead = DiskDeadLetterStore(bench.folder / "dead")
    (dead_letter,) = dead.read_all()
    assert send_rows_back(dead, bench.writer, [dead_letter.id]) == 1
    bench.drain(processor)
    assert bench.stored() == [("bad", 13)]
    assert bench.dead_letters() == []


def test_much_that_waits_is_written_in_steps_and_in_smaller_ones_while_the_store_refuses(tmp_path):
    bench = Bench(tmp_path, key=(), rows=10)
    sizes = []

    class Counting(SQLiteStore):
        def open(self):
            client = super().open()
            write = client.write

            def counted(queue, rows, *more):
                sizes.append(rows.num_rows)
                if rows.num_rows > 3:
                    raise StoreUnavailable("the store", "takes three rows at a time")
                write(queue, rows, *more)

            client.write = counted
            return client

    for n in range(40):
        bench.put((f"w{n}", n))
    processor = bench.processor(store=Counting(str(tmp_path / "results.db"), "results"))
    bench.drain(processor)
    assert bench.stored() == [(f"w{n}", n) for n in range(40)]
    assert sizes[:3] == [10, 5, 2]
    assert max(sizes) == 10


def test_two_queues_of_one_name_do_not_share_their_progress(tmp_path):
    """Two topologies of the same name that write to one database."""
    one, other = Bench(tmp_path, key=()), Bench(tmp_path, key=())
    other.queue = EmbeddedQueue(str(tmp_path / "other"))
    other.writer = other.queue.open("t/persist", "")
    other.incarnation = one.incarnation + 1000
    first, second = one.processor(), other.processor()
    for n in range(5):
        one.put(("one", n))
        first.turn(flush=True)
        other.put(("other", n))
        second.turn(flush=True)
        one.clock.advance(5)
        other.clock.advance(5)
    assert sorted(one.stored()) == [(name, n) for name in ("one", "other") for n in range(5)]


def test_a_database_file_that_was_deleted_is_made_anew(bench):
    processor = bench.processor()
    bench.put(("a", 1))
    bench.drain(processor)
    for path in bench.folder.glob("results.db*"):
        path.unlink()
    bench.put(("b", 2))
    bench.drain(processor)
    assert bench.stored() == [("b", 2)]


def test_two_calls_that_send_dead_letters_back_at_once_lose_none(tmp_path):
    bench = Bench(tmp_path, key=())
    dead = DiskDeadLetterStore(tmp_path / "dead")
    rows = DeadLetterRows(tmp_path / "dead", "persist")
    for word in ("first", "second"):
        rows.add([DeadLetterRow(word, pa.table({"word": [word], "n": [1]}), "refused", 1.0)])
    first, second = (dead_letter.id for dead_letter in dead.read_all())

    class Interrupted:
        """A queue's client. Another command runs between its registration and its put, if it can."""

        def __getattr__(self, name):
            return getattr(bench.writer, name)

        def put(self, *args):
            other.start()
            other.join(0.3)
            bench.drain(processor)
            bench.writer.put(*args)

    def another():
        assert (
            send_rows_back(DiskDeadLetterStore(tmp_path / "dead"), bench.queue.open("t/persist", ""), [second])
            == 1
        )

    processor = bench.processor()
    other = threading.Thread(target=another)
    assert send_rows_back(dead, Interrupted(), [first]) == 1
    other.join()
    bench.drain(processor)
    assert sorted(bench.stored()) == [("first", 1), ("second", 1)]
    assert bench.dead_letters() == []


def test_dead_letters_of_two_folders_are_sent_by_writers_of_their_own(tmp_path):
    bench = Bench(tmp_path, key=())
    for folder in ("dead", "elsewhere"):
        rows = DeadLetterRows(tmp_path / folder, "persist")
        rows.add([DeadLetterRow(folder, pa.table({"word": [folder], "n": [1]}), "refused", 1.0)])
    processor, packed = bench.processor(), []

    class Late:
        """Its entries are put after those of the other, although it has the older incarnation."""

        def __getattr__(self, name):
            return getattr(bench.writer, name)

        def put(self, *args):
            packed.append(args)

    send_rows_back(DiskDeadLetterStore(tmp_path / "elsewhere"), Late(), [0])
    send_rows_back(DiskDeadLetterStore(tmp_path / "dead"), bench.writer, [0])
    bench.drain(processor)
    bench.writer.put(*packed[0])
    bench.drain(processor)
    assert sorted(bench.stored()) == [("dead", 1), ("elsewhere", 1)]


def test_two_commands_that_send_the_same_dead_letter_back_send_it_once(tmp_path):
    queues = open_beside(tmp_path)
    queues.dead.add([ReplayRecord(("a",), 5), ReplayRecord(("b",), 5)])
    ids = {dead_letter.id for dead_letter in queues.dead.read_all()}
    assert [send_back(queues, ids), send_back(queues, ids)] == [2, 0]
    assert [record.payload for _, record in queues.from_.read(10)] == [("a",), ("b",)]
    queues.close()


def test_a_queue_that_gets_a_new_id_doubles_and_loses_nothing(tmp_path):
    bench = Bench(tmp_path, key=())
    processor = bench.processor()
    first = bench.put(("before", 1))
    bench.drain(processor)
    [id] = tmp_path.glob("queue/*/id")
    id.write_text("another")  # as after a server has lost its contents
    bench.put(("before", 1), number=first)  # the writer did not learn that it had arrived
    bench.put(("after", 2))

    def kill(step):
        if step == "written":
            raise Killed

    processor._crash = kill
    with pytest.raises(Killed):
        processor.turn(flush=True)
    assert bench.stored() == [("before", 1), ("after", 2)]
    bench.drain(bench.processor())
    assert bench.stored() == [("before", 1), ("after", 2)]


def test_what_is_in_hand_when_a_queue_gets_a_new_id_is_written(tmp_path):
    bench = Bench(tmp_path, key=(), period=10.0)
    bench.put(("first", 0))
    processor = bench.processor()
    processor.turn()
    in_hand = bench.put(("in hand", 1))
    processor.turn()
    assert bench.stored() == [("first", 0)]
    [id] = tmp_path.glob("queue/*/id")
    id.write_text("another")
    bench.put(("in hand", 1), number=in_hand)
    bench.put(("later", 2))
    bench.drain(processor)
    bench.drain(bench.processor())
    assert bench.stored() == [("first", 0), ("in hand", 1), ("later", 2)]


def test_a_damaged_dead_letter_is_not_sent_back(bench, tmp_path):
    dead = DiskDeadLetterStore(tmp_path / "dead")
    dead.add([ReplayRecord((b"P unsigned",), 1, "not signed", "persist", 1.0, damaged=True)])
    with pytest.raises(EntryDamaged, match="cannot be read, so it cannot be sent back: not signed"):
        send_rows_back(dead, bench.writer, [0])
    assert len(dead.read_all()) == 1
