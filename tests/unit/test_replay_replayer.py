"""The threads of the replayer: failures and load."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter

import pytest

from penstock.columns import to_column
from penstock.errors import ComponentError
from penstock.replay import DiskQueue, QueueEden, Replayer, ReplayRecord, replayer
from penstock.replay.eden import SpoutEden
from penstock.replay.embedded import open_beside
from penstock.state.values import TaskState
from penstock.topology.components import BatchSpout, Context, Failure

DEADLINE = 60.0


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(replayer, "_RETRY_PAUSE", 0.01)


class Bench:
    def __init__(self, folder):
        self.source = DiskQueue(folder / "eden")
        self.eden = QueueEden(folder / "eden", ("n",))
        self.state = TaskState()
        self.eden.open({}, Context("t", "s", 1, 0, {"s": (1,)}, state=self.state))
        self.folder = folder / "q"

    def start(self, **options):
        self.queues = open_beside(self.folder)
        self.replayer = Replayer(self.eden, self.queues, state=self.state, **options)
        self.replayer.start()
        return self.replayer

    def feed(self, *values):
        self.source.append([ReplayRecord((value,)) for value in values])

    def take(self, count):
        end, entries = time.monotonic() + DEADLINE, []
        while len(entries) < count:
            self.replayer.wait(0.1)
            entries += self.replayer.take(count - len(entries))
            assert time.monotonic() < end
        return entries


@pytest.fixture
def bench(tmp_path):
    return Bench(tmp_path)


def fails_once(owner, name, error):
    """The next call of a method raises."""
    real = getattr(owner, name)

    def call(*args):
        setattr(owner, name, real)
        raise error

    setattr(owner, name, call)


@pytest.mark.parametrize("error", [OSError("disk gone"), ZeroDivisionError("a user's Eden")])
def test_what_a_thread_runs_into_is_said_once_and_tried_again(bench, quick, error):
    fails_once(bench.eden, "read", error)
    bench.feed(1)
    bench.start()
    assert bench.replayer.wait(DEADLINE)
    with pytest.raises(type(error), match=str(error)):
        bench.replayer.take(10)
    assert [entry.record.payload for entry in bench.take(1)] == [(1,)]
    bench.replayer.close()


@pytest.mark.parametrize(("part", "step"), [("from_", "append"), ("pointer", "store")])
def test_backflow_and_swap_survive_a_disk_that_fails_once(bench, quick, part, step):
    bench.feed("x", "y")
    bench.start()
    entries = bench.take(2)
    fails_once(getattr(bench.queues, part), step, OSError("No space left on device"))
    bench.replayer.fail(entries[0], Failure("split", "boom"))
    assert bench.replayer.wait(DEADLINE)
    with pytest.raises(OSError, match="No space"):
        bench.replayer.take(10)
    [again] = bench.take(1)
    assert again.record.payload == ("x",)
    assert again.record.attempts == 1
    bench.replayer.ack([again, entries[1]])
    bench.replayer.close()


def test_close_writes_what_failed_and_stops_the_threads(bench):
    bench.feed(*range(50))
    bench.start()
    entries = bench.take(50)
    for entry in entries:
        bench.replayer.fail(entry, Failure("split", "boom"))
    bench.replayer.close()
    assert not any(thread.is_alive() for thread in bench.replayer._threads)
    after = open_beside(bench.folder)
    held = [record for queue in (after.from_, after.to) for _, record in queue.read(100)]
    assert sorted(record.payload[0] for record in held) == list(range(50))
    assert {record.attempts for record in held} == {1}
    assert bench.state.value("eden").value == 50  # Eden's position in the state is behind them
    # Without a commit they are still in the queue.
    assert len(DiskQueue(bench.folder.parent / "eden").read(100)) == 50


def test_what_is_done_is_released_when_the_epoch_after_it_is_committed(bench):
    bench.feed("a", "b")
    bench.start()
    entries = bench.take(2)
    bench.replayer.fail(entries[0], Failure("split", "boom"))
    [again] = bench.take(1)
    bench.replayer.ack([entries[1], again])

    def held():
        beside = open_beside(bench.folder)
        queues = (DiskQueue(bench.folder.parent / "eden"), beside.from_, beside.to)
        return [len(queue.read(10)) for queue in queues]

    bench.replayer.save_positions()
    assert held() == [2, 1, 0]
    bench.replayer.on_committed()
    assert held() == [2, 1, 0]  # a restart may use the epoch before the newest
    bench.replayer.save_positions()
    assert held() == [2, 1, 0]
    bench.replayer.on_committed()
    assert held() == [0, 0, 0]
    bench.replayer.close()


def test_a_release_that_fails_is_made_good_by_the_next(bench, caplog):
    bench.feed("a")
    bench.start()
    bench.replayer.ack(bench.take(1))
    fails_once(bench.eden._queue, "release", OSError("No space left on device"))
    for _ in range(2):
        bench.replayer.save_positions()
        bench.replayer.on_committed()
    assert "No space left on device; processed records stay stored" in caplog.text
    assert not DiskQueue(bench.folder.parent / "eden").empty
    bench.replayer.save_positions()
    bench.replayer.on_committed()
    assert DiskQueue(bench.folder.parent / "eden").empty
    bench.replayer.close()


def test_under_load_every_tuple_is_acked_or_dead(bench):
    random.seed(7)
    total, bad = 5_000, set(range(0, 5_000, 97))
    bench.feed(*range(total))
    bench.start(max_attempts=3)
    acked, tries, settled = set(), Counter(), 0
    end = time.monotonic() + DEADLINE
    while settled < total:
        assert time.monotonic() < end
        bench.replayer.wait(0.05)
        entries = bench.replayer.take(300)
        random.shuffle(entries)
        done = []
        for entry in entries:
            [value] = entry.record.payload
            tries[value] += 1
            if value in bad or random.random() < 0.02:
                bench.replayer.fail(entry, Failure("split", "boom"))
                settled += entry.record.attempts == 2
            else:
                done.append(entry)
                acked.add(value)
        bench.replayer.ack(done)
        settled += len(done)
    bench.replayer.close()
    dead = {dead_letter.record.payload[0] for dead_letter in open_beside(bench.folder).dead.read_all()}
    assert bad <= dead
    assert acked | dead == set(range(total))
    assert not acked & dead
    assert max(tries.values()) == 3


class Numbers(BatchSpout):
    """A spout with message ids, or without."""

    tracked = True

    def __init__(self):
        self.acked = []

    def declare_output_fields(self, declarer):
        declarer.declare(("n", int), "text")

    def open(self, conf, context, collector):
        self.collector, self.next = collector, 0

    def next_batch(self):
        values = list(range(self.next, self.next + 3))
        self.next += 3
        columns = {"n": to_column(values, None), "text": [str(value) for value in values]}
        self.collector.emit_batch(columns, msg_ids=[value + 100 for value in values] if self.tracked else None)

    def ack_many(self, msg_ids):
        self.acked += msg_ids


def test_a_batch_spout_as_a_source():
    spout = Numbers()
    eden = SpoutEden(spout)
    assert [field[0] if isinstance(field, tuple) else field for field in eden.fields] == ["n", "text"]
    eden.open({}, Context("t", "s", 1, 0, {"s": (1,)}))
    assert eden.read(2) == [(100, (0, "0")), (101, (1, "1"))]
    assert eden.read(2) == [(102, (2, "2"))]
    assert eden.read(2)[0] == (103, (3, "3"))
    eden.done([100, 103])
    assert spout.acked == [100, 103]
    eden.close()


def test_a_source_must_emit_with_message_ids():
    spout = Numbers()
    spout.tracked = False
    eden = SpoutEden(spout)
    eden.open({}, Context("t", "s", 1, 0, {"s": (1,)}))
    with pytest.raises(ComponentError, match=r"emits tuples without message ids\. Only"):
        eden.read(1)


class WaitingEden(QueueEden):
    """Can wait, and says when it does."""

    def open(self, conf, context):
        super().open(conf, context)
        self.waits, self.arrived = 0, threading.Event()

    def wait(self, seconds):
        self.waits += 1
        self.arrived.wait(seconds)
        self.arrived.clear()
        return True


def test_a_source_that_can_wait_is_read_when_something_has_arrived(bench, monkeypatch):
    monkeypatch.setattr(replayer, "_EDEN_PAUSE", DEADLINE)
    bench.eden = WaitingEden(bench.folder.parent / "eden", ("n",))
    bench.eden.open({}, Context("t", "s", 1, 0, {"s": (1,)}, state=bench.state))
    woken = threading.Event()
    bench.start(wake=woken.set)
    for number in range(3):
        bench.feed(number)
        bench.eden.arrived.set()
        assert woken.wait(DEADLINE), "the task's thread is told"
        woken.clear()
        assert [entry.record.payload for entry in bench.take(1)] == [(number,)]
    assert bench.eden.waits
    bench.eden.arrived.set()
    bench.replayer.close()


def test_a_source_that_fails_while_waiting_is_read_again_after_a_pause(bench, quick, monkeypatch):
    bench.eden = WaitingEden(bench.folder.parent / "eden", ("n",))
    bench.eden.open({}, Context("t", "s", 1, 0, {"s": (1,)}, state=bench.state))
    fails_once(bench.eden, "wait", OSError("no broker"))
    bench.start()
    bench.feed(7)
    assert [entry.record.payload for entry in bench.take(1)] == [(7,)]
    bench.replayer.close()
