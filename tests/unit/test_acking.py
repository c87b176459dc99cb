"""XOR acking in single cases: lineages, tallies, ledgers, the pending table of a spout, and the calls a spout
gets."""

import tracemalloc

import numpy as np
import pytest

from penstock import BatchBolt, BatchSpout, CustomGrouping, RichBolt, Spout, TopologyBuilder
from penstock.acking import ledger, lineage
from penstock.acking.ids import NUMBER_BITS, UNTRACKED, edges_of_roots, roots, seeded_edges
from penstock.acking.ledger import MAX_OPEN, Acker, Tally
from penstock.acking.lineage import Entries, Lineage, of_all, of_groups, of_roots, union, untracked
from penstock.acking.pending import Pending
from penstock.testing import CaptureBolt, FeederSpout, LocalRunner
from penstock.worker.spouts import SpoutExecutor
from penstock.worker.tracking import MessageIds, Origins, Tracker
from tests.helpers import Pass, executors_of, settings_with

KEY = 0x1234_5678_9ABC_DEF0
RING = 1 << 14  # places in a new ring


def entries(*rows):
    """Each row is (first, length, value)."""
    first, length, value = zip(*rows, strict=True) if rows else ((), (), ())
    return Entries(np.array(first, np.uint64), np.array(length, np.int64), np.array(value, np.uint64))


def root(number, task=1):
    return (task << NUMBER_BITS) | number


def edge(number, task=1):
    """The initial value of a root's ledger."""
    return int(edges_of_roots(KEY, np.array([root(number, task)], np.uint64))[0])


def feed(acker, *rows):
    """Send the entries over the wire and return what is complete afterwards: {task: numbers}."""
    done = acker.apply(*ledger.unpack(ledger.pack([entries(row) for row in rows])))
    return {task: numbers.tolist() for task, numbers in done.items()}


@pytest.fixture
def acker():
    return Acker(KEY)


# ---- the acker ---------------------------------------------------------------------------------------------


def test_a_tuple_sent_once_is_complete_with_its_own_ack(acker):
    assert feed(acker, (root(0), 1, edge(0))) == {1: [0]}


def test_an_ack_may_come_before_its_spout_says_what_it_sent(acker):
    copies = 111, 222
    assert feed(acker, (root(5), 1, copies[0])) == {}
    assert feed(acker, (root(5), 1, copies[1])) == {}
    correction = (root(5), 1, edge(5)), (root(5), 1, copies[0]), (root(5), 1, copies[1])
    assert feed(acker, *correction) == {1: [5]}


def test_a_child_keeps_its_root_open(acker):
    assert feed(acker, (root(0), 1, edge(0)), (root(0), 1, 77)) == {}
    assert feed(acker, (root(0), 1, 77)) == {1: [0]}


def test_roots_of_several_spout_tasks_in_one_message(acker):
    mixed = [(root(n, task), 1, edge(n, task)) for n in (3, 4) for task in (2, 9, 1)]
    assert feed(acker, *mixed) == {1: [3, 4], 2: [3, 4], 9: [3, 4]}


def test_range_entries_mix_with_single_ones(acker):
    """A batch bolt acks five single roots and sends one frame that stems from all of them."""
    assert feed(acker, *((root(n), 1, edge(n)) for n in range(5)), (root(0), 5, 99)) == {}
    assert feed(acker, (root(0), 2, 99)) == {1: [0, 1]}
    assert feed(acker, (root(2), 3, 99)) == {1: [2, 3, 4]}


def test_single_and_range_entries_that_begin_at_one_root(acker):
    """They arrive in the order single, range, single: the two single entries are still one entry on the wire."""
    parts = (root(7), 1, edge(7)), (root(7), 3, 50), (root(7), 1, 60)
    singles, ranges = ledger.unpack(ledger.pack([entries(part) for part in parts]))
    assert singles.first.tolist() == [root(7)]
    assert ranges.first.tolist() == [root(7)]
    assert feed(acker, *parts) == {}
    assert feed(acker, (root(7), 1, 50 ^ 60)) == {1: [7]}


def test_roots_that_look_like_a_run_but_are_not(acker):
    parts = (root(7), 1, 10), (root(7), 2, 50), (root(7), 1, 20), (root(9), 1, 30)
    singles, _ = ledger.unpack(ledger.pack([entries(part) for part in parts]))
    assert singles.first.tolist() == [root(7), root(9)]
    assert singles.value.tolist() == [10 ^ 20, 30]


def test_a_root_first_heard_of_after_later_ones(acker):
    later = [(root(n), 1, edge(n)) for n in range(100, 200)]
    assert feed(acker, *later) == {1: list(range(100, 200))}
    assert feed(acker, (root(50), 1, edge(50))) == {1: [50]}


def test_a_root_first_heard_of_when_a_later_one_has_its_place(acker):
    """It waited in a long queue while the spout advanced by a whole ring."""
    assert feed(acker, (root(3 + RING), 1, edge(3 + RING) ^ 9)) == {}
    assert feed(acker, (root(3), 1, edge(3))) == {1: [3]}
    assert feed(acker, (root(3 + RING), 1, 9)) == {1: [3 + RING]}


def test_a_ring_grows_around_a_straggler(acker):
    assert feed(acker, (root(0), 1, edge(0) ^ 5)) == {}  # not complete: a child of it is being processed
    for first in range(1, 3 * RING, 1000):
        some = roots(1, first, 1000)
        own = Entries(some, np.ones(1000, np.int64), edges_of_roots(KEY, some))
        assert acker.apply(*ledger.unpack(ledger.pack([own])))[1].tolist() == list(range(first, first + 1000))
    assert feed(acker, (root(0), 1, 5)) == {1: [0]}


def test_a_message_that_spans_more_than_a_ring(acker):
    ends = 0, 5 * RING
    assert feed(acker, *((root(n), 1, edge(n) ^ 1) for n in ends)) == {}
    assert feed(acker, *((root(n), 1, 1) for n in ends)) == {1: list(ends)}


def test_one_message_completes_a_root_and_begins_the_next_owner_of_its_place(acker):
    """The single entry comes first and frees the place for the range, which must not overwrite it."""
    assert feed(acker, (root(4), 1, edge(4)), (root(3 + RING), 2, 9)) == {1: [4]}


def test_a_late_ack_does_not_hit_the_next_owner_of_its_place():
    """In a ring of maximum size: the root failed long ago, and its place belongs to another root."""
    acker = Acker(KEY)
    # the ring has its maximum size
    feed(acker, (root(0), 1, edge(0) ^ 5), (root(MAX_OPEN - 1), 1, edge(MAX_OPEN - 1)))
    assert feed(acker, (root(MAX_OPEN), 1, edge(MAX_OPEN) ^ 8)) == {}  # takes the place of 0
    assert feed(acker, (root(0), 1, 5)) == {}
    assert feed(acker, (root(0), 1, 13)) == {}
    assert feed(acker, (root(MAX_OPEN), 1, 8)) == {1: [MAX_OPEN]}


def flow_of_roots(acker, first, end):
    """Each root is started and completed within one message of a thousand."""
    for begin in range(first, end, 1000):
        numbers = roots(1, begin, 1000)
        own = Entries(numbers, np.ones(1000, np.int64), edges_of_roots(KEY, numbers))
        assert acker.apply(*ledger.unpack(ledger.pack([own])))[1].tolist() == list(range(begin, begin + 1000))


def fail(acker, number):
    return acker.close(np.array([root(number)], np.uint64), np.array([1], np.int64))


def test_a_failed_root_does_not_keep_its_place(acker):
    assert feed(acker, (root(0), 1, edge(0) ^ 5)) == {}
    fail(acker, 0)
    flow_of_roots(acker, 1, 4 * RING)
    assert acker.size(1) == RING


def test_what_comes_for_a_failed_root_changes_nothing(acker):
    assert feed(acker, (root(0), 1, edge(0) ^ 5)) == {}
    fail(acker, 0)
    assert feed(acker, (root(0), 1, 5)) == {}  # it would have been complete
    fail(acker, 1)  # the failure arrives first
    assert feed(acker, (root(1), 1, edge(1))) == {}
    flow_of_roots(acker, 2, 4 * RING)
    assert acker.size(1) == RING


def test_a_failed_root_stays_failed_when_the_ring_grows(acker):
    feed(acker, (root(0), 1, edge(0) ^ 5), (root(1), 1, edge(1) ^ 5))
    fail(acker, 0)
    feed(acker, (root(1 + RING), 1, edge(1 + RING) ^ 5))
    assert acker.size(1) == 2 * RING
    assert feed(acker, (root(0), 1, 5), (root(1), 1, 5)) == {1: [1]}


def test_a_root_that_timed_out_does_not_keep_its_place(acker):
    assert feed(acker, (root(0), 1, edge(0) ^ 5)) == {}
    acker.settled_below(1, 1)
    flow_of_roots(acker, 1, 4 * RING)
    assert acker.size(1) == RING


def test_a_late_ack_of_a_settled_root_does_not_open_it_again(acker):
    flow_of_roots(acker, 0, 40_000)
    acker.settled_below(1, 40_000)
    mixed = [(root(n), 1, edge(n)) for n in (3, 4, 40_000)]
    assert feed(acker, *mixed, (root(39_998), 3, 99)) == {}
    assert feed(acker, (root(39_998), 3, 99)) == {1: [40_000]}
    assert acker.size(1) == RING


def test_failed_roots_by_task(acker):
    closed = acker.close(np.array([root(3), root(5), root(4, 2)], np.uint64), np.array([3, 2, 1], np.int64))
    assert {task: numbers.tolist() for task, numbers in closed.items()} == {1: [3, 4, 5, 6], 2: [4]}
    assert acker.close(np.zeros(0, np.uint64), np.zeros(0, np.int64)) == {}


# ---- tallies -----------------------------------------------------------------------------------------------


def test_a_tally_gives_what_it_collected_once():
    tally = Tally()
    assert not tally
    tally.add(entries())
    assert not tally
    tally.add(entries((1, 1, 2)))
    tally.add(entries((3, 1, 4)))
    assert tally
    assert [part.first.tolist() for part in tally.take()] == [[1], [3]]
    assert not tally
    assert tally.take() == []


@pytest.mark.parametrize(
    "parts",
    [
        [entries((root(1), 1, 5))],
        [entries((root(1), 1, 5), (root(2), 1, 6), (root(3), 1, 7))],  # a run
        [entries((root(1), 1, 5), (root(7), 1, 6))],
        [entries((root(1), 4, 5))],
        [entries((root(1), 4, 5)), entries((root(2), 1, 6), (root(9), 2, 7)), entries((root(3), 1, 8))],
        [entries((root(1), 1, 5)), entries((root(1, 2), 1, 6))],
        [entries((root(1), 1, 5)), entries((root(1), 1, 5))],  # cancels out
        [entries((root(1), 3, 5)), entries((root(1), 3, 6)), entries((root(1), 2, 7))],
    ],
)
def test_what_a_tally_says_of_each_root_survives_the_wire(parts):
    def by_root(parts):
        found = {}
        for first, length, value in (row for part in parts for row in zip(*part, strict=True)):
            for each in range(int(first), int(first) + int(length)):
                found[each] = found.get(each, 0) ^ int(value)
        return {each: value for each, value in found.items() if value}

    singles, ranges = ledger.unpack(ledger.pack(parts))
    assert by_root([singles, ranges]) == by_root(parts)
    assert len(set(singles.first.tolist())) == len(singles.first), "each single root is given once"
    assert np.all(singles.length == 1)
    assert np.all(ranges.length > 1)


def test_numbers_as_ranges_and_back():
    numbers = np.array([1, 2, 3, 7, 9, 10])
    first, length = ledger.ranges(numbers)
    assert (first.tolist(), length.tolist()) == ([1, 7, 9], [3, 1, 2])
    assert ledger.numbers(first, length).tolist() == numbers.tolist()
    assert ledger.numbers(*ledger.ranges(np.arange(5, 9))).tolist() == [5, 6, 7, 8]


# ---- lineages ----------------------------------------------------------------------------------------------


def groups(made):
    """A lineage as [(end of rows, edge, {roots})]."""
    found = [(int(end), int(value), set()) for end, value in zip(made.ends, made.edges, strict=True)]
    for first, length, group in zip(made.first, made.length, made.group, strict=True):
        found[int(group)][2].update(range(int(first), int(first) + int(length)))
    return found


LINEAGES = {
    "a spout's frame": lambda: Lineage(
        np.arange(1, 4), edges_of_roots(KEY, roots(1, 5, 3)), roots(1, 5, 3), np.ones(3, np.int64), np.arange(3)
    ),
    "a spout's frame with roots left out": lambda: of_roots(roots(1, 0, 9)[[0, 4, 5]]).lineage(3),
    "untracked rows between tracked ones": lambda: of_roots(
        np.array([UNTRACKED, root(3), UNTRACKED, UNTRACKED, root(4)], np.uint64)
    ).lineage(3),
    "nothing tracked": lambda: untracked(4).lineage(9),
    "one row, nothing tracked": lambda: untracked(1).lineage(9),
    "no rows": lambda: untracked(0).lineage(9),
    "rows of one group side by side": lambda: of_groups(
        of_roots(roots(1, 0, 4)).lineage(1), np.array([0, 0, 2, 2, 2, 1])
    ).lineage(8),
    "a whole batch": lambda: of_all([of_roots(roots(1, 0, 400)).lineage(1)], 50).lineage(2),
    "several ranges": lambda: of_all(
        [of_roots(roots(1, 0, 4)).lineage(1), of_roots(roots(2, 7, 3)).lineage(2)], 2
    ).lineage(4),
}


@pytest.mark.parametrize("case", LINEAGES)
def test_a_lineage_survives_the_wire(case):
    made = LINEAGES[case]()
    back = lineage.unpack(memoryview(made.pack()), KEY)
    assert back.rows == made.rows
    assert groups(back) == groups(made)
    assert back.pack() == made.pack()


def test_the_lineage_of_a_spouts_frame_is_small():
    assert len(LINEAGES["a spout's frame"]().pack()) == 32


def test_untracked_rows_between_tracked_ones_have_no_roots():
    found = groups(LINEAGES["untracked rows between tracked ones"]())
    assert [(end, behind) for end, _, behind in found] == [
        (1, set()),
        (2, {root(3)}),
        (4, set()),
        (5, {root(4)}),
    ]
    assert [value for _, value, _ in found] == seeded_edges(3, 4).tolist()


def test_a_root_behind_several_anchors_takes_a_new_edge_once():
    """Anchors in {R1, R2} and {R1, R3}: the second carries the edge for R3 but not for R1."""
    one = of_all([of_roots(roots(1, 1, 2)).lineage(1)], 1).lineage(2)
    other = of_all([of_roots(np.array([root(1), root(3)], np.uint64)).lineage(3)], 1).lineage(4)
    both = of_all([one, other], 1).lineage(5)
    assert groups(both) == [(1, int(both.edges[0]), {root(1), root(2), root(3)})]
    assert int(both.length.sum()) == 3, "each root once"


def test_union_of_overlapping_ranges():
    first, length = union(np.array([10, 1, 3, 20, 11], np.uint64), np.array([3, 2, 1, 1, 1], np.int64))
    assert list(zip(first.tolist(), length.tolist(), strict=True)) == [(1, 3), (10, 3), (20, 1)]


def test_rows_whose_origin_nobody_told_are_untracked():
    origins = Origins(Tracker(KEY, "bolt"))
    origins.add(of_roots(roots(1, 0, 2)), end=5)  # three rows before them
    anchors = origins.take(7)  # and two rows after them
    assert anchors.sets.tolist() == [-1, -1, -1, 0, 1, -1, -1]
    assert origins.take(1).sets.tolist() == [-1]


def test_fails_of_rows_name_each_root_once():
    tracker = Tracker(KEY, "bolt")
    rows = of_groups(of_all([of_roots(roots(1, 0, 2)).lineage(1)], 1).lineage(2), np.array([0, 0]))
    tracker.fail_row(rows, 1, "no")
    (failed,) = tracker.failed
    assert (failed.first.tolist(), failed.length.tolist()) == ([root(0)], [2])
    tracker.fail_row(untracked(3), 2, "nothing")
    assert len(tracker.failed) == 1


def test_message_ids_of_some_rows_only():
    pending = Pending(30.0)
    ids = MessageIds(Tracker(KEY, "spout"), 1, pending, lambda: 0.0)
    ids.ids += [None, "a", None, "b"]
    anchors = ids.take(4)
    assert anchors.sets.tolist() == [-1, 0, -1, 1]
    assert anchors.first.tolist() == [root(0), root(1)]
    assert pending.count == 2


# ---- pending messages --------------------------------------------------------------------------------------


def test_pending_expires_on_time():
    pending = Pending(10.0)
    pending.add(["a", "b"], 1.0)
    pending.add(["c"], 2.0)
    assert pending.next_expiry() == 11.0
    assert pending.expire(10.9) == []
    assert pending.expire(11.0) == ["a", "b"]
    assert pending.next_expiry() == 12.0
    assert pending.expire(99.0) == ["c"]
    assert pending.next_expiry() is None
    assert pending.count == 0
    pending.validate()


def test_pending_expires_only_what_is_still_open():
    pending = Pending(10.0)
    first = pending.add(["a", "b", "c"], 0.0)
    assert pending.resolve(np.array([first + 1]))[0] == ["b"]
    assert pending.expire(10.0) == ["a", "c"]
    pending.validate()


def test_pending_is_resolved_once():
    pending = Pending(10.0)
    pending.add(["a", "b"], 3.0)
    ids, born = pending.resolve(np.array([0, 1]))
    assert ids == ["a", "b"]
    assert born.tolist() == [3.0, 3.0]
    assert pending.resolve(np.array([0, 1]))[0] == []
    assert pending.resolve(np.array([7]))[0] == []  # never assigned
    pending.validate()


def test_pending_grows_around_the_end_of_its_table():
    pending = Pending(10.0)
    pending.add([("old", n) for n in range(3000)], 0.0)
    pending.resolve(np.arange(3000))
    first = pending.add([("a", n) for n in range(2000)], 1.0)  # wraps around the end of 4,096 places
    assert first == 3000
    pending.validate()
    more = pending.add([("b", n) for n in range(6000)], 2.0)  # and makes the table grow twice
    pending.validate()
    assert pending.count == 8000
    assert pending.resolve(np.arange(first, first + 2000))[0] == [("a", n) for n in range(2000)]
    ids, born = pending.resolve(np.arange(more, more + 6000))
    assert ids == [("b", n) for n in range(6000)]
    assert set(born.tolist()) == {2.0}
    assert pending.count == 0
    pending.validate()


def test_ids_in_arrays_are_kept_as_numbers_until_another_kind_comes():
    pending = Pending(10.0)
    first = pending.add(np.arange(5000) + (1 << 60), 0.0)
    ids, _ = pending.resolve(np.array([first + 2, first + 4]))
    assert isinstance(ids, np.ndarray)
    assert ids.tolist() == [(1 << 60) + 2, (1 << 60) + 4]
    pending.add(["a"], 0.0)
    pending.add(np.array([7]), 0.0)
    assert pending.take_all()[-3:] == [(1 << 60) + 4999, "a", 7]
    pending.validate()


def test_a_spout_may_reuse_its_array_of_ids():
    pending = Pending(30.0)
    ids = MessageIds(Tracker(KEY, "spout"), 1, pending, lambda: 0.0)
    numbers = np.arange(3)
    ids.add_many(numbers)
    numbers += 3
    ids.add_many(numbers)
    assert ids.take(6).sets.tolist() == [0, 1, 2, 3, 4, 5]
    assert pending.take_all().tolist() == [0, 1, 2, 3, 4, 5]
    ids.add_many(numbers)
    ids.add_many([None, "x"])
    assert ids.take(5).sets.tolist() == [0, 1, 2, -1, 3]
    assert pending.take_all() == [3, 4, 5, "x"]


def test_an_open_tuple_takes_few_bytes_however_it_was_emitted():
    """Emitted one by one or in batches: there is no object for a tuple or a batch."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        pending = Pending(30.0)
        for number in range(50_000):
            pending.add(np.array([number]), number * 0.01)
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown / 50_000 < 40
    pending.validate()


def test_pending_room_follows_the_oldest_open_number():
    pending = Pending(10.0)
    full = pending.room
    assert full == MAX_OPEN // 2
    pending.add(["a"], 0.0)
    pending.add(["b"] * 9, 1.0)
    assert pending.room == full - 10
    pending.resolve(np.arange(1, 10))
    assert pending.room == full - 10, "the oldest still is open"
    pending.resolve(np.array([0]))
    assert pending.room == full


# ---- what a spout hears ------------------------------------------------------------------------------------


def run(builder, limit=60.0, **settings):
    runner = LocalRunner(
        builder.build("t", settings_with(delivery="at_least_once", message_timeout=5.0, **settings))
    )
    runner.run(0.05)  # the first calls of a spout may emit nothing
    runner.run_until_idle(limit)
    return runner


def heard(runner, spout="s"):
    """The acked and the failed message ids of all tasks of a spout, sorted."""
    tasks = runner.component(spout)
    for executor in executors_of(runner):
        if isinstance(executor, SpoutExecutor):
            executor.pending.validate()
    return tuple(sorted(id for task in tasks for id in getattr(task, what)) for what in ("acked", "failed"))


def feeder(count, *fields):
    return FeederSpout(*(fields or ("n",)), rows=[[n] for n in range(count)])


EVERY = [(n,) for n in range(50)]


def test_fan_out_to_all():
    builder = TopologyBuilder()
    builder.set_spout("s", feeder(50), 2)
    builder.set_bolt("tee", CaptureBolt(), 3).all_grouping("s")
    builder.set_bolt("other", CaptureBolt(), 2).shuffle_grouping("s")
    runner = run(builder)
    assert heard(runner) == (EVERY, [])
    assert len(runner.captured("tee")) == 150


class Nowhere(CustomGrouping):
    """Sends odd numbers to no task."""

    def prepare(self, targets):
        self._first = targets.tasks[0]

    def choose(self, values):
        return [] if values[0] % 2 else [self._first]


def test_a_tuple_with_no_target_is_complete_at_once():
    builder = TopologyBuilder()
    builder.set_spout("s", feeder(50))
    builder.set_bolt("mid", Pass("n")).grouping("s", Nowhere())
    builder.set_bolt("end", CaptureBolt(), 2).grouping("mid", Nowhere())
    runner = run(builder)
    assert heard(runner) == (EVERY, [])
    assert len(runner.captured("end")) == 25


def test_a_stream_without_a_subscriber_is_complete_at_once():
    builder = TopologyBuilder()
    builder.set_spout("s", feeder(50))
    runner = run(builder)
    assert heard(runner) == (EVERY, [])


class Hold(RichBolt):
    """Fails the number 7 at once, and acks it later nevertheless, when the number 8 arrives."""

    def prepare(self, conf, context, collector):
        self._collector = collector
        self._seven = None

    def execute(self, tup):
        if tup.n == 7:
            self._seven = tup
            self._collector.fail(tup, "seven")
            return
        if tup.n == 8:
            self._collector.ack(self._seven)
        self._collector.ack(tup)


def test_a_failed_tuple_that_is_completed_later_is_heard_of_once():
    builder = TopologyBuilder()
    builder.set_spout("s", feeder(50))
    builder.set_bolt("hold", Hold()).shuffle_grouping("s")
    builder.set_bolt("other", CaptureBolt()).shuffle_grouping("s")
    assert heard(run(builder)) == ([id for id in EVERY if id != (7,)], [(7,)])


class FailsSome(Pass):
    """Emits, and then raises for the number 3: the child is acked downstream, but the root has failed."""

    def execute(self, tup, collector):
        collector.emit(tup)
        if tup.n == 3:
            raise ValueError("three")


def test_a_failed_tuple_whose_children_are_acked_later_is_heard_of_once():
    builder = TopologyBuilder()
    builder.set_spout("s", feeder(50))
    builder.set_bolt("some", FailsSome("n")).shuffle_grouping("s")
    builder.set_bolt("end", CaptureBolt()).shuffle_grouping("some")
    runner = run(builder)
    assert heard(runner) == ([id for id in EVERY if id != (3,)], [(3,)])
    assert len(runner.captured("end")) == 50


class Forgets(RichBolt):
    """Never acks."""

    def execute(self, tup):
        pass


def test_what_nobody_acks_fails_when_its_time_is_up():
    builder = TopologyBuilder()
    builder.set_spout("s", feeder(50))
    builder.set_bolt("forgets", Forgets()).shuffle_grouping("s")
    runner = run(builder)
    assert heard(runner) == ([], EVERY)
    assert 5.0 <= runner.clock.now() < 6.5


def test_a_value_that_does_not_fit_fails_its_tuple_at_the_spout():
    builder = TopologyBuilder()
    builder.set_spout("s", FeederSpout(("n", int), rows=[[1], ["two"], [3]]))
    builder.set_bolt("end", CaptureBolt(), 2).all_grouping("s")
    assert heard(run(builder)) == ([(1,), (3,)], [("two",)])


def test_a_value_that_does_not_fit_fails_what_it_stems_from():
    builder = TopologyBuilder()
    builder.set_spout("s", FeederSpout("n", rows=[[1], ["two"], [3]]))
    builder.set_bolt("mid", Pass(("n", int))).shuffle_grouping("s")
    builder.set_bolt("end", CaptureBolt()).shuffle_grouping("mid")
    assert heard(run(builder)) == ([(1,), (3,)], [("two",)])


class Mixed(Spout):
    """Every third tuple has no message id."""

    def declare_output_fields(self, declarer):
        declarer.declare(("n", int))

    def open(self, conf, context, collector):
        self._collector, self._next = collector, 0
        self.acked, self.failed = [], []

    def next_tuple(self):
        if self._next < 90:
            self._collector.emit([self._next], msg_id=None if self._next % 3 == 0 else (self._next,))
            self._next += 1

    def ack(self, msg_id):
        self.acked.append(msg_id)

    def fail(self, msg_id, failure):
        self.failed.append(msg_id)


class FailsTens(Pass):
    def execute(self, tup, collector):
        if tup.n % 10 == 0:
            raise ValueError("ten")
        collector.emit(tup)


@pytest.mark.parametrize("targets", [1, 3])
def test_untracked_tuples_between_tracked_ones(targets):
    builder = TopologyBuilder()
    builder.set_spout("s", Mixed())
    builder.set_bolt("tens", FailsTens("n"), targets).shuffle_grouping("s")
    builder.set_bolt("end", CaptureBolt(), 2).shuffle_grouping("tens")
    runner = run(builder)
    tracked = [(n,) for n in range(90) if n % 3]
    assert heard(runner) == ([id for id in tracked if id[0] % 10], [id for id in tracked if id[0] % 10 == 0])
    assert sorted(tup.n for tup in runner.captured("end")) == [n for n in range(90) if n % 10]


class Batches(BatchSpout):
    """Its first batch has too few message ids and is rejected; ten valid batches follow."""

    def declare_output_fields(self, declarer):
        declarer.declare(("n", int))

    def open(self, conf, context, collector):
        self._collector, self._calls = collector, 0
        self.acked, self.failed = [], []

    def next_batch(self):
        self._calls += 1
        if self._calls == 1:
            self._collector.emit_batch([list(range(100, 110))], msg_ids=[-1])
        elif self._calls <= 11:
            begin = 10 * (self._calls - 2)
            self._collector.emit_batch([list(range(begin, begin + 10))], msg_ids=range(begin, begin + 10))

    def ack(self, msg_id):
        self.acked.append(msg_id)

    def fail(self, msg_id, failure):
        self.failed.append(msg_id)


class FailsOne(RichBolt):
    def prepare(self, conf, context, collector):
        self._collector = collector

    def execute(self, tup):
        if tup.n == 42:
            self._collector.fail(tup)
        else:
            self._collector.ack(tup)


def test_a_refused_batch_does_not_shift_the_message_ids_of_the_next():
    builder = TopologyBuilder()
    builder.set_spout("s", Batches())
    builder.set_bolt("one", FailsOne()).shuffle_grouping("s")
    runner = run(builder)
    assert heard(runner) == ([n for n in range(100) if n != 42], [42])
    assert "msg_ids must have one item for each tuple, but there are 1 for 10" in str(runner.errors[0])


class WrongAnchors(BatchBolt):
    """Passes anchors that do not fit the first batch, and continues after the error."""

    def declare_output_fields(self, declarer):
        declarer.declare(("n", int))

    def execute_batch(self, batch, source, collector):
        try:
            collector.emit_batch([batch.column(0)], anchors=[0])
        except Exception:  # handled by user code
            collector.emit_batch([batch.column(0)], anchors=range(batch.num_rows))


def test_a_batch_refused_for_its_anchors_is_not_sent():
    builder = TopologyBuilder()
    builder.set_spout("s", feeder(50, ("n", int)))
    builder.set_bolt("wrong", WrongAnchors()).shuffle_grouping("s")
    builder.set_bolt("end", CaptureBolt()).shuffle_grouping("wrong")
    runner = run(builder)
    assert sorted(tup.n for tup in runner.captured("end")) == list(range(50))
    assert heard(runner) == (EVERY, [])
