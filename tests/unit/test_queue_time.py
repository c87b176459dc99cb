"""Queues are bounded in time: what waits on a path is done well within the message timeout."""

import math

import pytest

from penstock import Settings, TopologyBuilder
from penstock.control.backpressure import CreditDetector, StepDetector, StepLimiter, queue_time
from penstock.control.pace import GrowingPace, ServiceRate
from penstock.control.signals import TaskMessage
from penstock.plan.planner import make_plan
from penstock.testing import LocalRunner
from tests.consistency.flow_components import CLOCK, Branches, Worker, inbox_of
from tests.helpers import settings_with

# ---- how fast a task is ------------------------------------------------------------------------------------


def served(steps):
    """The rate after ⟨seconds, taken, waiting⟩."""
    rate, now = ServiceRate(), 0.0
    for seconds, taken, waiting in steps:
        now += seconds
        rate.observe(now, taken, waiting)
    return rate.rate


def test_the_rate_of_a_task_that_always_has_work():
    assert served([(0.0, 0, 100)] + [(0.005, 1, 100)] * 400) == pytest.approx(200)


def test_idle_time_does_not_count():
    assert served([(0.0, 0, 1), (0.01, 1, 0), (10.0, 0, 0)] * 20) == pytest.approx(100)


def test_a_batch_bolt_is_measured_from_batch_to_batch():
    batches = [(0.0, 0, 1000)] + [*[(0.5, 0, 1000)] * 9, (0.5, 1000, 1000)] * 4
    assert served(batches) == pytest.approx(200)


def test_a_change_is_noticed_within_seconds():
    before = [(0.0, 0, 100)] + [(0.001, 1, 100)] * 5_000
    assert served(before) == pytest.approx(1000)
    assert served(before + [(0.01, 1, 100)] * 300) == pytest.approx(200, rel=0.25)


def test_what_was_never_busy_has_no_rate():
    assert served([]) is None
    assert served([(1.0, 0, 0)] * 3) is None
    assert served([(1.0, 0, 5)] * 3) is None, "it has not taken any yet"


# ---- how fast a rate may grow ------------------------------------------------------------------------------


def sent(seconds, offered=math.inf, frame=1, pace=None, tick=0.001):
    """How many tuples leave in this time."""
    pace, done, waiting = pace or GrowingPace(), 0, 0.0
    for step in range(round(seconds / tick)):
        waiting = min(waiting + offered * tick, 1e9)
        while waiting >= frame and pace.room(step * tick) > 0:
            pace.spend(frame)
            waiting, done = waiting - frame, done + frame
    return done


def test_a_burst_begins_small_and_a_fast_source_is_not_held_up_for_long():
    assert 200 <= sent(0.001) <= 205
    assert sent(0.1) < 600
    assert sent(0.3) < 4_000
    assert sent(1.0, frame=128) > 250_000


@pytest.mark.parametrize("rate", [100, 1_900, 20_000])
def test_a_steady_rate_does_not_wait(rate):
    assert sent(20.0, rate) == pytest.approx(20 * rate, rel=0.02)


def test_a_batch_larger_than_the_room_is_made_up_for_soon():
    pace = GrowingPace()
    assert pace.room(0.0) > 0
    pace.spend(50_000)
    waited = 0.0
    while wait := pace.wait(waited):
        waited += wait
    assert waited < 1.0


def test_after_a_rest_it_begins_anew():
    pace = GrowingPace()
    sent(1.0, pace=pace, frame=16)
    assert pace.room(30.0) < 300


def test_released_senders_continue_from_their_rate():
    limiter = StepLimiter()
    limiter.handle(TaskMessage(7, 1, "slow", 1.0), 0.0, 40_000.0)
    limiter.handle(TaskMessage(7, 1, "cancel", 0.0), 5.0, 20_000.0)
    assert limiter.rate == math.inf
    assert limiter.room(7, 5.0) == pytest.approx(4_000), "a tenth of a second of 40,000"


# ---- detectors -----------------------------------------------------------------------------------------------


def test_a_queue_beyond_its_inbox_asks_for_all_steps_at_once():
    detector = StepDetector([1, 2], 100)
    detector.resize(100, 50.0)
    messages = []
    for tick in range(100):
        messages += detector.observe(tick * 0.01, 15 * tick, 15 * tick)
        if messages:
            break
    assert messages[:4] == [(1, "slow", 1.0), (2, "slow", 1.0), (1, "slow", 2.0), (2, "slow", 2.0)]
    assert detector.steps == math.ceil(math.log2(detector.demand / 50)) > 3
    detector.validate()


def test_credits_follow_the_capacity():
    detector = CreditDetector([1, 2], 100)
    assert detector.observe(0.0, 0, 0) == [(1, "grant", 50.0), (2, "grant", 50.0)]
    detector.resize(20)
    detector.record_consumed(1, 30)
    assert detector.observe(0.1, 0, 30) == [], "it has more credit than it should have now"
    detector.record_consumed(1, 20)
    assert detector.observe(0.2, 0, 50) == [(1, "grant", 60.0)]


# ---- a topology ------------------------------------------------------------------------------------------


def chain(service, bolts=1, rate=2_000, **settings):
    builder = TopologyBuilder()
    builder.set_spout("source", Branches(asks=False, a=rate))
    builder.set_bolt("slow", Worker(service)).shuffle_grouping("source", stream="a")
    before = "slow"
    for number in range(bolts - 1):
        builder.set_bolt(f"next{number}", Worker()).shuffle_grouping(before)
        before = f"next{number}"
    return builder.build("t", settings_with(**{"delivery": "at_least_once"} | settings))


@pytest.mark.parametrize(("bolts", "hops"), [(1, 1), (3, 3)])
def test_all_queues_of_the_longest_path_share_half_of_the_timeout(bolts, hops):
    plan = make_plan(chain(0.0, bolts))
    assert plan.hops == hops
    assert queue_time(Settings(), plan.hops) == 30.0 / 4 / hops
    assert queue_time(Settings().with_values({"flow.queue_time": 2.0}), hops) == 2.0


@pytest.mark.parametrize("service", [0.002, 0.01])
@pytest.mark.parametrize("timeout", [5.0, 30.0])
def test_a_flood_of_a_slow_bolt_times_nothing_out(service, timeout):
    """It offers 2,000 per second, and 50,000 may be pending: without a bound of time they wait for minutes."""
    runner = LocalRunner(chain(service, message_timeout=timeout), clock=CLOCK)
    runner.run(4 * timeout)
    (source,), (slow,) = runner.stats("source"), runner.stats("slow")
    assert (source.timed_out, slow.expired) == (0, 0)
    assert slow.executed > 0.85 * 4 * timeout / service, "the slow task never runs dry"
    assert inbox_of(runner, "slow").capacity == pytest.approx(timeout / 4 / service, rel=0.2)


def test_without_the_bound_tuples_wait_longer_than_the_timeout():
    """The test before this one can fail."""
    runner = LocalRunner(chain(0.01, message_timeout=5.0, queue_time=100.0), clock=CLOCK)
    runner.run(20.0)
    assert runner.stats("source")[0].timed_out > 1_000


def test_a_fast_task_keeps_its_inbox():
    runner = LocalRunner(chain(0.0), clock=CLOCK)
    runner.run(2.0)
    assert inbox_of(runner, "slow").capacity >= 16_384
