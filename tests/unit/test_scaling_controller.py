"""What a running topology's counters say about its load, and what becomes of it: load samples, decisions, free
workers."""

import copy
import dataclasses
import math

import pytest

from penstock import BasicBolt, Scaling, Settings, SimulatedClock, Spout, TopologyBuilder
from penstock.control.failure_policy import FailurePolicy
from penstock.control.scaling import RatePolicy
from penstock.driver.load_sampler import LoadSampler, shape_of
from penstock.driver.scaling_controller import ScalingController, make_policy
from penstock.metrics.stats import TaskStats
from penstock.plan.planner import make_plan
from penstock.testing import LocalRunner
from tests.helpers import settings_with

CLOCK = SimulatedClock()
"""The clock of all that takes time here; each test takes it on from where it stands."""
ACKED = {"delivery": "at_least_once"}


class Source(Spout):
    """``rate`` tuples a second, as a queue would offer them."""

    def __init__(self, rate=0.0):
        self.rate, self.emitted, self._owed, self._at = rate, 0, 0.0, None

    def declare_output_fields(self, declarer):
        declarer.declare(("n", int))

    def open(self, conf, context, collector):
        self._collector, self._at = collector, CLOCK.now()

    def next_tuple(self):
        now = CLOCK.now()
        self._owed, self._at = self._owed + (now - self._at) * self.rate, now
        if self._owed >= 1:
            self._owed -= 1
            self._collector.emit([self.emitted], msg_id=self.emitted)
            self.emitted += 1


class Work(BasicBolt):
    """Takes ``seconds`` for a tuple and passes it on."""

    def __init__(self, seconds=0.0):
        self._seconds = seconds

    def declare_output_fields(self, declarer):
        declarer.declare(("n", int))

    def execute(self, tup, collector):
        if self._seconds:
            CLOCK.advance(self._seconds)
        collector.emit([tup.n])


def build(a=1, b=1, tasks_of_b=None, service=0.0, rate=0.0, fused=False, **settings):
    """source -> a -> b -> end; ``fused``: a => b share workers."""
    builder = TopologyBuilder()
    builder.set_spout("source", Source(rate))
    builder.set_bolt("a", Work(service), a).shuffle_grouping("source")
    bolt = builder.set_bolt("b", Work(), b)
    if fused:
        bolt.local_or_shuffle_grouping("a")
    else:
        bolt.fields_grouping("a", "n")
    if tasks_of_b:
        bolt.set_num_tasks(tasks_of_b)
    builder.set_bolt("end", Work()).global_grouping("b")
    return builder.build("t", settings_with(**{"scaling": "rate", **settings}))


class Bench:
    """Hand-made counters of a topology; ``pass_time`` adds a window to them and has them looked at."""

    def __init__(self, topology, room=None):
        self.use(topology)
        self.scalings = ScalingController(self.plan, topology, topology.settings, room)
        self.time = 100.0
        assert self.decide() is None, "the first only remembers"

    def use(self, topology):
        self.topology, self.plan = topology, make_plan(topology)
        self.stats = {task: TaskStats(capacity=1000) for task in self.plan.task}

    def decide(self):
        return self.scalings.decide(self.time, {task: _copied(stats) for task, stats in self.stats.items()})

    def spend(self, component, index=0, latency=None, count=0, **more):
        stats = self.stats[self.plan.tasks_of[component][index]]
        for name, value in more.items():
            setattr(stats, name, value if name in ("queued", "demand", "limit") else getattr(stats, name) + value)
        if latency is not None:
            stats.latency.record(latency, count)

    def pass_time(self, seconds=5.0, a=0.5, b=0.1, tuples=500, **spout):
        """All components get ``tuples``, spread evenly; their bolts work for that share of the time, each task."""
        self.time += seconds
        self.spend("source", emitted=tuples, executed=tuples, **spout)
        for component, share in {"a": a, "b": b, "end": 0.0}.items():
            tasks = len(self.plan.tasks_of[component])
            each = tuples // tasks
            for index in range(tasks):
                work = {"busy": share * seconds, "arrived": each, "executed": each, "emitted": each}
                self.spend(component, index, **work)
        return self.decide()

    def texts(self):
        return [decision.text for decision in self.scalings.decisions]


def _copied(stats):
    return copy.deepcopy(stats)


# ---- load samples
# -------------------------------------------------------------------------------------------------


def taken(topology, change, seconds=5.0):
    """The load sample between nothing and what ``change`` makes of the counters, by component."""
    plan = make_plan(topology)
    sampler = LoadSampler(shape_of(plan, topology))
    stats = {task: TaskStats() for task in plan.task}
    assert sampler.take(10.0, stats) is None
    after = {task: _copied(each) for task, each in stats.items()}
    change({component: [after[task] for task in tasks] for component, tasks in plan.tasks_of.items()})
    sample = sampler.take(10.0 + seconds, after)
    return sample, {bolt.name: bolt for bolt in sample.bolts}


def test_a_load_sample_has_what_was_counted_between_two_reports():
    def change(of):
        (source,) = of["source"]
        source.emitted, source.timed_out, source.failed, source.held_back = 50, 3, 9, 2.5
        for number, task in enumerate(of["a"], 1):
            task.arrived, task.executed, task.emitted, task.busy = 10 * number, 9 * number, 18 * number, number / 2
            task.queued, task.capacity = number, 64

    sample, bolts = taken(build(a=2, **ACKED), change)
    (spout,) = sample.spouts
    assert dataclasses.astuple(spout) == ("source", 50, 3, 0.5, None)
    assert (sample.time, sample.seconds, sample.failed, sample.latency) == (15.0, 5.0, 3, None)
    assert [bolt.inputs for bolt in sample.bolts] == [("source",), ("a",), ("b",)]
    tasks = [dataclasses.astuple(task) for task in bolts["a"].tasks]
    assert tasks == [(9, 0.5, 10, 18, 1, 64), (18, 1.0, 20, 36, 2, 64)]
    assert [bolt.fixed for bolt in sample.bolts] == [False, False, True]


def test_tasks_that_share_an_executor_are_one_load():
    def change(of):
        for number, task in enumerate(of["b"]):
            task.busy, task.arrived, task.queued, task.capacity = 1.0 + number, 10**number, 5, 100

    _, bolts = taken(build(b=2, tasks_of_b=4), change)
    assert [(task.busy, task.arrived, task.queued, task.capacity) for task in bolts["b"].tasks] == [
        (3.0, 11, 10, 200),
        (7.0, 1100, 10, 200),
    ]


def test_fused_bolts_are_one_load():
    """They share the worker's time; what comes in is what comes to the first."""

    def change(of):
        for task in of["a"]:
            task.busy, task.arrived, task.executed, task.emitted = 1.0, 100, 100, 100
        for task in of["b"]:
            task.busy, task.arrived, task.executed, task.emitted = 2.0, 100, 100, 300

    sample, bolts = taken(build(a=2, b=2, fused=True), change)
    assert [bolt.name for bolt in sample.bolts] == ["a", "end"]
    assert bolts["end"].inputs == ("a",)
    assert [(task.busy, task.arrived, task.processed) for task in bolts["a"].tasks] == [(3.0, 100, 100)] * 2


def test_a_bolt_fused_with_a_spout_is_a_load_of_its_own():
    builder = TopologyBuilder()
    builder.set_spout("source", Source())
    builder.set_bolt("a", Work()).local_or_shuffle_grouping("source")
    builder.set_bolt("b", Work()).local_or_shuffle_grouping("a")
    builder.set_bolt("c", Work()).shuffle_grouping("b")
    topology = builder.build("t")
    units = shape_of(make_plan(topology), topology).units
    assert [(unit.components, unit.inputs, unit.fixed) for unit in units] == [
        (("a",), ("source",), True),
        (("b",), ("a",), True),
        (("c",), ("b",), False),
    ]


@pytest.mark.parametrize(
    ("demand", "limit", "busy"), [(900.0, math.inf, 5.0), (0.0, math.inf, 2.0), (900.0, 50.0, 2.0)]
)
def test_who_slows_its_senders_and_is_not_slowed_works_all_the_time(demand, limit, busy):
    """Also at what is not the component's own code."""
    topology = build()
    plan = make_plan(topology)
    sampler = LoadSampler(shape_of(plan, topology))
    (task,) = plan.tasks_of["a"]
    stats = {each: TaskStats(demand=900.0, limit=limit) for each in plan.task}
    sampler.take(0.0, stats)
    sample = sampler.take(5.0, stats | {task: TaskStats(demand=demand, limit=limit, busy=2.0)})
    assert sample.bolts[0].tasks[0].busy == busy


def test_with_acks_latency_is_that_of_the_spouts():
    def change(of):
        of["source"][0].latency.record(2.0, 3)
        of["end"][0].latency.record(90.0, 5)

    sample, _ = taken(build(**ACKED), change)
    assert sample.latency == pytest.approx(2.0, rel=0.05)
    assert sample.failed == 0


def test_without_acks_who_is_late_at_the_last_bolts_has_failed():
    def change(of):
        of["a"][0].latency.record(90.0, 100)
        of["end"][0].latency.record(1.0, 3)
        of["end"][0].latency.record(40.0, 4)

    sample, _ = taken(build(), change)
    assert sample.failed == 4
    assert sample.latency == pytest.approx(163 / 7, rel=0.05)


# ---- decisions ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scaling", "kind"), [("off", type(None)), ("failures", FailurePolicy), ("rate", RatePolicy)]
)
def test_the_policy_is_that_of_the_settings(scaling, kind):
    settings = Settings(scaling=Scaling(scaling, least=2, most=9, cool_down=7, target=0.6))
    policy = make_policy(settings)
    assert type(policy) is kind
    if policy is not None:
        assert dataclasses.astuple(policy.bounds) == (2, 9, 7)
    if scaling == "rate":
        assert policy.target == 0.6
    if scaling == "failures":
        assert (policy.recent.maxlen, policy.threshold) == (6, 25.0)


def test_off_and_all_fixed_are_idle():
    topology = build()
    plan = make_plan(topology)
    assert not ScalingController(plan, topology, topology.settings).idle
    off = ScalingController(plan, topology, Settings())
    assert off.idle
    assert off.decide(1.0, {}) is None
    builder = TopologyBuilder()
    builder.set_spout("source", Source())
    builder.set_bolt("a", Work()).shuffle_grouping("source").set_fixed()
    topology = builder.build("t", Settings(scaling=Scaling("rate")))
    assert ScalingController(make_plan(topology), topology, topology.settings).idle


def test_a_bolt_at_its_limit_is_scaled_to_what_it_needs():
    bench = Bench(build())
    assert bench.pass_time(a=1.0, held_back=2.5) is None, "one load sample is chance"
    scale = bench.pass_time(a=1.0, held_back=2.5)
    assert scale.parallelism == {"a": 4}, "half the time held back: twice as much would come"
    (decision,) = bench.scalings.decisions
    assert (decision.time, decision.component, decision.text) == (110.0, "a", scale.reason)
    assert scale.reason == "a: the busiest task can process 100/s, but 200/s arrive: 1 -> 4 tasks"


def test_a_healthy_topology_and_an_idle_one_are_left_alone():
    bench = Bench(build())
    assert [bench.pass_time(a=0.6) for _ in range(20)] == [None] * 20
    assert [bench.pass_time(a=0.0, tuples=0) for _ in range(20)] == [None] * 20
    assert not bench.scalings.decisions


def test_tasks_with_little_to_do_are_given_back():
    bench = Bench(build(a=4))
    found = [bench.pass_time(a=0.1, tuples=400) for _ in range(5)]
    assert found[:4] == [None] * 4
    assert found[4].parallelism == {"a": 1}


def test_fused_bolts_are_scaled_together():
    bench = Bench(build(fused=True))
    bench.pass_time(a=0.7, b=0.3)
    assert bench.pass_time(a=0.7, b=0.3).parallelism == {"a": 2, "b": 2}
    assert bench.scalings.decisions[-1].component == "a"


def test_a_surge_of_time_outs_doubles_all_that_scales():
    bench = Bench(build(a=2, scaling="failures", **ACKED))
    assert [bench.pass_time(timed_out=2) for _ in range(6)] == [None] * 6
    scale = bench.pass_time(timed_out=200)
    assert scale.parallelism == {"a": 4, "b": 2}
    assert "200 time-outs, more than the average" in scale.reason
    assert bench.scalings.decisions[-1].component == ""
    assert [seen.failed for seen in bench.scalings.samples] == [2] * 6 + [200]
    assert bench.scalings.samples[-1].time == bench.time


def test_failures_that_are_no_time_outs_do_not_count():
    bench = Bench(build(scaling="failures", **ACKED))
    assert [bench.pass_time(failed=failed) for failed in (0, 0, 500, 3)] == [None] * 4


def test_load_samples_keep_the_latency_beside_the_failures():
    bench = Bench(build(scaling="failures", **ACKED))
    bench.pass_time(latency=0.5, count=10)
    bench.pass_time()
    assert [seen.latency for seen in bench.scalings.samples] == [pytest.approx(0.5, rel=0.05), None]


# ---- beginning anew ----------------------------------------------------------------------------------------


def test_a_restart_begins_anew_and_waits_for_its_backlog():
    bench = Bench(build())
    bench.pass_time()
    bench.pass_time(a=1.0)
    bench.use(bench.topology)
    assert bench.pass_time(a=1.0) is None, "counters went back: nothing to compare with"
    assert len(bench.scalings.samples) == 2
    found = [bench.pass_time(a=1.0) for _ in range(7)]
    assert found[:5] == [None] * 5, "the cool-down of 30 s began with the restart"
    assert found[5] is not None


def test_a_task_that_does_not_report_yet_makes_no_load_sample():
    bench = Bench(build())
    bench.pass_time(a=1.0)
    gone = bench.stats.pop(bench.plan.tasks_of["a"][0])
    bench.time += 5.0
    assert bench.decide() is None
    bench.stats[bench.plan.tasks_of["a"][0]] = gone
    assert bench.pass_time(a=1.0) is None
    assert len(bench.scalings.samples) == 1


def test_a_pause_of_the_sampling_makes_no_load_sample():
    bench = Bench(build())
    bench.pass_time(a=1.0)
    bench.pass_time(seconds=10.5, a=1.0)
    assert len(bench.scalings.samples) == 1
    bench.pass_time(a=1.0)
    assert len(bench.scalings.samples) == 2
    assert bench.decide() is None, "no time has passed"
    assert len(bench.scalings.samples) == 2


def test_after_a_replacement_the_new_topology_is_sampled():
    bench = Bench(build(scaling_cool_down=10.0))
    bench.pass_time(a=1.0)
    scale = bench.pass_time(a=1.0)
    bench.use(bench.topology.scaled(scale.parallelism))
    bench.time += 3.0
    bench.scalings.replaced(bench.plan, bench.topology, bench.time)
    assert bench.decide() is None
    assert bench.pass_time(a=1.0) is None
    again = bench.pass_time(a=1.0)
    assert again.parallelism == {"a": 4}, "from the two it has now, after the cool-down"


# ---- free workers --------------------------------------------------------------------------------------------


def overloaded(a, b, room, **settings):
    """A decision about a and b, each of one task, at such a load."""
    bench = Bench(build(**settings), room)
    bench.pass_time(a=a, b=b)
    return bench, bench.pass_time(a=a, b=b)


def test_what_fits_is_done_as_it_is():
    _, scale = overloaded(3.0, 1.0, lambda: 12)
    assert scale.parallelism == {"a": 8, "b": 2}, "1 + 8 + 2 + 1 workers"
    assert "free" not in scale.reason


@pytest.mark.parametrize(
    ("free", "left"),
    [(11, {"a": 4, "b": 2}), (8, {"a": 4, "b": 2}), (9, {"a": 4, "b": 2}), (7, {"a": 4}), (5, {"a": 2})],
)
def test_what_does_not_fit_loses_the_doublings_needed_least(free, left):
    bench, scale = overloaded(3.0, 1.0, lambda: free)
    needs = make_plan(bench.topology.scaled(scale.parallelism)).workers
    assert needs <= free
    assert scale.parallelism == left
    assert scale.reason.endswith(f"needs 12 task slots, but only {free} are free")
    assert bench.texts() == [scale.reason]


def test_what_cannot_be_done_is_said_once():
    free = [4]
    bench, scale = overloaded(1.0, 0.1, lambda: free[0], scaling_cool_down=0)
    assert scale is None
    (text,) = bench.texts()
    assert text.endswith("1 -> 2 tasks; not done: it needs 5 task slots, but only 4 are free")
    assert [bench.pass_time(a=1.0) for _ in range(9)] == [None] * 9
    assert len(bench.texts()) == 1
    free[0] = 5
    found = [bench.pass_time(a=1.0) for _ in range(2)]
    assert {"a": 2} in [scale.parallelism for scale in found if scale]


def test_fewer_tasks_need_a_place_beside_the_old_ones_too():
    bench = Bench(build(a=4), lambda: 3)
    assert [bench.pass_time(a=0.1, tuples=400) for _ in range(5)] == [None] * 5
    assert bench.texts()[0].endswith("4 -> 1 tasks; not done: it needs 4 task slots, but only 3 are free")


# ---- a topology that runs ----------------------------------------------------------------------------------


def live(seconds, rates=(), service=0.01, **settings):
    """A runner and what was decided of it: ``rates`` maps seconds to what is offered from then on."""
    topology = build(service=service, **settings)
    runner = LocalRunner(topology, clock=CLOCK)
    scalings = ScalingController(runner.plan, topology, topology.settings)
    window, found = topology.settings.scaling.interval, []
    for number in range(int(seconds / window)):
        for begin, rate in rates:
            if begin <= number * window:
                runner.component("source")[0].rate = rate
        runner.run(window)
        stats = {}
        for component, tasks in runner.plan.tasks_of.items():
            stats |= zip(tasks, map(_copied, runner.stats(component)), strict=True)
        scale = scalings.decide(CLOCK.now(), stats)
        if scale is not None:
            found.append(scale)
    return found, scalings


@pytest.mark.parametrize(
    "settings",
    [{**ACKED, "max_spout_pending": 100}, {"inbox_capacity": 100, "inbox_time": 0}],
    ids=["acks", "backpressure"],
)
def test_by_rates_a_slow_bolt_gets_the_tasks_it_needs(settings):
    """It does 100 a second, and more than twice as many are offered: for 200 four tasks, busy half of the time."""
    found, scalings = live(25.0, [(0, 60.0), (10, 400.0)], scaling_interval=2.5, **settings)
    assert [scale.parallelism for scale in found] == [{"a": 4}]
    after = [seen.time for seen in scalings.samples].index(scalings.decisions[0].time)
    assert after >= 4, "not while 60 a second were offered"


@pytest.mark.parametrize("scaling", ["rate", "failures"])
@pytest.mark.parametrize("delivery", ["at_most_once", "at_least_once"])
def test_a_topology_that_keeps_up_is_left_alone(scaling, delivery):
    found, scalings = live(12.0, [(0, 60.0)], scaling=scaling, scaling_interval=1.0, delivery=delivery)
    assert (found, len(scalings.samples)) == ([], 11)
    assert all(seen.failed == 0 and seen.latency < 0.1 for seen in scalings.samples)
    found, _ = live(6.0, [], scaling=scaling, scaling_interval=0.5, delivery=delivery)
    assert found == [], "nothing to do, and no more tasks than one"


UNBOUNDED = {"queue_time": 60.0}
"""Seconds: inboxes hold more than the time-out allows."""


def test_by_time_outs_a_surge_doubles_all_bolts():
    settings = {**ACKED, "message_timeout": 5.0, "max_spout_pending": 1000}
    found, scalings = live(60.0, [(0, 60.0), (20, 400.0)], scaling="failures", **settings)
    assert found[0].parallelism == {"a": 2, "b": 2}
    assert "s, longer than the average" in found[0].reason
    assert max(seen.failed for seen in scalings.samples) == 0, "what waits in bounded queues does not time out"
    found, scalings = live(60.0, [(0, 60.0), (20, 400.0)], scaling="failures", **settings, **UNBOUNDED)
    assert found[0].parallelism == {"a": 2, "b": 2}
    assert max(seen.failed for seen in scalings.samples) > 100


def test_without_acks_late_tuples_count_as_time_outs():
    """Backpressure keeps few on their way; they are late where the inbox is long."""
    settings = {"message_timeout": 3.0, "inbox_capacity": 1000, "inbox_time": 0}
    found, scalings = live(60.0, [(0, 60.0), (20, 400.0)], scaling="failures", **settings, **UNBOUNDED)
    assert found[0].parallelism == {"a": 2, "b": 2}
    assert max(seen.failed for seen in scalings.samples) > 100
