"""How long a spout is held back, on a simulated clock: the timer alone, and in a running topology."""

import pytest

from penstock import BasicBolt, Delivery, Settings, SimulatedClock, Spout, TopologyBuilder
from penstock.control.hold_timer import HoldTimer
from penstock.testing import LocalRunner
from tests.helpers import settings_with

CLOCK = SimulatedClock()
"""The clock of all components here. Each test continues from its present time."""


def updated(*updates):
    hold = HoldTimer()
    for time, held in updates:
        hold.update(time, held)
    return hold


def test_a_hold_lasts_from_the_update_that_finds_it_to_the_one_that_does_not():
    hold = updated((0.0, False), (1.0, True), (1.1, True), (1.3, False), (9.0, False))
    hold.on_sent()
    assert hold.seconds == pytest.approx(0.3)


def test_several_holds_add_up():
    hold = updated((0.0, True), (0.1, False))
    hold.on_sent()
    for time, held in ((5.0, True), (5.2, False)):
        hold.update(time, held)
    hold.on_sent()
    assert hold.seconds == pytest.approx(0.3)


def test_a_hold_before_nothing_was_none():
    hold = updated((0.0, True), (0.2, False))
    hold.on_idle()
    hold.on_sent()
    assert hold.seconds == 0


def test_a_long_hold_counts_before_it_ends():
    hold = updated((0.0, True), (0.2, True))
    assert hold.seconds == 0
    hold.update(0.6, True)
    assert hold.seconds == pytest.approx(0.6)
    hold.update(1.0, True)
    hold.update(1.5, True)
    assert hold.seconds == pytest.approx(1.5)


# ---- a spout -----------------------------------------------------------------------------------------------


class Offered(Spout):
    """Offers tuples at this rate, like a queue."""

    def __init__(self, rate):
        self._rate, self.emitted = rate, 0

    def declare_output_fields(self, declarer):
        declarer.declare(("n", int))

    def open(self, conf, context, collector):
        self._collector, self._begin = collector, CLOCK.now()

    def next_tuple(self):
        if self.emitted < int((CLOCK.now() - self._begin) * self._rate):
            self._collector.emit([self.emitted], msg_id=self.emitted)
            self.emitted += 1


class Slow(BasicBolt):
    def __init__(self, seconds):
        self._seconds = seconds

    def execute(self, tup, collector):
        CLOCK.advance(self._seconds)


def run(rate, service=0.01, max_rate=None, seconds=20.0, **settings):
    """A runner after so many seconds, with a bolt that processes 1 / service tuples per second."""
    builder = TopologyBuilder()
    spout = builder.set_spout("source", Offered(rate))
    if max_rate:
        spout.set_max_rate(max_rate)
    builder.set_bolt("slow", Slow(service)).shuffle_grouping("source")
    runner = LocalRunner(builder.build("t", settings_with(**settings)), clock=CLOCK)
    runner.run(seconds)
    return runner


def held(runner):
    (stats,) = runner.stats("source")
    return stats.held_back


ACKED = {"delivery": "at_least_once", "max_spout_pending": 100}
SLOWED = {"inbox_capacity": 100, "inbox_time": 0}


@pytest.mark.parametrize("settings", [ACKED, *({**SLOWED, "flow": flow} for flow in ("step", "spout", "credit"))])
def test_a_spout_with_too_much_to_emit_is_held_back(settings):
    """Seconds of 20 s. Fewer in mode step, because a tuple is due every 10 ms and the clock advances by as
    much."""
    assert 9 < held(run(400, **settings)) < 20.1


@pytest.mark.parametrize("settings", [ACKED, SLOWED])
def test_a_spout_that_gets_rid_of_all_it_has_is_not_held_back(settings):
    assert held(run(50, **settings)) < 0.2


@pytest.mark.parametrize("settings", [ACKED, SLOWED])
def test_the_users_own_limit_holds_nobody_back(settings):
    assert held(run(400, max_rate=50, **settings)) < 0.2


def test_a_pause_is_not_counted():
    runner = run(400, **ACKED)
    runner.deactivate()
    before = held(runner)
    runner.run(20.0)
    assert held(runner) == before
    runner.activate()
    runner.run(10.0)
    assert held(runner) > before + 6


def test_a_hold_that_has_not_ended_is_reported():
    """The bolt is blocked: nothing is acked, and the spout is not called again."""
    runner = run(400, service=60.0, seconds=30.0, **ACKED, message_timeout=10_000.0)
    runner.run(300.0)
    assert held(runner) > 200


def test_time_outs_are_counted_apart_from_other_failures():
    class Fails(BasicBolt):
        def execute(self, tup, collector):
            raise ValueError("no")

    runner = run(20, service=2.0, seconds=60.0, delivery="at_least_once", message_timeout=5.0)
    (stats,) = runner.stats("source")
    assert 0 < stats.timed_out == stats.failed
    builder = TopologyBuilder()
    builder.set_spout("source", Offered(20))
    builder.set_bolt("fails", Fails()).shuffle_grouping("source")
    runner = LocalRunner(builder.build("t", Settings(delivery=Delivery("at_least_once"))), clock=CLOCK)
    runner.run(5.0)
    (stats,) = runner.stats("source")
    assert stats.failed > 90
    assert stats.timed_out == 0
