"""A topology goes on with another number of tasks: what it counts is what a sequential run counts."""

import math
import random
from collections import Counter

import pyarrow.dataset as ds
import pytest

from penstock import Delivery, Lifecycle, Reduce, Settings, StateError, TopologyBuilder, Transport
from penstock.aggregates import Count as Counting
from penstock.aggregates import Distinct, Sum
from penstock.clock import SimulatedClock
from penstock.connectors.parquet import ParquetSink
from penstock.driver.recovery import StateDirectory
from penstock.driver.savepoint_requests import save_at_rest
from penstock.faults import CrashPoint
from penstock.plan.planner import make_plan
from penstock.protocol.commands import AssignWorker, OpenTasks
from penstock.protocol.job import make_job
from penstock.spark.pickling import dumps
from penstock.state.store import StateStore
from penstock.testing import CaptureBolt, FeederSpout, LocalRunner
from penstock.worker.archive import WorkerArchive
from penstock.worker.worker import Worker
from tests.consistency.components import (
    INTERVAL,
    WORLDS,
    BatchCount,
    Count,
    Crash,
    Numbers,
    Outside,
    Pass,
    Replays,
    Seen,
    counts,
    die,
    key_of,
    pairs,
    rows_of,
    run_to_the_end,
    run_until,
    run_until_idle,
)

COUNT = 120
NUMBERS = ([2, 4, 1, 3, 2], [1, 2, 4, 2, 1], [3, 5, 2, 5])


def words(world, tasks, count=Count, crash_at="", sinks=None, sink=None):
    """Everything but the spouts has so many tasks."""
    builder = TopologyBuilder()
    builder.set_spout("numbers", Numbers(COUNT), 2)
    builder.set_bolt("middle", Pass(), tasks).shuffle_grouping("numbers")
    builder.set_bolt("count", count(), tasks).fields_grouping("middle", "key").fields_grouping("numbers", "key")
    builder.set_bolt("sink", sink or Outside(world), sinks or tasks).shuffle_grouping("count")
    return builder.build(
        "t",
        Settings(
            delivery=Delivery("exactly_once", epoch_interval=INTERVAL), lifecycle=Lifecycle(crash_at=crash_at)
        ),
    )


ORACLE = Counter(key_of(n) for _ in range(4) for n in range(COUNT))


def start(world, folder, tasks, seed=0, **more):
    runner = LocalRunner(words(world, tasks, **more), seed=seed, folder=folder, die=die, uneven=True)
    assert sorted(WORLDS[world].rows) == pairs(counts(runner)), "state and sinks tell of one moment"
    owners = [key for bolt in runner.component("count") for key in bolt.counts]
    assert len(owners) == len(set(owners)), "a key has one owner"
    return runner


def go_on(runner):
    """Run until one more epoch is committed and the sinks have published it; then the runner is dropped, with
    tuples under way, as if it were killed. Returns the epoch."""
    before = runner.commits.committed
    run_until(runner, lambda: runner.commits.published == runner.commits.committed > before)
    return runner.commits.committed


@pytest.mark.parametrize("count", [Count, BatchCount])
@pytest.mark.parametrize("numbers", NUMBERS)
def test_exactly_once_with_one_number_of_tasks_after_the_other(numbers, count, world, folder):
    for seed, tasks in enumerate(numbers):
        runner = start(world, folder, tasks, seed, count=count)
        passed = sum(bolt.seen.value for bolt in runner.component("middle"))
        assert passed == sum(counts(runner).values()) / 2, "what tasks counted that are no more is not lost"
        go_on(runner)
    run_to_the_end(runner)
    assert counts(runner) == ORACLE
    assert sorted(WORLDS[world].rows) == pairs(ORACLE)
    assert not runner.errors


@pytest.mark.parametrize("step", ["announced", "marked", "snapshotted", "written", "reported", "collected"])
def test_a_crash_in_the_first_epoch_with_another_number_of_tasks(step, world, folder):
    runner = start(world, folder, 2)
    epoch = go_on(runner)
    for tasks in (4, 3, 1):  # none of them commits: all of them find the two tasks' state
        with pytest.raises(Crash):
            start(world, folder, tasks, crash_at=f"{step}:{epoch + 1}").run(0.2)
    runner = start(world, folder, 4)
    run_to_the_end(runner)
    assert counts(runner) == ORACLE
    assert sorted(WORLDS[world].rows) == pairs(ORACLE)


def test_sinks_publish_before_their_number_changes(world, folder):
    with pytest.raises(Crash):
        start(world, folder, 2, crash_at="committed:2").run(0.2)
    with pytest.raises(
        StateError,
        match=r"'sink': it has 3 tasks now, but the output that its 2 tasks prepared in epoch 2 .*Ctrl-C",
    ):
        LocalRunner(words(world, 3), folder=folder)
    LocalRunner(words(world, 3, sinks=2), folder=folder).close()  # the others may have another number
    assert WORLDS[world].rows, "its sinks found what was prepared"
    go_on(start(world, folder, 3, sinks=2))
    runner = start(world, folder, 3)
    run_to_the_end(runner)
    assert sorted(WORLDS[world].rows) == pairs(ORACLE)


@pytest.mark.parametrize("numbers", NUMBERS)
def test_parquet_files_of_one_number_of_tasks_after_the_other(numbers, tmp_path):
    for seed, tasks in enumerate(numbers):
        topology = words("", tasks, sink=ParquetSink(tmp_path / "rows"))
        runner = LocalRunner(topology, seed=seed, folder=str(tmp_path / "state"), uneven=True)
        go_on(runner)
    run_to_the_end(runner)
    assert rows_of(ds.dataset(tmp_path / "rows", format="parquet").to_table()) == pairs(ORACLE)


@pytest.mark.parametrize("numbers", NUMBERS)
def test_at_least_once_with_one_number_of_tasks_after_the_other(numbers, folder):
    def begin(tasks, seed):
        builder = TopologyBuilder()
        builder.set_spout("numbers", Replays(COUNT), 2)
        builder.set_bolt("middle", Pass(), tasks).shuffle_grouping("numbers")
        builder.set_bolt("seen", Seen(), tasks).fields_grouping("middle", "n")
        settings = Settings(
            delivery=Delivery("at_least_once", epoch_interval=INTERVAL),
            transport=Transport(0.0, busy_linger=INTERVAL / 4),
        )
        return LocalRunner(builder.build("t", settings), seed=seed, folder=folder, uneven=True)

    for seed, tasks in enumerate(numbers):
        runner = begin(tasks, seed)
        go_on(runner)
    run_until_idle(runner)
    assert not runner.errors
    times = Counter()
    for bolt in runner.component("seen"):
        assert not times.keys() & bolt.times.keys(), "a key has one owner"
        times.update(dict(bolt.times))
    assert set(times) == set(range(COUNT))
    assert min(times.values()) >= 2, "by each spout task"


def test_a_savepoint_is_begun_from_with_another_number_of_tasks(world, folder):
    go_on(start(world, folder, 2))
    before = counts(start(world, folder, 2))
    savepoint = StateStore(f"{folder}-savepoint")
    save_at_rest(StateStore(folder).child("t"), savepoint)
    topology = words(world, 3)
    StateDirectory(make_plan(topology), topology, f"{folder}-other").adopt(savepoint)
    again = LocalRunner(topology, folder=f"{folder}-other")
    assert counts(again) == before
    assert [len(bolt.counts) > 0 for bolt in again.component("count")].count(True) > 1


@pytest.mark.parametrize("now", [1, 2, 3, 4])
def test_state_is_read_ahead_while_the_others_still_run(now, world, folder):
    runner = start(world, folder, 2)
    topology = words(world, now)
    plan = make_plan(topology)
    state = StateDirectory(plan, topology, folder)
    point = CrashPoint("", "driver")
    archives = {id: WorkerArchive(state.store.url, id, point) for id in plan.worker_ids()}

    def of(id):
        keys = {plan.task[task].key for task in plan.routes.tasks_of(id)}
        return {key: entry for key, entry in state.tasks().items() if key in keys}

    for _ in range(3):
        go_on(runner)
        state.inspect()
        for id, archive in archives.items():
            archive.prefetch(of(id))
    assert go_on(runner) > state.epoch, "it committed more, undisturbed"
    expected = counts(start(world, folder, 2))
    state.recover(published=runner.commits.published)
    found = Counter()
    for id, archive in archives.items():
        job = make_job(topology, plan, state.store.url, dumps)
        worker = Worker(id, job, SimulatedClock(), AssignWorker(id.index), archive)
        assert not worker.handle(OpenTasks({}, state.generation, state.epoch, of(id)))
        for executor in worker.inspect().executors:
            if executor.context.component == "count":
                found.update(dict(executor.component.counts))
    assert found == expected


# ---- reduce ------------------------------------------------------------------------------------------------


FIELDS = ("shop", "product", "price", "time")
MERGES = {"sold": Counting(), "revenue": Sum("price"), "products": Distinct("product")}


def sales(count, seed):
    """In the order of time; some shops sell seldom, so that their tasks are behind."""
    draw = random.Random(seed)
    shops = ["a"] * 30 + ["b"] * 10 + ["c", "d", "e", "f", "g", "h"]
    return [(draw.choice(shops), draw.choice("xyz"), draw.randrange(100), n / 10) for n in range(count)]


def reduced(reduce, tasks, by):
    builder = TopologyBuilder()
    builder.set_spout("rows", FeederSpout(*FIELDS))
    windows = reduce._window is not None  # whose rows must stay in order
    builder.set_bolt("partials", reduce.partials(), 1 if windows else 1 + tasks % 2).shuffle_grouping("rows")
    total = builder.set_bolt("total", reduce.merged(), tasks)
    total = total.fields_grouping("partials", *by) if by else total.global_grouping("partials")
    builder.set_bolt("capture", CaptureBolt()).global_grouping("total")
    if windows:
        builder.set_bolt("late", CaptureBolt()).global_grouping("total", stream="late")
    return builder.build(
        "t",
        Settings(delivery=Delivery("exactly_once", epoch_interval=1000.0), transport=Transport(frame_bytes=200)),
    )


def in_turns(reduce, rows, numbers, by, folder):
    """All that is emitted when the rows come in as many pieces as there are numbers of tasks."""
    found = []
    for turn, tasks in enumerate(numbers):
        runner = LocalRunner(reduced(reduce, tasks, by), seed=turn, folder=folder)
        piece = rows[turn * len(rows) // len(numbers) : (turn + 1) * len(rows) // len(numbers)]
        for begin in range(0, len(piece), 20):  # less in a batch than may be late
            runner.feed("rows", piece[begin : begin + 20])
            runner.run_until_idle()
        assert not runner.errors
        runner.commit()
        found += [tuple(tup) for tup in runner.captured("capture")]
        if reduce._window is not None:
            assert runner.captured("late") == []
    return found


KEYS = [((), ()), (("shop",), ("shop",)), (("shop", "product"), ("shop",)), (("shop", "product"), ("product",))]
KEYS += [(("shop", "product"), ("product", "shop")), (("shop", "product"), ())]


@pytest.mark.parametrize(("key", "by"), KEYS, ids=[f"{'-'.join(k)} by {'-'.join(b)}" for k, b in KEYS])
@pytest.mark.parametrize("numbers", NUMBERS)
def test_totals_are_the_same_whatever_the_numbers_of_tasks(numbers, key, by, folder):
    rows = sales(300, 1)
    found = in_turns(Reduce(*key, **MERGES), rows, numbers, by, folder)
    expected = {}
    for shop, product, price, time in rows:
        values = dict(zip(FIELDS, (shop, product, price, time), strict=True))
        sold, revenue, products = expected.setdefault(tuple(values[field] for field in key), (0, 0, set()))
        expected[tuple(values[field] for field in key)] = sold + 1, revenue + price, products | {product}
    latest = {row[: len(key)]: row[len(key) :] for row in found}
    assert latest == {key: (sold, revenue, len(all)) for key, (sold, revenue, all) in expected.items()}


ODD = [
    ("a", 1),
    ("a", 2),
    ("b", 1),
    (("a",), 2),
    "a",
    frozenset("ab"),
    None,
    (),
    1.5,
    ("a",),
    math.nan,
    b"a",
    (math.nan, 1),
]
"""Values of one field, some of them tuples that begin alike."""


@pytest.mark.parametrize("window", [False, True], ids=["totals", "windows"])
@pytest.mark.parametrize(("key", "by"), [(("shop",), ("shop",)), (("product", "shop"), ("shop",))])
@pytest.mark.parametrize("numbers", NUMBERS)
def test_a_field_may_have_tuples_as_values(numbers, key, by, window, folder):
    """A key of one field was shared out by its first part: after scaling, two tasks had totals of it."""
    draw = random.Random(7)
    rows = [(draw.choice(ODD), "x", 1, n / 10) for n in range(300)]
    reduce = Reduce(*key, sold=Counting())
    if window:
        reduce = reduce.window("time", 1e6, lateness=0)
    found = in_turns(reduce, rows, numbers, by, folder)
    if window:
        assert found == []
        runner = LocalRunner(reduced(reduce, 3, by), folder=folder)
        for shop in ODD:  # every task gets a row past the end
            runner.feed("rows", [(shop, "x", 1, 2e6)])
            runner.run_until_idle()
        found = [(*row[: len(key)], row[-1]) for row in map(tuple, runner.captured("capture"))]
    place = key.index("shop")
    latest = {repr(row[place]) if "nan" in repr(row[place]) else row[place]: row[-1] for row in found}
    shops = [repr(row[0]) if "nan" in repr(row[0]) else row[0] for row in rows]
    assert latest == Counter(shops)


@pytest.mark.parametrize(("key", "by"), KEYS[1:5], ids=[f"{'-'.join(k)} by {'-'.join(b)}" for k, b in KEYS[1:5]])
@pytest.mark.parametrize("numbers", [*NUMBERS, [1, 4, 4, 1, 3, 2, 6, 1]])
@pytest.mark.parametrize("slides", [1, 3])
def test_every_window_is_emitted_once_whatever_the_numbers_of_tasks(numbers, key, by, slides, folder):
    rows = sales(600, 2)
    end = 1e6
    closing = [(shop, product, 0, end) for shop in "abcdefgh" for product in "xyz"]  # so that every task goes on
    reduce = Reduce(*key, **MERGES).window("time", 2.0 * slides, slide=2.0, lateness=8.0)
    found = in_turns(reduce, rows, numbers, by, folder)
    runner = LocalRunner(reduced(reduce, 3, by), folder=folder)
    runner.feed("rows", closing)
    runner.run_until_idle()
    found += [tuple(tup) for tup in runner.captured("capture")]
    expected = {}
    for shop, product, price, time in rows:
        values = dict(zip(FIELDS, (shop, product, price, time), strict=True))
        for window in range(int(time // 2) + 1, int(time // 2) + 1 + slides):
            at = (*(values[field] for field in key), window * 2.0)
            sold, revenue, products = expected.get(at, (0, 0, set()))
            expected[at] = sold + 1, revenue + price, products | {product}
    assert sorted(found) == sorted((*at, sold, revenue, len(all)) for at, (sold, revenue, all) in expected.items())
