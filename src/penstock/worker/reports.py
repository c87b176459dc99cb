"""The reports of a worker: counters of its tasks, errors of user code, and rows that components publish for
display."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from penstock.clock import Clock
from penstock.control.segments import Segment
from penstock.errors import PenstockError, SinkBusy
from penstock.metrics.machine import MachineProbe, spark_jvm
from penstock.metrics.stats import TaskStats
from penstock.protocol.events import Event, SpoutProgress, WorkerReport
from penstock.settings import Settings
from penstock.texts import MOST_ROWS, bounded_cell
from penstock.worker.call_timer import WaitTimes
from penstock.worker.flow_control import FlowControl
from penstock.worker.intake import Intake
from penstock.worker.sender import FrameSender
from penstock.worker.tasks import Tasks

REPORTS_PER_SAMPLE = 4
"""How many times per load sample of the load monitor a worker reports its streams. A load sample then misses less
than a quarter of its own end and contains less than a quarter of the previous one, equally each time."""
_MOST_ERRORS = 32
"""Number of the newest user errors that are kept. They are for display; the stats count all errors."""


class Reporter:
    """Collects errors, rows and segments between two reports, and creates the reports. Used by the worker's loop;
    any thread may call a function that ``on_error`` returned."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        skew: Callable[[], float],
        intake: Intake,
        tasks: Tasks,
        flow: FlowControl,
        sender: FrameSender,
    ) -> None:
        self.fatal: PenstockError | None = None
        """The first error that stops the topology (setting ``delivery.on_error``); None if there is none."""
        self._stops = settings.delivery.on_error == "stop"
        self._clock, self._skew, self._intake, self._tasks, self._flow, self._sender = (
            clock,
            skew,
            intake,
            tasks,
            flow,
            sender,
        )
        self._errors: deque[PenstockError] = deque(maxlen=_MOST_ERRORS)
        self._unreported: deque[str] = deque(maxlen=_MOST_ERRORS)
        self._published: dict[int, list[list[Any]]] = {}
        self._segments: list[tuple[int, Segment]] = []
        self._monitored = settings.monitored
        self._acker_processes = settings.delivery.acker_processes
        self._machine = MachineProbe(spark_jvm())
        self._wait_times = WaitTimes()
        self._load_interval = settings.monitor.interval / REPORTS_PER_SAMPLE
        self._load_due = self._due = 0.0
        self._interval = settings.lifecycle.metrics_interval

    # ---- between two reports ---------------------------------------------------------------------------

    def on_error(self, stats: TaskStats, may_stop: bool = True) -> Callable[[Exception], None]:
        """Make the function with which a task reports errors. ``may_stop``: an error may stop the topology
        (setting ``delivery.on_error``); a ``SinkBusy`` never does."""

        def note(error: Exception) -> None:
            assert isinstance(error, PenstockError)
            stats.errors += 1
            stats.last_error = str(error)
            self.add_error(error)
            stops = may_stop and self._stops and not isinstance(error, SinkBusy)
            if stops and self.fatal is None:
                self.fatal = error

        return note

    def add_error(self, error: PenstockError) -> None:
        self._errors.append(error)
        self._unreported.append(str(error))

    def publisher(self, task: int) -> Callable[[Sequence[Sequence[Any]]], None]:
        """Make the function with which a task publishes rows for display."""

        def publish(rows: Sequence[Sequence[Any]]) -> None:
            self._published[task] = [[bounded_cell(cell) for cell in row[:MOST_ROWS]] for row in rows[:MOST_ROWS]]

        return publish

    def add_segments(self, segments: Sequence[tuple[int, Segment]]) -> None:
        """Add migrated segments that have ended, each with the task that sent it."""
        self._segments += segments

    @property
    def errors(self) -> tuple[PenstockError, ...]:
        """The newest user errors, newest last."""
        return tuple(self._errors)

    # ---- reports ---------------------------------------------------------------------------------------

    @property
    def due(self) -> float:
        """When the next report is due, on the monotonic clock."""
        return self._due

    def report_load_soon(self) -> None:
        """Include streams and machine in the next report. Called when this process takes over the worker from
        another one: until then the driver ignored its reports."""
        self._load_due = 0.0

    def report(self, probe: int = 0, final: bool = False) -> WorkerReport:
        """Make a report, and set the time of the next one. ``probe``: the number of the request that it answers.
        ``final``: this is the last report, which always contains streams and machine."""
        self._due = self._clock.monotonic() + self._interval
        published, self._published = self._published, {}
        segments, self._segments = self._segments, []
        errors = [self._unreported.popleft() for _ in range(len(self._unreported))]
        with_load = final or self._clock.monotonic() >= self._load_due
        if with_load:
            self._load_due = self._clock.monotonic() + self._load_interval
        return WorkerReport(
            self._sender.frames_sent,
            sum(bolt.frames_done for bolt in self._tasks.bolts),
            self.pending(),
            time.process_time(),
            resident_bytes(),
            self.stats(),
            published,
            errors,
            [(task, each.branch, each.target, each.offset, each.length) for task, each in segments],
            probe,
            self._sender.streams() if with_load and self._monitored else None,
            self._machine.read() if with_load else {},
            self._skew(),
            self._settled_below(),
            time.thread_time(),
            self._intake.links.speeds(),
        )

    def spout_progress(self) -> list[Event]:
        """What acker processes must know about the worker's spouts, if there are any. Sent at once when the tasks
        are open, and with each report."""
        if not self._acker_processes or not self._tasks.acked_spouts:
            return []
        return [SpoutProgress(self._settled_below())]

    def pending(self) -> int:
        """The number of tuples in this worker: in inboxes, in execution, emitted but not sent, or not acked; plus
        the frames to relay, and the spouts whose failed tuples are not yet safe in a queue."""
        tasks, intake = self._tasks, self._intake
        held = sum(bolt.queued + bool(bolt.busy) for bolt in tasks.bolts)
        held += sum(spout.pending.count for spout in tasks.spouts if spout.pending is not None)
        held += sum(not spout.settled for spout in tasks.spouts)
        held += intake.alignment.held + self._flow.held + len(intake.relay)
        return held + sum(executor.waiting() for executor in tasks.all)

    def stats(self) -> dict[int, TaskStats]:
        """The counters of each task, with current queue lengths; empty before the tasks are open. The objects
        continue to change, so the caller must encode or copy them."""
        tasks, detectors, now = self._tasks, self._intake.detectors, self._clock.monotonic()
        self._wait_times.settle([executor.timer for executor in tasks.all])
        for bolt in tasks.bolts:
            stats = bolt.stats
            stats.queued, stats.overflowing = bolt.queued, bolt.inbox.overflowing
            stats.capacity = bolt.inbox.capacity
            stats.peak, stats.demand = detectors.pressure(bolt.context.task)
            inside, stats.arrived_bytes = bolt.arrived_inside
            stats.arrived = inside + bolt.inbox.behind
        for sink in tasks.sinks:
            sink.stats.away = sink.unavailable_for(now)
        for executor in tasks.all:
            executor.stats.limit = self._flow.rate(executor.context.task)
            state = executor.context.state
            executor.stats.state_keys, executor.stats.state_bytes = state.counted, state.bytes
        for spout in tasks.spouts:
            spout.stats.limit = min(spout.stats.limit, spout.pace.rate)
            spout.stats.lag = spout.lag()
        return {executor.context.task: executor.stats for executor in tasks.all}

    def _settled_below(self) -> dict[int, int]:
        """For each spout task that tracks acks, the number below which all its messages are settled."""
        return {
            spout.context.task: spout.pending.oldest for spout in self._tasks.spouts if spout.pending is not None
        }


def resident_bytes() -> int:
    """The resident memory of this process; 0 if the system does not report it."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
