"""Data migration: forced, left out or flapping at any moment, by hand or by the control loop, the merged results
are those of a sequential run."""

import random
import uuid
from collections import defaultdict

import pytest

from penstock import BasicBolt, Flow, Migration, Settings, Spout, TopologyBuilder, Transport
from penstock.aggregates import Count, Max, Mean, Reduce, Sum, Variance
from penstock.plan.render import as_text
from penstock.testing import LocalRunner
from tests.consistency.components import Crash, die, flap, run_until
from tests.helpers import settings_with

COUNT = 150
TASKS = 3
LEVELS = ("at_most_once", "at_least_once", "exactly_once")
MERGES = {"count": Count(), "total": Sum("x"), "mean": Mean("x"), "spread": Variance("x"), "most": Max("x")}


def value_of(n):
    return (n * 37 % 101) / 7 - 5


def key_of(n):
    """Most are of one key: what migration is for."""
    return "hot" if n % 5 else f"k{n % 11}"


class Values(Spout):
    """⟨key, x⟩ a few at a time; where it is, is its state."""

    def __init__(self, count, burst=7):
        self._count, self._burst = count, burst

    def declare_output_fields(self, declarer):
        declarer.declare(("key", str), ("x", float), ("n", int))

    def open(self, conf, context, collector):
        self._collector, self._task = collector, context.index
        self.position = context.state.value("position", 0)
        self.acked = set()

    def next_tuple(self):
        begin = self.position.value
        for n in range(begin, min(begin + self._burst, self._count)):
            self._collector.emit([key_of(n), value_of(n) * (1 + self._task), n], msg_id=n)
        self.position.value = min(begin + self._burst, self._count)

    @property
    def done(self):
        return self.position.value == self._count

    def ack(self, msg_id):
        self.acked.add(msg_id)


def topology(delivery="at_most_once", count=COUNT, group="fields", rate=10_000, **options):
    reduce = Reduce("key", **MERGES)
    builder = TopologyBuilder()
    builder.set_spout("values", Values(count), 2).set_max_rate(rate)
    partials = builder.set_bolt("partials", reduce.partials(), TASKS)
    partials.fields_grouping("values", "key") if group == "fields" else partials.shuffle_grouping("values")
    builder.set_bolt("total", reduce.merged(), 2).fields_grouping("partials", "key")
    given = {"delivery": delivery, "frame_bytes": 400, "inbox_capacity": 20, "epoch_interval": 0.004, **options}
    return builder.build("t", settings_with(**given))


def results(runner):
    """⟨key, name⟩ → what came out."""
    found = {}
    for bolt in runner.component("total"):
        for name, merge in MERGES.items():
            for key, part in bolt.partials[name].items():
                assert (key, name) not in found, "all parts of a key are merged by one task"
                found[key, name] = merge.result(part)
    return found


def oracle(count=COUNT):
    values = defaultdict(list)
    for task in range(2):
        for n in range(count):
            values[key_of(n)].append(value_of(n) * (1 + task))
    found = {}
    for key, xs in values.items():
        mean = sum(xs) / len(xs)
        found[key, "count"] = len(xs)
        found[key, "total"], found[key, "mean"], found[key, "most"] = sum(xs), mean, max(xs)
        found[key, "spread"] = MERGES["spread"].result(MERGES["spread"].total(xs))
    return found


def check(runner, count=COUNT):
    assert results(runner) == pytest.approx(oracle(count), rel=1e-9, abs=1e-9)
    assert runner.errors == []


def all_sent(runner):
    return lambda: all(spout.done for spout in runner.component("values"))


# ---- by hand -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", ["fields", "shuffle"])
@pytest.mark.parametrize("delivery", LEVELS)
@pytest.mark.parametrize("how", ["off", "on", "flapping"])
def test_results_are_equal_with_and_without(delivery, how, group):
    runner = LocalRunner(topology(delivery, group=group, migration=False), seed=3, uneven=True)
    if how == "on":
        runner.reroute("partials", {0: 2, 1: 2})
    if how == "flapping":
        flap(runner, "partials", random.Random(delivery + group), all_sent(runner))
    run_until(runner, all_sent(runner))
    runner.run_until_idle()
    check(runner)
    executed = [stats.executed for stats in runner.stats("partials")]
    assert sum(executed) == 2 * COUNT
    if how == "on":
        assert executed == [0, 0, 2 * COUNT]
    if delivery == "at_least_once":
        assert all(spout.acked == set(range(COUNT)) for spout in runner.component("values"))


@pytest.mark.parametrize("seed", range(2))
def test_the_ledger_says_what_went_another_way(seed):
    """Its segments do not overlap, and add up to what the tasks got that was bound for others."""
    runner = LocalRunner(topology(migration=False), seed=seed)
    flap(runner, "partials", random.Random(seed), all_sent(runner))
    runner.run_until_idle()
    runner.reroute("partials", {})
    by_sender = defaultdict(list)
    assert runner.segments
    for task, segment in runner.bus.segments():
        by_sender[task, segment.branch].append(segment)
    assert by_sender
    for segments in by_sender.values():
        ends = 0
        for segment in segments:
            assert segment.length > 0
            assert segment.offset >= ends
            assert segment.branch != segment.target
            ends = segment.offset + segment.length
    executed = {f"partials/{index}": stats.executed for index, stats in enumerate(runner.stats("partials"))}
    plain = LocalRunner(topology(migration=False), seed=seed)
    plain.run_until_idle()
    for index, stats in enumerate(plain.stats("partials")):
        name = f"partials/{index}"
        lost = sum(segment.length for segment in runner.segments if segment.branch == name)
        won = sum(segment.length for segment in runner.segments if segment.target == name)
        assert executed[name] == stats.executed - lost + won
    assert len(runner.segments) == sum(map(len, by_sender.values()))


@pytest.fixture
def state():
    return f"memory://{uuid.uuid4().hex}"


@pytest.mark.parametrize("step", ["marked", "snapshotted", "written", "reported", "committed", "published"])
def test_exactly_once_with_crashes_in_between(step, state):
    draw = random.Random(step)
    crashed = 0
    for attempt in range(3):
        crash_at = f"{step}:{2 + 3 * attempt}"
        runner = LocalRunner(
            topology("exactly_once", rate=3000, crash_at=crash_at),
            seed=attempt,
            folder=state,
            die=die,
            uneven=True,
        )
        try:
            flap(runner, "partials", draw, all_sent(runner))
        except Crash:
            crashed += 1
    assert crashed >= 2
    runner = LocalRunner(topology("exactly_once"), seed=9, folder=state, uneven=True)
    flap(runner, "partials", draw, all_sent(runner))
    runner.run_until_idle()
    check(runner)


# ---- by the control loop -----------------------------------------------------------------------------------


def slow_down(runner, component, index, share):
    """A task's worker takes its turn in so few rounds, and executes one frame in each: no time passes in a turn,
    so otherwise it would empty its inbox."""
    id = runner.plan.routes.worker_of[runner.plan.tasks_of[component][index]]
    runner._pace[id] = share
    bolts = runner.workers[id]._tasks.bolts
    turn, done = runner.workers[id].turn, set()

    def begin():
        done.clear()
        return turn()

    def once(bolt, run):
        def call():
            return bolt not in done and run() and not done.add(bolt)

        return call

    if share < 1.0:
        runner.workers[id].turn = begin
        for bolt in bolts:
            bolt.run = once(bolt, bolt.run)
    else:
        del runner.workers[id].turn
        for bolt in bolts:
            del bolt.run


QUICK = {
    "inbox_capacity": 400,
    "frame_bytes": 4000,
    "migration_interval": 0.05,
    "epoch_interval": 0.05,
    "rate": 6000,
}
"""Frames large enough for a task in every turn to keep up with what three are sent."""


@pytest.mark.parametrize("delivery", LEVELS)
def test_an_overloaded_task_is_migrated_and_restored(delivery):
    count = 1500
    runner = LocalRunner(topology(delivery, count, "shuffle", **QUICK))
    slow_down(runner, "partials", 0, 0.005)
    run_until(runner, all_sent(runner))
    (text,) = (decision.text for decision in runner.migrations.decisions)
    assert text.startswith("partials/0 → partials/")
    assert "uses 100% of a queue, more than 80%" in text
    executed = [stats.executed for stats in runner.stats("partials")]
    assert executed[0] < 100
    assert max(executed) > 1.3 * sorted(executed)[1], "one of them does the work of two"
    slow_down(runner, "partials", 0, 1.0)
    runner.run_until_idle()
    runner.run(0.2)
    text = runner.migrations.decisions[-1].text
    assert text.startswith("partials/0 restored")
    assert "less than 50%" in text
    check(runner, count)
    assert sum(segment.length for segment in runner.segments) > 500


def test_migration_shortens_the_time_to_the_end():
    """Against step by step backpressure alone."""

    def seconds(migration):
        options = {**QUICK, "inbox_capacity": 100, "migration": migration}
        runner = LocalRunner(topology(count=600, group="shuffle", **options))
        slow_down(runner, "partials", 0, 0.02)
        runner.run_until_idle()
        check(runner, 600)
        return runner.clock.now()

    assert seconds(True) < 0.8 * seconds(False)


class Whole(BasicBolt):
    """Counts each key itself: no other task may get its tuples."""

    def prepare(self, conf, context):
        self.counts = defaultdict(int)

    def execute(self, tup, collector):
        self.counts[tup.key] += 1


def test_a_bolt_that_does_not_emit_partials_is_never_migrated():
    builder = TopologyBuilder()
    builder.set_spout("values", Values(200), 2).set_max_rate(2000)
    builder.set_bolt("partials", Whole(), TASKS).fields_grouping("values", "key")
    settings = Settings(
        flow=Flow(inbox_capacity=50), transport=Transport(frame_bytes=400), migration=Migration(interval=0.02)
    )
    runner = LocalRunner(builder.build("t", settings))
    hot = max(range(TASKS), key=lambda index: _keys_of(index).count("hot"))
    slow_down(runner, "partials", hot, 0.02)
    full = False
    end = runner.clock.now() + 60.0
    while not all_sent(runner)() and runner.clock.now() < end:
        runner.run(0.02)
        full = full or runner.stats("partials")[hot].peak > 0.8 * 50
    runner.run_until_idle()
    assert full
    assert runner.plan.not_migrated["partials"] == "does not emit partials"
    assert runner.migrations.idle
    assert not runner.migrations.decisions
    assert runner.segments == []
    keys = [set(bolt.counts) for bolt in runner.component("partials")]
    assert sum(map(len, keys)) == len(set.union(*keys)), "each key at one task"


def _keys_of(index):
    """The keys of one task, by the grouping itself."""
    builder = TopologyBuilder()
    builder.set_spout("values", Values(60), 1)
    builder.set_bolt("partials", Whole(), TASKS).fields_grouping("values", "key")
    runner = LocalRunner(builder.build("t", Settings()))
    runner.run_until_idle()
    return list(runner.component("partials")[index].counts)


# ---- branches of several hops ------------------------------------------------------------------------------


class Hop(BasicBolt):
    """A node on the way from the branching point to the merge: any task may execute any tuple."""

    emits_partials = True

    def declare_output_fields(self, declarer):
        declarer.declare(("key", str), ("x", float), ("n", int))

    def execute(self, tup, collector):
        collector.emit(tup)


def long_branches(hops=2, count=COUNT, **options):
    """Each task of the first hop sends to the task of the next with its own index, up to the merge."""
    reduce = Reduce("key", **MERGES)
    builder = TopologyBuilder()
    builder.set_spout("values", Values(count), 2).set_max_rate(options.pop("rate", 10_000))
    builder.set_bolt("hop0", Hop(), TASKS).shuffle_grouping("values")
    for hop in range(1, hops):
        builder.set_bolt(f"hop{hop}", Hop(), TASKS).forward_grouping(f"hop{hop - 1}")
    builder.set_bolt("partials", reduce.partials(), TASKS).forward_grouping(f"hop{hops - 1}")
    builder.set_bolt("total", reduce.merged(), 2).fields_grouping("partials", "key")
    return builder.build("t", settings_with(**{"epoch_interval": 0.05, **options}))


def test_a_branch_goes_from_the_branching_point_to_the_merge():
    runner = LocalRunner(long_branches())
    plan = runner.plan
    assert plan.migratable == ("hop0",)
    text = as_text(long_branches(), plan)
    assert "  hop0             yes, its branches go on with hop1, partials\n" in text
    assert "  hop1             no: is a hop of the branches of 'hop0'\n" in text
    assert plan.not_migrated["hop1"] == "is a hop of the branches of 'hop0'"
    assert plan.not_migrated["partials"] == "is a hop of the branches of 'hop1'"
    for index in range(TASKS):
        branch = plan.branch_of(plan.tasks_of["hop0"][index])
        assert [plan.task[task].key for task in branch] == [f"hop0/{index}", f"hop1/{index}", f"partials/{index}"]


@pytest.mark.parametrize("delivery", ["at_least_once", "exactly_once"])
@pytest.mark.parametrize("slow", ["hop1", "partials"])
def test_an_overloaded_node_further_down_makes_its_branch_heavy(delivery, slow):
    """The walk goes up from the overloaded node to the branching point, where the data takes another way."""
    count = 1500
    runner = LocalRunner(long_branches(count=count, delivery=delivery, **QUICK))
    slow_down(runner, slow, 1, 0.005)
    run_until(runner, all_sent(runner))
    text = runner.migrations.decisions[0].text
    assert text.startswith("hop0/1 → hop0/")
    assert {decision.component for decision in runner.migrations.decisions} == {"hop0"}
    executed = [stats.executed for stats in runner.stats(slow)]
    assert executed[1] < min(executed[0], executed[2])
    slow_down(runner, slow, 1, 1.0)
    runner.run_until_idle()
    runner.run(0.2)
    check(runner, count)
    assert sum(segment.length for segment in runner.segments) > 100


def test_a_branch_that_is_not_merged_is_not_migrated():
    builder = TopologyBuilder()
    builder.set_spout("values", Values(10), 1)
    builder.set_bolt("hop0", Hop(), TASKS).shuffle_grouping("values")
    builder.set_bolt("hop1", Hop(), TASKS).forward_grouping("hop0")
    builder.set_bolt("whole", Whole(), TASKS).fields_grouping("hop1", "key")
    plan = LocalRunner(builder.build("t", Settings())).plan
    assert plan.not_migrated["hop0"] == "'whole', which reads it, does not merge partials"
