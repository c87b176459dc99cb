"""What is known of a call: how long it took, and for how much of that it only waited."""

import threading
import time

import pytest

from penstock import SimulatedClock
from penstock.metrics.stats import TaskStats
from penstock.worker.call_timer import CallTimer, WaitTimes
from penstock.worker.calls import CurrentCall


class Clock(SimulatedClock):
    """Time passes only when a call says so; the CPU time that a thread uses is real."""


def timer(clock):
    return CallTimer(TaskStats(), clock, CurrentCall(), 7)


def run(timed, clock, seconds, calls=1):
    timed.start()
    clock.advance(seconds)
    return timed.stop(calls)


def test_a_chunk_of_calls_is_busy_time_and_is_the_running_call():
    clock, call = Clock(), CurrentCall()
    timed = CallTimer(stats := TaskStats(), clock, call, 7)
    timed.start()
    assert call.running == (7, clock.monotonic())
    clock.advance(0.5)
    assert timed.stop(3) == 0.5
    assert (stats.busy, call.running) == (0.5, None)


def test_calls_that_use_no_cpu_have_waited_from_the_second_chunk_on():
    clock = Clock()
    timed = timer(clock)
    run(timed, clock, 0.01)
    assert timed.unsettled == 0, "CPU time is not measured before a call was slow"
    run(timed, clock, 0.01)
    assert timed.unsettled == pytest.approx(0.01, abs=0.002)


def test_slow_calls_are_counted():
    clock = Clock()
    timed = timer(clock)
    run(timed, clock, 0.01)
    run(timed, clock, 0.03, calls=3)
    assert timed._stats.slow_calls == 3


def test_short_calls_are_not_measured_however_many_there_are():
    clock = Clock()
    timed = timer(clock)
    for _ in range(3):
        run(timed, clock, 0.02, calls=100)
    assert timed.unsettled == 0


def test_calls_that_compute_have_not_waited():
    clock = SimulatedClock()
    timed = timer(clock)
    run(timed, clock, 0.01)
    timed.start()
    begun = time.thread_time()
    while time.thread_time() - begun < 0.02:
        pass
    clock.advance(0.02)
    timed.stop(1)
    assert timed.unsettled == 0


def test_time_without_a_core_is_not_waiting(tmp_path):
    schedule = tmp_path / "schedstat"
    schedule.write_text("5 1000000000 3")
    times, clock = WaitTimes(schedule), Clock()
    first, second = timer(clock), timer(clock)
    for timed, seconds in ((first, 3.0), (second, 1.0)):
        run(timed, clock, seconds)
        run(timed, clock, seconds)
    schedule.write_text("5 3000000000 3")  # two of the four seconds
    times.settle([first, second])
    assert first._stats.waited == pytest.approx(1.5, abs=0.01)
    assert second._stats.waited == pytest.approx(0.5, abs=0.01)
    times.settle([first, second])
    assert first._stats.waited == pytest.approx(1.5, abs=0.01), "each second is counted once"


def test_without_the_kernels_count_all_of_it_is_waiting(tmp_path):
    times, clock = WaitTimes(tmp_path / "none"), Clock()
    timed = timer(clock)
    run(timed, clock, 1.0)
    run(timed, clock, 1.0)
    times.settle([timed])
    assert timed._stats.waited == pytest.approx(1.0, abs=0.01)


def test_a_real_sleep_is_found():
    from penstock.clock import SystemClock

    woken, sleeper = threading.Event(), timer(SystemClock())
    for _ in range(4):
        sleeper.start()
        woken.wait(0.01)
        sleeper.stop(1)
    assert sleeper.unsettled >= 0.025, "all but the first, before which calls were not known to be slow"
