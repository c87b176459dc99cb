"""What a running topology's counters say about the load of its workers, and what becomes of it: samples, the fit
of a replacement, refusals."""

import copy
import dataclasses

import pytest

from penstock import BasicBolt, Delivery, Settings, Spout, TopologyBuilder, Workers
from penstock.control.packing import PackedGroup
from penstock.driver.refit_controller import RefitController
from penstock.driver.refit_sampler import RefitSampler
from penstock.metrics.stats import TaskStats
from penstock.metrics.views import Load, WorkerLoad
from penstock.plan.model import Fit
from penstock.plan.planner import make_plan


class Source(Spout):
    def declare_output_fields(self, declarer):
        declarer.declare("n")

    def next_tuple(self):
        pass


class Work(BasicBolt):
    def declare_output_fields(self, declarer):
        declarer.declare("n")

    def execute(self, tup, collector):
        collector.emit([tup.n])


def build(**workers):
    """source -> a -> b, all with one executor."""
    builder = TopologyBuilder()
    builder.set_spout("source", Source())
    builder.set_bolt("a", Work()).fields_grouping("source", "n")
    builder.set_bolt("b", Work()).fields_grouping("a", "n")
    return builder.build("t", Settings(delivery=Delivery("at_least_once"), workers=Workers(**workers)))


class Bench:
    """Hand-made counters of a topology in 10 s steps."""

    def __init__(self, fit, room=None, **workers):
        self.topology = build(**workers)
        self.plan = make_plan(self.topology, fit)
        self.refits = RefitController(self.plan, self.topology, self.topology.settings, room)
        self.time = 100.0
        self.reset()

    def reset(self):
        self.stats = {task: TaskStats(capacity=1000) for task in self.plan.task}
        self.loop = dict.fromkeys(self.plan.worker_ids(), 0.0)
        assert self.decide() is None, "the first only remembers"

    def load(self):
        return Load(
            0, {worker: WorkerLoad(self.time, cpu, 1, loop_cpu=cpu) for worker, cpu in self.loop.items()}, {}
        )

    def decide(self):
        return self.refits.decide(self.time, copy.deepcopy(self.stats), self.load())

    def pass_time(self, cpu, tuples=10_000, waited=None, **busy):
        """``cpu``: the share of a core that each worker's loop uses; ``busy``: of its time, by component."""
        self.time += 10.0
        for worker, share in zip(self.loop, cpu, strict=True):
            self.loop[worker] += 10.0 * share
        for component, tasks in self.plan.tasks_of.items():
            stats = self.stats[tasks[0]]
            stats.executed += tuples
            stats.emitted += tuples
            stats.arrived += 0 if component == "source" else tuples
            stats.busy += 10.0 * busy.get(component, 0.0)
            stats.waited += 10.0 * (waited or {}).get(component, 0.0)
            stats.slow_calls += tuples if component in (waited or {}) else 0
        return self.decide()

    def carry_out(self, choice):
        self.plan = make_plan(self.topology, choice.fit)
        self.refits.replaced(self.plan, self.topology, self.time, by_refit=True)
        self.reset()

    def until_decided(self, most, **load):
        for number in range(1, most + 1):
            choice = self.pass_time(**load)
            if choice is not None:
                return number, choice
        return most, None

    def texts(self):
        return [decision.text for decision in self.refits.decisions]


def groups(plan):
    return [(*group.components, group.workers) for stage in plan.stages for group in stage.fused_groups]


ALL = ("source", "a", "b", 1)


def test_a_sample_divides_the_loops_cpu_time_by_the_time_spent_computing():
    bench = Bench(Fit(1))
    sampler = RefitSampler(bench.plan, bench.topology, 15.0)
    assert sampler.take(bench.time, copy.deepcopy(bench.stats), bench.load()) is None
    bench.pass_time([0.8], source=0.1, a=0.5, b=0.3, waited={"a": 0.3})
    measured = sampler.take(bench.time, copy.deepcopy(bench.stats), bench.load())
    assert measured.weights == pytest.approx({"source": 0.8 / 6, "a": 0.8 / 3, "b": 0.4})
    assert measured.traffic == {("source", "a"): 1000.0, ("a", "b"): 1000.0}
    sample = measured.sample
    assert sample.groups == (PackedGroup(("source", "a", "b"), 1),)
    assert (sample.busiest, sample.throughput, sample.behind) == (pytest.approx(0.8), 1000.0, False)
    assert sample.waits["a"].share == pytest.approx(0.3)
    assert sample.waits["a"].per_call == pytest.approx(0.0003)
    assert {part for part, wait in sample.waits.items() if wait.share} == {"a"}


def test_a_worker_at_its_limit_is_behind_although_nothing_is_queued():
    bench = Bench(Fit(1))
    sampler = RefitSampler(bench.plan, bench.topology, 15.0)
    sampler.take(bench.time, copy.deepcopy(bench.stats), bench.load())
    bench.pass_time([0.97], a=0.5)
    assert sampler.take(bench.time, copy.deepcopy(bench.stats), bench.load()).sample.behind


def test_no_sample_spans_a_restart_or_a_worker_that_has_not_reported():
    bench = Bench(Fit(2, groups=(PackedGroup(("source", "a"), 1), PackedGroup(("b",), 1))))
    sampler = RefitSampler(bench.plan, bench.topology, 15.0)

    def take(load):
        return sampler.take(bench.time, copy.deepcopy(bench.stats), load)

    assert take(bench.load()) is None
    bench.pass_time([0.5, 0.5], a=0.5)
    partly = bench.load()
    del partly.workers[bench.plan.worker_ids()[0]]
    assert take(partly) is None
    bench.pass_time([0.5, 0.5], a=0.5)
    assert take(bench.load()) is None, "the reading before was incomplete"
    bench.pass_time([0.5, 0.5], a=0.5)
    assert take(bench.load()) is not None
    bench.loop = dict.fromkeys(bench.loop, 0.0)
    bench.time += 10
    assert take(bench.load()) is None, "the CPU time went back: another process"


def test_an_overloaded_worker_is_divided_after_the_first_minute_and_once_only():
    bench = Bench(Fit(2, groups=(PackedGroup(("source", "a", "b"), 1),)))
    assert groups(bench.plan) == [ALL]
    number, choice = bench.until_decided(20, cpu=[0.98], source=0.05, a=0.45, b=0.48)
    assert number == 6
    assert groups(make_plan(bench.topology, choice.fit)) == [("source", "a", 1), ("b", 1)]
    assert bench.texts() == [choice.reason]
    bench.carry_out(choice)
    assert bench.until_decided(20, cpu=[0.2, 0.2], tuples=20_000, source=0.05, a=0.1, b=0.2)[1] is None


def test_a_packing_that_does_not_help_is_taken_back():
    bench = Bench(Fit(2, groups=(PackedGroup(("source", "a", "b"), 1),)))
    _, choice = bench.until_decided(10, cpu=[0.98], source=0.05, a=0.45, b=0.48)
    bench.carry_out(choice)
    _, back = bench.until_decided(20, cpu=[0.98, 0.9], source=0.05, a=0.45, b=0.48)
    assert groups(make_plan(bench.topology, back.fit)) == [ALL]
    bench.carry_out(back)
    assert groups(bench.plan) == [ALL]
    assert bench.until_decided(30, cpu=[0.98], source=0.05, a=0.45, b=0.48)[1] is None


def test_blocking_calls_get_a_worker_of_their_own_within_half_a_minute():
    bench = Bench(Fit(1))
    number, choice = bench.until_decided(10, cpu=[0.1], source=0.01, a=0.9, b=0.05, waited={"a": 0.88}, tuples=90)
    assert number == 2
    assert choice.fit.blocking == {"a"}
    plan = make_plan(bench.topology, choice.fit)
    assert groups(plan) == [("source", 1), ("a", 1), ("b", 1)]
    bench.carry_out(choice)
    load = {"cpu": [0.1, 0.1, 0.1], "source": 0.01, "a": 0.9, "b": 0.05, "waited": {"a": 0.88}, "tuples": 90}
    later = bench.until_decided(20, **load)[1]
    assert later is None or later.fit.blocking == {"a"}, "found once, it stays so"


def test_without_room_it_says_so_once_and_changes_nothing():
    bench = Bench(Fit(2, groups=(PackedGroup(("source", "a", "b"), 1),)), room=lambda: 1)
    assert bench.until_decided(20, cpu=[0.98], source=0.05, a=0.45, b=0.48)[1] is None
    (text,) = bench.texts()
    assert text.endswith("; not done: it needs 2 task slots, but 1 are free")


@pytest.mark.parametrize("workers", [{"refit": "off"}, {}])
def test_off_means_off(workers):
    bench = Bench(Fit(2, groups=(PackedGroup(("source", "a", "b"), 1),)), **workers)
    if not workers:
        topology = dataclasses.replace(
            bench.topology,
            settings=dataclasses.replace(
                bench.topology.settings,
                transport=dataclasses.replace(bench.topology.settings.transport, fusing=False),
            ),
        )
        bench.refits = RefitController(make_plan(topology), topology, topology.settings)
    assert bench.refits.idle


def test_by_hand_it_packs_by_what_was_measured():
    bench = Bench(Fit(1))
    assert bench.refits.by_hand(None) is None
    assert bench.refits.by_hand(2).fit == Fit(2)
    assert "no load is known" in bench.refits.by_hand(2).reason
    bench.pass_time([0.9], source=0.02, a=0.44, b=0.44)
    fit = bench.refits.by_hand(2).fit
    assert "by the measured load" in bench.refits.by_hand(2).reason
    assert fit.weights["b"] == pytest.approx(0.44)
    assert groups(make_plan(bench.topology, fit)) == [("source", "a", 1), ("b", 1)]
    assert bench.refits.by_hand(None) is None, "one worker is all that it may have"


def test_a_refit_by_hand_knows_the_load_from_before_and_finds_what_waits():
    bench = Bench(Fit(1))
    bench.pass_time([0.1], source=0.01, a=0.9, b=0.05, waited={"a": 0.88}, tuples=90)
    choice = bench.refits.by_hand(None)
    assert choice.fit.blocking == {"a"}
    bench.carry_out(choice)
    again = bench.refits.by_hand(3)
    assert again.fit.weights == choice.fit.weights, "what the components need did not change"
    assert again.fit.blocking == {"a"}


def test_of_paired_components_only_the_one_that_waits_is_blocking():
    builder = TopologyBuilder()
    builder.set_spout("source", Source())
    builder.set_bolt("a", Work()).fields_grouping("source", "n")
    builder.set_bolt("b", Work()).local_or_shuffle_grouping("a")
    bench = Bench(Fit(1))
    bench.topology = builder.build("t", Settings(delivery=Delivery("at_least_once")))
    bench.plan = make_plan(bench.topology, Fit(1))
    bench.refits = RefitController(bench.plan, bench.topology, bench.topology.settings)
    bench.reset()
    load = {"cpu": [0.1], "source": 0.01, "a": 0.05, "b": 0.9, "waited": {"b": 0.88}, "tuples": 90}
    _, choice = bench.until_decided(5, **load)
    assert choice.fit.blocking == {"b"}
    assert ("b", 1) in groups(make_plan(bench.topology, choice.fit))


def test_at_most_once_it_acts_only_if_it_is_asked_to():
    for refit, idle in (("once", True), ("always", False)):
        topology = build()
        settings = Settings(workers=Workers(refit=refit))
        topology = dataclasses.replace(topology, settings=settings)
        assert RefitController(make_plan(topology, Fit(1)), topology, settings).idle == idle
