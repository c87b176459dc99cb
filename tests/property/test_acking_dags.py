"""Random graphs of tuples, frames and orders of acks: a root is complete exactly when the last tuple that stems
from it is acked, and is reported once. A failed root is reported as failed."""

import random
from collections import Counter, defaultdict, deque
from contextlib import contextmanager

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import BasicBolt, BatchBolt, Delivery, RichBolt, Settings, Spout, TopologyBuilder
from penstock.acking import ledger, lineage, spread
from penstock.acking.ids import NUMBER_BITS, edges_of_roots
from penstock.acking.ledger import Acker
from penstock.acking.lineage import Entries, union
from penstock.acking.pending import Pending
from penstock.acking.spread import BLOCK, AckerShare, owners, split, split_ranges
from penstock.metrics.stats import TaskStats
from penstock.testing import CaptureBolt, LocalRunner
from penstock.topology.groupings import ALL_ROWS, Router
from penstock.topology.streams import OutputDeclarer
from penstock.topology.tuples import tuple_type
from penstock.worker.arrow_collectors import BoltArrowCollector
from penstock.worker.collectors import HeldTuples, RichTupleCollector
from penstock.worker.outputs import OutputEdge, StreamOutput
from penstock.worker.tracking import MessageIds, Origins, Tracker

KEY = 0xFEED_5EED_0123_4567
RING = 1 << 14
SPOUTS, RICH, BATCH = (1, 2), (3, 4), (5,)
BOLTS = RICH + BATCH
TUPLE = tuple_type("x", "default", 1, ("id",), held=True)


# ---- tuple trees through the runtime's own collectors, outputs, lineages, tallies and acker -------------------


class Drawn(Router):
    """Sends each row to any number of tasks, including none."""

    def __init__(self, draw):
        self._draw = draw

    def split(self, batch):
        if self._draw.random() < 0.3:
            return [(self._draw.randrange(len(BOLTS)), ALL_ROWS)]
        rows = defaultdict(list)
        for row in range(batch.num_rows):
            for position in self._draw.sample(range(len(BOLTS)), self._draw.choice((0, 1, 1, 2, 2, 3))):
                rows[position].append(row)
        return [(position, np.array(chosen)) for position, chosen in rows.items()]


class Task:
    """A task with one output. Its messages to the acker arrive in order, but may be delayed compared with other
    tasks."""

    def __init__(self, net, number):
        self.net, self.number = net, number
        self.tracker = Tracker(KEY, f"task {number}")
        self.messages = deque()
        declared = OutputDeclarer("x")
        declared.declare(("id", int))
        origins = Origins(self.tracker)
        if number in SPOUTS:
            self.pending = Pending(30.0)
            origins = MessageIds(self.tracker, number, self.pending, lambda: 0.0)
        self.output = StreamOutput(
            0,
            declared.streams["default"],
            [OutputEdge(Drawn(net.draw), BOLTS, "drawn")],
            1000,
            self._send,
            TaskStats(),
            self._never,
            lambda: 0.0,
            origins,
        )
        outputs = {"default": self.output}
        self.rich = RichTupleCollector("x", outputs, TaskStats(), self.tracker)
        self.batch = BoltArrowCollector("x", outputs)
        self.inbox = deque()
        self.held = []

    @staticmethod
    def _never(error):
        raise error

    def _send(self, stream, task, batch, born, made, source):
        """Send a frame: each of its rows becomes a copy that must be acked."""
        rows = batch.column(0).to_pylist()
        assert made.rows == len(rows)
        for id in rows:
            self.net.copies[id, task] += 1
        self.net.tasks[task].inbox.append((rows, made.pack()))
        return len(rows) * 1000 // self.net.draw.randrange(1, 6)  # the number of rows of the next frames

    def flush(self):
        self.net.waiting[self.number].clear()  # from now on there are only copies of them, if any
        self.output.flush()

    def emit(self, rows, tracked):
        """Emit tuples of a spout."""
        for id in range(self.net.fresh, self.net.fresh + rows):
            known = self.net.draw.random() < tracked
            self.output.columns[0].append(id)
            self.output.origins.ids.append(id if known else None)
            self.net.born(self.number, id, {id} if known else set())
            if known:
                self.net.messages.add(id)
        self.net.fresh += rows

    def receive(self):
        if self.inbox:
            rows, packed = self.inbox.popleft()
            held = HeldTuples(lineage.unpack(memoryview(packed), KEY), self.tracker)
            self.held += held.mark(TUPLE((id,)) for id in rows)

    def join(self):
        """Emit a tuple that stems from any number of the tuples in hand, often from related ones."""
        draw, roots = self.net.draw, self.net.roots
        chosen = draw.sample(self.held, min(len(self.held), draw.choice((0, 1, 1, 2, 3))))
        if chosen and draw.random() < 0.5:
            family = roots[chosen[0][0]]
            chosen = [tup for tup in self.held if roots[tup[0]] & family][:4] or chosen
        id, self.net.fresh = self.net.fresh, self.net.fresh + 1
        self.net.born(self.number, id, set().union(*(roots[tup[0]] for tup in chosen)))
        self.rich.emit([id], anchors=chosen[0] if len(chosen) == 1 and id % 2 else chosen)

    def settle(self, fail=False):
        if self.held:
            tup = self.held.pop(self.net.draw.randrange(len(self.held)))
            if fail:
                self.net.failed |= self.net.roots[tup[0]]
                self.rich.fail(tup)
            else:
                self.rich.ack(tup)
                self.rich.ack(tup)  # a second ack has no effect
                self.net.acked(tup[0], self.number)

    def execute_batch(self):
        """Process a whole frame. The output stems from some of its rows, or from all."""
        if not self.inbox:
            return
        rows, packed = self.inbox.popleft()
        made = lineage.unpack(memoryview(packed), KEY)
        self.batch.begin(made)
        for _ in range(self.net.draw.choice((0, 1, 1, 2))):
            ids = list(range(self.net.fresh, self.net.fresh + self.net.draw.randrange(1, 5)))
            self.net.fresh += len(ids)
            anchors = [self.net.draw.randrange(len(rows)) for _ in ids] if self.net.draw.random() < 0.5 else None
            whole = set().union(*(self.net.roots[id] for id in rows))
            for position, id in enumerate(ids):
                behind = whole if anchors is None else self.net.roots[rows[anchors[position]]]
                self.net.born(self.number, id, behind)
            self.batch.emit_batch([ids], anchors=anchors)
        if self.net.draw.random() < 0.1:
            self.tracker.fail(made.first, made.length, "no")
            self.net.failed |= set().union(*(self.net.roots[id] for id in rows))
        self.tracker.tally.add(made.entries())
        for id in rows:
            self.net.acked(id, self.number)

    def tell(self):
        """Report like a worker: failures at once, the tally when no emitted tuple is waiting."""
        count = len(self.net.ackers)
        for failed in self.tracker.failed:
            self.messages += split_ranges(failed.first, failed.length, count)
        self.tracker.failed = []
        if self.tracker.tally and not self.output.waiting():
            parts = split(ledger.merge(self.tracker.tally.take()), count)
            self.messages += [(acker, ledger.pack([part])) for acker, part in parts]


class Net:
    """All tasks, the acker, and the expected state: which copies of tuples are where."""

    def __init__(self, seed, ackers=1):
        self.draw = random.Random(seed)
        self.fresh = 0
        self.roots = {}
        """Tuple → the messages from which it stems."""
        self.copies = Counter()
        """(tuple, task) → copies that are not acked."""
        self.waiting = defaultdict(set)
        """Task → emitted tuples that are not sent."""
        self.messages, self.failed = set(), set()
        self.answers = {}
        self.ackers = [Acker(KEY, AckerShare(index, ackers)) for index in range(ackers)]
        self.tasks = {number: Task(self, number) for number in SPOUTS + BOLTS}

    def born(self, task, id, roots):
        self.roots[id] = roots
        self.waiting[task].add(id)

    def acked(self, id, task):
        self.copies[id, task] -= 1

    def open(self):
        """The messages that are not complete."""
        left = [id for (id, _), count in self.copies.items() if count]
        left += [id for ids in self.waiting.values() for id in ids]
        return set().union(*(self.roots[id] for id in left))

    def deliver(self, task):
        """Pass one message of a task to the acker."""
        if not task.messages:
            return
        acker, *message = self._next_message(task.messages)
        if len(message) == 1:
            self._answer(self.ackers[acker].apply(*ledger.unpack(message[0])), "acked")
        else:
            self._answer(self.ackers[acker].close(*message), "failed")

    def _next_message(self, messages):
        """The first message to any acker: the order of messages to different ackers is not kept."""
        acker = self.draw.choice([message[0] for message in messages])
        found = next(message for message in messages if message[0] == acker)
        messages.remove(found)
        return found

    def _answer(self, settled, answer):
        still = self.open() if settled else set()
        for task, numbers in settled.items():
            back = ledger.numbers(*ledger.ranges(numbers))
            assert back.tolist() == numbers.tolist()
            for id in self.tasks[task].pending.resolve(back)[0]:
                assert id not in self.answers
                self.answers[id] = answer
                assert (id in self.failed) == (answer == "failed")
                assert answer == "failed" or id not in still, "complete before its time"
            self.tasks[task].pending.validate()

    def tell_all(self):
        tasks = list(self.tasks.values())
        for task in tasks:
            task.tell()
        while any(task.messages for task in tasks):
            self.deliver(self.draw.choice(tasks))

    def finish(self):
        """Process everything that is left, one tuple at a time, with a check after each."""
        for _ in range(3000):
            busy = [task for task in self.tasks.values() if task.output.waiting() or task.inbox or task.held]
            if not busy:
                break
            task = self.draw.choice(busy)
            task.flush()
            if task.number in BATCH and task.inbox:
                rows, packed = task.inbox.popleft()
                task.tracker.tally.add(lineage.unpack(memoryview(packed), KEY).entries())
                for id in rows:
                    self.acked(id, task.number)
            elif task.inbox:
                task.receive()
            else:
                task.settle()
            for other in self.tasks.values():
                other.flush()
            self.tell_all()
            complete = self.messages - self.open() - self.failed
            assert {id for id, answer in self.answers.items() if answer == "acked"} == complete
        else:
            raise AssertionError("never done")
        assert set(self.answers) == self.messages
        assert {id for id, answer in self.answers.items() if answer == "failed"} == self.failed & self.messages
        assert all(self.tasks[number].pending.count == 0 for number in SPOUTS)


def spouts_emit(net, draw):
    net.tasks[draw.choice(SPOUTS)].emit(draw.randrange(1, 6), draw.choice((1.0, 1.0, 0.6)))


ACTIONS = {
    "emit": spouts_emit,
    "flush": lambda net, draw: net.tasks[draw.choice(SPOUTS + BOLTS)].flush(),
    "receive": lambda net, draw: net.tasks[draw.choice(RICH)].receive(),
    "join": lambda net, draw: net.tasks[draw.choice(RICH)].join(),
    "ack": lambda net, draw: net.tasks[draw.choice(RICH)].settle(),
    "fail": lambda net, draw: draw.random() < 0.2 and net.tasks[draw.choice(RICH)].settle(fail=True),
    "batch": lambda net, draw: net.tasks[draw.choice(BATCH)].execute_batch(),
    "tell": lambda net, draw: net.tasks[draw.choice(SPOUTS + BOLTS)].tell(),
    "deliver": lambda net, draw: net.deliver(net.tasks[draw.choice(SPOUTS + BOLTS)]),
}
OFTEN = sorted(ACTIONS) + 3 * ["flush", "receive", "join", "deliver"] + ["batch", "ack", "tell"]


@settings(max_examples=80)
@given(st.lists(st.sampled_from(OFTEN), min_size=1, max_size=120), st.integers(0, 2**32))
def test_a_root_is_complete_exactly_when_its_last_tuple_is_acked(actions, seed):
    net = Net(seed)
    spouts_emit(net, net.draw)
    for action in actions:
        ACTIONS[action](net, net.draw)
    net.finish()


@settings(max_examples=20)
@given(st.integers(0, 2**32))
def test_long_runs_too(seed):
    net = Net(seed)
    for _ in range(400):
        ACTIONS[net.draw.choice(OFTEN)](net, net.draw)
    net.finish()


@settings(max_examples=40)
@given(st.lists(st.sampled_from(OFTEN), min_size=1, max_size=120), st.integers(0, 2**32), st.integers(2, 5))
def test_several_ackers_complete_a_root_when_one_would(actions, seed, ackers):
    """With blocks of few roots, so that a frame has roots of several ackers."""
    with small_blocks():
        net = Net(seed, ackers)
        spouts_emit(net, net.draw)
        for action in actions:
            ACTIONS[action](net, net.draw)
        net.finish()


@contextmanager
def small_blocks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spread, "BLOCK_BITS", 1)
        patch.setattr(spread, "BLOCK", 2)
        yield


# ---- the parts against plain dicts ---------------------------------------------------------------------------

numbers = st.one_of(
    st.integers(0, 40), st.tuples(st.integers(0, 20), st.integers(0, 3)).map(lambda p: p[0] + RING * p[1])
)
anyhow = st.lists(st.tuples(st.integers(1, 3), numbers, st.integers(1, 30), st.integers(0, 3)), max_size=8)
neighbours = st.lists(st.tuples(st.just(1), st.integers(0, 2), st.integers(9, 12), st.integers(1, 7)), min_size=2)
rows = st.one_of(anyhow, neighbours.map(lambda rows: sorted(rows, key=lambda row: row[1])))


def as_entries(part):
    first = [(task << NUMBER_BITS) | number for task, number, _, _ in part]
    length = [length if length > 10 else 1 for _, _, length, _ in part]
    value = [value for *_, value in part]
    return Entries(np.array(first, np.uint64), np.array(length, np.int64), np.array(value, np.uint64))


def by_root(parts):
    """Root → the change of its ledger."""
    found = defaultdict(int)
    for part in parts:
        for first, length, value in zip(*(column.tolist() for column in part), strict=True):
            for root in range(first, first + length):
                found[root] ^= value
    return {root: value for root, value in found.items() if value}


@given(st.lists(rows.map(as_entries), min_size=1, max_size=5))
def test_a_tally_on_the_wire_changes_each_ledger_by_the_same(parts):
    single, ranges = ledger.unpack(ledger.pack(parts))
    assert by_root([single, ranges]) == by_root(parts)
    assert len(set(single.first.tolist())) == len(single.first)


@given(st.integers(1, 9), st.integers(0, 10 * BLOCK), st.integers(1, 3 * BLOCK), st.integers(1, 6))
def test_each_root_has_one_acker_and_a_place_there(task, first, length, count):
    numbers = np.arange(first, first + length)
    owner = owners(task, numbers, count)
    for index in range(count):
        share, mine = AckerShare(index, count), numbers[owner == index]
        local = share.local(task, mine)
        assert share.original(task, local).tolist() == mine.tolist()
        assert local.tolist() == [share.below(task, n) for n in mine.tolist()], "places without gaps, in order"
    assert sum(AckerShare(index, count).below(task, first) for index in range(count)) == first


@given(st.lists(rows.map(as_entries), min_size=1, max_size=5), st.integers(1, 4))
def test_entries_are_divided_among_ackers(parts, count):
    with small_blocks():
        divided = split(ledger.merge(parts), count)
        for acker, entries in divided:
            for first, length, _ in zip(*(column.tolist() for column in entries), strict=True):
                numbers = np.arange(length) + (first & ((1 << NUMBER_BITS) - 1))
                assert set(owners(first >> NUMBER_BITS, numbers, count).tolist()) == {acker}
        assert by_root([entries for _, entries in divided]) == by_root(parts)


@given(st.lists(st.lists(rows.map(as_entries), min_size=1, max_size=3), max_size=8))
def test_ledgers_are_a_dict(messages):
    """Any entries, in a ring with numbers that are whole turns apart: a ledger is complete when its sum is 0."""
    acker, ledgers = Acker(KEY), {}
    for parts in messages:
        done = acker.apply(*ledger.unpack(ledger.pack(parts)))
        touched = by_root(parts)
        for root, value in touched.items():
            begun = ledgers.setdefault(root, int(edges_of_roots(KEY, np.array([root], np.uint64))[0]))
            ledgers[root] = begun ^ value
        zero = {root for root in touched if not ledgers[root]}
        assert {(task << NUMBER_BITS) | n for task, found in done.items() for n in found.tolist()} == zero


@given(st.permutations([(n + RING * lap, share) for n in range(3) for lap in range(3) for share in range(3)]))
def test_shares_of_a_ledger_complete_it_in_any_order(order):
    """The edge id of each root arrives in three parts."""
    acker, left = Acker(KEY), Counter(number for number, _ in order)
    for number, share in order:
        root = (1 << NUMBER_BITS) | number
        edge = int(edges_of_roots(KEY, np.array([root], np.uint64))[0])
        value = (edge ^ 3, 1, 2)[share]
        part = Entries(np.array([root], np.uint64), np.ones(1, np.int64), np.array([value], np.uint64))
        done = acker.apply(*ledger.unpack(ledger.pack([part])))
        left[number] -= 1
        assert {task: found.tolist() for task, found in done.items()} == ({} if left[number] else {1: [number]})


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)), max_size=12))
def test_a_union_covers_the_same_roots_once(parts):
    first = np.array([begin for begin, _ in parts], np.uint64)
    length = np.array([size for _, size in parts], np.int64)
    covered = [
        root for a, n in zip(*(c.tolist() for c in union(first, length)), strict=True) for root in range(a, a + n)
    ]
    assert covered == sorted({root for begin, size in parts for root in range(begin, begin + size)})


@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.integers(0, 3000)),
            st.tuples(st.just("add array"), st.integers(0, 3000)),
            st.tuples(st.just("resolve"), st.integers(0, 2**32)),
            st.tuples(st.just("expire"), st.integers(0, 20)),
            st.tuples(st.just("restart"), st.just(0)),
        ),
        max_size=15,
    ),
    only_arrays=st.booleans(),
)
def test_pending_is_a_dict(steps, only_arrays):
    table, truth, now, restarted = Pending(10.0), {}, 0.0, 0.0
    for what, amount in steps:
        if what == "add" and not only_arrays:
            first = table.add([("id", table.next + n) for n in range(amount)], now)
            truth |= {first + n: (("id", first + n), now) for n in range(amount)}
        elif what.startswith("add"):
            ids = np.arange(table.next, table.next + amount) * 7 + (1 << 61)
            first = table.add(ids, now)
            truth |= {first + n: (id, now) for n, id in enumerate(ids.tolist())}
        elif what == "resolve":
            draw = random.Random(amount)
            some = sorted(draw.sample(range(table.next + 5), min(table.next, draw.choice((1, 50, 5000)))))
            expected = [truth.pop(number) for number in some if number in truth]
            ids, born = table.resolve(np.array(some, np.int64))
            assert list(zip(list(ids), born.tolist(), strict=True)) == expected
        elif what == "restart":
            table.restart(now)
            restarted = now
        else:
            now += amount
            over = [number for number, (_, born) in truth.items() if max(born, restarted) + 10.0 <= now]
            due = table.next_expiry()
            assert due is None or due == max(truth[min(truth)][1], restarted) + 10.0
            assert list(table.expire(now)) == [truth.pop(number)[0] for number in over]
        table.validate()
        assert table.count == len(truth)


# ---- whole topologies ------------------------------------------------------------------------------------------


class Inputs(Spout):
    """Emits numbers, and each again for as long as it fails."""

    def __init__(self, count):
        self._count = count

    def declare_output_fields(self, declarer):
        declarer.declare(("numbers", str))

    def open(self, conf, context, collector):
        self._collector = collector
        self._todo = deque(range(self._count)[context.index :: context.parallelism])
        self.emitted, self.acked, self.failed = Counter(), Counter(), Counter()

    def next_tuple(self):
        if self._todo:
            number = self._todo.popleft()
            self.emitted[number] += 1
            self._collector.emit([str(number)], msg_id=number)

    def ack(self, msg_id):
        self.acked[msg_id] += 1

    def fail(self, msg_id, failure):
        self.failed[msg_id] += 1
        self._todo.append(msg_id)


class Stubborn:
    """Fails some numbers when it sees them first."""

    def __init__(self, fails):
        self._fails = set(fails)

    def declare_output_fields(self, declarer):
        declarer.declare(("numbers", str))

    def check(self, numbers):
        bad = self._fails & {int(number) for number in numbers.split()}
        self._fails -= bad
        return not bad


class Basic(Stubborn, BasicBolt):
    """Emits twice and may raise in between."""

    def execute(self, tup, collector):
        collector.emit(tup)
        if not self.check(tup.numbers):
            raise ValueError(tup.numbers)
        collector.emit(tup)


class Joins(Stubborn, RichBolt):
    """Joins up to three tuples of any tasks; fails some, and emits some without anchors as well."""

    def prepare(self, conf, context, collector):
        self._collector, self._held = collector, []

    def execute(self, tup):
        if not tup.is_tick:
            if not self.check(tup.numbers):
                self._collector.fail(tup, "stubborn")
                return
            self._held.append(tup)
        if self._held and (tup.is_tick or len(self._held) == 3):
            together = " ".join(sorted({number for held in self._held for number in held.numbers.split()}))
            self._collector.emit([together], anchors=self._held)
            self._collector.emit(["0"])
            for held in self._held:
                self._collector.ack(held)
            self._held = []


class Batched(Stubborn, BatchBolt):
    """Processes batches; odd instances name the anchor rows of their tuples."""

    def __init__(self, fails, anchored):
        super().__init__(fails)
        self._anchored = anchored

    def execute_batch(self, batch, source, collector):
        values = batch.column(0).to_pylist()
        if not self.check(" ".join(values)):
            raise ValueError("stubborn")
        rows = [row for row in range(len(values)) for _ in range(2)][1:]
        column = pa.array([values[row] for row in rows])
        collector.emit_batch([column], anchors=rows if self._anchored else None)


def grouped(declarer, kind, source):
    if kind == "fields":
        return declarer.fields_grouping(source, "numbers")
    return getattr(declarer, f"{kind}_grouping")(source)


GROUPINGS = st.sampled_from(["shuffle", "fields", "all", "global", "local_or_shuffle", "partial_key", "none"])
BOLT_KINDS = st.sampled_from(["basic", "joins", "batched", "anchored"])
layers = st.lists(
    st.tuples(BOLT_KINDS, st.integers(1, 2), GROUPINGS, st.booleans(), st.sets(st.integers(0, 23), max_size=3)),
    min_size=1,
    max_size=3,
)


@settings(max_examples=40)
@given(layers, st.integers(1, 3), st.integers(0, 1000), st.sampled_from([3, 50, 50_000]), st.booleans())
def test_every_input_is_in_the_output_and_heard_of_once(layers, spouts, seed, most, uneven):
    count = 24
    builder = TopologyBuilder()
    builder.set_spout("layer 0", Inputs(count), spouts)
    for depth, (kind, tasks, grouping, skips, fails) in enumerate(layers, 1):
        bolt = {
            "basic": lambda fails=fails: Basic(fails),
            "joins": lambda fails=fails: Joins(fails),
            "batched": lambda fails=fails: Batched(fails, anchored=False),
            "anchored": lambda fails=fails: Batched(fails, anchored=True),
        }[kind]()
        if grouping == "partial_key":
            grouping = "fields" if tasks == 1 else "shuffle"
        declarer = grouped(builder.set_bolt(f"layer {depth}", bolt, tasks), grouping, f"layer {depth - 1}")
        if skips and depth > 1:
            declarer.shuffle_grouping(f"layer {depth - 2}")
        if kind == "joins":
            declarer.set_tick_interval(0.05)
    builder.set_bolt("end", CaptureBolt(), 2).shuffle_grouping(f"layer {len(layers)}")
    options = Settings(delivery=Delivery("at_least_once", max_spout_pending=most, message_timeout=20.0))
    runner = LocalRunner(builder.build("t", options), seed=seed, uneven=uneven)
    runner.run_until_idle(15.0)  # nothing depends on a time-out

    seen = {int(number) for tup in runner.captured("end") for number in tup.numbers.split()}
    assert seen == set(range(count))
    emitted, acked, failed = (
        sum((getattr(spout, what) for spout in runner.component("layer 0")), Counter())
        for what in ("emitted", "acked", "failed")
    )
    assert acked == Counter(range(count)), "each at last, and once"
    assert acked + failed == emitted, "each emission is heard of once"
    assert set().union(*(fails for *_, fails in layers)) <= set(failed), "what failed was told"
