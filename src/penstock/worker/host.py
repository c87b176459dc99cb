"""The host of a worker: it passes commands, signals, frames and job results to the worker, sends the worker's
events, runs its jobs and returns its rows.

A host is connected to the driver by a ``WorkerTransport``: on Spark a socket (``protocol.client``), in the local
runner memory (``testing.memory``). Everything else is the same for both.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import pyarrow as pa

from penstock.clock import Clock
from penstock.control.signals import TaskFlowState, TaskMessage
from penstock.faults import CrashPoint
from penstock.protocol.commands import Command
from penstock.protocol.events import (
    AckTally,
    EpochPublished,
    Event,
    Heartbeat,
    RootsFailed,
    SnapshotWritten,
    SpoutProgress,
)
from penstock.protocol.message_board import MessageBoard
from penstock.worker.background import BackgroundJob, JobResult, WriteSnapshot
from penstock.worker.outgoing import Row
from penstock.worker.phase import WorkerPhase
from penstock.worker.worker import LONGEST_WAIT, Worker

_READER_RETRY = 0.05
"""Seconds after which a reader that waits for room tries again and posts signals. Usually the loop wakes it
sooner."""


class WorkerTransport(Protocol):
    """A worker's connection to the driver. No method blocks, and any thread may call them."""

    @property
    def inbox(self) -> deque[Command]: ...

    def send(self, event: Event) -> None: ...

    def send_now(self, event: Event) -> None:
        """As ``send``, but as soon as possible. Used for acks and signals."""

    def listen(self, kind: type[Any], listener: Callable[[Any], None]) -> None:
        """Pass commands of this type to ``listener`` instead of ``inbox``. Any thread may call the listener."""


class JobRunner(Protocol):
    """Runs background jobs one after the other, and appends the result of each, or its exception, to
    ``results``."""

    results: deque[JobResult | BaseException]

    def submit(self, job: BackgroundJob) -> None: ...

    def close(self) -> None: ...


class InlineJobs:
    """Runs each job at once, on the loop's thread. ``submit`` raises the exception of a job."""

    def __init__(self) -> None:
        self.results: deque[JobResult | BaseException] = deque()

    def submit(self, job: BackgroundJob) -> None:
        self.results.append(job.run())

    def close(self) -> None:
        """Does nothing."""


class ThreadedJobs:
    """Runs the jobs on a separate thread, which is started with the first job. ``wake`` is called on that thread
    after each job."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self.results: deque[JobResult | BaseException] = deque()
        self._wake = wake
        self._jobs: queue.SimpleQueue[BackgroundJob | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, job: BackgroundJob) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="worker-jobs", daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def close(self) -> None:
        """End the thread after the submitted jobs. Returns at once."""
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self.results.append(job.run())
            except BaseException as error:  # the loop reports any error to the driver
                self.results.append(error)
            self._wake()


class WorkerHost:
    """Drives one worker. The reader thread calls ``deliver`` and ``fail``, the heartbeat thread ``heartbeat``, and
    the loop's thread all other methods."""

    def __init__(
        self,
        worker: Worker,
        transport: WorkerTransport,
        jobs: JobRunner,
        open_board: Callable[[Callable[[TaskMessage | TaskFlowState], None]], MessageBoard],
        clock: Clock,
        crash: CrashPoint,
        wake: Callable[[], None] = lambda: None,
        send_to_acker: Callable[[AckTally | RootsFailed | SpoutProgress], None] | None = None,
    ) -> None:
        """``open_board`` connects to the message board; its argument is called with each signal for the worker's
        tasks. ``wake`` ends the loop's wait; any thread may call it. ``send_to_acker`` sends an event to an acker
        process; None: the driver is the only acker."""
        self.worker = worker
        self.failure: BaseException | None = None
        """The first error of the worker; None while it has not failed."""
        self._transport, self._jobs, self._now = transport, jobs, clock.monotonic
        self._open_board, self._crash, self._wake = open_board, crash, wake
        self._signals: deque[TaskMessage | TaskFlowState] = deque()
        """Signals from the message board for the worker's tasks, not handled yet."""
        self._board: MessageBoard | None = None
        self._post_lock = threading.Lock()
        self._space = threading.Event()
        """Set by the loop after each step while the reader waits for room."""
        self._reader_waits = self._ended = False
        self._reader_error: BaseException | None = None
        self._wake_at = 0.0
        self._steps = self._steps_at_heartbeat = 0
        """Number of steps so far, and at the last heartbeat."""
        self._send: dict[type, Callable[[Any], None]] = {
            AckTally: send_to_acker or transport.send_now,
            RootsFailed: send_to_acker or transport.send_now,
            SpoutProgress: send_to_acker or (lambda event: None),  # the driver knows it from reports
            TaskMessage: self._post,
            TaskFlowState: self._publish,
            SnapshotWritten: self._report_snapshot,
            EpochPublished: self._report_published,
        }
        """The functions that send the types of events for which ``transport.send`` is not enough."""
        self._join_board()

    # ---- the loop --------------------------------------------------------------------------------------

    def load(self) -> None:
        """Import the components' modules. An error is reported to the driver."""
        try:
            self.worker.load()
        except BaseException as error:  # a user's module may raise anything
            self._fail(error)

    def step(self) -> list[Row]:
        """Pass the input that has arrived to the worker, run one turn, and return the rows for the next stage. An
        error is reported to the driver and stored in ``failure``."""
        self._steps += 1
        try:
            self._take_input()
            turn = self.worker.turn()
            self._send_all(turn.events)
            if self.worker.intake.has_messages:
                self._post_signals()
            for job in turn.jobs:
                self._submit(job)
            if self.worker.fatal is not None:
                raise self.worker.fatal
        except BaseException as error:  # the driver must know of any error before the process ends
            self._fail(error)
            self._wake_at = self._now() + LONGEST_WAIT
            return []
        if self._reader_waits:
            self._space.set()
        self._wake_at = turn.wake_at
        return turn.rows

    def take_input(self) -> None:
        """Pass the commands, signals and job results that have arrived to the worker, without a turn. The next
        step is due at once."""
        self._wake_at = self._now()
        try:
            self._take_input()
        except BaseException as error:  # as in ``step``
            self._fail(error)

    def _take_input(self) -> None:
        worker = self.worker
        error, self._reader_error = self._reader_error, None
        if error is not None and worker.phase is not WorkerPhase.CLOSED:
            raise error  # before CloseTasks is handled, because a closed worker ignores the reader's errors
        while self._signals:
            self._send_all(worker.handle(self._signals.popleft()))
        inbox = self._transport.inbox
        while inbox:
            self._send_all(worker.handle(inbox.popleft()))
            self._join_board()
        results = self._jobs.results
        while results:
            result = results.popleft()
            if isinstance(result, BaseException):
                raise result
            self._send_all(worker.finish(result))

    def wait(self) -> float:
        """Seconds until the next step is due, unless input arrives earlier."""
        return max(0.0, self._wake_at - self._now())

    def close(self) -> None:
        """Called when the loop has ended: releases the reader, ends the jobs and disconnects from the message
        board."""
        self._ended = True
        self._space.set()
        self._jobs.close()
        if self._board is not None:
            self._board.close(moved=self.worker.has_left)

    def _submit(self, job: BackgroundJob) -> None:
        if isinstance(job, WriteSnapshot):
            self._crash("snapshotted" if self.worker.id.stage else "marked", job.snapshot.epoch)
        self._jobs.submit(job)

    def _fail(self, error: BaseException) -> None:
        self.failure = self.failure or error
        self._send_all(self.worker.fail(error))

    # ---- events ----------------------------------------------------------------------------------------

    def _send_all(self, events: Iterable[Event]) -> None:
        for event in events:
            self._send.get(type(event), self._transport.send)(event)

    def _report_snapshot(self, event: SnapshotWritten) -> None:
        self._transport.send(event)
        self._crash("reported", event.epoch)

    def _report_published(self, event: EpochPublished) -> None:
        self._crash("published", event.epoch)
        self._transport.send(event)

    # ---- signals ---------------------------------------------------------------------------------------

    def _join_board(self) -> None:
        """Connect to the message board when the host is created. A worker that takes over from another one
        connects when its tasks are open, because until then the other worker receives their signals."""
        if self._board is None and (self.worker.phase.has_tasks or not self.worker.phase.shares_input):
            self._board = self._open_board(self._on_signal)

    def _on_signal(self, signal: TaskMessage | TaskFlowState) -> None:
        """Called on a thread of the message board."""
        self._signals.append(signal)
        self._wake()

    def _post(self, message: TaskMessage) -> None:
        if self._board is not None:
            self._board.post(message)

    def _publish(self, state: TaskFlowState) -> None:
        if self._board is not None:
            self._board.publish(state)

    def _post_signals(self) -> None:
        """Post the signals of the overload detectors. The reader thread also calls this, because the loop may be
        inside a long ``execute``. The lock keeps the signals in order."""
        if self._board is None:
            return
        with self._post_lock:
            while (message := self.worker.intake.take_message()) is not None:
                self._board.post(message)

    # ---- the reader thread -----------------------------------------------------------------------------

    def deliver(self, frame: pa.Buffer) -> None:
        """Pass a frame to the worker. Waits while there is no room for it, neither in memory nor on disk. If the
        loop has ended, the frame is dropped. If the worker is closed, an error is ignored: nobody needs the frame
        any more, but the reader must go on so that the senders are not blocked."""
        try:
            self._deliver(frame)
        except Exception:  # the loop may have closed the worker between the check of its phase and the write
            if self.worker.phase is not WorkerPhase.CLOSED:
                raise

    def _deliver(self, frame: pa.Buffer) -> None:
        intake = self.worker.intake
        while not self._ended and not intake.offer(frame):
            self._space.clear()
            self._reader_waits = True
            if intake.offer(frame):  # the loop made room before it could see that the reader waits
                break
            self._post_signals()
            self._space.wait(_READER_RETRY)
        self._reader_waits = False
        self._wake()
        if intake.has_messages:
            self._post_signals()

    def fail(self, error: BaseException) -> None:
        """Called when the reader cannot continue. The loop reports the error in its next step, unless the worker
        is closed: its tasks have ended, and the topology must not fail any more because of its input."""
        self._reader_error = error
        self._wake()

    # ---- the heartbeat thread --------------------------------------------------------------------------

    def heartbeat(self) -> None:
        """Called at every report interval. While the loop makes steps, it sends reports itself. Otherwise this
        method tells the driver that the worker is alive, and which call of user code has not returned."""
        steps = self._steps
        if steps != self._steps_at_heartbeat:
            self._steps_at_heartbeat = steps
            return
        running = self.worker.call.running
        if running is None:
            self._transport.send(Heartbeat())
        else:
            self._transport.send(Heartbeat(running[0], self._now() - running[1]))
