"""Overload detectors, rate limiters and paces, one call at a time: the cases of Lu 2020, algorithm 1, and the
other modes."""

import math
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.control.backpressure import (
    MAX_SENSITIVITY,
    MIN_SENSITIVITY,
    CreditDetector,
    CreditLimiter,
    RateLimiter,
    SpoutDetector,
    SpoutLimiter,
    StepDetector,
    StepLimiter,
    make_detector,
    make_limiter,
)
from penstock.control.pace import Meter, Pace
from penstock.control.signals import TaskMessage


def message(kind, value=0.0, source=9):
    return TaskMessage(source, 1, kind, value)


# ---- the overload detector
# ---------------------------------------------------------------------------------------------


def filled(detector, length, rate=1000, seconds=1.0):
    """A detector that has seen ``rate`` tuples per second arrive, of which all but ``length`` were taken."""
    arrived = 0
    for tick in range(round(seconds * 100)):
        arrived += rate // 100
        assert detector.observe(tick / 100, 0, arrived) == []
    return arrived + length


def test_a_signal_comes_after_the_sensitivity():
    detector = StepDetector([1, 2], 100)
    arrived = filled(detector, 90)
    assert detector.observe(1.0, 90, arrived) == []
    assert detector.sensitivity(90) == pytest.approx(MIN_SENSITIVITY), "(100 - 90) / (2 * 1000) is less"
    assert detector.observe(1.0 + 0.9 * MIN_SENSITIVITY, 90, arrived) == []
    assert detector.observe(1.0 + MIN_SENSITIVITY, 90, arrived) == [(1, "slow", 1.0), (2, "slow", 1.0)]
    assert detector.demand == pytest.approx(1000, rel=0.25)


def test_the_sensitivity_is_half_the_time_the_rest_of_the_queue_takes_to_fill():
    detector = StepDetector([1], 10_000)
    arrived = filled(detector, 8_500)
    detector.observe(1.0, 8_500, arrived)
    assert detector.sensitivity(8_500) == pytest.approx(1_500 / (2 * detector._rate))
    assert detector.sensitivity(20_000) == MIN_SENSITIVITY


def test_a_queue_below_the_mark_again_is_not_signalled():
    detector = StepDetector([1], 100)
    arrived = filled(detector, 90)
    detector.observe(1.0, 90, arrived)
    assert detector.observe(1.005, 80, arrived) == []
    assert detector.observe(1.02, 90, arrived) == [], "a new timer"
    assert detector.observe(1.04, 90, arrived) != []


def test_a_queue_on_its_way_back_is_left_alone():
    detector = StepDetector([1], 100)
    arrived = filled(detector, 99)
    detector.observe(1.0, 99, arrived)
    assert detector.observe(1.02, 95, arrived) == []


def test_no_second_signal_before_the_first_is_answered():
    detector = StepDetector([1], 100)
    arrived = filled(detector, 90)
    detector.observe(1.0, 90, arrived)
    assert detector.observe(1.01, 90, arrived)
    for now in (1.1, 1.5, 1.9):
        assert detector.observe(now, 300, arrived + 210) == []
    detector.on_sender_adjusted()
    assert detector.observe(1.91, 300, arrived + 210) == [], "the timer begins"
    assert detector.observe(1.92, 305, arrived + 215) == [], "is that growth, or a frame?"
    assert detector.observe(1.93, 310, arrived + 220) == [(1, "slow", 2.0)]


def test_without_an_answer_it_goes_on_after_a_second():
    detector = StepDetector([1], 100)
    arrived = filled(detector, 90)
    detector.observe(1.0, 90, arrived)
    detector.observe(1.01, 90, arrived)
    assert detector.observe(1.02 + MAX_SENSITIVITY, 200, arrived + 110) == []
    assert detector.observe(1.04 + MAX_SENSITIVITY, 205, arrived + 115) == []
    assert detector.observe(1.05 + MAX_SENSITIVITY, 210, arrived + 120) == [(1, "slow", 2.0)]


def test_a_frame_is_no_growth():
    """Frames arrive between takes again and again: the queue is stable above the mark."""
    detector = StepDetector([1], 100)
    arrived = filled(detector, 90)
    detector.observe(1.0, 90, arrived)
    detector.observe(1.01, 90, arrived)
    detector.on_sender_adjusted()
    for number in range(50):
        arrived += 30
        assert detector.observe(1.1 + number * 0.1, 120, arrived) == []
        assert detector.observe(1.15 + number * 0.1, 90, arrived) == []


def test_a_slow_growth_is_found():
    detector = StepDetector([1], 100)
    arrived = filled(detector, 90)
    detector.observe(1.0, 90, arrived)
    detector.observe(1.01, 90, arrived)
    detector.on_sender_adjusted()
    said = []
    for number in range(110):
        arrived += 1
        said += detector.observe(1.1 + number * 0.1, 90 + number // 10, arrived)
    assert said == [(1, "slow", 2.0)]


def test_an_empty_queue_takes_its_signals_back_one_by_one():
    detector = StepDetector([1], 100)
    arrived = filled(detector, 90)
    detector.observe(1.0, 90, arrived)
    detector.observe(1.01, 90, arrived)
    detector.on_sender_adjusted()
    said = [(now, m) for now in (1.1 + i / 100 for i in range(300)) for m in detector.observe(now, 0, arrived)]
    assert [m for _, m in said] == [(1, "cancel", 0.0)]
    assert detector.demand == 0.0


def test_a_queue_that_nothing_came_to_lately_is_no_division_by_zero():
    detector = StepDetector([1], 100)
    arrived = filled(detector, 90)
    detector.observe(5.0, 90, arrived)
    assert detector.observe(5.0 + MAX_SENSITIVITY, 90, arrived) == [(1, "slow", 1.0)]
    for tick in range(400):
        detector.observe(7.1 + tick / 100, 0, arrived)
    assert detector.steps == 0


def test_an_answer_may_come_from_another_thread_at_any_moment():
    """The reader thread calls ``observe`` while the main loop receives states."""
    detector = StepDetector([1], 10)
    ended = threading.Event()

    def answer():
        while not ended.is_set():
            detector.on_sender_adjusted()

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        for number in range(20_000):
            detector.observe(number * 0.02, 10 + number, 10 + number)
    finally:
        ended.set()
        thread.join()
    assert detector.steps == 10


# ---- the rate limiter
# ----------------------------------------------------------------------------------------------


def test_a_rate_limiter_halves_doubles_and_forgets():
    limiter = StepLimiter()
    rates = []
    for number, kind in enumerate(["slow", "slow", "slow", "cancel", "cancel", "cancel"]):
        steps = [1, 2, 3, 2, 1, 0][number]
        assert limiter.handle(message(kind, steps), number, measured=800.0 if not number else 5.0)
        rates.append(limiter.rate)
    assert rates == [400, 200, 100, 200, 400, math.inf]
    assert limiter.initial is None
    limiter.handle(message("slow", 1.0), 9.0, measured=60.0)
    assert limiter.rate == 30, "the initial rate is a new one"


def test_a_cancel_without_backpressure_is_ignored():
    limiter = StepLimiter()
    assert not limiter.handle(message("cancel", 0.0), 0.0, 100.0)
    assert limiter.rate == math.inf
    assert limiter.initial is None


def test_a_cancel_of_a_task_that_asked_for_nothing_is_ignored():
    limiter = StepLimiter()
    limiter.handle(message("slow", 1.0, source=7), 0.0, 100.0)
    assert not limiter.handle(message("cancel", 0.0, source=8), 0.1, 100.0)
    assert limiter.rate == 50


def test_who_sends_nothing_is_not_slowed():
    limiter = StepLimiter()
    assert not limiter.handle(message("slow", 1.0), 0.0, measured=0.0)
    assert limiter.initial is None
    limiter.handle(message("slow", 4.0), 1.0, measured=1000.0)
    assert limiter.rate == 500, "one step for one signal, not four at once"


def test_four_full_tasks_are_one_step():
    limiter = StepLimiter()
    for source in (5, 6, 7, 8):
        limiter.handle(message("slow", 1.0, source), 0.0, 1000.0)
    assert limiter.rate == 500
    for source in (5, 6, 7):
        assert not limiter.handle(message("cancel", 0.0, source), 0.1, 1000.0)
    assert limiter.handle(message("cancel", 0.0, 8), 0.2, 1000.0)
    assert limiter.rate == math.inf


def test_a_task_that_is_passed_by_slows_nobody():
    limiter = StepLimiter()
    limiter.handle(message("slow", 3.0, 5), 0.0, 1000.0)
    limiter.exclude_tasks([5], 0.1)
    assert limiter.rate == math.inf
    limiter.handle(message("slow", 1.0, 6), 0.2, 1000.0)
    assert limiter.rate == 500
    limiter.exclude_tasks([], 0.3)
    limiter.validate()
    assert limiter.rate == 500, "both ask for one step"


def test_a_lost_last_cancel_is_what_the_boards_must_not_do():
    """A known limit: nothing follows the last cancel, so if it is lost the sender stays slow until the next
    overload."""
    limiter = StepLimiter()
    limiter.handle(message("slow", 1.0), 0.0, 1000.0)
    assert limiter.rate == 500
    limiter.handle(message("slow", 1.0), 60.0, 500.0)
    limiter.handle(message("cancel", 0.0), 61.0, 500.0)
    assert limiter.rate == math.inf


def test_spouts_go_on_when_the_last_task_lets_them():
    limiter, detector = SpoutLimiter(), SpoutDetector([1], 100)
    assert detector.observe(0.0, 80, 80) == []
    assert detector.observe(0.1, 81, 81) == [(1, "hold", 0.0)]
    assert detector.observe(0.2, 21, 81) == []
    assert detector.observe(0.3, 19, 81) == [(1, "resume", 0.0)]
    assert limiter.handle(message("hold", source=5), 0.0, 0.0)
    assert not limiter.handle(message("hold", source=6), 0.0, 0.0)
    assert not limiter.handle(message("resume", source=5), 0.0, 0.0)
    assert limiter.room(1, 0.0) == 0
    assert limiter.handle(message("resume", source=6), 0.0, 0.0)
    assert limiter.room(1, 0.0) == math.inf


def test_credits_are_shared_and_renewed():
    detector, limiter = CreditDetector([1, 2], 100), CreditLimiter()
    assert limiter.room(9, 0.0) == 0, "before the first word, nothing"
    assert detector.observe(0.0, 0, 0) == [(1, "grant", 50.0), (2, "grant", 50.0)]
    limiter.handle(message("grant", 50.0), 0.0, 0.0)
    limiter.record_sent(9, 48)
    assert limiter.room(9, 0.0) == 2
    detector.record_consumed(1, 5)
    assert detector.observe(0.1, 43, 48) == [], "fewer than an eighth of 50"
    detector.record_consumed(1, 1)
    assert detector.observe(0.2, 42, 48) == [(1, "grant", 56.0)]
    limiter.handle(message("grant", 56.0), 0.0, 0.0)
    limiter.handle(message("grant", 50.0), 0.0, 0.0)
    assert limiter.room(9, 0.0) == 8, "a late grant takes nothing back"


def test_more_senders_than_places():
    detector = CreditDetector(range(1, 8), 3)
    assert [value for _, _, value in detector.observe(0.0, 0, 0)] == [1.0] * 7


def test_each_mode_has_its_pair():
    pairs = {
        "step": (StepDetector, StepLimiter),
        "credit": (CreditDetector, CreditLimiter),
        "spout": (SpoutDetector, RateLimiter),
    }
    for mode, (detector, limiter) in pairs.items():
        assert type(make_detector(mode, [1], [2], 10, 0.8, 2.0)) is detector
        assert type(make_limiter(mode, 2.0)) is limiter
    assert make_detector("none", [1], [2], 10, 0.8, 2.0) is None
    assert make_detector("spout", [1], [2], 10, 0.8, 2.0).upstream == (2,)


@pytest.mark.parametrize(
    "limiter",
    [RateLimiter(), StepLimiter(), SpoutLimiter(), CreditLimiter()],
    ids=lambda limiter: type(limiter).__name__,
)
def test_a_sender_that_is_epochs_ahead_waits_in_every_mode(limiter):
    limiter.handle(message("grant", 10.0), 0.0, 0.0)
    assert limiter.handle(message("wait", source=5), 0.0, 100.0)
    limiter.handle(message("wait", source=9), 0.0, 100.0)
    assert (limiter.room(9, 1.0), limiter.rate, limiter.wait(1.0)) == (0.0, 0.0, math.inf)
    limiter.handle(message("proceed", source=5), 1.0, 100.0)
    assert limiter.room(9, 1.0) == 0.0
    assert limiter.handle(message("proceed", source=9), 1.0, 100.0)
    assert limiter.room(9, 1.0) > 0


# ---- rates -------------------------------------------------------------------------------------------------


@given(st.floats(5.0, 1e6), st.lists(st.integers(1, 5000), min_size=1, max_size=8))
def test_the_mean_rate_holds_for_any_batches(rate, sizes):
    """A batch is sent when there is room for one tuple, so n batches are at most one too early."""
    pace, now, sent = Pace(rate), 0.0, 0
    for number in range(200):
        now += pace.wait(now)
        assert pace.room(now) > 0
        size = sizes[number % len(sizes)]
        pace.spend(size)
        sent += size
        assert sent <= rate * now + max(1.0, 0.05 * rate) + size
    assert sent >= 0.99 * rate * now - 1, "and it is not slower"


@given(st.floats(10.0, 1e6), st.floats(0.0, 1e6))
def test_a_pause_is_no_licence_to_flood(rate, pause):
    pace = Pace(rate)
    pace.room(0.0)
    assert pace.room(pause) <= max(1.0, 0.05 * rate) + 1e-9


@given(st.floats(10.0, 1e5), st.integers(1, 2000))
def test_being_told_the_same_rate_again_and_again_forgives_no_debt(rate, size):
    """Every message of every receiving task sets the rate of a limiter."""
    pace, now, sent = Pace(), 0.0, 0
    pace.set(rate, 0.0)
    for _ in range(300):
        now += 0.01
        pace.set(rate, now)
        if pace.room(now) > 0:
            pace.spend(size)
            sent += size
    assert sent <= rate * now + size


def test_a_debt_of_a_faster_time_does_not_last_longer():
    pace = Pace(1000.0)
    pace.room(0.0)
    pace.room(1.0)
    pace.spend(150)
    assert pace.wait(1.0) == pytest.approx(0.1, abs=1e-3)
    pace.set(10.0, 1.0)
    assert pace.wait(1.0) == pytest.approx(0.1, abs=1e-3)
    pace.set(math.inf, 1.0)
    assert pace.wait(1.0) == 0.0
    assert pace.room(1.0) == math.inf


def test_a_rate_of_nothing():
    pace = Pace(0.0)
    assert pace.room(0.0) <= 0
    assert pace.wait(1e6) == math.inf


@given(st.integers(1, 1000), st.floats(0.6, 30.0))
def test_a_steady_stream_is_measured_as_it_is(per_tick, until):
    meter, now = Meter(), 0.0
    while now < until:
        now += 0.005
        meter.add(per_tick, now)
    assert meter.rate(now) == pytest.approx(per_tick / 0.005, rel=0.02)
    assert meter.rate(now + 0.6) == 0
