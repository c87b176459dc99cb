"""The counters of all tasks: their newest values, their totals over all query runs, and recent rates."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace

from penstock.metrics.histogram import Histogram
from penstock.metrics.stats import TaskStats
from penstock.metrics.views import ComponentView, QueueView
from penstock.plan.model import Plan

RATE_SECONDS = 3.0
"""Seconds over which rates are measured: long enough for a steady display, short enough to follow changes."""
_SAMPLES = 12
"""Samples per ``RATE_SECONDS``, that is one every quarter of a second: the interval of a rate varies by no
more."""


@dataclass
class _CounterSample:
    time: float
    stats: dict[int, TaskStats]


class TaskCounters:
    """The counters of the tasks of one plan. Not thread-safe: the metrics bus holds its lock during every call."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.newest: dict[int, TaskStats] = {}
        """The last report of each task. Its counters start at 0 with each query run."""
        self._earlier: dict[int, TaskStats] = {}
        """The totals of earlier query runs."""
        self._samples: deque[_CounterSample] = deque()
        self._peaks: dict[int, int] = {}

    def start_run(self) -> None:
        """Add the counters of the last query run to the totals, because those of the next start at 0."""
        self._earlier = {task: _without_moments(self.total(task)) for task in self._plan.task}
        self.newest = {}
        self._samples.clear()

    def update(self, task: int, stats: TaskStats) -> None:
        self.newest[task] = stats
        self._peaks[task] = max(stats.peak, self._peaks.get(task, 0))

    def add_earlier(self, task: int, stats: TaskStats) -> None:
        """Add the totals of a task of the previous plan to those of this task."""
        self._earlier[task] = _sum([_without_moments(stats), self._earlier.get(task, TaskStats())])

    def sample(self, now: float) -> None:
        """Keep a sample for rates. Called at every report and view; does nothing if the last sample is recent."""
        if self._samples and now - self._samples[-1].time < RATE_SECONDS / _SAMPLES:
            return
        self._samples.append(_CounterSample(now, dict(self.newest)))
        while len(self._samples) > 2 and self._samples[1].time <= now - RATE_SECONDS:
            self._samples.popleft()

    def total(self, task: int) -> TaskStats:
        """The counters of a task over all query runs. Queues and limits are the newest."""
        return _sum([self.newest.get(task, TaskStats()), self._earlier.get(task, TaskStats())])

    def component_total(self, component: str) -> TaskStats:
        return _sum([self.total(task) for task in self._plan.tasks_of[component]])

    def take_peaks(self) -> dict[int, TaskStats]:
        """The newest counters, with ``peak`` as the maximum of all reports since the last call."""
        peaks, self._peaks = self._peaks, {}
        return {task: replace(now, peak=max(now.peak, peaks.get(task, 0))) for task, now in self.newest.items()}

    def queue_views(self, now: float) -> list[QueueView]:
        oldest = self._samples[0]
        span = max(now - oldest.time, 1e-9)
        result = []
        for task in self._plan.tasks:
            newest, then = self.newest.get(task.id, TaskStats()), oldest.stats.get(task.id, TaskStats())
            result.append(
                QueueView(
                    task.key,
                    newest.queued,
                    newest.capacity,
                    newest.overflowing,
                    (newest.arrived - then.arrived) / span,
                    (newest.received - then.received) / span,
                    newest.limit,
                )
            )
        return result

    def component_view(self, component: str, now: float) -> ComponentView:
        tasks = self._plan.tasks_of[component]
        newest = _sum([self.newest.get(task, TaskStats()) for task in tasks])
        then, span = TaskStats(), 0.0
        if self._samples:
            oldest = self._samples[0]
            then = _sum([oldest.stats.get(task, TaskStats()) for task in tasks])
            span = now - oldest.time
        total = _sum([newest, *(self._earlier.get(task, TaskStats()) for task in tasks)])
        executed = newest.executed - then.executed
        recent: Histogram = newest.latency.minus(then.latency)
        return ComponentView(
            component,
            len(tasks),
            (newest.received - then.received) / span if span else 0.0,
            (newest.emitted - then.emitted) / span if span else 0.0,
            newest.queued,
            (newest.busy - then.busy) / executed if executed else None,
            recent.percentile(0.5),
            recent.percentile(0.99),
            total.errors,
            newest.last_error,
            total.executed,
            total.emitted,
            total.acked,
            total.failed,
            newest.state_keys,
            newest.state_bytes,
            newest.capacity,
            newest.limit,
        )


def _without_moments(stats: TaskStats) -> TaskStats:
    """The counters without the values that only describe the moment of the report."""
    return replace(
        stats,
        queued=0,
        overflowing=0,
        capacity=0,
        limit=math.inf,
        state_keys=0,
        state_bytes=0,
        lag={},
        in_call=0.0,
        away=0.0,
    )


def _sum(stats: list[TaskStats]) -> TaskStats:
    result = TaskStats()
    for one in stats:
        result.arrived += one.arrived
        result.arrived_bytes += one.arrived_bytes
        result.received += one.received
        result.received_bytes += one.received_bytes
        result.executed += one.executed
        result.expired += one.expired
        result.late += one.late
        result.emitted += one.emitted
        result.sent += one.sent
        result.sent_bytes += one.sent_bytes
        result.errors += one.errors
        result.acked += one.acked
        result.failed += one.failed
        result.timed_out += one.timed_out
        result.given_up += one.given_up
        result.written += one.written
        result.in_call = max(result.in_call, one.in_call)
        result.away = max(result.away, one.away)
        result.held_back += one.held_back
        result.busy += one.busy
        result.queued += one.queued
        result.overflowing += one.overflowing
        result.capacity += one.capacity
        result.limit = min(result.limit, one.limit)
        result.state_keys += one.state_keys
        result.state_bytes += one.state_bytes
        result.lag = {**result.lag, **one.lag}
        result.last_error = result.last_error or one.last_error
        result.latency = result.latency.plus(one.latency)
    return result
