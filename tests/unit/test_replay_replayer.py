"""The threads of the replayer: failures and load."""

from __future__ import annotations

import random
import threading
import time
import tracemalloc
from collections import Counter

import pytest

from penstock.errors import ComponentError
from penstock.replay import DiskQueue, QueueEden, Replayer, ReplayRecord, replayer
from penstock.replay.embedded import open_beside
from penstock.replay.records import lost
from penstock.state.values import TaskState
from penstock.topology.components import Context, Failure

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
    bench.replayer.fail([entries[0].place], Failure("split", "boom"))
    assert bench.replayer.wait(DEADLINE)
    with pytest.raises(OSError, match="No space"):
        bench.replayer.take(10)
    [again] = bench.take(1)
    assert again.record.payload == ("x",)
    assert again.record.attempts == 1
    bench.replayer.ack([again.place, entries[1].place])
    bench.replayer.close()


def test_close_writes_what_failed_and_stops_the_threads(bench):
    bench.feed(*range(50))
    bench.start()
    entries = bench.take(50)
    for entry in entries:
        bench.replayer.fail([entry.place], Failure("split", "boom"))
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
    bench.replayer.fail([entries[0].place], Failure("split", "boom"))
    [again] = bench.take(1)
    bench.replayer.ack([entries[1].place, again.place])

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
    bench.replayer.ack([entry.place for entry in bench.take(1)])
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
                bench.replayer.fail([entry.place], Failure("split", "boom"))
                settled += entry.record.attempts == 2
            else:
                done.append(entry.place)
                acked.add(value)
        bench.replayer.ack(done)
        settled += len(done)
    bench.replayer.close()
    dead = {dead_letter.record.payload[0] for dead_letter in open_beside(bench.folder).dead.read_all()}
    assert bad <= dead
    assert acked | dead == set(range(total))
    assert not acked & dead
    assert max(tries.values()) == 3


class WaitingEden(QueueEden):
    """Can wait, and says when it does."""

    def open(self, conf, context):
        super().open(conf, context)
        self.waits, self.arrived = threading.Event(), threading.Event()

    def wait(self, seconds):
        self.waits.set()
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
    assert bench.eden.waits.wait(DEADLINE), "now that everything is read"
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


# ---- tuples are read again ------------------------------------------------------------------------------------


class AgainEden(QueueEden):
    """Notes what is read again, and may be told to do it badly."""

    def open(self, conf, context):
        super().open(conf, context)
        self.asked, self.most, self.faults = [], 10**9, []

    def read_again(self, positions):
        self.asked.append(len(positions))
        if self.faults:
            fault = self.faults.pop(0)
            if isinstance(fault, Exception):
                raise fault
            return fault
        return super().read_again(positions[: self.most])


@pytest.fixture
def again(bench):
    bench.eden = AgainEden(bench.folder.parent / "eden", ("n",))
    bench.eden.open({}, Context("t", "s", 1, 0, {"s": (1,)}, state=bench.state))
    return bench


def await_settled(replayer):
    end = time.monotonic() + DEADLINE
    while not replayer.settled:
        time.sleep(0.001)  # the threads of the replayer are real
        assert time.monotonic() < end


def held(bench):
    """The records in From and To, and the dead letters."""
    beside = open_beside(bench.folder)
    found = [record for queue in (beside.from_, beside.to) for _, record in queue.read(100_000)]
    dead = [dead_letter.record for dead_letter in beside.dead.read_all()]
    beside.close()
    return found, dead


def test_nothing_is_kept_of_a_tuple_but_its_place(bench):
    """8,000 tuples of 2 KB would be 16 MB, and an object for each would be 500 KB."""
    bench.source.append([ReplayRecord(("x" * 2_000,))] * 10_000)
    bench.start(capacity=50)
    bench.take(2_000)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(80):
            bench.take(100)
        # What is read ahead is there in both cases, but not always the same number.
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown < 50 * 3_000 + 8_000 * 30
    bench.replayer.close()


@pytest.mark.parametrize("most", [1, 7, 10**9])
def test_failed_tuples_are_read_again_in_the_order_of_their_places(again, most):
    again.eden.most = most
    again.feed(*range(100))
    again.start()
    entries = again.take(100)
    for number in (30, 10, 20):
        again.replayer.fail([entries[number].place, entries[number + 1].place], Failure("split", f"boom {number}"))
    await_settled(again.replayer)
    assert again.eden.asked[0] in (2, 4, 6)  # what failed while the first were stored
    again.replayer.close()
    found, dead = held(again)
    assert sorted((record.payload[0], record.error) for record in found) == [
        (number + more, f"boom {number}") for number in (10, 20, 30) for more in (0, 1)
    ]
    assert not dead


def test_a_source_that_is_away_while_tuples_are_read_again_loses_none(again, quick):
    again.eden.faults = [OSError("away"), OSError("still away")]
    again.eden.most = 20
    again.feed(*range(50))
    again.start()
    again.replayer.fail([entry.place for entry in again.take(50)], Failure("split", "boom"))
    await_settled(again.replayer)
    for text in ("away", "still away"):
        with pytest.raises(OSError, match=text):
            again.replayer.take(1)
    again.replayer.close()
    assert sorted(record.payload[0] for record in held(again)[0]) == list(range(50))


@pytest.mark.parametrize("step", [1, 2])
def test_a_disk_that_is_full_in_the_middle_repeats_only_what_is_left(again, quick, step):
    again.eden.most = 20
    again.feed(*range(50))
    again.start()
    entries = again.take(50)
    real, calls = again.queues.from_.append, []

    def append(records):
        calls.append(len(records))
        if len(calls) == step:
            raise OSError("No space left on device")
        real(records)

    again.queues.from_.append = append
    again.replayer.fail([entry.place for entry in entries], Failure("split", "boom"))
    await_settled(again.replayer)
    with pytest.raises(OSError, match="No space"):
        again.replayer.take(1)
    assert sorted(calls) == [10, 20, 20, 20]
    again.replayer.close()
    assert sorted(record.payload[0] for record in held(again)[0]) == list(range(50))


@pytest.mark.parametrize("found", [[], [(1,)] * 9])
def test_a_source_that_breaks_the_contract_is_said(again, quick, found):
    again.eden.faults = [found]
    again.feed(1)
    again.start()
    again.replayer.fail([again.take(1)[0].place], Failure("split", "boom"))
    await_settled(again.replayer)
    text = f"read_again of AgainEden: it returned {len(found)} tuples for 1 positions. It must return at least one"
    with pytest.raises(ComponentError, match=text):
        again.replayer.take(1)
    again.replayer.close()


def test_a_tuple_that_is_gone_becomes_a_dead_letter_and_the_others_go_on(again):
    reported = []
    again.eden.faults = [[("a",), lost("topic 'x' offset 1", "it was deleted"), ("c",)]]
    again.feed("a", "b", "c")
    again.start(report=reported.append)
    places = [entry.place for entry in again.take(3)]
    again.replayer.fail(places, Failure("split", "boom"))
    back = again.take(2)
    assert [(entry.record.payload, entry.record.attempts) for entry in back] == [(("a",), 1), (("c",), 1)]
    assert again.replayer.take_given_up() == 1
    [record] = held(again)[1]
    assert (record.payload, record.attempts, record.component) == ((b"topic 'x' offset 1",), 1, "split")
    assert record.error == "boom; topic 'x' offset 1 can no longer be read: it was deleted"
    assert "1 records cannot be read back" in str(reported[0])
    again.replayer.ack([entry.place for entry in back])
    again.replayer.close()
    assert again.state.value("eden").value == 3


def test_a_tuple_that_is_handed_on_and_gone_is_not_lost_either(again):
    again.eden.faults = [[lost("topic 'x' offset 0", "it was deleted")]]
    again.feed("a")
    again.start()
    again.replayer.fail([again.take(1)[0].place], Failure("", "the topology was replaced", handed_on=True))
    await_settled(again.replayer)
    again.replayer.close()
    [record] = held(again)[1]
    assert record.error == "the topology was replaced; topic 'x' offset 0 can no longer be read: it was deleted"


def test_attempts_of_a_tuple_from_to_are_read_again_with_it(bench):
    bench.feed("a")
    bench.start(max_attempts=4)
    for attempt in range(4):
        [entry] = bench.take(1)
        assert entry.record.attempts == attempt
        bench.replayer.fail([entry.place], Failure("split", f"boom {attempt}"))
    await_settled(bench.replayer)
    bench.replayer.close()
    [record] = held(bench)[1]
    assert (record.payload, record.attempts, record.error) == (("a",), 4, "boom 3")


def test_acks_do_not_wait_while_tuples_are_read_again(again):
    again.feed(*range(10))
    again.start()
    entries = again.take(10)
    begun, go_on = threading.Event(), threading.Event()
    real = again.eden.read_again

    def slowly(positions):
        begun.set()
        assert go_on.wait(DEADLINE)
        return real(positions)

    again.eden.read_again = slowly
    again.replayer.fail([entries[0].place], Failure("split", "boom"))
    assert begun.wait(DEADLINE)
    again.replayer.ack([entry.place for entry in entries[1:]])
    again.feed(10)
    assert [entry.record.payload for entry in again.take(1)] == [(10,)]  # and reading goes on
    again.replayer.save_positions()
    assert again.state.value("eden").value == 0
    go_on.set()
    await_settled(again.replayer)
    again.replayer.close()


def test_fifty_thousand_failures_are_stored_fast(bench):
    """As in a replacement: generous, because the machine may be busy."""
    bench.feed(*range(50_000))
    bench.start()
    places = [entry.place for entry in bench.take(50_000)]
    begun = time.monotonic()
    bench.replayer.fail(places, Failure("", "the topology was replaced", handed_on=True))
    await_settled(bench.replayer)
    assert time.monotonic() - begun < 10.0
    bench.replayer.close()
    found, dead = held(bench)
    assert sorted(record.payload[0] for record in found) == list(range(50_000))
    assert not dead
