"""Lanes, outlets and the messages between slots, without a topology that runs."""

import math

import pyarrow as pa
import pytest

from penstock import BasicBolt, Settings, SimulatedClock, Spout, TopologyBuilder
from penstock.control.backpressure import CreditGate, Gate, SpoutGate, StepGate
from penstock.control.signals import TaskMessage, TaskState
from penstock.frames.header import Header, Kind
from penstock.plan.model import SlotId
from penstock.plan.planner import make_plan
from penstock.runtime.flow import Flow, Lane, Outlets
from penstock.runtime.inbox import Inbox
from penstock.runtime.parcel import Parcel


def header(number=0, rows=10, task=7):
    return Header(Kind.DATA, 1, 0, 0, 0, target_task=task, source_task=1, sequence=number, rows=rows)


class Way:
    """A lane, its clock and what left it."""

    def __init__(self, gate, limit=1000, targets=(7, 8), longest=math.inf):
        self.clock, self.sent, self.gate = SimulatedClock(), [], gate
        self.lane = Lane("count", targets, gate, limit, longest, self._dispatch, self.clock)

    def _dispatch(self, head, frame):
        self.sent.append(head.sequence)

    def send(self, number, rows=10, task=7, size=100):
        self.lane.send(header(number, rows, task), bytes(size))

    def slow(self, rate):
        self.gate.take(TaskMessage(7, 1, "slow", 1.0), self.clock.monotonic(), 2 * rate)


# ---- lanes -------------------------------------------------------------------------------------------------


def test_an_open_lane_holds_nothing():
    way = Way(Gate())
    for number in range(5):
        way.send(number)
    assert (way.sent, way.lane.held, way.lane.room(), way.lane.frame_rows) == ([*range(5)], 0, math.inf, math.inf)


def test_a_slowed_lane_sends_at_its_rate_and_in_order():
    way = Way(StepGate(), limit=10**9)
    way.slow(100.0)
    for number in range(50):
        way.send(number, rows=10)
    for _ in range(2000):
        way.clock.advance(0.001)
        way.lane.release()
    assert way.sent == list(range(len(way.sent)))
    assert len(way.sent) == pytest.approx(20, abs=1), "200 tuples in two seconds"
    assert way.lane.held == 10 * (50 - len(way.sent))
    assert not way.lane.full
    assert way.lane.frame_rows == 16


def test_what_waits_is_not_overtaken_when_there_is_room_again():
    way = Way(StepGate(), limit=10**9)
    way.slow(100.0)
    way.send(0)
    way.send(1)
    way.gate.take(TaskMessage(7, 1, "cancel", 0.0), 0.0, 100.0)
    way.send(2)
    way.lane.release()
    assert way.sent == [0, 1, 2]


def test_everything_leaves_at_the_end_of_an_epoch():
    way = Way(CreditGate())
    for number in range(4):
        way.send(number)
    assert way.sent == []
    way.lane.release()
    assert way.sent == []
    way.lane.release(everything=True)
    assert (way.sent, way.lane.held) == ([0, 1, 2, 3], 0)


def test_a_lane_is_full_at_its_limit_and_an_impatient_one_at_once():
    way = Way(StepGate(), limit=250)
    way.slow(10.0)
    full = []
    for number in range(4):
        way.send(number)
        full.append(way.lane.full)
    assert full == [False, False, True, True]
    way = Way(CreditGate(), limit=250)
    way.send(0)
    assert way.lane.full


def test_room_is_that_of_the_task_with_the_least():
    way = Way(CreditGate())
    way.gate.take(TaskMessage(7, 1, "grant", 30.0), 0.0, 0.0)
    assert way.lane.room() == 0
    way.gate.take(TaskMessage(8, 1, "grant", 20.0), 0.0, 0.0)
    assert way.lane.room() == 20
    way.send(0, rows=25, task=8)
    assert way.lane.room() == -5, "the last may bring more than fit"


# ---- outlets -----------------------------------------------------------------------------------------------


def full_inbox():
    inbox = Inbox(1)
    inbox.put(Parcel(header(), pa.py_buffer(b"x")))
    return inbox


def test_a_task_goes_on_while_one_of_its_lanes_takes_something():
    slow, open_ = Way(StepGate(), limit=10**9), Way(StepGate())
    outlets = Outlets([slow.lane, open_.lane], [], Gate())
    slow.slow(10.0)
    slow.send(0)
    slow.send(1)
    assert slow.lane.held
    assert not outlets.held_back
    assert outlets.room() == math.inf
    open_.slow(10.0)
    open_.send(0)
    open_.send(1)
    assert outlets.held_back
    assert outlets.room() == 0


@pytest.mark.parametrize("chained", [True, False])
def test_a_slowed_lane_does_not_slow_what_is_chained(chained):
    slow = Way(StepGate(), limit=10**9)
    slow.slow(10.0)
    outlets = Outlets([slow.lane], [Inbox(10)] if chained else [], Gate())
    assert (outlets.room() > 0) == chained
    slow.send(0)
    slow.send(1)
    assert outlets.held_back != chained


def test_a_full_inbox_in_the_slot_holds_the_task_back():
    assert Outlets([], [Inbox(10), full_inbox()], Gate()).held_back
    assert Outlets([], [full_inbox()], Gate()).room() == 0
    assert Outlets([], [], Gate()).room() == math.inf


def test_without_patience_the_least_room_counts():
    one, two = Way(CreditGate(), targets=[7]), Way(CreditGate(), targets=[7])
    outlets = Outlets([one.lane, two.lane], [], Gate())
    one.gate.take(TaskMessage(7, 1, "grant", 30.0), 0.0, 0.0)
    assert outlets.room() == 0
    two.gate.take(TaskMessage(7, 1, "grant", 5.0), 0.0, 0.0)
    assert outlets.room() == 5


def test_a_held_spout_has_no_room_wherever_it_sends():
    gate = SpoutGate()
    gate.take(TaskMessage(7, 1, "hold"), 0.0, 0.0)
    assert Outlets([], [Inbox(10)], gate).room() == 0


# ---- a slot's flow -----------------------------------------------------------------------------------------


class Source(Spout):
    def declare_output_fields(self, declarer):
        declarer.declare("n")

    def next_tuple(self): ...


class Bolt(BasicBolt):
    def declare_output_fields(self, declarer):
        declarer.declare("n")

    def execute(self, tup, collector): ...


class Flows:
    """The flows of all slots of source -> left, right -> end, and a clock."""

    def __init__(self, mode="step", **settings):
        builder = TopologyBuilder()
        builder.set_spout("source", Source(), 2)
        builder.set_bolt("left", Bolt(), 2).shuffle_grouping("source")
        builder.set_bolt("right", Bolt()).shuffle_grouping("source")
        builder.set_bolt("end", Bolt()).shuffle_grouping("left").shuffle_grouping("right")
        self.settings = Settings(flow=mode, inbox_capacity=100, **settings)
        self.plan = make_plan(builder.build("t", self.settings))
        self.clock, self.inboxes, self.flows, self.sent = SimulatedClock(), {}, {}, []
        for slot in self.plan.slot_ids():
            inboxes = {task: Inbox(100, 10_000) for task in self.plan.routes.tasks_of(slot)}
            self.inboxes |= inboxes
            dispatch = lambda head, frame: self.sent.append(head)  # noqa: E731
            self.flows[slot] = Flow(self.plan, self.settings, self.clock, inboxes, dispatch, slot)

    def task(self, component, index=0):
        return self.plan.tasks_of[component][index]

    def flow_of(self, component, index=0) -> Flow:
        return self.flows[self.plan.routes.slot_of[self.task(component, index)]]

    def fill(self, component, index=0, rows=95):
        task = self.task(component, index)
        self.inboxes[task].offer(Parcel(header(rows=rows, task=task), pa.py_buffer(b"x")))

    def signals(self, component, index=0):
        flow = self.flow_of(component, index)
        flow.observe()
        self.clock.advance(1.5)
        flow.observe()
        return list(flow.messages)


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


def test_a_signal_slows_one_lane_and_is_answered():
    flows = Flows()
    flow, source = flows.flow_of("source"), flows.task("source")
    left, right = flow.lane(source, flows.task("left")), flow.lane(source, flows.task("right"))
    left.send(header(rows=400, task=flows.task("left")), b"x")
    flows.clock.advance(0.2)
    flow.receive(TaskMessage(flows.task("left", 1), source, "slow", 1.0))
    assert left.gate.rate == pytest.approx(1000)
    assert right.gate.rate == math.inf
    assert flow.rate(source) == left.gate.rate
    (state,) = flow.states
    assert state == TaskState(source, "left", left.gate.rate)


def test_an_answer_lets_the_watch_go_on():
    flows = Flows()
    flows.fill("left")
    assert flows.signals("left")
    watch = flows.flow_of("left").watch(flows.task("left"))
    assert watch._answer_by is not None
    flows.flow_of("left").heard(TaskState(flows.task("source"), "right", 10.0))
    assert watch._answer_by is not None, "not its own"
    flows.flow_of("left").heard(TaskState(flows.task("source"), "left", 10.0))
    assert watch._answer_by is None


def test_a_hold_closes_all_lanes_of_a_spout():
    flows = Flows("spout")
    flow, source = flows.flow_of("source"), flows.task("source")
    outlets = flow.outlets(source)
    flow.receive(TaskMessage(flows.task("end"), source, "hold"))
    assert [lane.room() for lane in outlets.lanes] == [0, 0]
    assert (outlets.room(), flow.rate(source), len(flow.states)) == (0, 0.0, 1)
    flow.receive(TaskMessage(flows.task("end"), source, "resume"))
    assert outlets.room() == math.inf


def test_migration_takes_a_task_out_of_the_gates_account():
    flows = Flows()
    flow, source = flows.flow_of("source"), flows.task("source")
    lane = flow.lane(source, flows.task("left"))
    lane.send(header(rows=400, task=flows.task("left")), b"x")
    flow.receive(TaskMessage(flows.task("left"), source, "slow", 1.0))
    flow.pass_by(source, "left", [flows.task("left")])
    assert lane.gate.rate == math.inf
    flow.pass_by(source, "left", [])
    assert lane.gate.rate < math.inf


def test_the_peak_is_that_since_the_last_report():
    flows = Flows()
    flow, task = flows.flow_of("left"), flows.task("left")
    flows.fill("left", rows=60)
    flow.observe()
    flows.inboxes[task].take()
    assert flow.pressure(task) == (60, 0.0)
    assert flow.pressure(task) == (0, 0.0)


def test_a_lane_takes_no_more_than_it_can_send_in_the_time_a_tuple_has():
    """At least once: what waits longer counts as failed."""
    way = Way(StepGate(), limit=10**9, longest=2.0)
    way.slow(100.0)
    full = []
    for number in range(25):
        way.send(number, rows=10)
        full.append(way.lane.full)
    assert full == [False] * 20 + [True] * 5


def test_senders_that_are_ahead_are_told_to_wait_and_to_proceed():
    flows = Flows()
    flow, pair = flows.flow_of("end"), (flows.task("end"), flows.task("right"))
    for ahead in ([pair], [pair], []):
        flow.observe(ahead)
    assert [(m.source, m.target, m.kind) for m in flow.messages] == [(*pair, "wait"), (*pair, "proceed")]


def test_slots_without_senders_have_nothing_to_watch():
    flows = Flows()
    assert flows.flow_of("source").watch(flows.task("source")) is None
    assert SlotId(0, 0) in flows.flows
    assert flows.flow_of("source").wait() == math.inf
    assert flows.flow_of("source").held == 0
