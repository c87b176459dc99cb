"""A slot on Spark: a Spark task in which a worker runs. It moves rows between Spark's iterators and the worker's
host. A slot may be empty, and a worker may move to it from another slot while the query runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pyarrow as pa

from penstock.control.signals import TaskFlowState, TaskMessage
from penstock.faults import CrashPoint
from penstock.plan.model import WorkerId
from penstock.protocol.client import ControlClient
from penstock.protocol.commands import AssignWorker
from penstock.protocol.driver_clock import INTERVAL
from penstock.protocol.events import SlotFreed
from penstock.protocol.job import Job
from penstock.protocol.message_board import MessageBoard
from penstock.worker.ackers import SlotAckers
from penstock.worker.archive import WorkerArchive
from penstock.worker.host import ThreadedJobs, WorkerHost
from penstock.worker.message_board import open_message_board
from penstock.worker.outgoing import Row
from penstock.worker.phase import WorkerPhase
from penstock.worker.wake import Wake
from penstock.worker.worker import LONGEST_WAIT, Worker

_NAMES = ["slot", "frame"]
_BINARY = pa.binary()
_LARGE = 32_768
"""Bytes of a frame from which on copying it costs more than sending it in a batch of its own."""


class Slot:
    """Runs one worker at a time, or none; several in succession if workers move. ``rows`` runs on the thread of
    the Spark task, the loop."""

    def __init__(
        self,
        stage: int,
        job: Job,
        attempt: int,
        control: ControlClient,
        wake: Wake,
        ackers: SlotAckers | None = None,
    ) -> None:
        """``ackers``: None if the driver is the only acker."""
        self._stage, self._job, self._attempt = stage, job, attempt
        self._control, self._wake, self._ackers = control, wake, ackers
        self._host: WorkerHost | None = None
        self._had_worker = threading.Event()
        self._input_ended = False

    def rows(self, batches: Iterator[pa.RecordBatch], given: AssignWorker | None) -> Iterator[pa.RecordBatch]:
        """The body of the Spark task: a thread reads the input rows, and the generator yields the worker's output
        rows. ``given``: the worker to run; None if the slot is empty at the start."""
        threading.Thread(target=self._read, args=(batches,), name="slot-reader", daemon=True).start()
        try:
            while (assignment := given or self._next()) is not None:
                given = None
                host = self._host = self._make_host(assignment)
                self._had_worker.set()
                yield from self._run(host)
                self._host = None
        finally:
            self._input_ended = True
            if self._ackers is not None:
                self._ackers.close()
            self._control.close()

    def _next(self) -> AssignWorker | None:
        """Wait until the driver assigns a worker. Returns None if the query ends."""
        while not self._input_ended and not self._control.lost:
            while self._control.inbox:
                command = self._control.inbox.popleft()
                if isinstance(command, AssignWorker):
                    return command
            self._wake.wait(LONGEST_WAIT)
        return None

    def _make_host(self, assignment: AssignWorker) -> WorkerHost:
        job, control, id = self._job, self._control, WorkerId(self._stage, assignment.worker)
        crash = CrashPoint(job.settings.lifecycle.crash_at if self._attempt == 0 else "", str(id))
        archive = WorkerArchive(job.archive, id, crash)
        worker = Worker(id, job, control.clock, assignment, archive, lambda: control.clock.skew, self._wake.set)

        def open_board(on_signal: Callable[[TaskMessage | TaskFlowState], None]) -> MessageBoard:
            run = f"{job.plan.topology}-{job.key:016x}-{self._attempt}"
            tasks = job.plan.routes.tasks_of(id)
            return open_message_board(job.settings.flow.board, run, tasks, on_signal, on_signal, control)

        jobs = ThreadedJobs(self._wake.set)
        send = None if self._ackers is None else self._ackers.links.send
        return WorkerHost(worker, control, jobs, open_board, control.clock, crash, self._wake.set, send)

    # ---- the loop --------------------------------------------------------------------------------------

    def _run(self, host: WorkerHost) -> Iterator[pa.RecordBatch]:
        """Run the worker and yield its rows for the next stage, until the input ends or the worker has left the
        slot. Raises ``ConnectionError`` if the connection to the driver is lost."""
        control, worker, wake = self._control, host.worker, self._wake
        ended = threading.Event()
        threading.Thread(target=self._beat, args=(host, ended), name="worker-heartbeat", daemon=True).start()
        try:
            yield from as_batches(host.step())  # opens the channels before modules are imported
            host.load()
            while not self._input_ended and not control.lost and not worker.gone:
                rows = host.step()
                if rows:
                    yield from as_batches(rows)
                wait = host.wait()
                if wait > 0:
                    wake.wait(wait)
            if control.lost and worker.phase is not WorkerPhase.CLOSED:
                reason = control.lost_because
                raise ConnectionError(f"worker {worker.id} lost its connection to the driver. {reason}".rstrip())
            if worker.gone:
                control.send(SlotFreed())
        finally:
            ended.set()
            host.close()

    def _beat(self, host: WorkerHost, ended: threading.Event) -> None:
        """The heartbeat thread: tells the driver that the worker is alive while Spark or user code blocks the
        loop, and keeps the worker's clock close to the driver's."""
        control, ask_at = self._control, time.monotonic() + INTERVAL
        while not ended.wait(self._job.settings.lifecycle.metrics_interval) and not control.lost:
            if time.monotonic() >= ask_at:
                ask_at = time.monotonic() + INTERVAL
                control.ask_time()
            host.heartbeat()

    # ---- the reader thread -----------------------------------------------------------------------------

    def _read(self, batches: Iterator[pa.RecordBatch]) -> None:
        """The reader thread: delivers frames to the worker. It waits while there is no worker yet or the worker
        has no room; Spark's buffers then block the senders. Frames that arrive after the worker has left are
        dropped."""
        while not self._had_worker.wait(LONGEST_WAIT):
            if self._control.lost:
                return
        host: WorkerHost | None = None
        try:
            for frame in _frames(batches):
                host = self._host
                if host is not None:
                    host.deliver(frame)
            self._input_ended = True
        except Exception as error:  # an internal error must not look like the end of the input
            if host is None:
                raise
            host.fail(error)
        self._wake.set()


def _frames(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.Buffer]:
    """The frames in Spark's record batches. Ends with the input, or when the query is stopped, which breaks the
    pipe to Spark."""
    try:
        for batch in batches:
            for value in batch.column(1) if batch.num_columns > 1 else ():
                if value.is_valid:
                    yield value.as_buffer()
    except (OSError, EOFError, ValueError, pa.ArrowException):
        return


def as_batches(rows: list[Row]) -> Iterator[pa.RecordBatch]:
    """Convert rows to Spark's record batches. Small frames share a batch, so that a frame and its nudge cost one
    message, not two. A large frame has its own batch and is not copied."""
    slots: list[int] = []
    frames: list[bytes | None] = []
    for slot, frame in rows:
        if frame is not None and len(frame) >= _LARGE:
            if slots:
                yield _small(slots, frames)
                slots, frames = [], []
            yield _large(slot, frame)
        else:
            slots.append(slot)
            frames.append(frame.to_pybytes() if isinstance(frame, pa.Buffer) else frame)
    if slots:
        yield _small(slots, frames)


def _small(slots: list[int], frames: list[bytes | None]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array(slots, pa.int32()), pa.array(frames, _BINARY)], names=_NAMES)


def _large(slot: int, frame: bytes | pa.Buffer) -> pa.RecordBatch:
    buffer = frame if isinstance(frame, pa.Buffer) else pa.py_buffer(frame)
    offsets = pa.py_buffer(b"\0\0\0\0" + buffer.size.to_bytes(4, "little"))
    value = pa.Array.from_buffers(_BINARY, 1, [None, offsets, buffer])
    return pa.RecordBatch.from_arrays([pa.array([slot], pa.int32()), value], names=_NAMES)
