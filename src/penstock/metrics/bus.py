"""The metrics bus: all reports go in here, every view comes out of here."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from penstock.control.migration import Segment
from penstock.metrics.histogram import Histogram
from penstock.metrics.stats import TaskStats
from penstock.plan.model import Plan, WorkerId
from penstock.redaction import redacted

_RATE_SECONDS = 3.0  # seconds a rate looks back: steady to the eye, and still quick to follow
_NOTES = 64  # of what happened that are kept: a screen or two


class WorkerState(Protocol):
    """What the bus needs of a report."""

    @property
    def tasks(self) -> dict[int, TaskStats]: ...
    @property
    def published(self) -> dict[int, list[list[Any]]]: ...
    @property
    def errors(self) -> list[str]: ...
    @property
    def segments(self) -> list[tuple[int, str, str, int, int]]: ...
    @property
    def cpu(self) -> float: ...
    @property
    def rss(self) -> int: ...
    @property
    def pending(self) -> int: ...
    @property
    def streams(self) -> list[tuple[int, int, int, int]] | None: ...
    @property
    def machine(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True)
class ComponentView:
    """One component, now. Rates are tuples a second over the last seconds; times are seconds."""

    component: str
    tasks: int
    rate_in: float
    rate_out: float
    queued: int
    execute_time: float | None
    latency_p50: float | None
    latency_p99: float | None
    errors: int
    last_error: str
    executed: int
    emitted: int
    acked: int = 0
    failed: int = 0
    state_keys: int = 0
    state_bytes: int = 0
    capacity: int = 0
    """Tuples its inboxes hold together; what is queued beyond waits on disk."""
    limit: float = math.inf
    """Tuples a second the most slowed of its tasks may send; ``inf``: none is."""


@dataclass(frozen=True)
class QueueView:
    """One task's inbox, now. Rates are tuples a second over the last seconds."""

    task: str
    """Its key: component and number."""
    length: int
    capacity: int
    overflowing: int
    """What waits on disk of ``length``."""
    rate_in: float
    rate_out: float
    limit: float
    """Tuples a second the task may send where it is slowed most; ``inf``: nowhere."""


@dataclass(frozen=True)
class Note:
    """Something that happened, and why; for people."""

    time: float
    """On the monotonic clock."""
    kind: str
    """``flow``, ``restart``, ``error`` …"""
    component: str
    """Which it is about; empty for the whole topology, or where the text says it."""
    text: str


@dataclass(frozen=True)
class StreamCount:
    """From one task to another."""

    tuples: int = 0
    bytes: int = 0
    """On the wire; in memory where both tasks share a worker."""

    def __add__(self, other: StreamCount) -> StreamCount:
        return StreamCount(self.tuples + other.tuples, self.bytes + other.bytes)


Pair = tuple[int, int]
"""Two tasks: sender, receiver."""


@dataclass(frozen=True)
class WorkerLoad:
    """What a worker has told of its load, and when that came, on the monotonic clock. CPU and memory are as new as
    its last report; streams and machine it tells less often."""

    time: float
    cpu: float
    rss: int
    detailed_at: float = -math.inf
    """When ``streams`` and ``machine`` came, which a report does not always have."""
    streams: Mapping[Pair, StreamCount] | None = None
    """Of its tasks, since the last start; None: not told yet, or the load monitor is off."""
    machine: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Load:
    """All workers of one start."""

    attempt: int
    workers: Mapping[WorkerId, WorkerLoad]
    busy: Mapping[int, float]
    """Seconds of each task."""


@dataclass
class _CounterSample:
    time: float
    stats: dict[int, TaskStats]


class MetricsBus:
    """Folds the reports of all workers into one view per component. Safe to use from several threads."""

    def __init__(self, plan: Plan, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._plan, self._monotonic = plan, monotonic
        self._lock = threading.Lock()
        self._attempt = 0
        self._now: dict[int, TaskStats] = {}
        self._base: dict[int, TaskStats] = {}
        self._samples: deque[_CounterSample] = deque()
        self._peaks: dict[int, int] = {}
        self._published: dict[int, list[list[Any]]] = {}
        self._errors: deque[str] = deque(maxlen=64)
        self._last_errors: deque[Note] = deque(maxlen=_NOTES)
        self._notes: deque[Note] = deque(maxlen=_NOTES)
        self._segments: deque[tuple[int, Segment]] = deque(maxlen=10_000)
        self._process: dict[WorkerId, tuple[float, int]] = {}
        self._pending: dict[WorkerId, int] = {}
        self._loads: dict[WorkerId, WorkerLoad] = {}
        self._base_streams: dict[Pair, StreamCount] = {}

    @property
    def plan(self) -> Plan:
        return self._plan

    def record(self, attempt: int, worker: WorkerId, report: WorkerState) -> None:
        """Take a worker's report."""
        with self._lock:
            if attempt != self._attempt:  # the counters of a new start begin at 0 again
                self._base = {task: _counted(self._total(task)) for task in self._plan.task}
                self._base_streams = self._total_streams()
                self._now, self._attempt = {}, attempt
                self._loads = {}
                self._pending.clear()
                self._samples.clear()
            for task, stats in report.tasks.items():
                self._note_pressure(task, self._now.get(task, TaskStats()), stats)
                self._now[task] = stats
                self._peaks[task] = max(stats.peak, self._peaks.get(task, 0))
            self._published.update(report.published)
            self._take_errors(report.errors)
            self._segments.extend((each[0], Segment(*each[1:])) for each in report.segments)
            self._process[worker] = (report.cpu, report.rss)
            self._pending[worker] = report.pending
            self._note_load(worker, report)
            self._sample()

    def note_call(self, attempt: int, task: int, seconds: float) -> None:
        """A worker's loop has not returned from the code of a task for so long; ``task`` -1: from no task's."""
        with self._lock:
            if attempt == self._attempt and task in self._now:
                self._now[task] = replace(self._now[task], in_call=seconds)

    def note_errors(self, errors: Sequence[str]) -> None:
        """What a process says that no longer has its worker, or not yet: nothing else of it counts."""
        with self._lock:
            self._take_errors(errors)

    def _take_errors(self, errors: Sequence[str]) -> None:
        texts = [redacted(text) for text in errors]
        self._errors.extend(texts)
        self._last_errors.extend(Note(self._monotonic(), "error", "", text) for text in texts)

    def forget_process_of(self, worker: WorkerId) -> None:
        """Another process has the worker: what the one before told of itself is no longer so. Its tasks count
        on."""
        with self._lock:
            self._loads.pop(worker, None)

    def continue_from(self, before: MetricsBus) -> None:
        """Take over what the bus of the topology's form before this one has: what was noted, and counted. A task
        that is no more leaves its counts to the one of its component that its number falls to."""
        totals = before.task_totals()
        with self._lock, before._lock:
            for old, stats in totals.items():
                task = before._plan.task[old]
                heirs = self._plan.tasks_of.get(task.component, ())
                if heirs:
                    heir = heirs[task.index % len(heirs)]
                    self._base[heir] = _sum([_counted(stats), self._base.get(heir, TaskStats())])
            for (source, target), count in before._total_streams().items():
                sources, targets = (
                    (before._plan.task[old].index, self._plan.tasks_of.get(before._plan.task[old].component, ()))
                    for old in (source, target)
                )
                if sources[1] and targets[1]:
                    pair = sources[1][sources[0] % len(sources[1])], targets[1][targets[0] % len(targets[1])]
                    self._base_streams[pair] = self._base_streams.get(pair, StreamCount()) + count
            for mine, theirs in (
                (self._notes, before._notes),
                (self._last_errors, before._last_errors),
                (self._errors, before._errors),
            ):
                newer = list(mine)
                mine.clear()
                mine.extend([*theirs, *newer])  # type: ignore[list-item] # notes with notes, texts with texts

    def note(self, kind: str, component: str, text: str) -> None:
        """Write down what was decided."""
        with self._lock:
            self._notes.append(Note(self._monotonic(), kind, component, redacted(text)))

    def view(self) -> list[ComponentView]:
        """All components, in the order of the topology."""
        with self._lock:
            self._sample()
            return [self._component(component, tasks) for component, tasks in self._plan.tasks_of.items()]

    def queues(self) -> list[QueueView]:
        """Every task's inbox, in the order of the tasks; of a spout only what it may send."""
        with self._lock:
            self._sample()
            oldest = self._samples[0]
            span = max(self._monotonic() - oldest.time, 1e-9)
            result = []
            for task in self._plan.tasks:
                now, then = self._now.get(task.id, TaskStats()), oldest.stats.get(task.id, TaskStats())
                result.append(
                    QueueView(
                        task.key,
                        now.queued,
                        now.capacity,
                        now.overflowing,
                        (now.arrived - then.arrived) / span,
                        (now.received - then.received) / span,
                        now.limit,
                    )
                )
            return result

    def published(self) -> dict[str, list[list[Any]]]:
        """The rows each component shows, task by task."""
        with self._lock:
            result: dict[str, list[list[Any]]] = {}
            for task in sorted(self._published):
                result.setdefault(self._plan.task[task].component, []).extend(self._published[task])
            return result

    def take_errors(self) -> list[str]:
        """The error texts that came since the last call."""
        with self._lock:
            taken = list(self._errors)
            self._errors.clear()
            return taken

    def notes(self) -> list[Note]:
        """The newest decisions that were written down, and where tasks slowed their senders; oldest first."""
        with self._lock:
            return list(self._notes)

    def last_errors(self) -> list[Note]:
        """The newest error texts, oldest first; other than ``take_errors`` it leaves them."""
        with self._lock:
            return list(self._last_errors)

    def pending(self) -> int:
        """Tuples on their way, as far as workers hold them; 0 once nothing is. One that waits for its ack is
        counted at its spout too."""
        with self._lock:
            return sum(self._pending.values())

    def task_totals(self) -> dict[int, TaskStats]:
        """Everything each task has counted since the topology was first started; queues and limits are those of
        now."""
        with self._lock:
            return {task: self._total(task) for task in self._plan.task}

    def totals(self) -> dict[str, TaskStats]:
        """Everything counted since the topology was first started, per component."""
        with self._lock:
            return {
                component: _sum([self._total(task) for task in tasks])
                for component, tasks in self._plan.tasks_of.items()
            }

    def segments(self) -> list[tuple[int, Segment]]:
        """The newest migrated segments that have ended, with the tasks that sent them."""
        with self._lock:
            return list(self._segments)

    def loads(self) -> dict[int, TaskStats]:
        """The same for a control loop: ``peak`` is the largest of all reports since the last call."""
        with self._lock:
            peaks, self._peaks = self._peaks, {}
            return {task: replace(now, peak=max(now.peak, peaks.get(task, 0))) for task, now in self._now.items()}

    def tasks(self) -> dict[int, TaskStats]:
        """The newest counters of each task since the last start. Not to be changed."""
        with self._lock:
            return dict(self._now)

    def processes(self) -> dict[WorkerId, tuple[float, int]]:
        """CPU seconds and resident bytes of each worker's process."""
        with self._lock:
            return dict(self._process)

    def streams(self) -> dict[Pair, StreamCount]:
        """What went from task to task since the topology was first started, as far as it was told: with the load
        monitor on."""
        with self._lock:
            return self._total_streams()

    def load(self) -> Load:
        """What the load monitor looks at, of the last start."""
        with self._lock:
            return Load(self._attempt, dict(self._loads), {task: now.busy for task, now in self._now.items()})

    def _note_load(self, worker: WorkerId, report: WorkerState) -> None:
        now, before = self._monotonic(), self._loads.get(worker)
        if report.machine:
            streams = None
            if report.streams is not None:
                streams = {(source, target): StreamCount(*count) for source, target, *count in report.streams}
            self._loads[worker] = WorkerLoad(now, report.cpu, report.rss, now, streams, report.machine)
        elif before is None:
            self._loads[worker] = WorkerLoad(now, report.cpu, report.rss)
        else:
            self._loads[worker] = replace(before, time=now, cpu=report.cpu, rss=report.rss)

    def _total_streams(self) -> dict[Pair, StreamCount]:
        total = dict(self._base_streams)
        for load in self._loads.values():
            for pair, count in (load.streams or {}).items():
                total[pair] = total.get(pair, StreamCount()) + count
        return total

    def _note_pressure(self, task: int, before: TaskStats, now: TaskStats) -> None:
        if (now.demand > 0) == (before.demand > 0):
            return
        of = self._plan.task[task]
        wait = f"{now.queued:,} of {now.capacity:,} tuples wait"
        text = f"{of.key} lets its senders go: {wait}"
        if now.demand:
            text = f"{of.key} slows its senders: {wait}, {now.demand:,.0f} a second came"
        self._notes.append(Note(self._monotonic(), "flow", of.component, text))

    def _sample(self) -> None:
        now = self._monotonic()
        if self._samples and now - self._samples[-1].time < _RATE_SECONDS / 12:
            return
        self._samples.append(_CounterSample(now, dict(self._now)))
        while len(self._samples) > 2 and self._samples[1].time <= now - _RATE_SECONDS:
            self._samples.popleft()

    def _component(self, component: str, tasks: tuple[int, ...]) -> ComponentView:
        now = _sum([self._now.get(task, TaskStats()) for task in tasks])
        then, span = TaskStats(), 0.0
        if self._samples:
            oldest = self._samples[0]
            then = _sum([oldest.stats.get(task, TaskStats()) for task in tasks])
            span = self._monotonic() - oldest.time
        total = _sum([now, *(self._base.get(task, TaskStats()) for task in tasks)])
        executed = now.executed - then.executed
        recent: Histogram = now.latency.minus(then.latency)
        return ComponentView(
            component,
            len(tasks),
            (now.received - then.received) / span if span else 0.0,
            (now.emitted - then.emitted) / span if span else 0.0,
            now.queued,
            (now.busy - then.busy) / executed if executed else None,
            recent.percentile(0.5),
            recent.percentile(0.99),
            total.errors,
            now.last_error,
            total.executed,
            total.emitted,
            total.acked,
            total.failed,
            now.state_keys,
            now.state_bytes,
            now.capacity,
            now.limit,
        )

    def _total(self, task: int) -> TaskStats:
        return _sum([self._now.get(task, TaskStats()), self._base.get(task, TaskStats())])


def _counted(stats: TaskStats) -> TaskStats:
    """Without what holds for a moment only."""
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
