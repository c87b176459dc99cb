"""A worker in its slot: moves rows between it and ``runtime.Worker``, and commands and reports between the
coordinator and it."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.acking import ledger
from penstock.control.signals import TaskFlowState, TaskMessage
from penstock.errors import FramesLost, PenstockError, SinkRefused, SnapshotCorrupt, StateError, StateUnavailable
from penstock.faults import CrashPoint
from penstock.frames.header import Header, Kind, unpack
from penstock.metrics.machine import MachineProbe, spark_jvm
from penstock.plan.model import WorkerId
from penstock.protocol.client import ControlClient
from penstock.protocol.driver_clock import INTERVAL
from penstock.protocol.message_board import MessageBoard, open_message_board
from penstock.protocol.messages import (
    AckTally,
    ActivateSpouts,
    AssignWorker,
    CancelLeave,
    ChannelsWarm,
    CloseTasks,
    DeactivateSpouts,
    EndEpoch,
    EpochCommitted,
    EpochPublished,
    HoldTimeouts,
    LeavePrepared,
    OpenTasks,
    PrefetchState,
    PrepareToLeave,
    RequestReport,
    RootsFailed,
    RootsSettled,
    RouteWorker,
    SetMigrationRoutes,
    SetSpoutRate,
    SlotFreed,
    SnapshotFailed,
    SnapshotWritten,
    SpoutsSnapshotted,
    StatePrefetched,
    StateUnreadable,
    StopTicks,
    TakeSnapshot,
    TasksClosed,
    TasksOpened,
    WorkerFailed,
    WorkerLeft,
    WorkerReport,
    WorkerRouted,
)
from penstock.topology.components import Failure
from penstock.worker.archive import WorkerArchive
from penstock.worker.handover import HandoverState
from penstock.worker.job import Job
from penstock.worker.outgoing import Row
from penstock.worker.rows import as_batches
from penstock.worker.wake import Wake
from penstock.worker.worker import Worker, WorkerSnapshot

LONGEST_WAIT = 1.0  # seconds; whatever happens sooner wakes the loop
_PUBLISH_RETRY = 1.0  # seconds until another system is asked again to take an epoch
_KIND = 3  # where a header has its kind
_READER_RETRY = 0.05  # seconds; the loop wakes the reader sooner
REPORTS_PER_SAMPLE = 4
"""How often in a window of the load monitor a worker tells its streams: what a window misses of its end, and has
of the one before, is then less than a quarter, and as much in every window."""


class WorkerHost:
    """Runs a worker for as long as the query lives, or until it has moved to another slot."""

    def __init__(
        self, id: WorkerId, job: Job, attempt: int, control: ControlClient, wake: Wake, slot: AssignWorker
    ) -> None:
        self._following = [list(slots) for slots in slot.next]
        """Slots of the next stage by its workers' numbers; empty where each has its own number."""
        self._worker = Worker(id, job, control.clock, slot.takes_over)
        self._job, self._attempt = job, attempt
        self._upstream = job.plan.stages[id.stage - 1].workers if id.stage else 0
        self._last: set[int] = set()
        """Workers of the stage before that send nothing more here."""
        self._unheard: list[TaskMessage] = []
        """What came for the tasks after the worker had left."""
        self._crash = CrashPoint(job.settings.lifecycle.crash_at if attempt == 0 else "", str(id))
        self._archive = WorkerArchive(job.archive, id, 0, self._crash)
        self._chores: queue.SimpleQueue[WorkerSnapshot | int | None] = queue.SimpleQueue()
        """For the archive's thread: snapshots to write, epochs to publish, None at the end."""
        self._interval = job.settings.lifecycle.metrics_interval
        self._wake = wake
        self._monitored = job.settings.monitored
        self._machine = MachineProbe(spark_jvm())
        self._load_interval = job.settings.monitor.window / REPORTS_PER_SAMPLE
        self._load_due = 0.0
        self._space = threading.Event()
        self._reader_waits = False
        self._reporting = threading.Lock()
        self._over = False
        self._reader_error: PenstockError | None = None
        self._opened = self._said_warm = self._said_ready = self._failed = self._closed = self._said_left = False
        self._control = control
        self._own_rows: list[Row] = []
        """For slots; before what the worker sends."""
        self._told: deque[TaskMessage | TaskFlowState] = deque()
        """The trigger queue: what the board has for the worker's tasks."""
        self._posting = threading.Lock()
        self._board: MessageBoard | None = None
        if not slot.takes_over:  # else its tasks are another's until it opens
            self._join()

    def _join(self) -> None:
        job, worker = self._job, self._worker.id
        run = f"{job.plan.topology}-{job.key:016x}-{self._attempt}"
        tasks = job.plan.routes.tasks_of(worker)
        self._board = open_message_board(
            job.settings.flow.board, run, tasks, self._tell, self._tell, self._control
        )

    def rows(self, ended: Callable[[], bool]) -> Iterator[pa.RecordBatch]:
        """What goes to the next stage, until there is no more input, or the worker has gone."""
        worker = self._worker
        threading.Thread(target=self._pulse, name="worker-pulse", daemon=True).start()
        try:
            yield from as_batches(self._placed(worker.warm_up()))
            self._load()
            while not ended() and not self._control.lost and not self._gone:
                try:
                    self._obey()
                    own, self._own_rows = self._own_rows, []
                    rows = self._placed(worker.turn()) if self._runs else []
                    self._hand_over()
                    output = list(as_batches(own + rows)) if own or rows else []
                    self._check()
                except BaseException as error:  # whatever it is, the driver must hear of it before the task dies
                    self._fail(error)
                    output = []
                yield from output
                if self._reader_waits:
                    self._space.set()
                wait = worker.idle_for() if self._runs else LONGEST_WAIT
                if wait > 0:
                    self._wake.wait(wait)
            if self._control.lost and not self._closed:
                reason = self._control.lost_because
                raise ConnectionError(
                    f"worker {worker.id} lost its connection to the coordinator. {reason}".rstrip()
                )
            if self._gone:
                self._control.send(SlotFreed())
        finally:
            self._over = True
            self._chores.put(None)
            if self._board is not None:
                self._board.close(moved=worker.left)

    @property
    def _gone(self) -> bool:
        """It was closed, and nobody sends to it any more; or it never was to be opened after all."""
        return self._closed and (not self._opened or (self._worker.left and len(self._last) == self._upstream))

    def _placed(self, rows: list[Row]) -> list[Row]:
        """Rows for workers as rows for the slots they have."""
        following = self._following
        return [(slot, frame) for worker, frame in rows for slot in following[worker]] if following else rows

    def _send_to(self, message: RouteWorker) -> None:
        """The first frame to a slot that is new warms it; to one that is left, the last says so."""
        id, worker = self._worker.id, message.worker
        before, self._following[worker] = self._following[worker], list(message.slots)
        for slots, kind in (
            (set(message.slots) - set(before), Kind.WARM),
            (set(before) - set(message.slots), Kind.LAST),
        ):
            frame = Header(kind, id.stage + 1, worker, id.stage, id.index).pack()
            self._own_rows += [row for slot in slots for row in ((slot, frame), (slot, None))]
        self._control.send(WorkerRouted(worker, message.slots))

    def _load(self) -> None:
        try:
            self._worker.load()
        except BaseException as error:  # a user's module may raise anything; the driver must hear of it
            self._fail(error)

    @property
    def _runs(self) -> bool:
        """The tasks are open: not before ``OpenTasks``, not after ``CloseTasks`` or a failure."""
        return self._opened and not self._failed and not self._closed

    # ---- input -----------------------------------------------------------------------------------------

    def fail_reading(self, error: Exception) -> None:
        """By the reader: it can read no more."""
        self._reader_error = _as_ours(self._worker.id, error)
        self._wake.set()

    def deliver(self, frame: pa.Buffer) -> None:
        """By the reader: put a frame in its inbox; while even an overflow is full, wait."""
        if memoryview(frame)[_KIND] == Kind.LAST:
            self._last.add(unpack(memoryview(frame)).source_worker)
            self._wake.set()
            return
        while not self._closed and not self._worker.offer(
            frame
        ):  # a closed worker takes nothing and holds nobody up
            self._space.clear()
            self._reader_waits = True
            if self._worker.offer(frame):  # room was made before the loop could see that we wait
                break
            self._post()
            self._space.wait(_READER_RETRY)
        self._reader_waits = False
        self._wake.set()
        self._post()

    # ---- control ---------------------------------------------------------------------------------------

    def _tell(self, message: TaskMessage | TaskFlowState) -> None:
        """From a thread of the board's."""
        self._told.append(message)
        self._wake.set()

    def _post(self) -> None:
        """Bring what the tasks have to say to the board; from the reader too, for the loop may be in a long
        execute."""
        flow, board = self._worker.flow, self._board
        if board is None or (not flow.messages and not flow.states):
            return
        with self._posting:
            while flow.messages:
                board.post(flow.messages.popleft())
            while flow.states:
                board.publish(flow.states.popleft())

    def _obey(self) -> None:
        flow = self._worker.flow
        while self._told:
            told = self._told.popleft()
            if isinstance(told, TaskMessage) and self._worker.left:
                self._pass_on(told)
            elif isinstance(told, TaskMessage):
                flow.on_message(told)
            else:
                flow.on_state(told)
        inbox = self._control.inbox
        while inbox:
            message = inbox.popleft()
            if isinstance(message, PrefetchState):
                self._read_ahead(message)
            elif isinstance(message, OpenTasks):
                self._open(message)
            elif isinstance(message, ActivateSpouts):
                self._worker.activate()
            elif isinstance(message, DeactivateSpouts):
                self._worker.deactivate()
            elif isinstance(message, StopTicks):
                self._worker.rest()
            elif isinstance(message, RootsSettled):
                self._settle(message)
            elif isinstance(message, SetMigrationRoutes):
                routes = {int(heavy): light for heavy, light in message.routes.items()}
                self._worker.reroute(message.component, routes, message.version)
            elif isinstance(message, HoldTimeouts):
                self._worker.hold_timeouts(message.held)
            elif isinstance(message, SetSpoutRate):
                self._worker.set_rate(message.component, message.rate)
            elif isinstance(message, EndEpoch):
                self._worker.announce(message.epoch, message.last)
            elif isinstance(message, TakeSnapshot):
                self._take_snapshot(message)
            elif isinstance(message, EpochCommitted):
                self._worker.on_committed(message.epoch)
                self._chores.put(message.epoch)
            elif isinstance(message, RequestReport):
                self._report(message.number)
            elif isinstance(message, RouteWorker):
                self._send_to(message)
            elif isinstance(message, PrepareToLeave):
                self._worker.prepare_to_leave(message.commit, message.epoch)
                self._control.send(LeavePrepared(message.commit))
            elif isinstance(message, CancelLeave):
                self._stay()
            elif isinstance(message, CloseTasks):
                self._close()
        if not self._said_warm and self._worker.warm:
            self._said_warm = True
            self._control.send(ChannelsWarm())
        if self._opened and not self._said_ready and self._said_warm:
            self._said_ready = True
            self._control.send(TasksOpened(self._worker.stateful))

    def _read_ahead(self, message: PrefetchState) -> None:
        try:
            self._archive.ahead(message.tasks)
        except SnapshotCorrupt as error:
            self._control.send(StateUnreadable(str(error)))
            return
        self._control.send(StatePrefetched(message.epoch))

    def _open(self, message: OpenTasks) -> None:
        try:
            self._archive.generation = message.generation
            restored = self._archive.restore(message.tasks)
        except SnapshotCorrupt as error:
            self._failed = True
            self._control.send(StateUnreadable(str(error)))
            return
        threading.Thread(target=self._keep, args=(self._archive,), name="worker-archive", daemon=True).start()
        nodes = {WorkerId.parse(name): node for name, node in message.nodes.items()}
        handover = HandoverState(message.epoch, message.handover) if message.handover else None
        self._worker.open(nodes, restored, message.epoch, handover, message.generation)
        self._opened = True
        if self._board is None:
            self._load_due = 0.0  # what was told so far nobody took
            self._join()

    def _pass_on(self, message: TaskMessage) -> None:
        """For who has the task now; kept until there is one."""
        if self._closed and self._board is not None:
            self._board.post(message)
        else:
            self._unheard.append(message)

    def _stay(self) -> None:
        self._worker.cancel_leave()
        self._said_left = False
        while self._unheard:
            self._worker.flow.on_message(self._unheard.pop(0))

    def _settle(self, message: RootsSettled) -> None:
        first, length = np.frombuffer(message.data, np.int64).reshape(2, -1)
        failure = Failure(message.component, message.error) if message.error else None
        self._worker.settle(message.task, ledger.numbers(first, length), failure)

    def _take_snapshot(self, message: TakeSnapshot) -> None:
        if message.what == "spouts":
            self._worker.snapshot_spouts(message.epoch, message.last)
            self._control.send(SpoutsSnapshotted(message.epoch))
        else:
            self._worker.snapshot_bolts(message.epoch, message.last)

    def _hand_over(self) -> None:
        """What the turn left for the acker and for the archive."""
        worker = self._worker
        self._post()
        failed, tally = worker.take_acks()
        for roots in failed:
            self._control.send_now(
                RootsFailed(roots.first.tolist(), roots.length.tolist(), roots.component, roots.error)
            )
        if tally is not None:
            self._control.send_now(AckTally(tally))
        while worker.snapshots:
            snapshot = worker.snapshots.popleft()
            self._crash("snapshotted" if worker.id.stage else "marked", snapshot.epoch)
            self._chores.put(snapshot)
        if worker.left and not self._said_left:
            self._said_left = True
            handover = worker.handover()
            self._report(0)
            self._control.send(WorkerLeft(handover.epoch, handover.data))

    def _keep(self, archive: WorkerArchive) -> None:
        """The archive's thread: write what was snapshotted, publish what is committed, in order. Another system
        that does not take what is to be published is asked again; epochs go on meanwhile."""
        unpublished = 0
        try:
            while True:
                try:
                    chore = self._chores.get(timeout=_PUBLISH_RETRY if unpublished else None)
                except queue.Empty:
                    chore = unpublished
                if chore is None:
                    return
                if isinstance(chore, WorkerSnapshot):
                    self._write(archive, chore)
                else:
                    unpublished = 0 if self._publish(max(chore, unpublished)) else max(chore, unpublished)
        except Exception as error:  # whatever it is, the loop must hear of it
            self._reader_error = _as_ours(self._worker.id, error)
            self._wake.set()

    def _publish(self, epoch: int) -> bool:
        try:
            self._worker.publish_sinks(epoch)
        except SinkRefused:
            raise  # asking again will not help, starting again may
        except PenstockError:  # its task has reported it
            return False
        self._crash("published", epoch)
        self._control.send(EpochPublished(epoch))
        return True

    def _write(self, archive: WorkerArchive, snapshot: WorkerSnapshot) -> None:
        try:
            tasks = archive.write(self._worker, snapshot)
        except StateError as error:
            self._control.send(SnapshotFailed(snapshot.epoch, str(error)))
            return
        self._control.send(SnapshotWritten(snapshot.epoch, tasks))
        self._crash("reported", snapshot.epoch)

    def _close(self) -> None:
        self._closed = True
        self._space.set()
        try:
            self._worker.deactivate()
        finally:
            self._worker.close()
            self._hand_over()  # what sinks acked with their last commit
            for message in self._unheard:
                self._pass_on(message)
            self._report(0)
            self._control.send(TasksClosed())

    def _check(self) -> None:
        """Raise what ends the topology: a fatal user error, or a frame that could not be read."""
        if self._worker.fatal is not None:
            raise self._worker.fatal
        if self._reader_error is not None:
            raise self._reader_error

    def _fail(self, error: BaseException) -> None:
        if self._failed:
            return
        self._failed = True
        error = _as_ours(self._worker.id, error)
        self._report(0)
        passing = isinstance(error, SinkRefused | FramesLost | StateUnavailable)  # the last commit is a way out
        self._control.send(WorkerFailed(error.where, error.problem, error.hint, passing))

    def _pulse(self) -> None:
        """Report at every interval, from a thread of its own: while Spark holds the loop back because the next
        stage is slow, the driver must still hear that the worker lives."""
        ask_at = time.monotonic() + INTERVAL
        while not self._over and not self._control.lost:
            if time.monotonic() >= ask_at:
                ask_at = time.monotonic() + INTERVAL
                self._control.ask_time()
            with contextlib.suppress(RuntimeError):  # the loop changed a table under our eyes: next time
                self._report(0)
            time.sleep(self._interval)

    def _report(self, probe: int) -> None:
        worker = self._worker
        with self._reporting:  # one at a time, so that reports leave in the order they were made
            # Counters first: where the loop changes one under our eyes, what is only told once is still there.
            tasks = {str(task): stats.to_json() for task, stats in worker.stats().items()}
            published, worker.published = worker.published, {}
            ended = [worker.segments.popleft() for _ in range(len(worker.segments))]
            segments = [[task, s.branch, s.target, s.offset, s.length] for task, s in ended]
            errors = [str(worker.errors.popleft()) for _ in range(len(worker.errors))]
            streams, machine = self._load_now()
            self._control.send(
                WorkerReport(
                    worker.frames_sent,
                    worker.frames_done(),
                    worker.pending(),
                    time.process_time(),
                    resident_bytes(),
                    tasks,
                    {str(task): rows for task, rows in list(published.items())},
                    errors,
                    segments,
                    probe,
                    streams,
                    machine,
                    self._control.clock.skew,
                    worker.settled_below(),
                )
            )

    def _load_now(self) -> tuple[list[list[int]] | None, dict[str, Any]]:
        """What only the load monitor wants: not in every report, but in the last."""
        now = time.monotonic()
        if now < self._load_due and not self._closed:
            return None, {}
        self._load_due = now + self._load_interval
        pairs = list(self._worker.streams.items())
        return [[*pair, *count] for pair, count in pairs] if self._monitored else None, self._machine.read()


def _as_ours(worker: WorkerId, error: BaseException) -> PenstockError:
    if isinstance(error, PenstockError):
        return error
    told = "".join(traceback.format_exception(error))
    return PenstockError(f"worker {worker}", f"internal error (please report it): {told}")


def resident_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
