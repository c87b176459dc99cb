"""Exactly once, a tuple that a bolt gives up is a dead letter of its epoch, once."""

import pytest

from penstock import BasicBolt, BatchBolt, RichBolt, Settings, Spout, TopologyBuilder
from penstock.replay.stored_letters import FOLDER, StoredLetters
from penstock.runtime import given_up
from penstock.state.store import StateStore
from penstock.testing import LocalRunner

BAD = [7, 17, 27]


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
        topology = builder.build("giving", Settings(delivery=delivery, epoch_interval=0.5))
        return LocalRunner(topology, folder=str(tmp_path))

    return make


def letters(runner):
    store = StateStore(f"{runner._job.shared}/bolt/{FOLDER}/0")
    return [letter.record for letter in StoredLetters(store).letters()]


@pytest.mark.parametrize("bolt", [Basic, Rich, Failing])
def test_a_tuple_that_fails_is_a_dead_letter(start, bolt):
    runner = start(bolt())
    runner.run(1.5)
    found = letters(runner)
    assert [record.payload[0] for record in found] == BAD
    assert all("bad" in record.error and record.component == "bolt" for record in found)
    assert runner.stats("bolt")[0].given_up == 3
    assert found[0].payload[1].endswith("(cut: 200,000 in all)")
    assert len(found[0].payload[1]) < 70_000, "bounded"
    assert found[1].payload[1] == "x"


def test_a_batch_that_fails_is_dead_letters_row_by_row(start):
    runner = start(Batch())
    runner.run(1.5)
    found = [record.payload[0] for record in letters(runner)]
    assert set(BAD) <= set(found)
    assert len(found) == len(set(found)) == runner.stats("bolt")[0].given_up


@pytest.mark.parametrize("bolt", [Basic, Rich, Batch])
def test_an_epoch_that_is_done_again_leaves_each_letter_once(start, bolt, monkeypatch):
    class Died(BaseException):
        pass

    add = StoredLetters.add_once

    def die(self, records, once):
        add(self, records, once)
        raise Died

    first = start(bolt())
    monkeypatch.setattr(StoredLetters, "add_once", die)
    with pytest.raises(Died):
        first.run(1.0)
    monkeypatch.setattr(StoredLetters, "add_once", add)
    before = letters(first)
    assert before
    assert first.commits.committed == 0
    again = start(bolt())  # the first one died
    again.run(1.5)
    assert again.commits.committed
    assert [record.payload for record in letters(again)] == [record.payload for record in before]


def test_the_epoch_waits_until_the_letters_are_stored(start, monkeypatch):
    def full(self, records, once):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(StoredLetters, "add_once", full)
        runner = start(Basic())
        runner.run(2.0)
        assert runner.commits.committed == 0
        assert len([error for error in runner.errors if "dead letter is stored" in str(error)]) == 1, "said once"
        (slot,) = [slot for slot in runner._slots.values() if slot._bolts]
        assert 0 < slot.idle_for() <= 0.5, "it does not turn idly"
    runner.run(2.0)
    assert runner.commits.committed
    assert [record.payload[0] for record in letters(runner)] == BAD


def test_memory_is_bounded_by_storing_before_the_epoch_ends(start, monkeypatch):
    monkeypatch.setattr(given_up, "_MOST_LETTERS", 2)
    runner = start(Basic())
    runner.run(1.5)
    assert [record.payload[0] for record in letters(runner)] == BAD


def test_at_most_once_it_is_counted_and_dropped(start):
    runner = start(Basic(), "at_most_once")
    runner.run(1.0)
    assert letters(runner) == []
    assert runner.stats("bolt")[0].errors == 3
