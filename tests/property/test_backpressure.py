"""Step-by-step backpressure in a model of senders, queues and consumers, with any capacity, rates and signal
delay.

Each property states what it guarantees and for which delays. Credits and holds are checked with the same model.
"""

import math
from collections import deque

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from penstock.control.backpressure import (
    MIN_SENSITIVITY,
    CreditDetector,
    CreditLimiter,
    SpoutDetector,
    SpoutLimiter,
    StepDetector,
    StepLimiter,
)
from penstock.control.pace import Meter
from penstock.control.signals import TaskMessage

TICK = 0.001  # seconds between two observations of the queues

# ---- the model ---------------------------------------------------------------------------------------------


class Sender:
    """Sends ``demand`` tuples per second in frames, to the receivers in turn, as far as its rate limiter
    permits."""

    def __init__(self, id, demand, frame, limiter):
        self.id, self.demand, self.frame, self.limiter = id, demand, frame, limiter
        self.meter, self.owed, self.turn, self.sent = Meter(), 0.0, id, 0

    def run(self, now, receivers):
        self.owed = min(self.owed + self.demand * TICK, self.frame + self.demand * TICK)
        while self.owed >= self.frame:
            receiver = receivers[self.turn % len(receivers)]
            if self.limiter.room(receiver.id, now) <= 0:
                return
            self.turn += 1
            self.owed -= self.frame
            self.sent += self.frame
            self.limiter.record_sent(receiver.id, self.frame)
            self.meter.add(self.frame, now)
            receiver.queue.append((self.id, self.frame))
            receiver.length += self.frame
            receiver.arrived += self.frame


class Receiver:
    """Processes ``speed`` tuples per second, in whole frames."""

    def __init__(self, id, speed, detector):
        self.id, self.speed, self.detector = id, speed, detector
        self.queue, self.length, self.arrived, self.taken, self.may = deque(), 0, 0, 0, 0.0
        self.signals = []
        """(time, kind, steps, shortest sensitivity since the previous signal)"""
        self._shortest = math.inf

    def run(self, now):
        self.may = min(self.may + self.speed * TICK, 1 + self.speed * TICK if self.queue else 0.0)
        while self.queue and self.may > 0:
            source, rows = self.queue.popleft()
            self.may -= rows
            self.length -= rows
            self.taken += rows
            self.detector.record_consumed(source, rows)
        if isinstance(self.detector, StepDetector):
            self._shortest = min(self._shortest, self.detector.sensitivity(self.length))
        said = self.detector.observe(now, self.length, self.arrived)
        if said:
            self.signals.append((now, said[0][1], said[0][2], self._shortest))
            self._shortest = math.inf
        return [TaskMessage(self.id, target, kind, value) for target, kind, value in said]


class World:
    """Senders and receivers. ``delay``: of a signal and of its answer. ``spoil`` may lose or duplicate messages:
    it gets each message and returns how often it arrives."""

    def __init__(self, demands, speeds, capacity, delay=0.0, frame=1, mode="step", spoil=lambda message: 1):
        limiters = {"step": StepLimiter, "spout": SpoutLimiter, "credit": CreditLimiter}
        detectors = {"step": StepDetector, "spout": SpoutDetector, "credit": CreditDetector}
        ids = range(1, len(demands) + 1)
        self.senders = [
            Sender(id, demand, frame, limiters[mode]()) for id, demand in zip(ids, demands, strict=True)
        ]
        self.receivers = [
            Receiver(100 + i, speed, detectors[mode](ids, capacity)) for i, speed in enumerate(speeds)
        ]
        self.now, self.delay, self._spoil = 0.0, delay, spoil
        self._wire = deque()
        self.steps = []
        """The maximum steps that any task requests, at each tick."""

    def run(self, seconds):
        for _ in range(round(seconds / TICK)):
            self.now += TICK
            while self._wire and self._wire[0][0] <= self.now:
                self._deliver(self._wire.popleft()[1])
            for sender in self.senders:
                sender.run(self.now, self.receivers)
            for receiver in self.receivers:
                for message in receiver.run(self.now):
                    self._wire += [(self.now + self.delay, message)] * self._spoil(message)
            if isinstance(self.senders[0].limiter, StepLimiter):
                self._check()

    def _deliver(self, message):
        if message is None:
            for receiver in self.receivers:
                receiver.detector.on_sender_adjusted()
            return
        sender = self.senders[message.target - 1]
        if sender.limiter.handle(message, self.now, sender.meter.rate(self.now)):
            self._wire.append((self.now + self.delay, None))

    def _check(self):
        for receiver in self.receivers:
            receiver.detector.validate()
        for sender in self.senders:
            sender.limiter.validate()
        self.steps.append(max(receiver.detector.steps for receiver in self.receivers))

    def ease(self):
        """End the overload: the senders stop."""
        for sender in self.senders:
            sender.demand = 0.0

    @property
    def slowed(self):
        return [sender.id for sender in self.senders if sender.limiter.initial is not None]


@st.composite
def worlds(draw, overload=(1.1, 12.0), delays=(0.0, 0.005, 0.02, 0.05), **options):
    """An overloaded topology, and the seconds in which a full queue drains."""
    capacity = draw(st.sampled_from([100, 400, 1000]))
    rate = capacity * draw(st.sampled_from([5, 10, 40]))
    senders, receivers = draw(st.sampled_from([(1, 1), (3, 1), (1, 3), (2, 2)]))
    sustainable = rate / draw(st.floats(*overload))
    frame = draw(st.sampled_from([1, capacity // 100, capacity // 30]))
    delay = draw(st.sampled_from(delays))
    world = World(
        [rate / senders] * senders, [sustainable / receivers] * receivers, capacity, delay, frame, **options
    )
    return world, receivers * capacity / sustainable


# ---- step by step ------------------------------------------------------------------------------------------


@given(worlds(overload=(1.5, 12.0)))
@settings(max_examples=12)
def test_when_the_overload_ends_every_sender_is_back_at_its_rate(case):
    world, drain = case
    world.run(1.0 + drain)
    assert max(world.steps) > 0
    world.ease()
    world.run(2 * drain + max(world.steps) * 1.2)  # at most one cancel per second
    assert not world.slowed
    assert all(sender.limiter.initial is None and sender.limiter.rate == math.inf for sender in world.senders)
    assert [receiver.detector.steps for receiver in world.receivers] == [0] * len(world.receivers)


@given(worlds(delays=(0.0, 0.001, 0.02, 0.1)))
@settings(max_examples=10)
def test_a_task_never_signals_twice_within_a_sensitivity(case):
    world, drain = case
    world.run(1.0 + 2 * drain)
    for receiver in world.receivers:
        times = [time for time, *_ in receiver.signals]
        for before, (time, _, _, shortest) in zip(times, receiver.signals[1:], strict=False):
            assert time - before >= shortest - TICK
            assert time - before >= MIN_SENSITIVITY - TICK


@given(worlds())
@settings(max_examples=20)
def test_on_a_steady_overload_the_rate_stays_around_the_sustainable_one(case):
    """The rate alternates between two neighbouring steps, with any delay of the signals (here up to five
    sensitivities), because a task waits for the answer before it decides. The next faster step is tried
    occasionally if the rate above the sustainable one exceeds it by less than a fifth (so slow a growth looks like
    balance), or if frames are larger than a fiftieth of the queue."""
    world, drain = case
    world.run(4.0 + 2.5 * drain)
    settled = len(world.steps)
    world.run(2.0 + 3 * drain)
    used = set(world.steps[settled:])
    demand = sum(sender.demand for sender in world.senders)
    ideal = math.log2(demand / sum(receiver.speed for receiver in world.receivers))
    measured = math.log2(demand / sum(sender.limiter.initial or sender.demand for sender in world.senders))
    assert max(used) - min(used) <= 2
    if 0.35 < (ideal - measured) % 1 < 0.9 and world.senders[0].frame * 50 < world.receivers[0].detector.capacity:
        assert max(used) - min(used) <= 1
    assert min(used) <= math.ceil(ideal)
    assert max(used) >= math.floor(ideal)


@given(worlds())
@settings(max_examples=10)
def test_the_consumers_never_starve_for_long(case):
    """Backpressure costs no throughput, except during the first descent."""
    world, drain = case
    world.run(2.0 + drain)
    before = sum(receiver.taken for receiver in world.receivers)
    seconds = 2.0 + 4 * drain
    world.run(seconds)
    done = sum(receiver.taken for receiver in world.receivers) - before
    assert done >= 0.9 * seconds * sum(receiver.speed for receiver in world.receivers)


@given(worlds(), st.randoms(use_true_random=False), st.floats(0.0, 0.4))
@settings(max_examples=10)
def test_doubled_and_lost_messages_leave_no_sender_slow(case, draw, share):
    """Each message contains the total of requested steps, so the next one compensates for lost or duplicated
    messages. Only the last cancel has no successor: the message boards must deliver it."""
    world, drain = case
    world._spoil = lambda message: (
        1 if not message.value else draw.choices((1, 0, 2), (1 - share, share, share))[0]
    )
    world.run(1.0 + drain)
    world.ease()
    world.run(2 * drain + 12 * 1.2)
    assert not world.slowed


@given(st.lists(st.tuples(st.sampled_from([7, 8]), st.sampled_from(["slow", "cancel"]), st.integers(0, 10))))
def test_whatever_comes_in_whatever_order_the_rate_limiter_is_sound(messages):
    """Late, duplicated or lost messages: at most one step per message, no limit by a task that requests nothing,
    and a cancel of all steps always takes effect."""
    limiter = StepLimiter()
    for number, (source, kind, value) in enumerate(messages):
        asked = limiter.steps.get(source, 0)
        limiter.handle(TaskMessage(source, 1, kind, float(value)), number * 0.01, 1000.0)
        limiter.validate()
        assert limiter.steps.get(source, 0) <= min(value, asked + (kind == "slow"))
        most = max(limiter.steps.values(), default=0)
        assert limiter.rate == (1000 / 2**most if most else math.inf)


@given(st.floats(0.1, 2.0))
@settings(max_examples=6)
def test_a_sender_that_was_idle_when_told_to_slow_gets_its_share_later(pause):
    """It is not limited to a rate it never had: the next signal arrives while it sends, and halves that rate."""
    world = World([4000, 0], [500], 100)
    world.run(0.5)
    busy, idle = world.senders
    assert busy.limiter.initial is not None
    assert idle.limiter.initial is None
    busy.demand, idle.demand = 0.0, 4000
    world.run(pause)
    assert idle.sent >= 0.5 * min(pause, 0.2) * 500
    world.run(5.0)
    before = idle.sent
    world.run(3.0)
    assert idle.sent - before >= 0.9 * 3.0 * 500


# ---- the baselines -----------------------------------------------------------------------------------------


@given(worlds(mode="credit"))
@settings(max_examples=20)
def test_with_credits_no_more_is_on_the_way_than_was_granted(case):
    world, _ = case
    receivers = {receiver.id: receiver for receiver in world.receivers}
    for _ in range(40):
        world.run(0.05)
        for sender in world.senders:
            for id, receiver in receivers.items():
                taken = receiver.detector._consumed[sender.id]
                outstanding = sender.limiter._sent.get(id, 0) - taken
                assert outstanding < receiver.detector.share + sender.frame
        assert all(
            r.length < r.detector.capacity + len(world.senders) * world.senders[0].frame for r in world.receivers
        )


@given(worlds(mode="credit", delays=(0.0, 0.02)))
@settings(max_examples=10)
def test_credits_come_to_no_deadlock(case):
    world, drain = case
    world.run(1.0)
    before = sum(receiver.taken for receiver in world.receivers)
    world.run(2.0)
    assume(world.delay == 0.0 or drain > 0.5)  # otherwise the delay of a credit limits the rate
    speed = sum(receiver.speed for receiver in world.receivers)
    assert (
        sum(receiver.taken for receiver in world.receivers) - before >= 0.8 * 2.0 * speed - world.senders[0].frame
    )


@given(worlds(mode="spout"))
@settings(max_examples=20)
def test_spouts_are_held_as_long_as_a_queue_is_above(case):
    world, drain = case
    for _ in range(60):
        sent = [sender.sent for sender in world.senders]
        held = all(sender.limiter.holders for sender in world.senders)
        low = [0.2 * receiver.detector.capacity for receiver in world.receivers]
        above = any(r.length > least for r, least in zip(world.receivers, low, strict=True))
        world.run(TICK)
        if held and above and not world._wire:
            assert [sender.sent for sender in world.senders] == sent
        for sender in world.senders:
            assert (
                world.delay
                or sender.limiter.holders == {r.id for r in world.receivers if r.detector._holds}
                or world._wire
            )
        world.run(0.03)
    world.ease()
    world.run(1.0 + 2 * drain)
    assert not any(sender.limiter.holders for sender in world.senders)
