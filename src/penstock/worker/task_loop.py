"""One turn of a worker's tasks: the order in which they run, when their tuples are sent, and how long the worker
may wait before the next turn."""

from __future__ import annotations

from penstock.clock import Clock
from penstock.control.spout_pause import SpoutPause
from penstock.settings import Settings
from penstock.worker.epochs import WorkerEpochs
from penstock.worker.flow_control import FlowControl
from penstock.worker.intake import Intake
from penstock.worker.outgoing import Linger, Outgoing
from penstock.worker.tasks import Tasks
from penstock.worker.unfinished import UnfinishedMessages


class TaskLoop:
    """Runs the tasks of a worker. Used by the worker's loop only."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        intake: Intake,
        tasks: Tasks,
        flow: FlowControl,
        epochs: WorkerEpochs,
        out: Outgoing,
    ) -> None:
        self._clock, self._pause = clock, SpoutPause(settings.transport.spout_pause)
        self._intake, self._tasks, self._flow, self._epochs, self._out = intake, tasks, flow, epochs, out
        self._linger = Linger(settings, tasks.most_targets)
        self._spout_emitted = False
        self.unfinished = UnfinishedMessages(tasks)

    def run(self) -> None:
        """Run one turn: relay frames, run ticks and bolts, then the end of the epoch if no bolt worked, then
        spouts if no epoch is ending, and send the tuples that are due."""
        tasks, intake, out = self._tasks, self._intake, self._out
        self._epochs.relay_frames()
        intake.refill()
        tasks.run_ticks(allowed=not self._epochs.half_prepared and not self._epochs.stopped)
        for spout in tasks.spouts:
            spout.expire()
        self._flow.release()
        before, self._spout_emitted = self._spout_emitted, self._run_tasks()
        if self._spout_emitted or tasks.bolts or out.needs_nudge or tasks.has_unsent_rows():
            flat_out = before and self._spout_emitted  # a spout that emits in every turn soon fills frames
            idle = not flat_out and not intake.relay and not tasks.may_run
            self._flush(idle)
            out.nudge(idle)
        intake.observe()

    def _run_tasks(self) -> bool:
        """Run bolts, the end of the epoch, or spouts: the first of these that has something to do. Returns whether
        a spout emitted."""
        if self._epochs.try_to_overtake() or self._epochs.stopped:
            return False
        if self._tasks.run_bolts():
            return False  # input first: what waits in inboxes is older than what a spout would emit
        if self._epochs.try_to_end():
            return False  # a spout must not emit between the end of an epoch and its snapshot
        emitted = self._tasks.run_spouts()
        self._pause.note(emitted)
        return emitted

    def _flush(self, idle: bool) -> None:
        """Send full frames, and all other waiting tuples if they are due."""
        now, tasks = self._clock.monotonic(), self._tasks
        emits = idle and tasks.may_emit()  # called only if needed, because it measures holds
        due = self._linger.is_due(now, idle, emits)
        if due and tasks.has_unsent_rows():
            self._linger.sent(now)
        tasks.flush(only_full=not due)
        self._linger.note(now, tasks.has_unsent_rows())

    def idle_for(self, longest: float) -> float:
        """Seconds until the next turn is due if nothing arrives before, at most ``longest``; 0 if it is due
        now."""
        tasks, intake, out = self._tasks, self._intake, self._out
        if intake.relay or (tasks.may_run and not self._epochs.holds_tasks):
            return 0.0
        if self._epochs.overtakes and not self._epochs.waits_for_systems:
            return 0.0
        if self._epochs.over and not tasks.busy and not self._epochs.waits_for_systems:
            return 0.0
        if intake.may_refill:
            return 0.0
        pause = 0.0 if self._spout_emitted else self._pause.seconds
        only_spouts = not self._linger.waiting and not out.needs_nudge and not tasks.bolts
        if only_spouts and tasks.may_emit():
            return pause  # so short that nothing else needs to be checked
        now = self._clock.monotonic()
        waits = [longest, self._flow.wait(), intake.detectors.wait()]
        waits += tasks.waits(now, ticking=not self._epochs.half_prepared and not self._epochs.stopped)
        emits = tasks.may_emit()  # called after the waits, so that room that has become free meanwhile is noticed
        if emits:
            waits.append(pause)
        return max(0.0, min(*waits, self._linger.wait(now, emits), out.wait()))
