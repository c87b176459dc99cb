"""The decisions of replay under random interleavings, crashes and queues: no tuple is lost, and order and bounds
hold.

A model replaces the three threads: it carries out instructions in any order that a scheduler could choose, on real
or simulated queues, crashes at any time, and restarts from the durable state. A bolt that remembers what it has
seen follows the spout. A commit snapshots the positions, later the state of the bolt, and later becomes durable or
never does.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ComponentError
from penstock.replay.decisions import (
    MOST_STORED,
    Acked,
    Arrived,
    Decisions,
    Done,
    Failed,
    FailedTuples,
    QueuesChecked,
    Read,
    ReplayEntry,
    Stored,
    StoreFailed,
    Swap,
    Swapped,
    Taken,
    after_failure,
    is_dead,
)
from penstock.replay.embedded import open_beside
from penstock.replay.places import MAX_POSITION, Origin, as_places, by_origin, places_of
from penstock.replay.positions import KeptPosition
from penstock.replay.progress import ReadProgress
from penstock.replay.queues import Queues
from penstock.replay.records import ReplayRecord
from penstock.replay.sources import position_values
from penstock.state.values import TaskState
from penstock.topology.components import Failure

MAX_ATTEMPTS = 3


class MemoryQueue:
    """A queue whose durable part survives ``reopen``, exactly as the contract requires."""

    def __init__(self):
        self.items, self.released = [], 0
        self.reopen()

    def reopen(self):
        self.seek(self.released)

    def seek(self, position):
        self.cursor = max(position, self.released)
        self.progress = ReadProgress(self.cursor)

    def append(self, records):
        self.items += records

    def read(self, limit):
        found = list(enumerate(self.items))[self.cursor : self.cursor + limit]
        self.cursor += len(found)
        self.progress.read([at for at, _ in found], self.cursor)
        return found

    def read_again(self, positions):
        assert all(self.released <= at < self.cursor for at in positions.tolist())
        return [self.items[at] for at in positions.tolist()]

    def done(self, positions):
        self.progress.done(positions)

    @property
    def position(self):
        return self.progress.position

    @property
    def empty(self):
        return self.cursor == len(self.items)

    def release(self, position):
        assert position <= self.progress.position
        self.released = max(position, self.released)

    def close(self):
        pass


class MemoryPointer:
    exchanged = False

    def load(self):
        return self.exchanged

    def store(self, exchanged):
        self.exchanged = exchanged


class MemoryDeadLetterStore:
    def __init__(self):
        self.records = []

    def add(self, records):
        self.records += records

    def close(self):
        pass


class MemoryPlace:
    def __init__(self):
        self.queues = Queues(MemoryQueue(), MemoryQueue(), MemoryDeadLetterStore(), MemoryPointer())

    def reopen(self):
        self.queues.from_.reopen()
        self.queues.to.reopen()
        return self.queues

    def dead(self):
        return self.queues.dead.records

    def close(self):
        pass


class DiskPlace:
    """Each reopening uses a copy of the files, so the old process can no longer change them."""

    def __init__(self):
        self.root, self.turn, self.queues = Path(tempfile.mkdtemp(prefix="penstock-replay-")), 0, None

    def reopen(self):
        old = self.root / str(self.turn)
        self.turn += 1
        if old.exists():
            shutil.copytree(old, self.root / str(self.turn))
            self.queues.close()
            shutil.rmtree(old)
        self.queues = open_beside(self.root / str(self.turn))
        return self.queues

    def dead(self):
        return [dead_letter.record for dead_letter in self.queues.dead.read_all()]

    def close(self):
        self.queues.close()
        shutil.rmtree(self.root)


class Model:
    """One spout task; the work of the threads is a list of instructions that wait to be carried out."""

    def __init__(self, place, fresh):
        self.place = place
        self.eden = MemoryQueue()
        self.eden.append([ReplayRecord((number,)) for number in range(fresh)])
        self.fresh = fresh
        self.seen, self.failures = set(), Counter()
        self.manifests = [({}, frozenset())]
        self.start()

    def start(self):
        """Starts from the newest manifest."""
        positions, seen = self.manifests[-1]
        self.seen, self.epoch = set(seen), []
        self.queues = self.place.reopen()
        self.eden.reopen()
        state = TaskState()
        self.values = {"eden": state.value("eden"), **{value.name: value for value in position_values(state)}}
        for name, value in self.values.items():
            value.value = positions.get(name)
        queues = (self.eden, self.queues.from_, self.queues.to)
        self.kept = [KeptPosition(*each) for each in zip(queues, self.values.values(), strict=True)]
        self.exchanged = self.queues.pointer.load()
        self.decisions = Decisions(capacity=4, from_holds=not self.from_.empty)
        self.waiting, self.buffer = [], []
        self.pending = []
        """The places of the tuples in flight: nothing else is known of them."""
        self.values_of = {}
        """What a bolt sees of them."""
        self.tell(QueuesChecked())

    @property
    def to(self):
        return self.queues.from_ if self.exchanged else self.queues.to

    @property
    def from_(self):
        return self.queues.to if self.exchanged else self.queues.from_

    def tell(self, event):
        for instruction in self.decisions.handle(event):
            if isinstance(instruction, Done):
                (self.to if instruction.origin is Origin.TO else self.eden).done(instruction.positions)
            else:
                self.waiting.append(instruction)
        self.decisions.validate()

    def act(self, index):
        """Lets one of the threads carry out its instruction."""
        if not self.waiting:
            return
        instruction = self.waiting.pop(index % len(self.waiting))
        if isinstance(instruction, Read):
            source = self.to if instruction.origin is Origin.TO else self.eden
            if instruction.origin is Origin.EDEN:
                assert self.to.empty, "fresh data while To still holds something"
            read = source.read(instruction.limit)
            places = places_of(instruction.origin, [at for at, _ in read])
            assert not set(places) & set(self.pending), "two tuples in flight with the same place"
            assert len(read) <= instruction.limit
            self.buffer += [ReplayEntry(place, record) for place, (_, record) in zip(places, read, strict=True)]
            self.tell(Arrived(instruction.origin, len(read)))
        elif isinstance(instruction, Swap):
            assert self.to.empty
            self.queues.pointer.store(not self.exchanged)
            self.exchanged = not self.exchanged
            self.tell(Swapped())
        elif isinstance(instruction, StoreFailed):
            self.store(instruction, index)

    def store(self, instruction, index):
        """Stores some of the tuples, and the others later."""
        done = 1 + index % 3
        for tuples in instruction.tuples:
            for place in tuples.places.tolist():
                if not done:
                    left = [replace(each, places=each.places[each.places >= 0]) for each in instruction.tuples]
                    self.waiting.append(StoreFailed([each for each in left if len(each.places)]))
                    return
                done -= 1
                [(origin, positions)] = by_origin(as_places([place]))
                [record] = (self.to if origin is Origin.TO else self.eden).read_again(positions)
                record = after_failure(record, tuples)
                dead = is_dead(record, tuples, MAX_ATTEMPTS)
                assert dead == (record.attempts == MAX_ATTEMPTS)
                (self.queues.dead.add if dead else self.from_.append)([record])
                tuples.places[tuples.places == place] = -1
                self.tell(Stored(as_places([place]), int(not dead)))

    def take(self, count):
        taken, self.buffer = self.buffer[:count], self.buffer[count:]
        self.pending += [entry.place for entry in taken]
        self.values_of |= {entry.place: entry.record.payload[0] for entry in taken}
        if taken:
            self.tell(Taken(len(taken)))
        return taken

    def run(self):
        """Lets the threads work until they wait, and the spout take what they have read."""
        for _ in range(20):
            self.act(0)
            self.take(100)

    def ack(self, index):
        if self.pending:
            place = self.pending.pop(index % len(self.pending))
            self.seen.add(self.values_of[place])
            self.tell(Acked(as_places([place])))

    def fail(self, index, count=1):
        """Fails some tuples together."""
        places = [self.pending.pop(index % len(self.pending)) for _ in range(min(count, len(self.pending)))]
        if places:
            self.failures.update(self.values_of[place] for place in places)
            self.tell(Failed(FailedTuples(as_places(places), Failure("bolt", "boom"), 1.0)))

    def commit(self, tell=True):
        """The next step of an epoch's commit: snapshot the spout, snapshot the bolt, write the manifest. With
        ``tell`` the task is notified."""
        if not self.epoch:
            for kept in self.kept:
                kept.save()
            self.epoch.append({name: value.value for name, value in self.values.items()})
        elif len(self.epoch) == 1:
            self.epoch.append(frozenset(self.seen))
        else:
            self.manifests = [self.manifests[-1], tuple(self.epoch)]
            self.epoch = []
            for kept in self.kept if tell else ():
                kept.on_committed()

    def crash(self, back=False):
        """Crashes and restarts. With ``back`` the newest epoch cannot be read."""
        if back:
            self.manifests = self.manifests[:1]
        self.check_nothing_lost()

    def check_nothing_lost(self):
        """Each tuple was seen, is a dead letter, or will be read again by a new process."""
        self.start()
        queues = (self.eden, self.queues.from_, self.queues.to)
        held = {record.payload[0] for queue in queues for _, record in queue.read(10_000)}
        held |= {record.payload[0] for record in self.place.dead()} | self.seen
        assert held == set(range(self.fresh))
        self.start()

    def drain(self):
        """Continues without failures until nothing is left to do."""
        for _ in range(10_000):
            self.take(100)
            while self.pending:
                self.ack(0)
            if self.waiting:
                self.act(0)
            elif self.eden.empty and self.to.empty and self.from_.empty and not self.buffer:
                if not self.decisions.outstanding:
                    return
            else:
                self.tell(QueuesChecked())
        raise AssertionError("it does not come to rest")


# Mostly work and failures: a swap while tuples of To are in flight needs a dozen steps in a row.
_KINDS = ["act"] * 3 + ["run"] * 4 + ["take", "ack", "ack"] + ["fail"] * 4 + ["commit"] * 4 + ["look", "crash"]
steps = st.lists(st.tuples(st.sampled_from(_KINDS), st.integers(0, 5)), max_size=80)


@pytest.mark.parametrize("kind", [MemoryPlace, DiskPlace])
@settings(max_examples=80)
@given(steps=steps, fresh=st.integers(0, 8))
def test_no_interleaving_and_no_crash_loses_a_tuple(kind, steps, fresh):
    place = kind()
    try:
        model = Model(place, fresh)
        for name, number in steps:
            match name:
                case "act":
                    model.act(number)
                case "run":
                    model.run()
                case "take":
                    model.take(number)
                case "ack":
                    model.ack(number)
                case "fail":
                    model.fail(number, 1 + number % 3)
                case "commit":
                    model.commit(tell=number > 0)
                case "crash":
                    model.crash(back=number == 0)
                case "look":
                    model.tell(QueuesChecked(to=not model.to.empty, from_=not model.from_.empty))
        model.drain()
        for _ in range(6):  # at least one complete epoch
            model.commit()
        dead = {record.payload[0] for record in place.dead()}
        assert model.seen | dead == set(range(fresh))
        assert all(record.attempts == MAX_ATTEMPTS for record in place.dead())
        model.crash()
        model.drain()
        assert model.eden.position == fresh
    finally:
        place.close()


@given(steps=steps, fresh=st.integers(0, 8))
def test_without_crashes_attempts_are_counted_and_order_holds(steps, fresh):
    model = Model(MemoryPlace(), fresh)
    seen = []
    for name, number in steps:
        if name in ("act", "run", "commit"):
            model.act(number)
        elif name == "take":
            seen += model.take(number)
        elif name == "fail":
            model.fail(number)
        elif name == "ack":
            model.ack(number)
    origins = {entry.place: next(by_origin(as_places([entry.place])))[0] for entry in seen}
    fresh_order = [entry.record.payload[0] for entry in seen if origins[entry.place] is Origin.EDEN]
    assert fresh_order == sorted(fresh_order)
    model.drain()
    dead = {record.payload[0] for record in model.place.dead()}
    assert dead == {value for value, count in model.failures.items() if count >= MAX_ATTEMPTS}
    assert max(model.failures.values(), default=0) <= MAX_ATTEMPTS
    assert model.seen == set(range(fresh)) - dead


def test_what_failed_comes_before_fresh_data():
    model = Model(MemoryPlace(), 12)
    model.act(0)  # To is empty
    model.act(0)  # Eden: 0 to 3
    model.take(4)
    model.fail(1)
    assert [type(instruction) for instruction in model.waiting] == [Read, StoreFailed]
    model.act(1)
    assert [type(instruction) for instruction in model.waiting] == [
        Read
    ]  # of Eden, under way: the swap waits for it
    model.fail(1)
    model.act(0)  # Eden: 4 to 7
    assert [type(instruction) for instruction in model.waiting] == [Swap]  # before any other read or store
    model.act(0)
    assert [type(instruction) for instruction in model.waiting] == [StoreFailed]  # what failed meanwhile
    model.take(4)
    assert model.waiting[1:] == [Read(Origin.TO, 4)]
    model.act(1)
    assert model.take(4)[-1].record == ReplayRecord((1,), 1, "boom", "bolt", 1.0)


def test_an_exchange_waits_until_all_that_was_read_from_to_is_done():
    model = Model(MemoryPlace(), 2)
    model.run()
    model.fail(0)
    model.run()
    assert [origin for place in model.pending for origin, _ in by_origin(as_places([place]))] == [
        Origin.EDEN,
        Origin.TO,
    ]
    exchanged = model.exchanged
    model.fail(0)  # the other tuple goes to From while the first is in flight
    model.run()
    assert model.exchanged == exchanged
    assert not model.from_.empty
    model.ack(0)
    model.run()
    assert model.exchanged != exchanged
    assert [model.values_of[place] for place in model.pending] == [1]


def test_what_is_read_ahead_is_bounded_in_bytes():
    decisions = Decisions(capacity=100, from_holds=False, byte_capacity=1000)
    limits = []

    def tell(event):
        limits.append([each.limit for each in decisions.handle(event) if isinstance(each, Read)])
        decisions.validate()

    tell(QueuesChecked())  # the size is not known yet: one
    tell(Arrived(Origin.TO, 0))
    tell(Arrived(Origin.EDEN, 1, size=10))  # 100 would fit: as many as may wait
    tell(Arrived(Origin.EDEN, 59, size=100))  # 60 wait, and ten would fit
    tell(Taken(45))
    tell(Taken(10))  # five wait, and five fit
    tell(Arrived(Origin.EDEN, 5, size=5000))
    tell(Taken(9))
    tell(Taken(1))  # none waits: one is read, however large
    assert limits == [[1], [1], [99], [], [], [5], [], [], [1]]


def test_many_failures_are_stored_in_parts():
    count = 2 * MOST_STORED + 7
    decisions = Decisions(capacity=count, from_holds=False)
    decisions.handle(QueuesChecked())
    decisions.handle(Arrived(Origin.TO, 0))
    decisions.handle(Arrived(Origin.EDEN, count))
    decisions.handle(Taken(count))
    places = as_places(places_of(Origin.EDEN, range(count)))
    told, sizes, stored = [Read(Origin.EDEN, count)], [], []
    for number, part in enumerate(np.split(places, [3000, 3100])):
        told += decisions.handle(Failed(FailedTuples(part, Failure("", str(number)), 1.0)))
    while told:
        instruction = told.pop(0)
        if isinstance(instruction, StoreFailed):
            sizes.append(sum(len(each.places) for each in instruction.tuples))
            assert not decisions.settled
            stored += [each.places for each in instruction.tuples]
            for each in instruction.tuples:
                told += decisions.handle(Stored(each.places, len(each.places)))
                decisions.validate()
        elif isinstance(instruction, Swap):
            told += decisions.handle(Swapped())
        elif isinstance(instruction, Read):
            told += decisions.handle(Arrived(instruction.origin, 0))
    assert sizes == [3000, MOST_STORED, count - 3000 - MOST_STORED]
    assert np.concatenate(stored).tolist() == places.tolist()
    assert decisions.settled
    assert not decisions.outstanding


def test_a_position_must_fit_into_a_place():
    for position in (-1, 1 << 62):
        with pytest.raises(ComponentError, match=f"gave a tuple the position {position}. Positions are integers"):
            places_of(Origin.EDEN, [0, position, 7])
    for origin in Origin:
        places = as_places(places_of(origin, [0, 5, MAX_POSITION]))
        assert [(each, found.tolist()) for each, found in by_origin(places)] == [(origin, [0, 5, MAX_POSITION])]


def test_many_tuples_that_failed_one_by_one_are_taken_fast():
    """Whoever reports the last event waits for it. CPU seconds, because the machine may be busy."""
    count = 200_000
    decisions = Decisions(count, from_holds=False)
    decisions.handle(QueuesChecked())
    decisions.handle(Arrived(Origin.TO, count))
    for place in range(count):
        decisions.handle(Failed(FailedTuples(as_places([place]), Failure("split", f"boom {place}"), 0.0)))
    begun = time.thread_time()
    [stored] = [each for each in decisions.handle(Stored(as_places([0]), 1)) if isinstance(each, StoreFailed)]
    assert time.thread_time() - begun < 0.7
    assert len(stored.tuples) == MOST_STORED
    decisions.validate()
