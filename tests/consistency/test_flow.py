"""Overload on a simulated clock: who is slowed and who is not, and that no mode changes a result."""

import math
from collections import Counter

import pytest

from penstock import BasicBolt, Delivery, Flow, Settings, TopologyBuilder, Transport
from penstock.protocol.commands import SetSpoutRate
from penstock.testing import CaptureBolt, LocalRunner
from tests.consistency.components import (
    INTERVAL,
    SHAPES,
    WORLDS,
    Count,
    Numbers,
    Outside,
    World,
    counts,
    key_of,
    pairs,
    run_to_the_end,
    run_until_idle,
)
from tests.consistency.flow_components import CLOCK, BoundedRunner, Branches, Worker, inbox_of, send_queue_of
from tests.helpers import settings_with

MODES = ("step", "spout", "credit", "none")
LEVELS = ("at_most_once", "at_least_once", "exactly_once")


# ---- a slow branch -----------------------------------------------------------------------------------------


def two_branches(mode, slow=0.01, rate=1000, frame_bytes=1000, **settings):
    """A healthy branch and one that takes a tenth of what it is offered, on streams of their own. A frame of ten
    tuples and an inbox of a hundred: the proportions of a real one."""
    builder = TopologyBuilder()
    builder.set_spout("source", Branches(a=rate, b=rate))
    builder.set_bolt("slow", Worker(slow)).shuffle_grouping("source", stream="a")
    builder.set_bolt("fast", Worker()).shuffle_grouping("source", stream="b")
    settings = settings_with(flow=mode, inbox_capacity=100, inbox_time=0.0, frame_bytes=frame_bytes, **settings)
    return BoundedRunner(builder.build("t", settings), clock=CLOCK)


def rates(runner, seconds, *components):
    """Tuples a second each gets, once a second has passed."""
    runner.run(1.0)
    before = [len(runner.component(id)[0].got) for id in components]
    begin = CLOCK.now()
    runner.run(seconds)
    passed = CLOCK.now() - begin
    return [
        (len(runner.component(id)[0].got) - count) / passed for id, count in zip(components, before, strict=True)
    ]


@pytest.mark.parametrize(
    ("mode", "least", "most"),
    [("step", 0.95, 1.05), ("spout", 0.0, 0.5), ("credit", 0.0, 0.5), ("none", 0.0, 0.5)],
)
def test_only_step_by_step_leaves_the_other_branch_its_rate(mode, least, most):
    """Undisturbed it gets what the source offers, 1,000 a second; the slow one can take 95 or so."""
    fast, slow = rates(two_branches(mode, linger=0.001), 10.0, "fast", "slow")
    assert least <= fast / 1000 <= most
    assert 80 <= slow <= 100, "the slow branch never runs dry"


def test_undisturbed_both_branches_get_what_the_source_offers():
    assert rates(two_branches("step", slow=0.0), 1.0, "fast", "slow") == pytest.approx([1000, 1000], rel=0.01)


def test_after_the_overload_the_source_is_as_fast_as_before():
    runner = two_branches("step")
    runner.run(3.0)
    assert send_queue_of(runner, "source", "slow").limiter.rate < 1000
    runner.component("slow")[0]._seconds = 0.0
    runner.run(2.0)
    assert send_queue_of(runner, "source", "slow").limiter.rate == math.inf
    assert inbox_of(runner, "slow").length < 20


def test_the_queue_of_a_slow_task_stays_bounded():
    runner = two_branches("step")
    longest = 0
    for _ in range(60):
        runner.run(0.1)
        longest = max(longest, inbox_of(runner, "slow").length + send_queue_of(runner, "source", "slow").held)
    assert longest < 300, "what was on its way when the signals went is the only excess"


def test_acks_of_the_healthy_branch_come_while_the_other_is_stuck():
    runner = two_branches("step", slow=0.2, frame_bytes=100_000, delivery="at_least_once")
    runner.run(10.0)
    (source,) = runner.component("source")
    assert inbox_of(runner, "slow").full
    assert source.acked["b"] > 0.9 * 10 * 1000
    assert source.acked["a"] <= 50, "five a second"


@pytest.mark.parametrize("mode", ["step", "none"])
def test_frames_for_others_pass_a_task_whose_inbox_is_full(mode):
    """Both streams reach the worker of the slow task; one is only relayed there. Without flow control the full
    inbox stops the reader, and what is behind in the channel waits with it."""
    builder = TopologyBuilder()
    builder.set_spout("source", Branches(asks=False, a=1000, b=1000))
    builder.set_bolt("slow", Worker(0.05)).shuffle_grouping("source", stream="a")
    builder.set_bolt("far", Worker()).shuffle_grouping("slow").shuffle_grouping("source", stream="b")
    # Relays leave when the slow task has returned, 50 tuples or more at once: the far inbox must be larger, and
    # may still ask for a step now and then.
    settings = Settings(
        flow=Flow(mode, inbox_capacity=1000, inbox_time=0.0, queue_time=60.0),
        transport=Transport(frame_bytes=1000),
    )
    runner = LocalRunner(builder.build("t", settings), clock=CLOCK)
    runner.run(10.0)
    assert inbox_of(runner, "slow").full
    relayed = len(runner.component("far")[0].got)
    assert relayed > 9_000 if mode == "step" else relayed < 5_000


def test_frames_for_another_task_of_the_same_worker_pass_too():
    builder = TopologyBuilder()
    builder.set_spout("source", Branches(asks=False, a=1000))
    builder.set_bolt("work", Unequal()).set_num_tasks(2).shuffle_grouping("source", stream="a")
    runner = LocalRunner(
        builder.build("t", Settings(flow=Flow(inbox_capacity=100), transport=Transport(frame_bytes=1000))),
        clock=CLOCK,
    )
    (slow, fast), longest = (inbox_of(runner, "work", index) for index in (0, 1)), 0
    for _ in range(20):
        runner.run(0.1)
        longest = max(longest, slow.length)
        assert fast.length < 20
    assert longest > 0.8 * slow.capacity, "it is overloaded"
    assert slow.arrived > 100


class Unequal(Worker):
    """Only its first task is slow."""

    def prepare(self, conf, context):
        self._seconds = 0.0 if context.index else 0.02


# ---- one stream for both -----------------------------------------------------------------------------------


@pytest.mark.parametrize("delivery", LEVELS)
def test_a_finite_overload_of_a_shared_stream_goes_to_disk(delivery):
    builder = TopologyBuilder()
    builder.set_spout("source", Branches(asks=False, until=1.0, a=2000))
    builder.set_bolt("slow", Worker(0.002)).shuffle_grouping("source", stream="a")
    builder.set_bolt("fast", Worker()).shuffle_grouping("source", stream="a")
    settings = Settings(
        flow=Flow(inbox_capacity=100), transport=Transport(frame_bytes=1000), delivery=Delivery(delivery)
    )
    runner = LocalRunner(builder.build("t", settings), clock=CLOCK)
    runner.run(1.5)
    assert len(runner.component("fast")[0].got) == 2000, "not held back by the other"
    assert send_queue_of(runner, "source", "slow").held + inbox_of(runner, "slow").length > 1000
    runner.run_until_idle()
    assert runner.component("slow")[0].got == runner.component("fast")[0].got == list(range(2000))


@pytest.mark.parametrize("limit", [0, 5_000, 40_000])
def test_what_waits_on_disk_has_a_limit(limit):
    """Beyond it the task is held back as a whole, and nothing is lost."""
    builder = TopologyBuilder()
    builder.set_spout("source", Branches(asks=False, until=1.0, a=2000))
    builder.set_bolt("slow", Worker(0.002)).shuffle_grouping("source", stream="a")
    builder.set_bolt("fast", Worker()).shuffle_grouping("source", stream="a")
    settings = Settings(flow=Flow(inbox_capacity=100, overflow_bytes=limit), transport=Transport(frame_bytes=1000))
    runner = LocalRunner(builder.build("t", settings), clock=CLOCK)
    (fast,), (slow,), send_queue = (
        runner.component("fast"),
        runner.component("slow"),
        send_queue_of(runner, "source", "slow"),
    )
    for _ in range(500):
        runner.run(0.01)
        turn = 4096 * 40  # bytes the source may emit between two looks
        assert send_queue._held.bytes <= limit + turn
        assert inbox_of(runner, "slow")._overflow.bytes <= limit + 2_000
    runner.run_until_idle()
    assert fast.got == slow.got == list(range(2000))


# ---- fused groups
# ------------------------------------------------------------------------------------------------


def test_mode_spout_stops_a_spout_whose_tuples_all_stay_in_its_worker():
    """They leave the worker with the bolt that is fused with it."""
    builder = TopologyBuilder()
    builder.set_spout("source", Branches(a=1000))
    builder.set_bolt("fused", Worker()).local_or_shuffle_grouping("source", stream="a")
    builder.set_bolt("slow", Worker(0.01)).fields_grouping("fused", "n")
    settings = Settings(flow=Flow("spout", inbox_capacity=100), transport=Transport(frame_bytes=1000))
    runner = LocalRunner(builder.build("t", settings), clock=CLOCK)
    runner.run(5.0)
    assert runner.component("source")[0].emitted["a"] < 2000, "of 5,000: it is stopped most of the time"


def test_a_fused_branch_keeps_its_rate_too():
    builder = TopologyBuilder()
    builder.set_spout("source", Branches(a=1000, b=1000))
    builder.set_bolt("slow", Worker(0.01)).shuffle_grouping("source", stream="a")
    builder.set_bolt("fast", Worker()).local_or_shuffle_grouping("source", stream="b")
    settings = Settings(flow=Flow(inbox_capacity=100), transport=Transport(frame_bytes=1000))
    runner = LocalRunner(builder.build("t", settings), clock=CLOCK)
    fast, slow = rates(runner, 5.0, "fast", "slow")
    assert fast / 1000 >= 0.95
    assert slow <= 100


# ---- equal results -----------------------------------------------------------------------------------------


class Gather(BasicBolt):
    """Emits what it has gathered when it ticks."""

    def declare_output_fields(self, declarer):
        declarer.declare(("n", int), ("key", str))

    def prepare(self, conf, context):
        self.gathered = context.state.value("gathered", [])

    def execute(self, tup, collector):
        if not tup.is_tick:
            self.gathered.value = [*self.gathered.value, tuple(tup)]
            return
        for row in self.gathered.value:
            collector.emit(row)
        self.gathered.value = []


def ticking(builder, count, sink):
    """A bolt that emits in lumps, held back or not."""
    builder.set_spout("numbers", Numbers(count), 2)
    builder.set_bolt("gather", Gather(), 2).shuffle_grouping("numbers").set_tick_interval(0.003)
    builder.set_bolt("count", Count(), 2).fields_grouping("gather", "key")
    builder.set_bolt("sink", sink, 2).shuffle_grouping("count")
    return {"numbers": 2}


@pytest.mark.parametrize("delivery", LEVELS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [*SHAPES, "ticking"])
def test_results_are_those_of_a_sequential_run(shape, mode, delivery, world):
    """Nothing lost, nothing doubled, no deadlock, with queues that hold next to nothing."""
    for capacity, overflow in [(1, 0), (8, 300)]:
        WORLDS[world] = World()
        check_results(shape, world, flow=mode, delivery=delivery, inbox_capacity=capacity, overflow_bytes=overflow)


def check_results(shape, world, **settings):
    builder, count = TopologyBuilder(), 40
    copies = {**SHAPES, "ticking": ticking}[shape](builder, count, Outside(world))
    oracle = Counter()
    for n in range(count):
        oracle[key_of(n)] += sum(copies.values())
    settings = settings_with(frame_bytes=200, epoch_interval=INTERVAL, **settings)
    exact, capacity = settings.delivery.guarantee == "exactly_once", settings.flow.inbox_capacity
    folder = f"memory://{world}/{capacity}" if exact else None
    runner = LocalRunner(builder.build("t", settings), seed=capacity, folder=folder, uneven=True)
    run_until_idle(runner)
    if shape == "ticking":
        runner.run(0.02)
    if exact:
        run_to_the_end(runner)
    else:
        runner.close()  # the sinks commit
    assert counts(runner) == oracle
    assert sorted(WORLDS[world].rows) == pairs(oracle)
    assert runner.errors == []
    if settings.delivery.guarantee == "at_least_once" and "numbers" in copies:
        assert all(sorted(spout.acked) == list(range(count)) for spout in runner.component("numbers"))


# ---- the user's own limit ----------------------------------------------------------------------------------


@pytest.mark.parametrize("tasks", [1, 3])
def test_max_rate_holds_and_can_be_changed(tasks):
    builder = TopologyBuilder()
    builder.set_spout("numbers", Numbers(10**6, burst=3), tasks).set_max_rate(600)
    builder.set_bolt("sink", CaptureBolt()).shuffle_grouping("numbers")
    runner = LocalRunner(builder.build("t", Settings()))

    def emitted(seconds):
        before = sum(spout.position.value for spout in runner.component("numbers"))
        runner.run(seconds)
        return sum(spout.position.value for spout in runner.component("numbers")) - before

    assert emitted(2.0) == pytest.approx(1200, abs=4 * tasks)
    for rate in (6000, 60):
        runner.registry.send(SetSpoutRate("numbers", rate))
        emitted(0.3)
        assert emitted(1.0) == pytest.approx(rate, rel=0.02, abs=4 * tasks)
    runner.registry.send(SetSpoutRate("numbers", math.inf))
    assert emitted(0.1) > 500, "as fast as it can"
