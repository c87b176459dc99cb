"""Keyed aggregates whose tasks own their keys: whatever is migrated, moved, killed or rescaled, the merged results
are those of a sequential run, and each task keeps the states of its own keys only."""

import random
import uuid
from collections import Counter, defaultdict
from types import SimpleNamespace

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from penstock import Reduce, Spout, TopologyBuilder
from penstock.aggregates import Count, Distinct, KeyedAggregate, Mean, MergeBolt, Min, Sum, TopK
from penstock.columns import to_column
from penstock.state.values import TaskState
from penstock.testing import CaptureBolt, LocalRunner
from penstock.topology.components import Context, Source
from tests.consistency.components import Crash, die, flap, run_until
from tests.helpers import settings_with

LEVELS = ("at_least_once", "exactly_once")
MERGES = {"count": Count(), "total": Sum("x"), "mean": Mean("x"), "kinds": Distinct("n")}


class Skewed(Spout):
    """⟨key, n, x, time⟩: most of them of a few keys. Its position is its state."""

    def __init__(self, count, seed, keys, hot):
        self._count, self._seed, self._keys, self._hot = count, seed, keys, hot

    def declare_output_fields(self, declarer):
        declarer.declare(("key", str), ("n", int), ("x", float), ("time", float))

    def open(self, conf, context, collector):
        self._collector = collector
        self._rows = rows_of(self._count, self._seed, self._keys, self._hot)[context.index :: context.parallelism]
        self.position = context.state.value("position", 0)

    def next_tuple(self):
        begin = self.position.value
        for row in range(begin, min(begin + 7, len(self._rows))):
            self._collector.emit(self._rows[row], msg_id=row)
        self.position.value = min(begin + 7, len(self._rows))

    @property
    def done(self):
        return self.position.value == len(self._rows)


def rows_of(count, seed, keys=11, hot=0.7):
    draw = random.Random(seed)
    rows = []
    for n in range(count):
        key = draw.randrange(2) if draw.random() < hot else draw.randrange(keys)
        rows.append((f"k{key}", n, draw.uniform(-5.0, 5.0), n * 0.1))
    return rows


class Visits(KeyedAggregate):
    """A user's own aggregate: its state is mutable."""

    key, results = ("key",), ("visits", "total", "seen")

    def zero(self):
        return {"visits": 0, "total": 0.0, "seen": set()}

    def add(self, state, tup):
        state["visits"] += 1
        state["total"] += tup.x
        state["seen"].add(tup.n % 17)
        return state

    def merge(self, state, other):
        state["visits"] += other["visits"]
        state["total"] += other["total"]
        state["seen"] |= other["seen"]
        return state

    def result(self, state):
        return state["visits"], state["total"], len(state["seen"])


AGGREGATES = {"own": Visits(), "reduce": Reduce("key", **MERGES).by_owner()}


def oracle(form, rows):
    by_key = defaultdict(list)
    for key, n, x, _ in rows:
        by_key[key].append((n, x))
    found = {}
    for key, values in by_key.items():
        xs = [x for _, x in values]
        if form == "own":
            found[key] = (len(xs), sum(xs), len({n % 17 for n, _ in values}))
        else:
            found[key] = (len(xs), sum(xs), sum(xs) / len(xs), len({n for n, _ in values}))
    return found


def topology(form, delivery, count, seed=0, keys=11, hot=0.7, tasks=3, merging=2, spouts=2, **options):
    aggregate = AGGREGATES[form]
    builder = TopologyBuilder()
    builder.set_spout("clicks", Skewed(count, seed, keys, hot), spouts).set_max_rate(options.pop("rate", 10_000))
    builder.set_bolt("count", aggregate.keyed(), tasks).fields_grouping("clicks", "key")
    builder.set_bolt("total", aggregate.merged(), merging).fields_grouping("count", "key")
    builder.set_bolt("out", CaptureBolt()).global_grouping("total")
    given = {"delivery": delivery, "frame_bytes": 400, "inbox_capacity": 30, "epoch_interval": 0.004, **options}
    return builder.build("t", settings_with(**{"migration": False, **given}))


def results(runner, form):
    found = {}
    for bolt in runner.component("total"):
        for key in {*bolt.owned, *bolt.foreign}:
            assert key not in found, "all states of a key are merged by one task"
            found[key] = tuple(AGGREGATES[form].result(bolt.state_of(key)))
    return found


def check(runner, form, rows):
    expected = oracle(form, rows)
    found = results(runner, form)
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        assert found[key] == pytest.approx(values, rel=1e-9, abs=1e-9)
    assert runner.errors == []


def states_are_apart(runner):
    """Each task has the states of its own keys only."""
    owners = [key for bolt in runner.component("count") for key in bolt.states]
    assert len(owners) == len(set(owners))
    tasks = runner.component("count")
    for bolt in tasks:
        shares = bolt.states and dict.fromkeys(bolt.states, bolt)
        for key in shares or ():
            assert all(key not in other.states for other in tasks if other is not bolt)


def all_sent(runner):
    return lambda: all(spout.done for spout in runner.component("clicks"))


@pytest.fixture
def state():
    return f"memory://{uuid.uuid4().hex}"


# ---- results -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", AGGREGATES)
@pytest.mark.parametrize("delivery", ["at_most_once", *LEVELS])
@pytest.mark.parametrize("how", ["off", "on", "flapping"])
def test_results_are_equal_with_and_without(form, delivery, how):
    runner = LocalRunner(topology(form, delivery, 200), seed=3, uneven=True)
    assert runner.plan.migratable == ("count",)
    if how == "on":
        runner.reroute("count", {0: 2, 1: 2})
    if how == "flapping":
        flap(runner, "count", random.Random(delivery + form), all_sent(runner))
    run_until(runner, all_sent(runner))
    runner.run_until_idle()
    check(runner, form, rows_of(200, 0))
    states_are_apart(runner)
    foreign = sum(len(bolt.foreign) for bolt in runner.component("total"))
    assert bool(foreign) == (how != "off")
    if how == "on":
        assert [stats.executed for stats in runner.stats("count")] == [0, 0, 200]
    last = {tup.key: tuple(tup[1:]) for tup in runner.captured("out")}
    for key, values in oracle(form, rows_of(200, 0)).items():
        assert last[key] == pytest.approx(values, rel=1e-9, abs=1e-9), "the newest result is the last one emitted"


@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
)
@given(
    form=st.sampled_from(sorted(AGGREGATES)),
    delivery=st.sampled_from(LEVELS),
    seed=st.integers(0, 10**6),
    keys=st.integers(1, 40),
    hot=st.floats(0, 1),
    tasks=st.integers(2, 5),
    then=st.tuples(st.integers(1, 5), st.integers(1, 3)),
)
def test_any_keys_and_skew_with_a_rescale_in_the_middle(form, delivery, seed, keys, hot, tasks, then):
    """The number of tasks changes while data is migrated. What a task computed of foreign keys is with the bolt
    that merges it, and moves with the key."""
    folder, draw, load = f"memory://{uuid.uuid4().hex}", random.Random(seed), (150, seed, keys, hot)
    runner = LocalRunner(topology(form, delivery, *load, tasks=tasks, rate=4000), seed, folder=folder, uneven=True)
    flap(runner, "count", draw, lambda: sum(spout.position.value for spout in runner.component("clicks")) > 60)
    if delivery == "at_least_once":  # replay may count twice, so the change is made at rest
        runner.deactivate()
        runner.run_until_idle()
    begun = runner.commits.newest
    run_until(runner, lambda: runner.commits.committed > begun)
    tasks, merging = then
    runner = LocalRunner(
        topology(form, delivery, *load, tasks=tasks, merging=merging, rate=4000), seed, folder=folder, uneven=True
    )
    if tasks > 1:
        flap(runner, "count", draw, all_sent(runner))
    run_until(runner, all_sent(runner))
    runner.run_until_idle()
    check(runner, form, rows_of(*load))
    states_are_apart(runner)


@pytest.mark.parametrize("step", ["marked", "snapshotted", "written", "reported", "committed", "published"])
def test_exactly_once_with_crashes_in_between(step, state):
    draw, crashed = random.Random(step), 0
    for attempt in range(3):
        runner = LocalRunner(
            topology("own", "exactly_once", 300, rate=3000, crash_at=f"{step}:{2 + 3 * attempt}"),
            seed=attempt,
            folder=state,
            die=die,
            uneven=True,
        )
        try:
            flap(runner, "count", draw, all_sent(runner))
        except Crash:
            crashed += 1
    assert crashed >= 2
    runner = LocalRunner(topology("own", "exactly_once", 300), seed=9, folder=state, uneven=True)
    flap(runner, "count", draw, all_sent(runner))
    runner.run_until_idle()
    check(runner, "own", rows_of(300, 0))
    states_are_apart(runner)


@pytest.mark.parametrize("seed", range(2))
def test_at_least_once_a_restart_loses_nothing(seed, state):
    draw, rows = random.Random(seed), rows_of(300, 0)
    runner = LocalRunner(topology("own", "at_least_once", 300, rate=3000), seed, folder=state, uneven=True)
    flap(runner, "count", draw, lambda: runner.commits.committed >= 3)
    runner = LocalRunner(topology("own", "at_least_once", 300), seed + 5, folder=state, uneven=True)
    flap(runner, "count", draw, all_sent(runner))
    runner.run_until_idle()
    found, expected = results(runner, "own"), oracle("own", rows)
    assert found.keys() == expected.keys()
    assert all(found[key][0] >= expected[key][0] and found[key][2] == expected[key][2] for key in expected)


@pytest.mark.parametrize("delivery", LEVELS)
@pytest.mark.parametrize("component", ["count", "total"])
def test_workers_move_while_data_is_migrated(delivery, component, state):
    runner = LocalRunner(topology("own", delivery, 400, rate=3000), seed=4, folder=state, uneven=True)
    runner.reroute("count", {0: 1})
    moved = 0
    while not all_sent(runner)():
        task = runner.plan.tasks_of[component][moved % 2]
        moved += runner.move(runner.plan.routes.worker_of[task])
        runner.reroute("count", {moved % 3: (moved + 1) % 3})
        runner.run(0.003)
    assert moved >= 2
    runner.run_until_idle()
    check(runner, "own", rows_of(400, 0))


# ---- windows: the ledger says what is complete -------------------------------------------------------------


def windows(delivery, count, spouts=1, tasks=3, merging=2, **options):
    reduce = Reduce("key", **MERGES).window("time", length=4.0, slide=2.0, lateness=0.0)
    builder = TopologyBuilder()
    builder.set_spout("clicks", Skewed(count, 0, 11, 0.7), spouts).set_max_rate(options.pop("rate", 10_000))
    builder.set_bolt("count", reduce.partials(), tasks).fields_grouping("clicks", "key")
    builder.set_bolt("total", reduce.merged(), merging).fields_grouping("count", "key")
    builder.set_bolt("out", CaptureBolt()).global_grouping("total")
    builder.set_bolt("late", CaptureBolt()).global_grouping("total", stream="late")
    given = {"delivery": delivery, "frame_bytes": 400, "inbox_capacity": 30, "epoch_interval": 0.004, **options}
    return builder.build("t", settings_with(**{"migration": False, **given}))


def windows_oracle(rows):
    found = Counter()
    for key, _, _, time in rows:
        pane = int(time // 2.0)
        for end in (pane + 1, pane + 2):
            found[key, end * 2.0] += 1
    over = max(row[3] for row in rows)
    return {window: count for window, count in found.items() if window[1] <= over}


def complete(runner):
    found = {}
    for tup in runner.captured("out"):
        assert (tup.key, tup.window_end) not in found, "a window is emitted once"
        found[tup.key, tup.window_end] = tup.count
    return found


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("delivery", ["at_most_once", *LEVELS])
def test_a_window_waits_for_the_partials_of_all_its_segments(delivery, seed):
    """Without lateness: the partials overtake each other, and nothing is late."""
    runner = LocalRunner(windows(delivery, 300), seed=seed, uneven=True)
    flap(runner, "count", random.Random(seed), all_sent(runner))
    run_until(runner, all_sent(runner))
    runner.run_until_idle()
    assert runner.captured("late") == []
    assert complete(runner) == windows_oracle(rows_of(300, 0))
    for bolt in runner.component("total"):
        bolt._ledger.validate()
        assert bolt._ledger.gaps == 0, "everything that was sent has arrived"


@pytest.mark.parametrize("delivery", LEVELS)
def test_windows_wait_while_workers_move(delivery, state):
    """The sender continues its positions in the new process, and the merging task its ledger."""
    runner = LocalRunner(windows(delivery, 500, rate=3000), seed=2, folder=state, uneven=True)
    draw, moved = random.Random(7), 0
    while not all_sent(runner)():
        component = draw.choice(["count", "total"])
        task = draw.choice(runner.plan.tasks_of[component])
        moved += runner.move(runner.plan.routes.worker_of[task])
        runner.reroute("count", {moved % 3: (moved + 1) % 3})
        runner.run(0.004)
    assert moved >= 2
    runner.run_until_idle()
    assert runner.captured("late") == []
    assert complete(runner) == windows_oracle(rows_of(500, 0))


@pytest.mark.parametrize("tasks", [(3, 2), (4, 1), (2, 3)])
def test_windows_exactly_once_over_a_restart_with_other_tasks(tasks, state):
    draw, rows = random.Random(str(tasks)), rows_of(400, 0)
    runner = LocalRunner(windows("exactly_once", 400, rate=3000), seed=1, folder=state, uneven=True)
    flap(runner, "count", draw, lambda: runner.commits.committed >= 3)
    before = {}
    runner = LocalRunner(windows("exactly_once", 400, 1, *tasks), seed=3, folder=state, uneven=True)
    for bolt in runner.component("total"):
        assert bolt._ledger.gaps == 0, "at the end of an epoch nothing is on its way"
        before[bolt] = bolt._complete.value
    flap(runner, "count", draw, all_sent(runner))
    run_until(runner, all_sent(runner))
    runner.run_until_idle()
    assert runner.captured("late") == []
    expected, found = windows_oracle(rows), complete(runner)
    assert all(expected[window] == count for window, count in found.items())
    first = min(window for window in before.values() if window is not None) * 2.0
    assert {window for window in expected if window[1] > first + 4.0} <= found.keys()


class Lists(KeyedAggregate):
    """Its merge changes its first argument, and raises for some states."""

    key, results = ("key",), ("count",)

    def zero(self):
        return []

    def add(self, state, tup):
        return [*state, tup.value]

    def merge(self, state, other):
        if len({type(value) for value in state + other}) > 1:
            raise TypeError("numbers and texts")
        state += other
        return state

    def result(self, state):
        return [len(state)]


def test_a_batch_whose_merge_fails_changes_no_state():
    bolt, emitted = Lists().keyed(), []
    bolt.prepare({}, Context("t", "count", 1, 0, {"count": (1,)}))
    collector = SimpleNamespace(emit_batch=emitted.append)

    def execute(*rows):
        keys, values = ([row[at] for row in rows] for at in (0, 1))
        columns = {"key": to_column(keys, None), "value": to_column(values, None)}
        bolt.execute_batch(pa.RecordBatch.from_pydict(columns), Source("clicks", "default", 0), collector)

    execute(("a", 1), ("b", 1))
    with pytest.raises(TypeError, match="numbers and texts"):
        execute(("a", 2), ("b", "two"))
    assert dict(bolt.states) == {"a": [1], "b": [1]}
    execute(("a", 2), ("b", 2))
    assert {key: sorted(state) for key, state in bolt.states.items()} == {"a": [1, 2], "b": [1, 2]}


def test_a_failed_batch_of_partials_is_counted_once():
    """The partial of a merge that comes first must not be changed in place: the batch comes again."""
    bolt = MergeBolt(["key"], {"top": TopK("page", 3), "users": Distinct("user"), "least": Min("value")})
    bolt.prepare({}, Context("t", "total", 1, 0, {"total": (1,)}))
    collector = SimpleNamespace(emit_batch=lambda columns: None)

    def execute(least):
        values = {"key": ["a"], "top": [{"home": 1}], "users": [{"ann"}], "least": [least]}
        columns = {name: to_column(column, None) for name, column in values.items()}
        bolt.execute_batch(pa.RecordBatch.from_pydict(columns), Source("parts", "default", 0), collector)

    execute(5)
    for _ in range(2):
        with pytest.raises(TypeError):
            execute("text")
    assert {name: dict(state) for name, state in bolt.partials.items()} == {
        "top": {"a": {"home": 1}},
        "users": {"a": {"ann"}},
        "least": {"a": 5},
    }
    execute(3)
    assert (bolt.partials["top"]["a"], bolt.partials["least"]["a"]) == ({"home": 2}, 3)


class Checked(Lists):
    """Its result raises for some states."""

    def result(self, state):
        if 2 in state:
            raise ValueError("no result")
        return super().result(state)


class CheckedCount(Count):
    def result(self, partial):
        if partial == 3:
            raise ValueError("no result")
        return partial


def keyed_states(foreign):
    return lambda value: {"partial_foreign": foreign, "partial_state": [value]}


@pytest.mark.parametrize(
    ("bolt", "columns_of"),
    [
        (Checked().merged(), keyed_states(foreign=False)),
        (Checked().merged(), keyed_states(foreign=True)),
        (MergeBolt(["key"], {"count": CheckedCount()}), lambda value: {"count": value}),
    ],
    ids=["owned", "foreign", "merges"],
)
def test_a_batch_whose_result_fails_changes_no_state(bolt, columns_of):
    emitted, state = [], TaskState()
    bolt.prepare({}, Context("t", "merge", 1, 0, {"merge": (1,)}, state=state))
    collector = SimpleNamespace(emit_batch=emitted.append)

    def stored():
        return {name: change.encode() for name, change in state.snapshot(full=True).changes.items()}

    def execute(*rows):
        values = [{"key": key, **columns_of(value)} for key, value in rows]
        columns = {name: to_column([row[name] for row in values], None) for name in values[0]}
        bolt.execute_batch(pa.RecordBatch.from_pydict(columns), Source("count", "default", 0), collector)

    execute(("a", 1), ("b", 1))
    before = stored()
    with pytest.raises(ValueError, match="no result"):
        execute(("a", 4), ("b", 2))
    assert stored() == before
    assert len(emitted) == 1
    execute(("a", 4), ("b", 4))
    assert stored() != before
