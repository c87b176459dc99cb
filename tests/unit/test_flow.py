"""Send queues, a task's send queues and the messages between workers, without a topology that runs."""

import math

import pyarrow as pa
import pytest

from penstock import BasicBolt, SimulatedClock, Spout, TopologyBuilder
from penstock.control.backpressure import CreditLimiter, RateLimiter, SpoutLimiter, StepLimiter
from penstock.control.signals import TaskFlowState, TaskMessage
from penstock.frames.header import Header, Kind
from penstock.plan.model import WorkerId
from penstock.plan.planner import make_plan
from penstock.worker.flow_control import FlowControl, SendQueue, SendQueues
from penstock.worker.inbox import Inbox
from penstock.worker.overload import OverloadDetectors
from penstock.worker.parcel import Parcel
from tests.helpers import settings_with


def header(number=0, rows=10, task=7):
    return Header(Kind.DATA, 1, 0, 0, 0, target_task=task, source_task=1, sequence=number, rows=rows)


class Way:
    """A send queue, its clock and what left it."""

    def __init__(self, limiter, limit=1000, targets=(7, 8), longest=math.inf):
        self.clock, self.sent, self.limiter = SimulatedClock(), [], limiter
        self.send_queue = SendQueue("count", targets, limiter, limit, longest, self._dispatch, self.clock)

    def _dispatch(self, head, frame):
        self.sent.append(head.sequence)

    def send(self, number, rows=10, task=7, size=100):
        self.send_queue.send(header(number, rows, task), bytes(size))

    def slow(self, rate):
        self.limiter.handle(TaskMessage(7, 1, "slow", 1.0), self.clock.monotonic(), 2 * rate)


# ---- send queues
# -------------------------------------------------------------------------------------------------


def test_an_open_send_queue_holds_nothing():
    way = Way(RateLimiter())
    for number in range(5):
        way.send(number)
    assert (way.sent, way.send_queue.held, way.send_queue.room(), way.send_queue.frame_rows) == (
        [*range(5)],
        0,
        math.inf,
        math.inf,
    )


def test_a_slowed_send_queue_sends_at_its_rate_and_in_order():
    way = Way(StepLimiter(), limit=10**9)
    way.slow(100.0)
    for number in range(50):
        way.send(number, rows=10)
    for _ in range(2000):
        way.clock.advance(0.001)
        way.send_queue.release()
    assert way.sent == list(range(len(way.sent)))
    assert len(way.sent) == pytest.approx(20, abs=1), "200 tuples in two seconds"
    assert way.send_queue.held == 10 * (50 - len(way.sent))
    assert not way.send_queue.full
    assert way.send_queue.frame_rows == 16


def test_what_waits_is_not_overtaken_when_there_is_room_again():
    way = Way(StepLimiter(), limit=10**9)
    way.slow(100.0)
    way.send(0)
    way.send(1)
    way.limiter.handle(TaskMessage(7, 1, "cancel", 0.0), 0.0, 100.0)
    way.send(2)
    way.send_queue.release()
    assert way.sent == [0, 1, 2]


def test_everything_leaves_at_the_end_of_an_epoch():
    way = Way(CreditLimiter())
    for number in range(4):
        way.send(number)
    assert way.sent == []
    way.send_queue.release()
    assert way.sent == []
    way.send_queue.release(everything=True)
    assert (way.sent, way.send_queue.held) == ([0, 1, 2, 3], 0)


def test_a_send_queue_is_full_at_its_limit_and_an_impatient_one_at_once():
    way = Way(StepLimiter(), limit=250)
    way.slow(10.0)
    full = []
    for number in range(4):
        way.send(number)
        full.append(way.send_queue.full)
    assert full == [False, False, True, True]
    way = Way(CreditLimiter(), limit=250)
    way.send(0)
    assert way.send_queue.full


def test_room_is_that_of_the_task_with_the_least():
    way = Way(CreditLimiter())
    way.limiter.handle(TaskMessage(7, 1, "grant", 30.0), 0.0, 0.0)
    assert way.send_queue.room() == 0
    way.limiter.handle(TaskMessage(8, 1, "grant", 20.0), 0.0, 0.0)
    assert way.send_queue.room() == 20
    way.send(0, rows=25, task=8)
    assert way.send_queue.room() == -5, "the last may bring more than fit"


# ---- a task's send queues
# -----------------------------------------------------------------------------------------------


def full_inbox():
    inbox = Inbox(1)
    inbox.put(Parcel(header(), pa.py_buffer(b"x")))
    return inbox


def test_a_task_goes_on_while_one_of_its_send_queues_takes_something():
    slow, open_ = Way(StepLimiter(), limit=10**9), Way(StepLimiter())
    send_queues = SendQueues([slow.send_queue, open_.send_queue], [], RateLimiter())
    slow.slow(10.0)
    slow.send(0)
    slow.send(1)
    assert slow.send_queue.held
    assert not send_queues.held_back
    assert send_queues.room() > 0
    open_.slow(10.0)
    open_.send(0)
    open_.send(1)
    assert send_queues.held_back
    assert send_queues.room() == 0


@pytest.mark.parametrize("fused", [True, False])
def test_a_slowed_send_queue_does_not_slow_what_is_fused(fused):
    slow = Way(StepLimiter(), limit=10**9)
    slow.slow(10.0)
    send_queues = SendQueues([slow.send_queue], [Inbox(10)] if fused else [], RateLimiter())
    assert (send_queues.room() > 0) == fused
    slow.send(0)
    slow.send(1)
    assert send_queues.held_back != fused


def test_a_full_inbox_in_the_worker_holds_the_task_back():
    assert SendQueues([], [Inbox(10), full_inbox()], RateLimiter()).held_back
    assert SendQueues([], [full_inbox()], RateLimiter()).room() == 0
    assert SendQueues([], [], RateLimiter()).room() == math.inf


def test_without_patience_the_least_room_counts():
    one, two = Way(CreditLimiter(), targets=[7]), Way(CreditLimiter(), targets=[7])
    send_queues = SendQueues([one.send_queue, two.send_queue], [], RateLimiter())
    one.limiter.handle(TaskMessage(7, 1, "grant", 30.0), 0.0, 0.0)
    assert send_queues.room() == 0
    two.limiter.handle(TaskMessage(7, 1, "grant", 5.0), 0.0, 0.0)
    assert send_queues.room() == 5


def test_a_held_spout_has_no_room_wherever_it_sends():
    limiter = SpoutLimiter()
    limiter.handle(TaskMessage(7, 1, "hold"), 0.0, 0.0)
    assert SendQueues([], [Inbox(10)], limiter).room() == 0


# ---- a worker's flow -----------------------------------------------------------------------------------------


class Source(Spout):
    def declare_output_fields(self, declarer):
        declarer.declare("n")

    def next_tuple(self): ...


class Bolt(BasicBolt):
    def declare_output_fields(self, declarer):
        declarer.declare("n")

    def execute(self, tup, collector): ...


class Flows:
    """The flows of all workers of source -> left, right -> end, and a clock."""

    def __init__(self, mode="step", **settings):
        builder = TopologyBuilder()
        builder.set_spout("source", Source(), 2)
        builder.set_bolt("left", Bolt(), 2).shuffle_grouping("source")
        builder.set_bolt("right", Bolt()).shuffle_grouping("source")
        builder.set_bolt("end", Bolt()).shuffle_grouping("left").shuffle_grouping("right")
        self.settings = settings_with(flow=mode, inbox_capacity=100, **settings)
        self.plan = make_plan(builder.build("t", self.settings))
        self.clock, self.inboxes, self.flows, self.detectors, self.sent = SimulatedClock(), {}, {}, {}, []
        for worker in self.plan.worker_ids():
            inboxes = {task: Inbox(100, 10_000) for task in self.plan.routes.tasks_of(worker)}
            self.inboxes |= inboxes
            dispatch = lambda head, frame: self.sent.append(head)  # noqa: E731
            self.flows[worker] = FlowControl(self.plan, self.settings, self.clock, dispatch, worker)
            self.detectors[worker] = OverloadDetectors(self.plan, self.settings, self.clock, inboxes)

    def task(self, component, index=0):
        return self.plan.tasks_of[component][index]

    def flow_of(self, component, index=0) -> FlowControl:
        return self.flows[self.plan.routes.worker_of[self.task(component, index)]]

    def detectors_of(self, component, index=0) -> OverloadDetectors:
        return self.detectors[self.plan.routes.worker_of[self.task(component, index)]]

    def fill(self, component, index=0, rows=95):
        task = self.task(component, index)
        self.inboxes[task].offer(Parcel(header(rows=rows, task=task), pa.py_buffer(b"x")))

    def signals(self, component, index=0):
        detectors = self.detectors_of(component, index)
        detectors.observe()
        self.clock.advance(1.5)
        detectors.observe()
        return list(detectors.messages)


def test_a_full_inbox_tells_the_direct_senders_only():
    flows = Flows()
    flows.fill("end")
    signals = flows.signals("end")
    senders = {flows.task("left", 0), flows.task("left", 1), flows.task("right")}
    assert {message.target for message in signals} == senders
    assert {message.kind for message in signals} == {"slow"}


def test_in_mode_spout_all_spouts_are_told_and_in_none_nobody():
    flows = Flows("spout")
    flows.fill("end")
    assert {m.target for m in flows.signals("end")} == {flows.task("source", 0), flows.task("source", 1)}
    flows = Flows("none")
    flows.fill("end")
    assert flows.signals("end") == []


def test_a_signal_slows_one_send_queue_and_is_answered():
    flows = Flows()
    flow, source = flows.flow_of("source"), flows.task("source")
    left, right = flow.send_queue(source, flows.task("left")), flow.send_queue(source, flows.task("right"))
    left.send(header(rows=400, task=flows.task("left")), b"x")
    flows.clock.advance(0.2)
    flow.on_message(TaskMessage(flows.task("left", 1), source, "slow", 1.0))
    assert left.limiter.rate == pytest.approx(1000)
    assert right.limiter.rate == math.inf
    assert flow.rate(source) == left.limiter.rate
    (state,) = flow.take_states()
    assert state == TaskFlowState(source, "left", left.limiter.rate)


def test_an_answer_lets_the_overload_detector_continue():
    flows = Flows()
    flows.fill("left")
    assert flows.signals("left")
    overload_detector = flows.detectors_of("left").of_task(flows.task("left"))
    assert overload_detector._answer_by is not None
    flows.detectors_of("left").on_state(TaskFlowState(flows.task("source"), "right", 10.0))
    assert overload_detector._answer_by is not None, "not its own"
    flows.detectors_of("left").on_state(TaskFlowState(flows.task("source"), "left", 10.0))
    assert overload_detector._answer_by is None


def test_a_hold_closes_all_send_queues_of_a_spout():
    flows = Flows("spout")
    flow, source = flows.flow_of("source"), flows.task("source")
    send_queues = flow.send_queues(source, [])
    flow.on_message(TaskMessage(flows.task("end"), source, "hold"))
    assert [send_queue.room() for send_queue in send_queues.queues] == [0, 0]
    assert (send_queues.room(), flow.rate(source), len(flow.take_states())) == (0, 0.0, 1)
    flow.on_message(TaskMessage(flows.task("end"), source, "resume"))
    assert send_queues.room() == math.inf


def test_migration_takes_a_task_out_of_the_rate_limiters_account():
    flows = Flows()
    flow, source = flows.flow_of("source"), flows.task("source")
    send_queue = flow.send_queue(source, flows.task("left"))
    send_queue.send(header(rows=400, task=flows.task("left")), b"x")
    flow.on_message(TaskMessage(flows.task("left"), source, "slow", 1.0))
    flow.exclude_tasks(source, "left", [flows.task("left")])
    assert send_queue.limiter.rate == math.inf
    flow.exclude_tasks(source, "left", [])
    assert send_queue.limiter.rate < math.inf


def test_the_peak_is_that_since_the_last_report():
    flows = Flows()
    detectors, task = flows.detectors_of("left"), flows.task("left")
    flows.fill("left", rows=60)
    detectors.observe()
    flows.inboxes[task].take()
    assert detectors.pressure(task) == (60, 0.0)
    assert detectors.pressure(task) == (0, 0.0)


def test_a_send_queue_takes_no_more_than_it_can_send_in_the_time_a_tuple_has():
    """At least once: what waits longer counts as failed."""
    way = Way(StepLimiter(), limit=10**9, longest=2.0)
    way.slow(100.0)
    full = []
    for number in range(25):
        way.send(number, rows=10)
        full.append(way.send_queue.full)
    assert full == [False] * 20 + [True] * 5


def test_senders_that_are_ahead_are_told_to_wait_and_to_proceed():
    flows = Flows()
    detectors, pair = flows.detectors_of("end"), (flows.task("end"), flows.task("right"))
    for ahead in ([pair], [pair], []):
        detectors.observe(ahead)
    assert [(m.source, m.target, m.kind) for m in detectors.messages] == [(*pair, "wait"), (*pair, "proceed")]


def test_workers_without_senders_have_nothing_to_watch():
    flows = Flows()
    assert flows.detectors_of("source").of_task(flows.task("source")) is None
    assert WorkerId(0, 0) in flows.flows
    assert flows.detectors_of("source").wait() == math.inf
    assert flows.flow_of("source").wait() == math.inf
    assert flows.flow_of("source").held == 0
