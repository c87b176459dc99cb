"""Measures how long an executor's calls of user code take, and for how much of that they only waited."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from penstock.clock import Clock
from penstock.metrics.stats import TaskStats
from penstock.worker.calls import CurrentCall

_SLOW = 0.00025
"""Seconds per call. CPU time is measured only for executors whose calls take longer: reading it twice costs
0.8 us, and what waits takes longer than this."""


class CallTimer:
    """The times of one executor. Used by the worker's loop only."""

    __slots__ = ("_call", "_clock", "_cpu", "_slow", "_started", "_stats", "_task", "unsettled")

    def __init__(self, stats: TaskStats, clock: Clock, call: CurrentCall, task: int) -> None:
        self._stats, self._clock, self._call, self._task = stats, clock, call, task
        self._started = self._cpu = 0.0
        self._slow = False
        self.unsettled = 0.0
        """Seconds that passed in calls without using the CPU, since the last ``settle``."""

    def start(self) -> None:
        """Called before a chunk of calls."""
        self._started = self._clock.monotonic()
        self._call.running = (self._task, self._started)
        if self._slow:
            self._cpu = time.thread_time()

    def stop(self, calls: int) -> float:
        """Called after a chunk of calls. Returns its seconds."""
        self._call.running = None
        seconds = self._clock.monotonic() - self._started
        self._stats.busy += seconds
        if self._slow:
            self._stats.slow_calls += calls
            self.unsettled += max(0.0, seconds - (time.thread_time() - self._cpu))
        self._slow = seconds > _SLOW * max(calls, 1)
        return seconds

    def settle(self, share: float) -> None:
        """Count this share of the unsettled time as waited."""
        self._stats.waited += self.unsettled * share
        self.unsettled = 0.0


class WaitTimes:
    """Settles the timers of a worker's executors. Without CPU time passes for two reasons: the call waits, or all
    cores are busy with other threads. The kernel counts the latter per thread, so it can be subtracted."""

    def __init__(self, schedule: Path = Path("/proc/thread-self/schedstat")) -> None:
        """Created on the thread of the worker's loop."""
        self._schedule = schedule
        self._delayed = self._delay()

    def settle(self, timers: Sequence[CallTimer]) -> None:
        """Called before a report, on the thread of the worker's loop."""
        before, self._delayed = self._delayed, self._delay()
        idle = sum(timer.unsettled for timer in timers)
        if idle:
            share = max(0.0, 1 - (self._delayed - before) / idle)
            for timer in timers:
                timer.settle(share)

    def _delay(self) -> float:
        """Seconds for which this thread has waited for a core; 0 if the system does not count it."""
        try:
            return int(self._schedule.read_text().split()[1]) / 1e9
        except (OSError, ValueError, IndexError):
            return 0.0
