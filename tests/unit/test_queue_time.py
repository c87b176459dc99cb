"""Queues are bounded in time: what waits on a path is done well within the message timeout."""

import math

import pytest

from penstock import BasicBolt, BatchSpout, Settings, TopologyBuilder
from penstock.control.backpressure import CreditDetector, StepDetector, StepLimiter, queue_time
from penstock.control.flow_states import DetectorState
from penstock.control.pace import GrowingPace, ServiceRate
from penstock.control.signals import TaskMessage
from penstock.plan.planner import make_plan
from penstock.testing import LocalRunner
from penstock.worker.flow_control import LEAST_ROWS
from tests.consistency.flow_components import CLOCK, Branches, Worker, inbox_of, send_queue_of
from tests.helpers import settings_with

# ---- how fast a task is ------------------------------------------------------------------------------------


def served(steps):
    """The rate after ⟨seconds, taken, waiting⟩."""
    rate, now = ServiceRate(), 0.0
    for seconds, taken, waiting in steps:
        now += seconds
        rate.observe(now, taken, waiting)
    return rate.rate(now)


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


def test_a_task_that_is_held_back_becomes_slower_at_once():
    """Not only when it takes tuples again: its own senders go on meanwhile."""
    before = [(0.0, 0, 100)] + [(0.01, 100, 100)] * 100
    assert served(before) == pytest.approx(10_000)
    assert served([*before, (0.015, 0, 100)]) == pytest.approx(10_000), "its next tuples are not late yet"
    assert served([*before, (1.0, 0, 100)]) < 5_000
    assert served([*before, (8.0, 0, 100)]) < 50
    assert served([*before, (0.01, 100, 0), (8.0, 0, 0)]) == pytest.approx(10_000), "idle time does not count"


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


def test_a_cancel_takes_back_all_steps_that_the_task_does_not_need():
    detector = StepDetector([1], 100)
    detector.restore(DetectorState(steps=6, rate=1_000.0))
    detector.resize(100, 300.0)
    messages, now = [], 0.0
    while not messages:
        now += 0.05
        messages = detector.observe(now, 0, round(now * 1_000 / 2**6))
    assert messages == [(1, "cancel", step) for step in (5.0, 4.0, 3.0, 2.0)], "250 of its 300 per second"
    detector.on_sender_adjusted()
    messages, then = [], now
    while not messages:
        then += 0.05
        messages = detector.observe(then, 0, round(now * 1_000 / 2**6 + (then - now) * 250))
    assert messages == [(1, "cancel", 1.0)], "from there on step by step"
    detector.validate()


def test_a_task_that_stood_still_for_long_asks_for_the_most_steps():
    """Its rate halves every second, and after a quarter of an hour a division by it is infinite."""
    rate, now = ServiceRate(), 0.0
    for _ in range(100):
        rate.observe(now, 1, 100)
        now += 0.01
    assert rate.rate(now) == pytest.approx(100, rel=0.02)
    for waited in range(1_000, 1_100):
        detector = StepDetector([1], 100)
        detector.resize(16, rate.rate(now + waited))
        for tick in range(30):
            detector.observe(tick * 0.01, 50 * tick, 50 * tick)
        assert detector.steps in (1, 10), "1: it is not known any more how fast it is"


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
@pytest.mark.parametrize("timeout", [5.0, 15.0])
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


class Lines(BatchSpout):
    """As many lines as there is room for in each call, or always ``fixed``. A call takes ``seconds``."""

    def __init__(self, seconds=0.0, fixed=0, most=2_048):
        self._seconds, self._fixed, self._most = seconds, fixed, most

    def declare_output_fields(self, declarer):
        declarer.declare(("n", int))

    def open(self, conf, context, collector):
        self._collector, self.batches, self.open_ids = collector, [], set()

    def next_batch(self):
        room = min(self._most, self._collector.room())
        if room:
            CLOCK.advance(self._seconds)
            room = self._fixed or room
            first = sum(self.batches)
            self.batches.append(room)
            self.open_ids.update(range(first, first + room))
            self._collector.emit_batch([list(range(first, first + room))], msg_ids=range(first, first + room))

    def ack_many(self, msg_ids):
        self.open_ids.difference_update(msg_ids)


class Split(BasicBolt):
    """Ten words of each line, in no time."""

    def declare_output_fields(self, declarer):
        declarer.declare(("n", int))

    def execute(self, tup, collector):
        for _ in range(10):
            collector.emit([tup.n])


def lines(rate=math.inf, service=0.0, call=0.0, fixed=0, most=2_048, **settings):
    builder = TopologyBuilder()
    spout = builder.set_spout("lines", Lines(call, fixed, most))
    if math.isfinite(rate):
        spout.set_max_rate(rate)
    builder.set_bolt("split", Split()).shuffle_grouping("lines")
    builder.set_bolt("count", Worker(service)).shuffle_grouping("split")
    settings = {"delivery": "at_least_once", "workers": 64} | settings
    return LocalRunner(builder.build("t", settings_with(**settings)), clock=CLOCK)


def test_a_batch_spout_that_asks_for_room_keeps_its_rate():
    """Not one batch of 2,048 and a pause of five seconds."""
    runner = lines(rate=400)
    runner.run(3.0)
    (spout,) = runner.component("lines")
    assert max(spout.batches) <= 20, "a twentieth of a second"
    assert sum(spout.batches) == pytest.approx(1_200, rel=0.05)


def test_a_batch_spout_that_asks_for_room_keeps_to_what_may_be_pending():
    runner = lines(service=0.001, max_spout_pending=50)
    (spout,) = runner.component("lines")
    for _ in range(100):
        runner.run(0.05)
        assert len(spout.open_ids) <= 50
    assert len(spout.batches) > 20, "it does not wait until all of them are acked"
    assert sum(spout.batches) > 400, "and the slow task is never idle"


def test_a_limited_batch_spout_is_not_called_for_single_tuples():
    """At 20,000 per second these calls took a whole core."""
    runner = lines(rate=20_000)
    runner.run(1.0)  # until the rate has grown
    (spout,) = runner.component("lines")
    spout.batches.clear()
    runner.run(2.0)
    assert sum(spout.batches) == pytest.approx(40_000, rel=0.02)
    assert len(spout.batches) <= 2 * 210, "as often as every 5 ms"


def test_a_slowed_batch_spout_sends_no_tiny_frames():
    """Each frame costs its receiver a call."""
    runner = lines(service=0.001, most=3_000)
    runner.run(3.0)
    (spout,) = runner.component("lines")
    assert spout.batches[-1] >= LEAST_ROWS
    assert min(spout.batches[-20:-1]) >= LEAST_ROWS


def test_a_batch_spout_whose_calls_take_long_keeps_its_batches():
    """It shares a worker with its bolts. Fewer tuples in a call would not make the call shorter."""
    runner = lines(workers=1, delivery="at_most_once", call=0.02)
    runner.run(4.0)
    (spout,) = runner.component("lines")
    assert spout.batches[-1] > 1_000
    assert len(runner.workers) == 1


def test_a_batch_spout_that_emits_more_than_its_room_is_called_less_often():
    runner = lines(service=0.0001, max_spout_pending=1_000, fixed=1_000)
    (spout,) = runner.component("lines")
    runner.run(2.0)
    for _ in range(50):
        runner.run(0.05)
        assert len(spout.open_ids) <= 1_000


class Rare(BasicBolt):
    """Each tuple on one stream, a hundredth of them on another one."""

    def declare_output_fields(self, declarer):
        declarer.declare(("n", int), stream="all")
        declarer.declare(("n", int), stream="rare")

    def execute(self, tup, collector):
        collector.emit([tup.n], stream="all")
        if tup.n % 100 == 0:
            collector.emit([tup.n], stream="rare")


def test_a_slowed_receiver_of_a_rare_stream_does_not_limit_the_others():
    builder = TopologyBuilder()
    builder.set_spout("lines", Lines()).set_max_rate(5_000)
    builder.set_bolt("rare", Rare()).shuffle_grouping("lines")
    builder.set_bolt("few", Worker()).shuffle_grouping("rare", stream="rare")
    builder.set_bolt("many", Worker()).shuffle_grouping("rare", stream="all")
    settings = {"delivery": "at_least_once", "workers": 64}
    runner = LocalRunner(builder.build("t", settings_with(**settings)), clock=CLOCK)
    runner.run(2.0)
    (task,), (few,) = (runner.plan.tasks_of[each] for each in ("rare", "few"))
    (executor,) = runner.workers[runner.plan.routes.worker_of[task]].inspect().executors
    assert executor._calls_permitted() == math.inf
    queue = send_queue_of(runner, "rare", "few")
    queue.limiter.handle(TaskMessage(few, task, "slow", 1.0), CLOCK.monotonic(), 50.0)
    assert queue.slack == pytest.approx(25 * 30 / 8)
    assert executor._calls_permitted() == pytest.approx(queue.slack * 100, rel=0.1)


def test_a_fast_bolt_in_front_of_a_slow_one_executes_no_more_than_may_wait():
    """In one pass it would emit what the slow one needs half a minute for."""
    runner = lines(rate=400, service=0.001, message_timeout=5.0)
    runner.run(20.0)
    (source,), (split,), (count,) = (runner.stats(each) for each in ("lines", "split", "count"))
    assert (source.timed_out, split.expired, count.expired) == (0, 0, 0)
    assert count.executed > 0.7 * 20.0 / 0.001


@pytest.mark.parametrize("mode", ["step", "credit"])
def test_the_siblings_of_a_slow_branch_keep_their_rate(mode):
    """Behind a forward grouping a slow task slows only the one task that sends to it."""
    builder = TopologyBuilder()
    builder.set_spout("source", Branches(asks=False, a=1_000))
    builder.set_bolt("first", Worker(), 2).shuffle_grouping("source", stream="a")
    builder.set_bolt("second", SlowFirst(0.02), 2).forward_grouping("first")
    settings = {"delivery": "at_least_once", "workers": 64, "flow": mode, "migration": False}
    runner = LocalRunner(builder.build("t", settings_with(**settings)), clock=CLOCK)
    plan = runner.plan
    first, second = plan.tasks_of["first"], plan.tasks_of["second"]
    assert [plan.senders_to(task) for task in second] == [(first[0],), (first[1],)]
    assert [plan.receivers_of(task, "second") for task in first] == [(second[0],), (second[1],)]
    assert plan.senders_to(first[0]) == plan.tasks_of["source"]
    runner.run(5.0)
    slow, fast = (send_queue_of(runner, "first", "second", index) for index in (0, 1))
    assert (fast.held, fast.limiter.rate) == (0, math.inf)
    assert fast.room() > 0
    assert mode == "credit" or slow.limiter.rate < 100


class SlowFirst(Worker):
    """Only its first task takes time."""

    def prepare(self, conf, context):
        self._seconds *= context.index == 0


def test_a_fast_task_keeps_its_inbox():
    runner = LocalRunner(chain(0.0), clock=CLOCK)
    runner.run(2.0)
    assert inbox_of(runner, "slow").capacity >= 16_384
