"""The metrics bus on a simulated clock."""

import copy

import pytest

from penstock import SimulatedClock, make_plan
from penstock.metrics.bus import MetricsBus
from penstock.metrics.stats import TaskStats
from penstock.plan.model import WorkerId
from penstock.protocol.events import WorkerReport
from penstock.testing import CaptureBolt, FeederSpout
from tests.helpers import line_topology

SPOUTS = (1, 2)
BOLTS = (3, 4)


class Bench:
    """A bus for ``spout`` ×2 -> ``b1`` ×2 and a clock."""

    def __init__(self):
        self.clock = SimulatedClock(1000.0)
        plan = make_plan(line_topology(FeederSpout("x"), CaptureBolt(), parallelism=2))
        self.bus = MetricsBus(plan, self.clock.monotonic)

    def report(self, tasks, attempt=0, worker=(0, 0), published=None, errors=()):
        data = {task: copy.deepcopy(stats) for task, stats in tasks.items()}
        self.bus.record(
            attempt, WorkerId(*worker), WorkerReport(0, 0, 0, 1.5, 2048, data, published or {}, list(errors))
        )

    def view(self, component):
        return {view.component: view for view in self.bus.view()}[component]


def counted(n, **more):
    return TaskStats(received=n, executed=n, emitted=2 * n, **more)


def test_before_any_report():
    bench = Bench()
    assert [view.component for view in bench.bus.view()] == ["spout", "b1"]
    view = bench.view("b1")
    assert (view.tasks, view.rate_in, view.rate_out, view.executed, view.latency_p50) == (2, 0, 0, 0, None)
    assert view.execute_time is None


def steady(bench, seconds, step, rate=100, start=0):
    """Both bolts count ``rate`` tuples per second, reported every ``step`` seconds."""
    for number in range(round(seconds / step) + 1):
        done = start + int(rate * number * step + 0.5)
        bench.report({3: counted(done), 4: counted(done)}, worker=(1, 0))
        bench.clock.advance(step)


def test_rates_are_sums_over_the_tasks_per_second():
    bench = Bench()
    steady(bench, 2.0, 0.25)
    view = bench.view("b1")
    assert view.rate_in == pytest.approx(200, rel=0.13)  # one report more or less in two seconds
    assert view.rate_out == pytest.approx(2 * view.rate_in)
    assert view.executed == 400
    assert view.emitted == 800
    assert bench.view("spout").rate_in == 0


@pytest.mark.parametrize("seconds", [0.4, 0.7, 1.2, 2.4])
def test_a_rate_is_right_whenever_one_looks(seconds):
    bench = Bench()
    steady(bench, seconds, 0.1)
    bench.report({task: counted(round(100 * (seconds + 0.1))) for task in BOLTS}, worker=(1, 0))
    assert bench.view("b1").rate_in == pytest.approx(200, rel=0.05)


def test_rates_forget_what_lies_behind_the_window():
    bench = Bench()
    steady(bench, 2.0, 0.25)
    for _ in range(20):  # five seconds without a tuple
        bench.clock.advance(0.25)
        bench.report({3: counted(200), 4: counted(200)}, worker=(1, 0))
    view = bench.view("b1")
    assert (view.rate_in, view.rate_out) == (0, 0)
    assert view.executed == 400
    assert view.execute_time is None


def test_silence_lets_the_rate_fall_to_nothing():
    bench = Bench()
    steady(bench, 2.0, 0.25)
    for _ in range(20):
        bench.clock.advance(0.25)
        bench.view("b1")
    assert bench.view("b1").rate_in == 0


def test_times_are_those_of_the_window():
    bench = Bench()
    slow = counted(10, busy=10.0)
    slow.latency.record(5.0, 10)
    bench.report({3: slow}, worker=(1, 0))
    bench.clock.advance(1.0)
    after = counted(20, busy=10.1)
    after.latency.record(5.0, 10)
    after.latency.record(0.02, 10)
    bench.report({3: after}, worker=(1, 0))
    view = bench.view("b1")
    assert view.execute_time == pytest.approx(0.01)
    assert view.latency_p50 == pytest.approx(0.02, rel=0.05)
    assert view.latency_p99 == pytest.approx(0.02, rel=0.05)


def test_a_report_lost_costs_nothing():
    bench = Bench()
    bench.report({3: counted(10)}, worker=(1, 0))
    bench.report({3: counted(50)}, worker=(1, 0))
    assert bench.bus.totals()["b1"].executed == 50


def test_a_new_attempt_adds_to_what_was_counted_before():
    bench = Bench()
    bench.report({1: counted(7)})
    bench.report({3: counted(100, errors=2), 4: counted(50, errors=1)}, worker=(1, 0))
    bench.clock.advance(1.0)
    bench.report({3: counted(10, errors=1)}, attempt=1, worker=(1, 0))
    view = bench.view("b1")
    assert (view.executed, view.emitted, view.errors) == (160, 320, 4)
    assert bench.bus.totals()["b1"].executed == 160
    assert bench.bus.totals()["spout"].executed == 7
    bench.report({3: counted(1), 4: counted(1)}, attempt=2, worker=(1, 0))
    assert bench.view("b1").executed == 162


def test_a_new_attempt_makes_no_negative_or_giant_rate():
    bench = Bench()
    steady(bench, 2.0, 0.25)
    bench.report({3: counted(0), 4: counted(0)}, attempt=1, worker=(1, 0))
    bench.clock.advance(1.0)
    bench.report({3: counted(5), 4: counted(5)}, attempt=1, worker=(1, 0))
    assert bench.view("b1").rate_in == pytest.approx(10)


def test_queues_of_a_lost_attempt_are_gone():
    bench = Bench()
    bench.report({3: counted(1, queued=500)}, worker=(1, 0))
    bench.report({3: counted(1, queued=20), 4: counted(1, queued=3)}, attempt=1, worker=(1, 0))
    assert bench.view("b1").queued == 23
    assert bench.bus.totals()["b1"].queued == 23


def test_errors_are_handed_out_once():
    bench = Bench()
    bench.report({3: counted(1, errors=1, last_error="boom")}, errors=["boom", "bang"])
    assert bench.bus.take_errors() == ["boom", "bang"]
    assert bench.bus.take_errors() == []
    assert bench.view("b1").last_error == "boom"


def test_published_rows_are_put_together_task_by_task():
    bench = Bench()
    bench.report({}, published={4: [["d", 1]]}, worker=(1, 1))
    bench.report({}, published={3: [["c", 2]]}, worker=(1, 0))
    assert bench.bus.published() == {"b1": [["c", 2], ["d", 1]]}
    bench.report({}, published={3: [["e", 3]]}, worker=(1, 0))
    bench.report({}, worker=(1, 0))
    assert bench.bus.published() == {"b1": [["e", 3], ["d", 1]]}


def test_processes():
    bench = Bench()
    bench.report({}, worker=(1, 1))
    assert bench.bus.processes() == {WorkerId(1, 1): (1.5, 2048)}


def test_holds_and_time_outs_are_sums_that_survive_a_restart():
    bench = Bench()
    bench.report({1: TaskStats(failed=5, timed_out=2, held_back=1.5), 2: TaskStats(timed_out=1, held_back=0.5)})
    bench.report({1: TaskStats(timed_out=4, held_back=1.0)}, attempt=1)
    total = bench.bus.totals()["spout"]
    assert (total.timed_out, total.held_back) == (7, 3.0)


def test_a_sink_that_was_away_before_a_restart_is_not_shown_as_away_for_ever():
    bench = Bench()
    bench.report({3: counted(10, away=40.0)}, worker=(1, 0))
    assert bench.bus.totals()["b1"].away == 40.0
    bench.report({3: counted(0)}, attempt=1, worker=(1, 0))
    assert bench.bus.totals()["b1"].away == 0.0
