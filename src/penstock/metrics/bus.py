"""The metrics bus: workers' reports go in, views for the terminal, the web page and the control loops come out."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from penstock.control.segments import Segment
from penstock.metrics.counters import TaskCounters
from penstock.metrics.event_log import EventLog
from penstock.metrics.load_table import LoadTable, WorkerState
from penstock.metrics.stats import TaskStats
from penstock.metrics.views import ComponentView, Load, Note, Pair, QueueView, StreamCount, WorkerLoad
from penstock.plan.model import Plan, WorkerId

__all__ = [
    "ComponentView",
    "Load",
    "MetricsBus",
    "Note",
    "Pair",
    "QueueView",
    "StreamCount",
    "WorkerLoad",
    "WorkerState",
]

_SEGMENTS = 10_000
"""Migrated segments that are kept for display: a few MB."""


class MetricsBus:
    """Combines the reports of all workers into one view per component. Thread-safe."""

    def __init__(self, plan: Plan, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._plan, self._monotonic = plan, monotonic
        self._lock = threading.Lock()
        self._attempt = 0
        self._counters = TaskCounters(plan)
        self._events = EventLog()
        self._published: dict[int, list[list[Any]]] = {}
        self._segments: deque[tuple[int, Segment]] = deque(maxlen=_SEGMENTS)
        self._process: dict[WorkerId, tuple[float, int]] = {}
        self._pending: dict[WorkerId, int] = {}
        self._loads = LoadTable()

    @property
    def plan(self) -> Plan:
        return self._plan

    def record(self, attempt: int, worker: WorkerId, report: WorkerState) -> None:
        """Add a worker's report. ``attempt`` is the number of its query run."""
        with self._lock:
            if attempt != self._attempt:
                self._start_run(attempt)
            for task, stats in report.tasks.items():
                self._note_backpressure(task, self._counters.newest.get(task, TaskStats()), stats)
                self._counters.update(task, stats)
            self._published.update(report.published)
            self._events.add_errors(self._monotonic(), report.errors)
            self._segments.extend((each[0], Segment(*each[1:])) for each in report.segments)
            self._process[worker] = (report.cpu, report.rss)
            self._pending[worker] = report.pending
            self._loads.record(self._monotonic(), worker, report)
            self._counters.sample(self._monotonic())

    def note_call(self, attempt: int, task: int, seconds: float) -> None:
        """Record for how long a worker has been inside the code of a task. ``task`` is -1 if it is inside no
        task's code."""
        with self._lock:
            newest = self._counters.newest.get(task)
            if attempt == self._attempt and newest is not None:
                self._counters.newest[task] = replace(newest, in_call=seconds)

    def note_errors(self, errors: Sequence[str]) -> None:
        """Record the errors of a process that does not run its worker any more, or not yet. Nothing else of its
        report counts."""
        with self._lock:
            self._events.add_errors(self._monotonic(), errors)

    def forget_process_of(self, worker: WorkerId) -> None:
        """Drop the load of a worker's process, because another process runs the worker now. The counters of its
        tasks continue."""
        with self._lock:
            self._loads.forget(worker)

    def continue_from(self, before: MetricsBus) -> None:
        """Take over the notes and totals of the bus of the replaced topology. The totals of task i of a component
        go to task i mod n, where n is its new number of tasks."""
        totals = before.task_totals()
        with self._lock, before._lock:
            for old, stats in totals.items():
                successor = _successor(before._plan, self._plan, old)
                if successor is not None:
                    self._counters.add_earlier(successor, stats)
            for (source, target), count in before._loads.streams().items():
                sender, receiver = (
                    _successor(before._plan, self._plan, source),
                    _successor(before._plan, self._plan, target),
                )
                if sender is not None and receiver is not None:
                    self._loads.add_earlier((sender, receiver), count)
            self._events.prepend(before._events)

    def note(self, kind: str, component: str, text: str) -> None:
        """Record a decision for display."""
        with self._lock:
            self._events.add_note(self._monotonic(), kind, component, text)

    def view(self) -> list[ComponentView]:
        """All components, in the order of the topology."""
        with self._lock:
            now = self._monotonic()
            self._counters.sample(now)
            return [self._counters.component_view(component, now) for component in self._plan.tasks_of]

    def queues(self) -> list[QueueView]:
        """The inboxes of all tasks, in the order of the tasks. For a spout only ``limit`` is meaningful."""
        with self._lock:
            now = self._monotonic()
            self._counters.sample(now)
            return self._counters.queue_views(now)

    def published(self) -> dict[str, list[list[Any]]]:
        """The rows that each component shows in the live view, task by task."""
        with self._lock:
            result: dict[str, list[list[Any]]] = {}
            for task in sorted(self._published):
                result.setdefault(self._plan.task[task].component, []).extend(self._published[task])
            return result

    def take_errors(self) -> list[str]:
        """The error texts since the last call."""
        with self._lock:
            return self._events.take_unread()

    def notes(self) -> list[Note]:
        """The newest decisions and changes of backpressure, oldest first."""
        with self._lock:
            return list(self._events.notes)

    def last_errors(self) -> list[Note]:
        """The newest error texts, oldest first. Unlike ``take_errors`` it does not remove them."""
        with self._lock:
            return list(self._events.errors)

    def pending(self) -> int:
        """The number of tuples that workers hold; 0 if none is being processed. A tuple that waits for its ack
        also counts at its spout."""
        with self._lock:
            return sum(self._pending.values())

    def task_totals(self) -> dict[int, TaskStats]:
        """The counters of each task since the topology was first started. Queues and limits are the newest."""
        with self._lock:
            return {task: self._counters.total(task) for task in self._plan.task}

    def totals(self) -> dict[str, TaskStats]:
        """The counters of each component since the driver started, over all query runs."""
        with self._lock:
            return {component: self._counters.component_total(component) for component in self._plan.tasks_of}

    def segments(self) -> list[tuple[int, Segment]]:
        """The newest closed segments of migrated tuples, with the tasks that sent them."""
        with self._lock:
            return list(self._segments)

    def loads(self) -> dict[int, TaskStats]:
        """The newest counters of each task for a control loop. ``peak`` is the maximum of all reports since the
        last call, so only one loop may call it."""
        with self._lock:
            return self._counters.take_peaks()

    def tasks(self) -> dict[int, TaskStats]:
        """The newest counters of each task in the current query run. Do not change them."""
        with self._lock:
            return dict(self._counters.newest)

    def processes(self) -> dict[WorkerId, tuple[float, int]]:
        """CPU seconds and resident bytes of each worker's process."""
        with self._lock:
            return dict(self._process)

    def streams(self) -> dict[Pair, StreamCount]:
        """The tuples sent between tasks since the topology was first started. Only reported while the load monitor
        is on."""
        with self._lock:
            return self._loads.streams()

    def load(self) -> Load:
        """The input of the load monitor, for the current query run."""
        with self._lock:
            busy = {task: stats.busy for task, stats in self._counters.newest.items()}
            return Load(self._attempt, dict(self._loads.workers), busy, dict(self._loads.links))

    def _start_run(self, attempt: int) -> None:
        self._counters.start_run()
        self._loads.start_run()
        self._attempt = attempt
        self._pending.clear()

    def _note_backpressure(self, task: int, before: TaskStats, now: TaskStats) -> None:
        if (now.demand > 0) == (before.demand > 0):
            return
        of = self._plan.task[task]
        queued = f"{now.queued:,} of {now.capacity:,} tuples are queued"
        text = f"{of.key} no longer slows its senders: {queued}"
        if now.demand:
            text = f"{of.key} slows its senders: {queued}, and {now.demand:,.0f} per second arrived"
        self._events.add_note(self._monotonic(), "flow", of.component, text)


def _successor(before: Plan, now: Plan, task: int) -> int | None:
    """The task of plan ``now`` that continues the counters of a task of plan ``before``."""
    old = before.task[task]
    tasks = now.tasks_of.get(old.component, ())
    return tasks[old.index % len(tasks)] if tasks else None
