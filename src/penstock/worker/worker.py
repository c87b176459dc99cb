"""A worker: runs the tasks of one process and carries out the driver's commands.

``handle`` takes a command of the driver, ``finish`` the result of a background job, and ``turn`` runs the tasks
for a short time. One thread, the loop, calls all three; their results say what the host has to do. Nothing here
blocks on the network, sleeps, or depends on Spark. The reader thread uses only ``intake``, the heartbeat thread
only ``call``.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

from penstock.clock import Clock
from penstock.control.signals import TaskFlowState, TaskMessage
from penstock.errors import FramesLost, PenstockError, SinkRefused, SnapshotCorrupt, StateUnavailable
from penstock.metrics.stats import TaskStats
from penstock.plan.model import WorkerId
from penstock.protocol import commands
from penstock.protocol.commands import AssignWorker, Command
from penstock.protocol.events import (
    ChannelsWarm,
    EpochPublished,
    Event,
    LeavePrepared,
    SnapshotFailed,
    SnapshotWritten,
    StatePrefetched,
    StateUnreadable,
    TasksClosed,
    TasksOpened,
    WorkerFailed,
    WorkerLeft,
)
from penstock.protocol.job import Job
from penstock.worker.archive import WorkerArchive
from penstock.worker.background import BackgroundJob, JobResult, SnapshotResult, WriteSnapshot
from penstock.worker.calls import CurrentCall
from penstock.worker.epochs import WorkerEpochs
from penstock.worker.executor import Executor
from penstock.worker.flow_control import FlowControl
from penstock.worker.handover import restore_handover, take_handover
from penstock.worker.intake import Intake
from penstock.worker.outgoing import Outgoing, Row
from penstock.worker.phase import TRANSITIONS, IllegalTransition, WorkerPhase
from penstock.worker.publisher import Publisher
from penstock.worker.reports import Reporter
from penstock.worker.sender import FrameSender
from penstock.worker.spouts import fail_roots_of, settle
from penstock.worker.task_loop import TaskLoop
from penstock.worker.tasks import Tasks
from penstock.worker.tracking import AckCollector
from penstock.worker.waiting import WaitingFrames
from penstock.worker.wiring import Surroundings

LONGEST_WAIT = 1.0
"""Most seconds between two turns. Events wake the loop earlier, so this only limits the delay if one does not."""


_START_EVENTS = {ChannelsWarm, TasksOpened}
"""Sent once each, when their condition is met."""


class Turn(NamedTuple):
    """The result of a turn, for the host."""

    rows: list[Row]
    """Rows for the next stage, in order."""
    events: list[Event]
    """Events for the driver, in order. A ``TaskMessage`` or ``TaskFlowState`` is for the message board."""
    jobs: list[BackgroundJob]
    """Jobs to run in the background, in order."""
    wake_at: float
    """The time (monotonic) at which the next turn is due if nothing arrives before."""


class Inspection(NamedTuple):
    """The state of a worker, for tests and the local runner."""

    executors: tuple[Executor[Any], ...]
    errors: tuple[PenstockError, ...]
    """The newest errors of user code, newest last."""
    stats: dict[int, TaskStats]
    """The counters of each task; not copies."""
    pending: int


class Worker:
    """One worker; see the module. Its phases are in ``worker.phase``."""

    def __init__(
        self,
        id: WorkerId,
        job: Job,
        clock: Clock,
        assignment: AssignWorker,
        archive: WorkerArchive | None = None,
        skew: Callable[[], float] = lambda: 0.0,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """``archive``: the worker's files in the state directory; None if there is none. ``skew``: returns the
        seconds by which this machine's wall clock is ahead of the driver's, for reports. ``wake`` ends the wait
        before the next turn; components call it from their own threads."""
        plan, settings = job.plan, job.settings
        self.id = id
        self.call = CurrentCall()
        """The current call of user code. The heartbeat thread reads it."""
        self._phase = WorkerPhase.STANDING_BY if assignment.takes_over else WorkerPhase.CREATED
        self._job, self._clock, self._archive, self._wake = job, clock, archive, wake
        self.intake = Intake(id, job, clock, self._phase)
        """The input of the worker. The reader thread delivers frames to it."""
        self._out = Outgoing(id, plan, clock, settings.transport.linger, assignment.next)
        self._flow = FlowControl(plan, settings, clock, self._out.send, id)
        self._sender = FrameSender(id, plan, self.intake, self._flow)
        self._tasks = Tasks(id, job, clock)
        self._epochs = WorkerEpochs(
            settings.delivery.guarantee == "exactly_once", plan, self.intake, self._tasks, self._flow, self._out
        )
        self._acks = AckCollector(clock, job.ackers)
        self._publisher = Publisher(clock, self._tasks)
        self._reporter = Reporter(settings, clock, skew, self.intake, self._tasks, self._flow, self._sender)
        self._loop = TaskLoop(settings, clock, self.intake, self._tasks, self._flow, self._epochs, self._out)
        self._sent_once: set[type] = set()
        """The kinds of events already sent, of those that are sent only once."""
        self._undelivered: list[TaskMessage] = []
        """Signals for its tasks that arrived after the worker had left. If the worker closes, they are posted
        again for the process that now runs the tasks."""
        self._handlers = self._make_handlers()
        self._out.warm_up()

    def _make_handlers(self) -> dict[type, Callable[[Any], list[Event] | None]]:
        """The method that carries out each kind of command."""
        epochs, tasks = self._epochs, self._tasks
        return {
            commands.OpenTasks: self._open,
            commands.PrefetchState: self._prefetch,
            commands.CloseTasks: self._close,
            commands.RouteWorker: lambda command: [self._out.route(command.worker, command.slots)],
            commands.PrepareToLeave: self._prepare_to_leave,
            commands.CancelLeave: self._cancel_leave,
            commands.RootsSettled: lambda command: settle(tasks.spouts, command),
            commands.FailRoots: lambda command: fail_roots_of(tasks.acked_spouts, command.acker, self._job.ackers),
            commands.EndEpoch: lambda command: epochs.announce(command.epoch, command.last, command.overtakes),
            commands.TakeSnapshot: epochs.take_snapshot,
            commands.EpochCommitted: lambda command: self._publisher.on_committed(command.epoch),
            commands.SetMigrationRoutes: self._set_routes,
            commands.ProbeLinks: lambda command: self._out.probe(),
            commands.SetSpoutRate: lambda command: tasks.set_rate(command.component, command.rate),
            commands.HoldTimeouts: lambda command: tasks.hold_timeouts(command.held),
            commands.ActivateSpouts: lambda command: tasks.activate(),
            commands.DeactivateSpouts: lambda command: tasks.deactivate(),
            commands.HandOnUnfinished: lambda command: self._loop.unfinished.hand_on(),
            commands.StopTicks: lambda command: tasks.stop_ticks(),
            commands.RequestReport: lambda command: [self._report(command.number)],
            TaskMessage: self._on_message,
            TaskFlowState: self.intake.detectors.on_state,
        }

    # ---- input -----------------------------------------------------------------------------------------

    def handle(self, command: Command) -> list[Event]:
        """Carry out a command. Raises the errors of user code, with the name of the component."""
        return self._handlers[type(command)](command) or []

    def finish(self, result: JobResult) -> list[Event]:
        """Take the result of a background job. Raises ``SinkRefused`` if a sink cannot publish and a retry will
        not help."""
        if isinstance(result, SnapshotResult):
            if result.error:
                self._epochs.on_snapshot_failed(result.snapshot)
                return [SnapshotFailed(result.snapshot.epoch, result.error)]
            return [SnapshotWritten(result.snapshot.epoch, result.tasks, result.overtaken)]
        return [EpochPublished(result.epoch)] if self._publisher.finish(result) else []

    def fail(self, error: BaseException) -> list[Event]:
        """Called for an error from which the worker cannot recover; it does nothing more. Returns the events that
        report the error to the driver, none if an error was reported before."""
        if WorkerFailed in self._sent_once:
            return []
        self._sent_once.add(WorkerFailed)
        if self._phase not in (WorkerPhase.CLOSED, WorkerPhase.FAILED):
            self._become(WorkerPhase.FAILED)
        ours = as_penstock_error(self.id, error)
        # After these errors, a restart from the last commit may help.
        passing = isinstance(error, SinkRefused | FramesLost | StateUnavailable)
        return [self._report(), WorkerFailed(ours.where, ours.problem, ours.hint, passing)]

    def load(self) -> None:
        """Import the components' modules. This may take long, so the host calls it while the worker waits for
        other workers. Raises what the modules raise."""
        self._tasks.load()

    # ---- turns -----------------------------------------------------------------------------------------

    def turn(self) -> Turn:
        """Run the tasks for a short time. Errors of user code that concern a tuple are reported; other errors are
        raised."""
        runs = self._phase is WorkerPhase.OPEN or self._phase is WorkerPhase.LEAVING
        if runs:
            self._loop.run()
        events: list[Event] = [*self._acks.collect(self._tasks), *self._flow.take_states()]
        if not _START_EVENTS.issubset(self._sent_once):
            events += self._one_time_events()
        events += self._loop.unfinished.take_answer()
        if self._phase is WorkerPhase.LEAVING and self.has_left:
            events += self._leave()
        if self._clock.monotonic() >= self._reporter.due:
            events += [self._report(), *self._reporter.spout_progress()]
        rows = [] if self._phase is WorkerPhase.FAILED else self._out.take()
        jobs, now = self._jobs(), self._clock.monotonic()
        wait = min(LONGEST_WAIT, self._reporter.due - now, self._publisher.wait())
        if runs and wait > 0:
            wait = self._loop.idle_for(wait)
        return Turn(rows, events, jobs, now + wait)

    def _jobs(self) -> list[BackgroundJob]:
        jobs: list[BackgroundJob] = []
        for snapshot in self._epochs.take_snapshots():
            assert self._archive is not None, "a snapshot needs a place to be written to"
            jobs.append(WriteSnapshot(self._archive.write, snapshot))
        publish = self._publisher.next_job()
        if publish is not None:
            jobs.append(publish)
        return jobs

    def _one_time_events(self) -> list[Event]:
        events: list[Event] = []
        if ChannelsWarm not in self._sent_once and self.intake.warm:
            self._sent_once.add(ChannelsWarm)
            events.append(ChannelsWarm())
        if ChannelsWarm in self._sent_once and TasksOpened not in self._sent_once and self._phase.has_tasks:
            self._sent_once.add(TasksOpened)
            events.append(TasksOpened(self._tasks.stateful))
        return events

    def _report(self, probe: int = 0, final: bool = False) -> Event:
        return self._reporter.report(probe, final)

    # ---- the life of a worker --------------------------------------------------------------------------

    @property
    def phase(self) -> WorkerPhase:
        return self._phase

    def _become(self, phase: WorkerPhase) -> None:
        if phase not in TRANSITIONS[self._phase]:
            raise IllegalTransition(self._phase, phase)
        self._phase = self.intake.phase = phase

    @property
    def fatal(self) -> PenstockError | None:
        """The error of user code that stops the topology (setting ``delivery.on_error``); None if there is
        none."""
        return self._reporter.fatal

    @property
    def has_left(self) -> bool:
        """True if the worker has stopped in this slot because it moves to another one. Stays true after the tasks
        are closed."""
        return self._epochs.departure.left

    @property
    def gone(self) -> bool:
        """True if the slot is free for another worker: this one is closed, and either no sender sends to it any
        more after a move, or its tasks were never opened."""
        if self._phase is not WorkerPhase.CLOSED:
            return False
        return not self._tasks.is_open or (self.has_left and self.intake.ended)

    def validate(self) -> None:
        """Check the invariants between phase, intake and departure. Raises ``AssertionError``."""
        departure = self._epochs.departure
        assert self.intake.phase is self._phase
        assert not self._phase.has_tasks or self._tasks.is_open
        if self._phase in (WorkerPhase.OPEN, WorkerPhase.LEAVING, WorkerPhase.LEFT):
            assert departure.left == (self._phase is WorkerPhase.LEFT)
            assert departure.requested == (self._phase is WorkerPhase.LEAVING)
        assert not self._undelivered or self._phase in (WorkerPhase.LEFT, WorkerPhase.FAILED)

    def inspect(self) -> Inspection:
        """Return the state of the worker. Call it on the loop's thread."""
        reporter = self._reporter
        return Inspection(tuple(self._tasks.all), reporter.errors, reporter.stats(), reporter.pending())

    def _prefetch(self, command: commands.PrefetchState) -> list[Event]:
        assert self._archive is not None
        self._archive.prefetch(command.tasks)
        return [StatePrefetched(command.epoch)]

    def _open(self, command: commands.OpenTasks) -> list[Event] | None:
        if WorkerPhase.OPEN not in TRANSITIONS[self._phase]:
            raise IllegalTransition(self._phase, WorkerPhase.OPEN)  # before any user code runs
        try:
            restored = {} if self._archive is None else self._archive.restore(command.tasks, command.generation)
            if command.waiting is not None and self._archive is not None:
                plan, inboxes = self._job.plan, self.intake.inboxes
                waiting = WaitingFrames(self.id, plan, command.waiting, inboxes, command.generation)
                waiting.restore(self._archive.read_waiting)
        except SnapshotCorrupt as error:
            self._become(WorkerPhase.FAILED)
            return [StateUnreadable(str(error))]
        nodes = {WorkerId.parse(name): node for name, node in command.nodes.items()}
        around = Surroundings(
            self.id,
            nodes,
            self._clock,
            self.intake,
            self._flow,
            self.call,
            self._sender.of_task,
            self._sender.count,
            self._reporter.on_error,
            self._reporter.publisher,
            self._wake,
            command.generation,
            command.behind,
        )
        handover, intake = command.handover, self.intake
        first = (command.epoch if handover is None else handover.epoch) + 1
        if handover is None:
            intake.alignment.begin(first, intake.accept)
        self._tasks.open(around, restored, command.epoch, first)
        if handover is not None:
            restore_handover(handover, self._tasks, self._flow, intake.detectors, self._sender)
            intake.alignment.take_over(first, intake.accept)
            self._reporter.report_load_soon()
        self._become(WorkerPhase.OPEN)
        return self._reporter.spout_progress()

    def _close(self, command: commands.CloseTasks) -> list[Event]:
        """Close all tasks, even if one raises. Does nothing if they are closed already."""
        if self._phase is WorkerPhase.CLOSED:
            return []
        self._become(WorkerPhase.CLOSED)
        failure: PenstockError | None = None
        try:
            self._tasks.deactivate()
        except PenstockError as error:
            failure = error
        for each in self._tasks.close():
            self._reporter.add_error(each)
        self._flow.close()
        self.intake.close()
        events: list[Event] = [*self._acks.collect(self._tasks, everything=True)]  # with the sinks' last commit
        events += self._undelivered
        self._undelivered = []
        events += [self._report(final=True), TasksClosed()]
        return events if failure is None else events + self.fail(failure)

    # ---- moving to another slot ------------------------------------------------------------------------

    def _prepare_to_leave(self, command: commands.PrepareToLeave) -> list[Event]:
        if self._phase is not WorkerPhase.LEAVING:
            self._become(WorkerPhase.LEAVING)
        self._epochs.departure.request(command.commit, command.epoch)
        return [LeavePrepared(command.commit)]

    def _leave(self) -> list[Event]:
        """Called when the last epoch of the worker in this slot has ended."""
        self._become(WorkerPhase.LEFT)
        report = self._report()
        state = take_handover(
            self._epochs.number,
            self._reporter.stats(),
            self._tasks,
            self._flow,
            self.intake.detectors,
            self._sender,
        )
        return [report, WorkerLeft(state)]

    def _cancel_leave(self, command: commands.CancelLeave) -> None:
        if self._phase not in (WorkerPhase.LEAVING, WorkerPhase.LEFT):
            return
        self._epochs.resume()
        self._become(WorkerPhase.OPEN)
        messages, self._undelivered = self._undelivered, []
        for message in messages:
            self._flow.on_message(message)

    def _on_message(self, message: TaskMessage) -> list[Event] | None:
        if self._phase is WorkerPhase.CLOSED and self.has_left:
            return [message]  # for the process that runs the task now
        if self._phase is WorkerPhase.LEFT:
            self._undelivered.append(message)
        else:
            self._flow.on_message(message)
        return None

    def _set_routes(self, command: commands.SetMigrationRoutes) -> None:
        if command.version < self._sender.route_version:
            return  # a newer command was carried out before
        self._sender.route_version = command.version
        self._reporter.add_segments(self._tasks.set_migration_routes(command.component, command.routes))
        for executor in self._tasks.senders_to(command.component):
            self._flow.exclude_tasks(executor.context.task, command.component, tuple(command.routes))


def as_penstock_error(worker: WorkerId, error: BaseException) -> PenstockError:
    """Convert any other exception to a ``PenstockError`` for the driver and the user."""
    if isinstance(error, PenstockError):
        return error
    text = "".join(traceback.format_exception(error))
    return PenstockError(f"worker {worker}", f"internal error (please report it): {text}")
