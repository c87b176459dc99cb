"""Exactly once, a tuple that a task gives up is a dead letter of its epoch, once."""

import re
import threading
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from penstock import (
    BasicBolt,
    BatchBolt,
    CustomGrouping,
    Delivery,
    Lifecycle,
    RichBolt,
    Settings,
    SimulatedClock,
    Spout,
    TopologyBuilder,
)
from penstock.errors import Superseded
from penstock.replay.state_dead_letters import FOLDER, StateDeadLetterStore
from penstock.state.manifest import newest
from penstock.state.savepoints import write_savepoint
from penstock.state.store import StateStore
from penstock.testing import CaptureBolt, LocalRunner
from penstock.worker import epoch_dead_letters as given_up
from penstock.worker.epoch_dead_letters import EpochDeadLetters

BAD = [7, 17, 27]


@dataclass
class Opaque:
    """An instance of a user's class."""

    text: str


class Numbers(Spout):
    def declare_output_fields(self, declarer):
        declarer.declare("n", "text")

    def open(self, conf, context, collector):
        self.collector, self.position = collector, context.state.value("next", 0)
        self.next = self.position.value

    def next_tuple(self):
        if self.next < 30:
            self.collector.emit([self.next, "x" * (200_000 if self.next == 7 else 1)])
            self.next += 1

    def before_snapshot(self):
        self.position.value = self.next


class Basic(BasicBolt):
    def execute(self, tup, collector):
        if tup.n in BAD:
            raise ValueError(f"bad {tup.n}")


class Rich(RichBolt):
    def prepare(self, conf, context, collector):
        self.collector = collector

    def execute(self, tup):
        if tup.n in BAD:
            raise ValueError(f"bad {tup.n}")
        self.collector.ack(tup)


class Failing(Rich):
    def execute(self, tup):
        if tup.n in BAD:
            self.collector.fail(tup, f"bad {tup.n}")


class Batch(BatchBolt):
    def execute_batch(self, batch, source, collector):
        if set(BAD) & set(batch.column(0).to_pylist()):
            raise ValueError("bad batch")


@pytest.fixture
def start(tmp_path):
    def make(bolt, delivery="exactly_once"):
        builder = TopologyBuilder()
        builder.set_spout("numbers", Numbers())
        builder.set_bolt("bolt", bolt).shuffle_grouping("numbers")
        topology = builder.build("giving", Settings(delivery=Delivery(delivery, epoch_interval=0.5)))
        return LocalRunner(topology, folder=str(tmp_path))

    return make


def place(runner, index=0):
    return StateStore(f"{runner._job.shared}/bolt/{FOLDER}/{index}")


def dead_letters(runner):
    return [dead_letter.record for dead_letter in StateDeadLetterStore(place(runner)).read_all()]


@pytest.mark.parametrize("bolt", [Basic, Rich, Failing])
def test_a_tuple_that_fails_is_a_dead_letter(start, bolt):
    runner = start(bolt())
    runner.run(1.5)
    found = dead_letters(runner)
    assert [record.payload[0] for record in found] == BAD
    assert all("bad" in record.error and record.component == "bolt" for record in found)
    assert runner.stats("bolt")[0].given_up == 3
    assert found[0].payload[1].endswith("(truncated: 200,000 in all)")
    assert len(found[0].payload[1]) < 70_000, "bounded"
    assert found[1].payload[1] == "x"


def test_a_batch_that_fails_is_dead_letters_row_by_row(start):
    runner = start(Batch())
    runner.run(1.5)
    found = [record.payload[0] for record in dead_letters(runner)]
    assert set(BAD) <= set(found)
    assert len(found) == len(set(found)) == runner.stats("bolt")[0].given_up


@pytest.mark.parametrize("bolt", [Basic, Rich, Batch])
def test_an_epoch_that_is_done_again_leaves_each_dead_letter_once(start, bolt, monkeypatch):
    class Died(BaseException):
        pass

    add = StateDeadLetterStore.add_once

    def die(self, records, once):
        add(self, records, once)
        raise Died

    first = start(bolt())
    monkeypatch.setattr(StateDeadLetterStore, "add_once", die)
    with pytest.raises(Died):
        first.run(1.0)
    monkeypatch.setattr(StateDeadLetterStore, "add_once", add)
    assert list(place(first).list("added/")), "stored"
    assert dead_letters(first) == [], "and not committed"
    assert first.commits.committed == 0
    again = start(bolt())  # the first one died
    again.run(1.5)
    assert again.commits.committed
    found = [record.payload[0] for record in dead_letters(again)]
    assert set(BAD) <= set(found)
    assert len(found) == len(set(found)) == again.stats("bolt")[0].given_up


class Limited(Numbers):
    limit = 0

    def next_tuple(self):
        if self.next < self.limit:
            super().next_tuple()


@pytest.fixture
def begin(tmp_path):
    """Start a topology whose epochs end when the test says so."""

    class Died(BaseException):
        pass

    def make(limit, crash_at="", bolts=1):
        def die():
            raise Died

        builder = TopologyBuilder()
        builder.set_spout("numbers", Limited())
        builder.set_bolt("bolt", Basic(), bolts).shuffle_grouping("numbers")
        settings = Settings(
            delivery=Delivery("exactly_once", epoch_interval=1e6), lifecycle=Lifecycle(crash_at=crash_at)
        )
        runner = LocalRunner(builder.build("giving", settings), folder=str(tmp_path), die=die)
        runner.component("numbers")[0].limit = limit
        runner.run(1.0)
        if crash_at:
            with pytest.raises(Died):
                runner.commit()
        return runner

    return make


def goes_on(runner, limit):
    runner.component("numbers")[0].limit = limit
    runner.run(1.0)
    return runner.commit()


def given_up_by(runner):
    return [record.payload[0] for record in dead_letters(runner)]


def test_a_superseded_start_cannot_touch_the_dead_letters_of_its_successor(begin):
    stalled = begin(limit=10)
    successor = begin(limit=20)
    assert successor.commit() == 1
    assert given_up_by(successor) == [7, 17]
    stalled.commits.start_commit(stalled.clock.now())
    with pytest.raises(Superseded):
        stalled.run(1.0)
    assert len(place(successor).list("added/")) == 2, "the older start stored its dead letter too"
    assert given_up_by(successor) == [7, 17]
    assert goes_on(successor, 30) == 2
    assert given_up_by(successor) == BAD


def test_dead_letters_of_an_epoch_that_was_not_committed_do_not_count(begin):
    begin(limit=20, crash_at="collected:1")
    again = begin(limit=10)
    assert given_up_by(again) == []
    assert again.commit() == 1
    assert given_up_by(again) == [7]
    assert goes_on(again, 30) == 2
    assert given_up_by(again) == BAD, "17 was in epoch 1 first and is in epoch 2 now"
    third = begin(limit=30)
    assert third.commit() == 3
    assert given_up_by(third) == BAD


def test_dead_letters_in_more_parts_than_at_the_second_time_do_not_count(begin, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(given_up, "_MOST_DEAD_LETTERS", 1)
        begin(limit=30, crash_at="collected:1")
    again = begin(limit=30)
    again.commit()
    assert given_up_by(again) == BAD


def test_dead_letters_of_a_task_that_a_rescale_removed_count_only_if_committed(begin):
    first = begin(limit=25, bolts=2)
    first.commit()
    found = [StateDeadLetterStore(place(first, index)) for index in (0, 1)]
    committed = sorted(dead_letter.record.payload[0] for each in found for dead_letter in each.read_all())
    assert committed == [7, 17]
    first = begin(limit=30, crash_at="collected:2", bolts=2)
    again = begin(limit=30, bolts=1)
    again.commit()
    assert sorted(dead_letter.record.payload[0] for each in found for dead_letter in each.read_all()) == BAD


@pytest.mark.parametrize("way", ["fresh", "savepoint"])
def test_another_run_under_the_same_epoch_numbers_keeps_the_dead_letters_of_the_one_before(
    begin, tmp_path_factory, way
):
    first = begin(limit=10)
    assert first.commit() == 1
    saved = StateStore(str(tmp_path_factory.mktemp("saved")))
    write_savepoint(first._state.store, newest(first._state.store), saved)
    assert goes_on(first, 20) == 2
    assert given_up_by(first) == [7, 17]
    if way == "fresh":
        first._state.clear()
    else:
        first._state.adopt(saved)
    second = begin(limit=20)
    assert given_up_by(second) == [7, 17]
    assert second.commit() == (1 if way == "fresh" else 2)
    assert given_up_by(second) == ([7, 17, 7, 17] if way == "fresh" else [7, 17, 17])


def test_after_a_fall_back_the_dead_letters_of_the_epoch_done_again_count_once(begin):
    first = begin(limit=10)
    first.commit()
    assert goes_on(first, 20) == 2
    first._state.inspect()
    first._state.fall_back("damaged")
    second = begin(limit=30)
    assert given_up_by(second) == [7]
    second.commit()
    assert given_up_by(second) == BAD


def test_the_epoch_waits_until_the_dead_letters_are_stored(start, monkeypatch):
    def full(self, records, once):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(StateDeadLetterStore, "add_once", full)
        runner = start(Basic())
        runner.run(2.0)
        assert runner.commits.committed == 0
        assert len([error for error in runner.errors if "its dead letter cannot be stored" in str(error)]) == 1, (
            "said once"
        )
        (slot,) = [slot for slot in runner._slots.values() if slot.id.stage == 1]
        slot.host.step()
        assert 0 < slot.host.wait() <= 0.5, "it does not turn idly"
    runner.run(2.0)
    assert runner.commits.committed
    assert [record.payload[0] for record in dead_letters(runner)] == BAD


def test_memory_is_bounded_by_storing_before_the_epoch_ends(start, monkeypatch):
    monkeypatch.setattr(given_up, "_MOST_DEAD_LETTERS", 2)
    runner = start(Basic())
    runner.run(1.5)
    assert [record.payload[0] for record in dead_letters(runner)] == BAD


def test_at_most_once_it_is_counted_and_dropped(start):
    runner = start(Basic(), "at_most_once")
    runner.run(1.0)
    assert dead_letters(runner) == []
    assert runner.stats("bolt")[0].errors == 3


class Odd:
    """Neither a key nor a number; it can be pickled."""


class Picky(CustomGrouping):
    def prepare(self, targets):
        self.tasks = targets.tasks

    def choose(self, values):
        if values[1] == "bad":
            raise LookupError("no task for it")
        return [self.tasks[values[0] % 2]]


CASES = {  # how the bad value is made, the field's type, the grouping, and words of the error
    "key": (Odd, None, lambda bolt, source: bolt.fields_grouping(source, "k"), "Odd"),
    "type": (lambda: "three", int, lambda bolt, source: bolt.shuffle_grouping(source), "declared int"),
    "pickle": (threading.Lock, None, lambda bolt, source: bolt.shuffle_grouping(source), "can be pickled"),
    "grouping": (
        lambda: "bad",
        None,
        lambda bolt, source: bolt.grouping(source, Picky()),
        "no task for it",
    ),
}


class Feed(Spout):
    """Emits six rows; of a case, the fourth is bad."""

    def __init__(self, case=None):
        self.case = case

    def declare_output_fields(self, declarer):
        declare(declarer, self.case)

    def open(self, conf, context, collector):
        self.collector, self.next = collector, 0
        self.failed, self.acked = [], []

    def next_tuple(self):
        if self.next < 6:
            self.collector.emit(row(self.next, self.case), msg_id=self.next)
            self.next += 1

    def ack(self, msg_id):
        self.acked.append(msg_id)

    def fail(self, msg_id, failure):
        self.failed.append((msg_id, failure.error))


class Passing(BasicBolt):
    """Emits them too."""

    def __init__(self, case):
        self.case = case

    def declare_output_fields(self, declarer):
        declare(declarer, self.case)

    def execute(self, tup, collector):
        collector.emit(row(tup.n, self.case))


def declare(declarer, case):
    type = CASES[case][1] if case else None
    declarer.declare("n", ("k", type) if type else "k")


def row(n, case):
    return [n, CASES[case][0]() if case and n == 3 else n]


@pytest.fixture(params=["spout", "bolt"])
def emitting(request, tmp_path):
    """Start a topology in which a spout or a bolt emits a row that cannot be sent. Returns it and which."""

    def make(case, delivery):
        source = request.param
        builder = TopologyBuilder()
        builder.set_spout("spout", Feed(case if source == "spout" else None))
        if source == "bolt":
            builder.set_bolt("bolt", Passing(case)).shuffle_grouping("spout")
        CASES[case][2](builder.set_bolt("end", CaptureBolt(), 2), source)
        settings = Settings(delivery=Delivery(delivery, epoch_interval=1e6))
        return LocalRunner(builder.build("emitting", settings), folder=str(tmp_path)), source

    return make


@pytest.mark.parametrize("case", CASES)
def test_a_row_that_cannot_be_sent_is_a_dead_letter_alone(emitting, case):
    runner, source = emitting(case, "exactly_once")
    runner.run(0.1)
    runner.commit()
    assert sorted(tup.n for tup in runner.captured("end")) == [0, 1, 2, 4, 5]
    store = StateStore(f"{runner._job.shared}/{source}/{FOLDER}/0")
    (dead_letter,) = StateDeadLetterStore(store).read_all()
    assert dead_letter.record.payload[0] == 3
    assert CASES[case][3] in dead_letter.record.error
    assert runner.stats(source)[0].given_up == runner.stats(source)[0].errors == 1


@pytest.mark.parametrize("case", CASES)
def test_at_least_once_only_the_row_that_cannot_be_sent_fails(emitting, case):
    runner, source = emitting(case, "at_least_once")
    runner.run(1.0)
    (spout,) = runner.component("spout")
    ((failed, error),) = spout.failed
    assert failed == 3
    assert CASES[case][3] in error
    assert sorted(spout.acked) == [0, 1, 2, 4, 5]
    assert sorted(tup.n for tup in runner.captured("end")) == [0, 1, 2, 4, 5]
    assert runner.stats(source)[0].given_up == 0


def test_a_row_that_two_receivers_cannot_be_sent_is_one_dead_letter(tmp_path):
    builder = TopologyBuilder()
    builder.set_spout("spout", Feed("grouping"))
    builder.set_bolt("one", CaptureBolt(), 2).grouping("spout", Picky())
    builder.set_bolt("two", CaptureBolt(), 2).grouping("spout", Picky())
    builder.set_bolt("all", CaptureBolt()).shuffle_grouping("spout")
    settings = Settings(delivery=Delivery("exactly_once", epoch_interval=1e6))
    runner = LocalRunner(builder.build("emitting", settings), folder=str(tmp_path))
    runner.run(0.1)
    runner.commit()
    assert sorted(tup.n for tup in runner.captured("one")) == [0, 1, 2, 4, 5]
    assert sorted(tup.n for tup in runner.captured("all")) == [0, 1, 2, 3, 4, 5]
    assert runner.stats("spout")[0].given_up == 1


def test_a_spout_whose_dead_letters_cannot_be_stored_waits_and_loses_none(tmp_path, monkeypatch):
    monkeypatch.setattr(given_up, "_MOST_DEAD_LETTERS", 1)

    def full(self, records, once):
        raise OSError(28, "No space left on device")

    builder = TopologyBuilder()
    builder.set_spout("spout", Feed("grouping"))
    builder.set_bolt("end", CaptureBolt(), 2).grouping("spout", Picky())
    settings = Settings(delivery=Delivery("exactly_once", epoch_interval=0.5))
    runner = LocalRunner(builder.build("emitting", settings), folder=str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(StateDeadLetterStore, "add_once", full)
        runner.run(2.0)
        assert runner.commits.committed == 0
        (slot,) = [slot for slot in runner._slots.values() if slot.id.stage == 0]
        (spout,) = slot.host.worker.inspect().executors
        slot.host.step()
        assert 0 < slot.host.wait() <= spout.dead_letters.wake_at - runner.clock.monotonic(), (
            "it does not turn idly"
        )
    runner.run(2.0)
    assert runner.commits.committed
    assert runner.stats("spout")[0].given_up == 1
    assert sorted(tup.n for tup in runner.captured("end")) == [0, 1, 2, 4, 5]


@pytest.mark.parametrize(
    "value", [["x" * 50_000] * 4, Opaque("x" * 200_000), {"key": b"x" * 200_000}], ids=["list", "object", "dict"]
)
def test_a_large_value_of_any_kind_becomes_a_short_text(value):
    stored = []
    context = SimpleNamespace(component="bolt", add_dead_letters=lambda rows, failures, once: stored.extend(rows))
    letters = EpochDeadLetters(context, SimulatedClock())
    letters.add((1, value), "bad")
    assert letters.store()
    ((number, text),) = stored
    assert number == 1
    assert re.search(r"\(truncated: 20\d,\d{3} bytes\)$", text)
    assert len(text) < 1000


def test_a_small_object_is_kept_whole():
    stored = []
    context = SimpleNamespace(component="bolt", add_dead_letters=lambda rows, failures, once: stored.extend(rows))
    letters = EpochDeadLetters(context, SimulatedClock())
    letters.add((Opaque("x"),), "bad")
    assert letters.store()
    assert stored == [(Opaque("x"),)]
