"""Drives a worker: commands, job results and frames go in, rows, events and jobs come out.

A host knows a ``WorkerTransport``: on Spark a socket to the driver (``protocol.client``), in the local runner
memory (``testing.memory``). Everything else is the same for both.
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
from penstock.protocol.events import AckTally, EpochPublished, Event, Heartbeat, RootsFailed, SnapshotWritten
from penstock.protocol.message_board import MessageBoard
from penstock.worker.background import BackgroundJob, JobResult, WriteSnapshot
from penstock.worker.outgoing import Row
from penstock.worker.worker import LONGEST_WAIT, Worker

_READER_RETRY = 0.05  # seconds; the loop wakes the reader sooner


class WorkerTransport(Protocol):
    """A worker's connection to the driver. Nothing here blocks, and any thread may call it."""

    @property
    def inbox(self) -> deque[Command]: ...

    def send(self, event: Event) -> None: ...

    def send_now(self, event: Event) -> None:
        """The same, as fast as possible: for acks and signals."""

    def listen(self, kind: type[Any], listener: Callable[[Any], None]) -> None:
        """Hand commands of this kind to ``listener`` instead of ``inbox``, from whatever thread they come in."""


class JobRunner(Protocol):
    """Runs jobs one after the other. ``results`` fills with what they return, or with what they raised."""

    results: deque[JobResult | BaseException]

    def submit(self, job: BackgroundJob) -> None: ...

    def close(self) -> None: ...


class InlineJobs:
    """Runs each job at once, in the loop's thread."""

    def __init__(self) -> None:
        self.results: deque[JobResult | BaseException] = deque()

    def submit(self, job: BackgroundJob) -> None:
        self.results.append(job.run())

    def close(self) -> None:
        """There is nothing to end."""


class ThreadedJobs:
    """Runs the jobs in a thread of its own, started with the first one."""

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
        """End the thread after the jobs that it has."""
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self.results.append(job.run())
            except BaseException as error:  # whatever it is, the loop must hear of it
                self.results.append(error)
            self._wake()


class WorkerHost:
    """``step`` and what belongs to it is called by one thread, the loop; ``deliver`` and ``fail`` by the reader
    thread; ``heartbeat`` by a third one."""

    def __init__(
        self,
        worker: Worker,
        transport: WorkerTransport,
        jobs: JobRunner,
        open_board: Callable[[Callable[[TaskMessage | TaskFlowState], None]], MessageBoard],
        clock: Clock,
        crash: CrashPoint,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """``open_board``: joins the message board; it is given what takes the signals for the worker's tasks.
        ``wake``: lets the loop's wait return."""
        self.worker = worker
        self.failure: BaseException | None = None
        """What the worker failed with first."""
        self._transport, self._jobs, self._now = transport, jobs, clock.monotonic
        self._open_board, self._crash, self._wake = open_board, crash, wake
        self._signals: deque[TaskMessage | TaskFlowState] = deque()
        """From the message board, for the worker's tasks."""
        self._board: MessageBoard | None = None
        self._posting = threading.Lock()
        self._space = threading.Event()
        self._reader_waits = self._ended = False
        self._reader_error: BaseException | None = None
        self._wake_at = 0.0
        self._steps = self._beaten = 0
        """How many steps were made, and how many of them at the last heartbeat."""
        self._send: dict[type, Callable[[Any], None]] = {
            AckTally: transport.send_now,
            RootsFailed: transport.send_now,
            TaskMessage: self._post,
            TaskFlowState: self._publish,
            SnapshotWritten: self._report_snapshot,
            EpochPublished: self._report_published,
        }
        """How events are sent that are not just sent."""
        self._join_board()

    # ---- the loop --------------------------------------------------------------------------------------

    def load(self) -> None:
        """Import the components' modules."""
        try:
            self.worker.load()
        except BaseException as error:  # a user's module may raise anything; the driver must hear of it
            self._fail(error)

    def step(self) -> list[Row]:
        """Give the worker what has come, let it work for a moment, and return the rows for the next stage."""
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
        except BaseException as error:  # whatever it is, the driver must hear of it before the process ends
            self._fail(error)
            self._wake_at = self._now() + LONGEST_WAIT
            return []
        if self._reader_waits:
            self._space.set()
        self._wake_at = turn.wake_at
        return turn.rows

    def take_input(self) -> None:
        """Give the worker what has come, without a turn. The next step is due at once."""
        self._wake_at = self._now()
        try:
            self._take_input()
        except BaseException as error:  # as in ``step``
            self._fail(error)

    def _take_input(self) -> None:
        worker = self.worker
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
        if self._reader_error is not None:
            error, self._reader_error = self._reader_error, None
            raise error

    def wait(self) -> float:
        """Seconds until the next step is due, unless something comes earlier."""
        return max(0.0, self._wake_at - self._now())

    def close(self) -> None:
        """The loop has ended."""
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
        """At once, or when a worker that takes over opens its tasks: until then they are another worker's."""
        if self._board is None and (self.worker.phase.has_tasks or not self.worker.phase.shares_input):
            self._board = self._open_board(self._on_signal)

    def _on_signal(self, signal: TaskMessage | TaskFlowState) -> None:
        """From a thread of the message board's."""
        self._signals.append(signal)
        self._wake()

    def _post(self, message: TaskMessage) -> None:
        if self._board is not None:
            self._board.post(message)

    def _publish(self, state: TaskFlowState) -> None:
        if self._board is not None:
            self._board.publish(state)

    def _post_signals(self) -> None:
        """Post what the overload detectors have to say. Also by the reader thread, because the loop may be inside
        a long execute; the lock keeps signals in order."""
        if self._board is None:
            return
        with self._posting:
            while (message := self.worker.intake.take_message()) is not None:
                self._board.post(message)

    # ---- the reader thread -----------------------------------------------------------------------------

    def deliver(self, frame: pa.Buffer) -> None:
        """Give the worker a frame. Waits while there is no room for it, not even on disk."""
        intake = self.worker.intake
        while not self._ended and not intake.offer(frame):
            self._space.clear()
            self._reader_waits = True
            if intake.offer(frame):  # room was made before the loop could see that we wait
                break
            self._post_signals()
            self._space.wait(_READER_RETRY)
        self._reader_waits = False
        self._wake()
        if intake.has_messages:
            self._post_signals()

    def fail(self, error: BaseException) -> None:
        """The reader can read no more."""
        self._reader_error = error
        self._wake()

    # ---- the heartbeat thread --------------------------------------------------------------------------

    def heartbeat(self) -> None:
        """To be called at every interval of reports. While the loop makes steps it reports itself; otherwise this
        tells the driver that the worker lives, and which call of user code has not returned."""
        steps = self._steps
        if steps != self._beaten:
            self._beaten = steps
            return
        running = self.worker.call.running
        if running is None:
            self._transport.send(Heartbeat())
        else:
            self._transport.send(Heartbeat(running[0], self._now() - running[1]))
