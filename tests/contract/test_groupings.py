"""The contract of each grouping, through whole topologies, over seeds and parallelisms."""

import random
from collections import Counter, defaultdict

import numpy as np
import pyarrow as pa
import pytest

from penstock import (
    BasicBolt,
    BatchSpout,
    CustomGrouping,
    Grouping,
    Router,
    Targets,
    TopologyBuilder,
    UserCodeError,
)
from penstock.columns import ColumnBatch
from penstock.testing import CaptureBolt, FeederSpout, LocalRunner, NumberSpout
from penstock.topology.groupings import LocalOrShuffle
from tests.helpers import BatchFeeder, BatchPass, Pass, per_task, reports_of, settings_with

TASKS = [1, 2, 3, 8]
SEEDS = [0, 1, 7]

over_all = pytest.mark.parametrize(("tasks", "seed"), [(tasks, seed) for tasks in TASKS for seed in SEEDS])


def spread(spout, subscribe, tasks, seed=0, sources=1, middle=None, bolt=None, **settings):
    """Run ``spout`` (and a ``middle`` bolt) into ``tasks`` sinks; the runner, idle."""
    builder = TopologyBuilder()
    builder.set_spout("source", spout, sources)
    if middle is not None:
        builder.set_bolt("middle", middle, sources).local_or_shuffle_grouping("source")
    subscribe(builder.set_bolt("sink", bolt or CaptureBolt(), tasks), "source" if middle is None else "middle")
    made = builder.build("t", settings_with(**{"seed": seed, "frame_bytes": 600, **settings}))
    runner = LocalRunner(made, seed=seed)
    runner.run_until_idle()
    assert runner.errors == []
    return runner


def numbers(got):
    """⟨task, n⟩ of a NumberSpout, all tasks together."""
    return Counter(row for rows in got for row in rows)


def in_order(rows):
    """Tuples of each source task came in the order they were emitted."""
    last = {}
    for task, n in rows:
        if n <= last.get(task, -1):
            return False
        last[task] = n
    return True


# ---- shuffle, none ---------------------------------------------------------------------------------------


@over_all
@pytest.mark.parametrize("method", ["shuffle_grouping", "none_grouping"])
@pytest.mark.parametrize("form", [None, BatchPass])
def test_shuffle_spreads_each_source_evenly(method, form, tasks, seed):
    middle = form and form("task", "n")
    runner = spread(NumberSpout(101), lambda b, s: getattr(b, method)(s), tasks, seed, sources=3, middle=middle)
    got = per_task(runner, "sink")
    assert numbers(got) == {(task, n): 1 for task in (1, 2, 3) for n in range(101)}
    assert all(map(in_order, got))
    for source in (1, 2, 3):
        counts = [sum(task == source for task, _ in rows) for rows in got]
        assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("tasks", TASKS)
def test_shuffle_of_single_tuples_takes_turns(tasks):
    runner = spread(FeederSpout("x"), lambda b, s: b.shuffle_grouping(s), tasks)
    for n in range(2 * tasks + 1):
        runner.feed("source", [(n,)])
        runner.run_until_idle()
    counts = [len(rows) for rows in per_task(runner, "sink")]
    assert sum(counts) == 2 * tasks + 1
    assert max(counts) - min(counts) <= 1


def test_shuffle_of_several_sources_does_not_begin_at_one_task():
    runner = spread(NumberSpout(1), lambda b, s: b.shuffle_grouping(s), 4, sources=4)
    assert [len(rows) for rows in per_task(runner, "sink")] == [1, 1, 1, 1]


# ---- fields ----------------------------------------------------------------------------------------------

WORDS = [f"word {n}" for n in range(60)]


def shuffled(rows, seed):
    rows = list(rows)
    random.Random(seed).shuffle(rows)
    return rows


def tasks_of_keys(got, key=lambda row: row[0]):
    result = defaultdict(set)
    for task, rows in enumerate(got):
        for row in rows:
            result[key(row)].add(task)
    return result


@over_all
def test_fields_same_key_same_task(tasks, seed):
    rows = shuffled([(word, n) for word in WORDS for n in range(5)], seed)
    runner = spread(FeederSpout("word", "n", rows=rows), lambda b, s: b.fields_grouping(s, "word"), tasks, seed, 2)
    got = per_task(runner, "sink")
    assert Counter(row for task in got for row in task) == Counter(rows)
    assert all(len(where) == 1 for where in tasks_of_keys(got).values())
    assert all(got), "a task without a key"


def test_fields_does_not_depend_on_seeds_or_emitters():
    def where(seed, sources):
        rows = shuffled([(word,) for word in WORDS], seed)
        runner = spread(
            FeederSpout("word", rows=rows), lambda b, s: b.fields_grouping(s, "word"), 3, seed, sources
        )
        return tasks_of_keys(per_task(runner, "sink"))

    assert where(0, 1) == where(5, 1) == where(3, 4)


@pytest.mark.parametrize("tasks", TASKS)
def test_fields_over_several_fields_reads_all_of_them(tasks):
    rows = [(a, b, n) for a in range(8) for b in range(8) for n in range(2)]
    spout = FeederSpout("a", "b", "n", rows=shuffled(rows, 1))
    got = per_task(spread(spout, lambda b, s: b.fields_grouping(s, "a", "b"), tasks), "sink")
    assert all(len(where) == 1 for where in tasks_of_keys(got, lambda row: row[:2]).values())
    if tasks > 1:  # and not only the first
        assert any(len(where) > 1 for where in tasks_of_keys(got).values())


COLUMNS = {
    "int64": lambda keys: pa.array(keys),
    "int8": lambda keys: pa.array(keys, pa.int8()),
    "uint64": lambda keys: pa.array(keys, pa.uint64()),
    "float64": lambda keys: pa.array([float(key) for key in keys]),
    "list": lambda keys: keys,
    "numpy": lambda keys: np.array(keys),
    "sliced": lambda keys: pa.array([99, *keys, 98])[1:-1],
    "dictionary": lambda keys: pa.array(keys).dictionary_encode(),
    "pickled": lambda keys: [*keys, "another type"],
}


@pytest.mark.parametrize("tasks", [2, 3, 8])
@pytest.mark.parametrize("form", COLUMNS)
def test_fields_is_the_same_for_batch_and_tuple_emitters(form, tasks):
    keys = list(range(40))
    builder = TopologyBuilder()
    builder.set_spout("tuples", FeederSpout("key", rows=[(key,) for key in keys]))
    builder.set_spout("batches", BatchFeeder("key", batches=[{"key": COLUMNS[form](keys)}]))
    sink = builder.set_bolt("sink", CaptureBolt(), tasks)
    sink.fields_grouping("tuples", "key").fields_grouping("batches", "key")
    runner = LocalRunner(builder.build("t"))
    runner.run_until_idle()
    got = per_task(runner, "sink")
    where = tasks_of_keys(got)
    assert all(len(where[key]) == 1 for key in keys)
    assert Counter(row[0] for rows in got for row in rows if row[0] in keys) == dict.fromkeys(keys, 2)


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int8(), pa.string())], ids=str)
def test_fields_of_texts_is_the_same_for_batch_and_tuple_emitters(kind):
    builder = TopologyBuilder()
    builder.set_spout("tuples", FeederSpout("key", rows=[(word,) for word in WORDS]))
    builder.set_spout("batches", BatchFeeder("key", batches=[[pa.array(WORDS).cast(kind)]]))
    sink = builder.set_bolt("sink", CaptureBolt(), 3)
    sink.fields_grouping("tuples", "key").fields_grouping("batches", "key")
    runner = LocalRunner(builder.build("t"))
    runner.run_until_idle()
    got = per_task(runner, "sink")
    assert sum(map(len, got)) == 2 * len(WORDS)
    assert all(len(where) == 1 for where in tasks_of_keys(got).values())


@pytest.mark.parametrize("key", ["\ud800", 2**70, ("a", "b"), None, float("nan")], ids=repr)
def test_any_value_can_be_a_key(key):
    spout = FeederSpout("key", "n", rows=[(key, 0), ("plain", 1), (1, 2)])
    got = per_task(spread(spout, lambda b, s: b.fields_grouping(s, "key"), 3), "sink")
    assert sorted(n for rows in got for _, n in rows) == [0, 1, 2]


# ---- partial key -----------------------------------------------------------------------------------------


@over_all
def test_partial_key_uses_at_most_two_tasks_per_key(tasks, seed):
    rows = shuffled([(word, n) for word in WORDS for n in range(10)], seed)
    spout = FeederSpout("word", "n", rows=rows)
    got = per_task(spread(spout, lambda b, s: b.partial_key_grouping(s, "word"), tasks, seed, sources=2), "sink")
    assert Counter(row for task in got for row in task) == Counter(rows)
    where = tasks_of_keys(got).values()
    assert all(len(tasks_of) <= 2 for tasks_of in where)
    if tasks > 1:
        assert sum(len(tasks_of) == 2 for tasks_of in where) > len(WORDS) / 2


@over_all
def test_partial_key_is_balanced_where_fields_is_not(tasks, seed):
    total = 2000
    rows = shuffled(
        [("hot", n) for n in range(total // 2)] + [(WORDS[n % 60], n) for n in range(total // 2)], seed
    )

    def most(method):
        spout = FeederSpout("word", "n", rows=rows)
        runner = spread(spout, lambda b, s: getattr(b, method)(s, "word"), tasks, seed)
        return max(len(task) for task in per_task(runner, "sink"))

    assert most("fields_grouping") >= total / 2
    assert most("partial_key_grouping") <= 1.3 * total * max(1 / tasks, 1 / 4)  # the hot key halved, at best


# ---- memory of a keyed count -----------------------------------------------------------------------------


class Count(BasicBolt):
    def __init__(self):
        self.counts = Counter()

    def execute(self, tup, collector):
        self.counts[tup.word] += 1


@pytest.mark.parametrize("tasks", [2, 4, 8])
def test_memory_of_a_keyed_count(tasks):
    keys, each = WORDS, 10 * tasks
    rows = shuffled([(word,) for word in keys for _ in range(each)], 11)

    def run(subscribe):
        runner = spread(FeederSpout("word", rows=rows), subscribe, tasks, bolt=Count(), frame_bytes=4000)
        counts = [bolt.counts for bolt in runner.component("sink")]
        assert sum(counts, Counter()) == dict.fromkeys(keys, each)
        return sum(map(len, counts))

    assert run(lambda b, s: b.shuffle_grouping(s)) >= 0.95 * len(keys) * tasks
    assert run(lambda b, s: b.fields_grouping(s, "word")) == len(keys)
    assert len(keys) < run(lambda b, s: b.partial_key_grouping(s, "word")) <= 2 * len(keys)


# ---- all, global -----------------------------------------------------------------------------------------


@over_all
@pytest.mark.parametrize("form", [None, BatchPass])
def test_all_gives_every_task_a_copy(form, tasks, seed):
    middle = form and form("task", "n")
    got = per_task(spread(NumberSpout(50), lambda b, s: b.all_grouping(s), tasks, seed, 2, middle), "sink")
    assert len(got) == tasks
    for rows in got:
        assert Counter(rows) == {(task, n): 1 for task in (1, 2) for n in range(50)}
        assert in_order(rows)


@over_all
def test_global_is_the_task_of_the_lowest_id(tasks, seed):
    runner = spread(NumberSpout(50), lambda b, s: b.global_grouping(s), tasks, seed, sources=3)
    first, *others = per_task(runner, "sink")
    assert Counter(first) == {(task, n): 1 for task in (1, 2, 3) for n in range(50)}
    assert in_order(first)
    assert not any(others)
    assert runner.plan.tasks_of["sink"][0] == min(runner.plan.tasks_of["sink"])


# ---- direct ----------------------------------------------------------------------------------------------


class Names(BasicBolt):
    """Sends n to the sink task of position n mod tasks."""

    def declare_output_fields(self, declarer):
        declarer.declare("task", "n", direct=True)

    def prepare(self, conf, context):
        self._sinks = context.tasks["sink"]

    def execute(self, tup, collector):
        collector.emit_direct(self._sinks[tup.n % len(self._sinks)], tup)


class NamesInBatches(BatchSpout):
    def declare_output_fields(self, declarer):
        declarer.declare("task", "n", direct=True)

    def open(self, conf, context, collector):
        self._collector, self._sinks, self._left = collector, context.tasks["sink"], 3

    def next_batch(self):
        if self._left:
            self._left -= 1
            for position, task in enumerate(self._sinks):
                ns = [n for n in range(self._left * 10, self._left * 10 + 10) if n % len(self._sinks) == position]
                self._collector.emit_batch_direct(task, {"task": [1] * len(ns), "n": ns})


@over_all
def test_direct_goes_where_the_emitter_says(tasks, seed):
    got = per_task(spread(NumberSpout(50), lambda b, s: b.direct_grouping(s), tasks, seed, 2, Names()), "sink")
    for position, rows in enumerate(got):
        assert Counter(rows) == {(task, n): 1 for task in (1, 2) for n in range(50) if n % tasks == position}
        assert in_order(rows)


@pytest.mark.parametrize("tasks", TASKS)
def test_direct_in_batches(tasks):
    got = per_task(spread(NamesInBatches(), lambda b, s: b.direct_grouping(s), tasks), "sink")
    assert [sorted(n for _, n in rows) for rows in got] == [list(range(p, 30, tasks)) for p in range(tasks)]


# ---- local or shuffle ------------------------------------------------------------------------------------


@over_all
def test_local_or_shuffle_fused_stays_in_its_worker(tasks, seed):
    runner = spread(NumberSpout(40), lambda b, s: b.local_or_shuffle_grouping(s), tasks, seed, sources=tasks)
    for position, rows in enumerate(per_task(runner, "sink")):
        assert rows == [(position + 1, n) for n in range(40)]
    assert sum(worker.frames_sent for worker in reports_of(runner).values()) == 0


@pytest.mark.parametrize(("sources", "tasks"), [(1, 2), (2, 3), (3, 1), (2, 8)])
@pytest.mark.parametrize("seed", SEEDS)
def test_local_or_shuffle_spreads_evenly_where_nothing_is_fused(sources, tasks, seed):
    runner = spread(NumberSpout(50), lambda b, s: b.local_or_shuffle_grouping(s), tasks, seed, sources=sources)
    got = per_task(runner, "sink")
    assert numbers(got) == {(task, n): 1 for task in range(1, sources + 1) for n in range(50)}
    for source in range(1, sources + 1):
        counts = [sum(task == source for task, _ in rows) for rows in got]
        assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize(
    ("same_worker", "same_node", "expected"),
    [((), (), {0, 1, 2, 3}), ((), (1, 3), {1, 3}), ((2,), (1, 2, 3), {2}), ((0, 2), (), {0, 2})],
)
def test_local_or_shuffle_prefers_the_worker_then_the_node(same_worker, same_node, expected):
    router = LocalOrShuffle().router(Targets((5, 6, 7, 8), 1, same_worker, same_node))
    batch = pa.RecordBatch.from_pydict({"n": list(range(10))})
    counts = Counter()
    for _ in range(7):
        for position, rows in router.split(batch):
            counts[position] += len(range(10)[rows])
    assert set(counts) == expected
    # In one worker a small batch goes to one task; the next batch goes to the next task.
    assert max(counts.values()) - min(counts.values()) <= (10 if same_worker else 1)
    assert sum(counts.values()) == 70


def test_in_one_worker_large_batches_are_divided_and_small_ones_take_turns():
    router = LocalOrShuffle().router(Targets((5, 6, 7), 1, (0, 1, 2)))

    def sizes(rows, of_batches=False):
        batch = ColumnBatch([("n", None)], [list(range(rows))])
        split = router.split(batch.arrow() if of_batches else batch)
        return [(position, len(range(rows)[part])) for position, part in split]

    assert [sizes(1) for _ in range(4)] == [[(1, 1)], [(2, 1)], [(0, 1)], [(1, 1)]]
    assert sizes(600) == [(2, 300), (0, 300)]
    assert sizes(900) == [(1, 300), (2, 300), (0, 300)]
    assert sizes(769) == [(1, 257), (2, 256), (0, 256)]
    assert sizes(8_000, of_batches=True) == [(2, 8_000)]
    assert sizes(20_000, of_batches=True) == [(0, 10_000), (1, 10_000)]


# ---- custom ----------------------------------------------------------------------------------------------


class Divisors(CustomGrouping):
    """n goes to every task whose position, from 1, divides it: none for 0, several for others."""

    def prepare(self, targets):
        self._tasks = targets.tasks

    def choose(self, values):
        _, n = values
        return [task for position, task in enumerate(self._tasks, 1) if n and n % position == 0]


class HighHalf(Grouping):
    """Batch by batch: small numbers to the first task, others to the last."""

    name = "high_half"

    def router(self, targets):
        return HighHalfRouter(len(targets))


class HighHalfRouter(Router):
    def __init__(self, count):
        self._count = count

    def split(self, batch):
        high = np.asarray(batch.column("n")) >= 25
        parts = [(0, np.flatnonzero(~high)), (self._count - 1, np.flatnonzero(high))]
        return [(position, rows) for position, rows in parts if len(rows)]


@over_all
def test_custom_tuple_by_tuple(tasks, seed):
    got = per_task(spread(NumberSpout(50), lambda b, s: b.grouping(s, Divisors()), tasks, seed, sources=2), "sink")
    for position, rows in enumerate(got, 1):
        assert Counter(rows) == {(task, n): 1 for task in (1, 2) for n in range(1, 50) if n % position == 0}
        assert in_order(rows)


@pytest.mark.parametrize("tasks", [2, 3, 8])
def test_custom_batch_by_batch(tasks):
    first, *middle, last = per_task(spread(NumberSpout(50), lambda b, s: b.grouping(s, HighHalf()), tasks), "sink")
    assert first == [(1, n) for n in range(25)]
    assert last == [(1, n) for n in range(25, 50)]
    assert not any(middle)


class BySource(CustomGrouping):
    """Every source task has a sink of its own: what ``prepare`` keeps must be kept per source task."""

    def prepare(self, targets):
        self._own = targets.tasks[targets.source_task % len(targets)]

    def choose(self, values):
        return [self._own]


def test_custom_groupings_are_prepared_per_source_task():
    got = per_task(spread(NumberSpout(20), lambda b, s: b.grouping(s, BySource()), 3, sources=3), "sink")
    assert [sorted({task for task, _ in rows}) for rows in got] == [[3], [1], [2]]


class Stubborn(CustomGrouping):
    def __init__(self, task):
        self._task = task

    def prepare(self, targets):
        self._first = targets.tasks[0]

    def choose(self, values):
        if values[0] != 3:
            return [self._first]
        if self._task is None:
            raise RuntimeError("cannot choose")
        return [self._task]


@pytest.mark.parametrize(("task", "text"), [(None, "RuntimeError: cannot choose"), (99, "99")])
def test_an_error_in_a_custom_grouping_is_the_user_s(task, text):
    builder = TopologyBuilder()
    builder.set_spout("source", FeederSpout("n", rows=[(3,)]))
    builder.set_bolt("sink", CaptureBolt(), 2).grouping("source", Stubborn(task))
    runner = LocalRunner(builder.build("t"))
    runner.run_until_idle()
    runner.feed("source", [(4,)])
    runner.run_until_idle()
    assert [tuple(tup) for tup in runner.captured("sink")] == [(4,)]
    (error,) = runner.errors
    assert isinstance(error, UserCodeError)
    assert "component 'source'" in str(error)
    assert "Stubborn" in str(error)
    assert text in str(error)


def test_two_subscribers_of_one_stream_have_groupings_of_their_own():
    builder = TopologyBuilder()
    builder.set_spout("source", NumberSpout(30))
    builder.set_bolt("spread", CaptureBolt(), 3).shuffle_grouping("source")
    builder.set_bolt("copies", CaptureBolt(), 2).all_grouping("source")
    builder.set_bolt("pass", Pass("task", "n")).global_grouping("source")
    runner = LocalRunner(builder.build("t"))
    runner.run_until_idle()
    assert [len(rows) for rows in per_task(runner, "spread")] == [10, 10, 10]
    assert [len(rows) for rows in per_task(runner, "copies")] == [30, 30]
    assert (runner.stats("source")[0].emitted, runner.stats("source")[0].sent) == (30, 30 + 60 + 30)
