"""A slot inside a Spark task: moves rows between Spark's iterators and ``runtime.Slot``, and commands and
reports between the coordinator and it."""

from __future__ import annotations

import contextlib
import gc
import os
import queue
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.acking import ledger
from penstock.clock import SystemClock
from penstock.control.signals import TaskMessage, TaskState
from penstock.coordinator.boards import open_board
from penstock.coordinator.client import ControlClient
from penstock.coordinator.messages import (
    Activate,
    Ahead,
    Announce,
    Close,
    Closed,
    Committed,
    Corrupt,
    CutState,
    Deactivate,
    Failed,
    Fails,
    Hello,
    NotSnapped,
    Open,
    Probe,
    Published,
    ReadAhead,
    Ready,
    Report,
    Reroute,
    Rest,
    SetRate,
    Settled,
    Snapped,
    SpoutsCut,
    TakeSeat,
    Tally,
)
from penstock.errors import PenstockError, SinkRefused, SnapshotCorrupt, StateError
from penstock.faults import CrashPoint
from penstock.metrics.machine import Machine, spark_jvm
from penstock.plan.model import SlotId
from penstock.runtime.archive import SlotArchive
from penstock.runtime.job import Job
from penstock.runtime.slot import Row, Slot, SlotCut
from penstock.topology.components import Failure

_NAMES = ["slot", "frame"]
_BINARY = pa.binary()
# Tuples are objects the collector counts but never needs to find: by default it looks every 700 of them, which
# took a tenth of a tuple bolt's time. Cycles in users' code are still found, a little later.
_GC_THRESHOLD = (50_000, 20, 50)
_SWITCH_INTERVAL = 0.0005  # seconds; with Python's 5 ms a snapshot written beside the loop cost each hop 20 ms
_LARGE = 32_768  # bytes; above it copying a frame costs more than a message of its own
_LONGEST_WAIT = 1.0  # seconds; whatever happens sooner wakes the loop
_PUBLISH_RETRY = 1.0  # seconds until another system is asked again to take an epoch
_READER_RETRY = 0.05  # seconds; the loop wakes the reader sooner
LOADS_IN_A_WINDOW = 4
"""How often in a window of the load monitor a slot tells its streams: what a window misses of its end, and has of
the one before, is then less than a quarter, and as much in every window."""


class StageFunction:
    """What Spark pickles for each stage: plain data, so that it pickles by reference to this module."""

    def __init__(
        self, stage: int, job: Job, address: tuple[str, int], secret: bytes, attempt: int, seated: bool = False
    ) -> None:
        """``seated``: which slot runs in which task is said when all have connected."""
        self._stage, self._job, self._seated = stage, job, seated
        self._address, self._secret, self._attempt = address, secret, attempt

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        task = TaskContext.get()
        assert task is not None
        gc.freeze()
        gc.set_threshold(*_GC_THRESHOLD)
        sys.setswitchinterval(_SWITCH_INTERVAL)
        wake, number = Wake(), task.partitionId()
        control = ControlClient(self._address, self._secret, wake.set)
        control.send(Hello(self._stage, number, self._attempt, os.getpid(), node_name()))
        seat = _await_seat(control, wake) if self._seated else TakeSeat(number)
        if seat.slot is None:
            control.close()
            return iter(())
        id = SlotId(self._stage, seat.slot)
        return SlotDriver(id, self._job, self._attempt, control, wake, seat.next).rows(batches)


def _await_seat(control: ControlClient, wake: Wake) -> TakeSeat:
    while not control.inbox:
        if control.lost:
            raise ConnectionError("a task lost its connection to the coordinator before it was given a slot")
        wake.wait(_LONGEST_WAIT)
    seat = control.inbox.popleft()
    assert isinstance(seat, TakeSeat)
    return seat


class Wake:
    """An alarm clock: ``wait`` returns after the time or at the next ``set``, one that came before included.
    A bare lock, because a spout with nothing to emit waits here a thousand times a second."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        with contextlib.suppress(RuntimeError):  # set already
            self._lock.release()

    def wait(self, seconds: float) -> None:
        self._lock.acquire(timeout=seconds)


class SlotDriver:
    """Runs a slot for as long as the query lives."""

    def __init__(
        self, id: SlotId, job: Job, attempt: int, control: ControlClient, wake: Wake, following: list[int]
    ) -> None:
        """``following``: the tasks of the next stage by their slots' numbers, where these differ."""
        self._following = following
        self._slot = Slot(id, job, SystemClock())
        self._crash = CrashPoint(job.settings.crash_at if attempt == 0 else "", str(id))
        self._archive = SlotArchive(job.archive, id, 0, self._crash)
        self._chores: queue.SimpleQueue[SlotCut | int | None] = queue.SimpleQueue()
        """For the archive's thread: cuts to write, epochs to publish, None at the end."""
        self._interval = job.settings.metrics_interval
        self._wake = wake
        self._monitored = job.settings.monitored
        self._machine = Machine(spark_jvm())
        self._load_interval = job.settings.monitor_window / LOADS_IN_A_WINDOW
        self._load_due = 0.0
        self._space = threading.Event()
        self._reader_waits = False
        self._reporting = threading.Lock()
        self._input_ended = False
        self._reader_error: PenstockError | None = None
        self._opened = self._said_ready = self._failed = self._closed = False
        self._control = control
        self._told: deque[TaskMessage | TaskState] = deque()
        """The trigger queue: what the board has for the slot's tasks."""
        self._posting = threading.Lock()
        run = f"{job.plan.topology}-{job.key:016x}-{attempt}"
        tasks = job.plan.routes.tasks_of(id)
        self._board = open_board(job.settings.board, run, tasks, self._tell, self._tell, self._control)

    def rows(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Spark's task: consume its rows in a thread, yield ours from the loop."""
        threading.Thread(target=self._read, args=(batches,), name="slot-reader", daemon=True).start()
        threading.Thread(target=self._pulse, name="slot-pulse", daemon=True).start()
        slot = self._slot
        try:
            yield from as_batches(self._seated(slot.warm_up()))
            self._load()
            while not self._input_ended and not self._control.lost:
                try:
                    self._obey()
                    rows = slot.turn() if self._runs else []
                    self._hand_over()
                    output = list(as_batches(self._seated(rows))) if rows else []
                    self._check()
                except Exception as error:  # whatever it is, the driver must hear of it before the task dies
                    self._fail(error)
                    output = []
                yield from output
                if self._reader_waits:
                    self._space.set()
                wait = slot.idle_for() if self._runs else _LONGEST_WAIT
                if wait > 0:
                    self._wake.wait(wait)
            if self._control.lost and not self._closed:
                raise ConnectionError(f"slot {slot.id} lost its connection to the coordinator")
        finally:
            self._input_ended = True
            self._chores.put(None)
            self._board.close()
            self._control.close()

    def _seated(self, rows: list[Row]) -> list[Row]:
        """Rows for slots as rows for the tasks they run in."""
        following = self._following
        return [(following[slot], frame) for slot, frame in rows] if following else rows

    def _load(self) -> None:
        try:
            self._slot.load()
        except Exception as error:  # a user's module may raise anything; the driver must hear of it
            self._fail(error)

    @property
    def _runs(self) -> bool:
        """The tasks are open: not before ``Open``, not after ``Close`` or a failure."""
        return self._opened and not self._failed and not self._closed

    # ---- input -----------------------------------------------------------------------------------------

    def _read(self, batches: Iterator[pa.RecordBatch]) -> None:
        """Move frames into the inboxes; while even an overflow is full, wait: Spark's buffers then hold the
        sender."""
        try:
            for batch in batches:
                for value in batch.column(1) if batch.num_columns > 1 else ():
                    if value.is_valid:
                        self._deliver(value.as_buffer())
        except PenstockError as error:
            self._reader_error = error
        except (OSError, EOFError, ValueError, pa.ArrowException):
            pass  # the pipe from the JVM breaks when the query is stopped
        except Exception as error:  # a bug of ours must not look like an end
            self._reader_error = PenstockError(f"slot {self._slot.id}", "the reader must not fail", repr(error))
        self._input_ended = self._reader_error is None
        self._wake.set()

    def _deliver(self, frame: pa.Buffer) -> None:
        while not self._closed and not self._slot.offer(frame):  # a closed slot takes nothing and holds nobody up
            self._space.clear()
            self._reader_waits = True
            if self._slot.offer(frame):  # room was made before the loop could see that we wait
                break
            self._post()
            self._space.wait(_READER_RETRY)
        self._reader_waits = False
        self._wake.set()
        self._post()

    # ---- control ---------------------------------------------------------------------------------------

    def _tell(self, message: TaskMessage | TaskState) -> None:
        """From a thread of the board's."""
        self._told.append(message)
        self._wake.set()

    def _post(self) -> None:
        """Bring what the tasks have to say to the board; from the reader too, for the loop may be in a long
        execute."""
        flow = self._slot.flow
        if not flow.messages and not flow.states:
            return
        with self._posting:
            while flow.messages:
                self._board.post(flow.messages.popleft())
            while flow.states:
                self._board.publish(flow.states.popleft())

    def _obey(self) -> None:
        flow = self._slot.flow
        while self._told:
            told = self._told.popleft()
            if isinstance(told, TaskMessage):
                flow.receive(told)
            else:
                flow.heard(told)
        inbox = self._control.inbox
        while inbox:
            message = inbox.popleft()
            if isinstance(message, ReadAhead):
                self._read_ahead(message)
            elif isinstance(message, Open):
                self._open(message)
            elif isinstance(message, Activate):
                self._slot.activate()
            elif isinstance(message, Deactivate):
                self._slot.deactivate()
            elif isinstance(message, Rest):
                self._slot.rest()
            elif isinstance(message, Settled):
                self._settle(message)
            elif isinstance(message, Reroute):
                routes = {int(heavy): light for heavy, light in message.routes.items()}
                self._slot.reroute(message.component, routes, message.version)
            elif isinstance(message, SetRate):
                self._slot.set_rate(message.component, message.rate)
            elif isinstance(message, Announce):
                self._slot.announce(message.epoch, message.last)
            elif isinstance(message, CutState):
                self._cut(message)
            elif isinstance(message, Committed):
                self._slot.committed(message.epoch)
                self._chores.put(message.epoch)
            elif isinstance(message, Probe):
                self._report(message.number)
            elif isinstance(message, Close):
                self._close()
        if self._opened and not self._said_ready and self._slot.warm:
            self._said_ready = True
            self._control.send(Ready(self._slot.stateful))

    def _read_ahead(self, message: ReadAhead) -> None:
        try:
            self._archive.ahead(message.tasks)
        except SnapshotCorrupt as error:
            self._control.send(Corrupt(str(error)))
            return
        self._control.send(Ahead(message.epoch))

    def _open(self, message: Open) -> None:
        try:
            self._archive.generation = message.generation
            restored = self._archive.restore(message.tasks)
        except SnapshotCorrupt as error:
            self._failed = True
            self._control.send(Corrupt(str(error)))
            return
        threading.Thread(target=self._keep, args=(self._archive,), name="slot-archive", daemon=True).start()
        nodes = {SlotId.parse(name): node for name, node in message.nodes.items()}
        self._slot.open(nodes, restored, message.epoch)
        self._opened = True

    def _settle(self, message: Settled) -> None:
        first, length = np.frombuffer(message.data, np.int64).reshape(2, -1)
        failure = Failure(message.component, message.error) if message.error else None
        self._slot.settle(message.task, ledger.numbers(first, length), failure)

    def _cut(self, message: CutState) -> None:
        if message.what == "spouts":
            self._slot.cut_spouts(message.epoch, message.last)
            self._control.send(SpoutsCut(message.epoch))
        else:
            self._slot.cut_bolts(message.epoch, message.last)

    def _hand_over(self) -> None:
        """What the turn left for the acker and for the archive."""
        slot = self._slot
        self._post()
        failed, tally = slot.take_acks()
        for roots in failed:
            self._control.send_now(
                Fails(roots.first.tolist(), roots.length.tolist(), roots.component, roots.error)
            )
        if tally is not None:
            self._control.send_now(Tally(tally))
        while slot.cuts:
            cut = slot.cuts.popleft()
            self._crash("cut" if slot.id.stage else "marked", cut.epoch)
            self._chores.put(cut)

    def _keep(self, archive: SlotArchive) -> None:
        """The archive's thread: write what was cut, publish what is committed, in order. Another system that does
        not take what is to be published is asked again; epochs go on meanwhile."""
        unpublished = 0
        try:
            while True:
                try:
                    chore = self._chores.get(timeout=_PUBLISH_RETRY if unpublished else None)
                except queue.Empty:
                    chore = unpublished
                if chore is None:
                    return
                if isinstance(chore, SlotCut):
                    self._write(archive, chore)
                else:
                    unpublished = 0 if self._publish(max(chore, unpublished)) else max(chore, unpublished)
        except Exception as error:  # whatever it is, the loop must hear of it
            self._reader_error = _as_ours(self._slot.id, error)
            self._wake.set()

    def _publish(self, epoch: int) -> bool:
        try:
            self._slot.publish_sinks(epoch)
        except SinkRefused:
            raise  # asking again will not help, starting again may
        except PenstockError as error:
            self._slot.errors.append(error)
            return False
        self._crash("published", epoch)
        self._control.send(Published(epoch))
        return True

    def _write(self, archive: SlotArchive, cut: SlotCut) -> None:
        try:
            tasks = archive.write(self._slot, cut)
        except StateError as error:
            self._control.send(NotSnapped(cut.epoch, str(error)))
            return
        self._control.send(Snapped(cut.epoch, tasks))
        self._crash("reported", cut.epoch)

    def _close(self) -> None:
        self._closed = True
        self._space.set()
        try:
            self._slot.deactivate()
        finally:
            self._slot.close()
            self._report(0)
            self._control.send(Closed())

    def _check(self) -> None:
        """Raise what ends the topology: a fatal user error, or a frame that could not be read."""
        if self._slot.fatal is not None:
            raise self._slot.fatal
        if self._reader_error is not None:
            raise self._reader_error

    def _fail(self, error: Exception) -> None:
        if self._failed:
            return
        self._failed = True
        error = _as_ours(self._slot.id, error)
        self._report(0)
        passing = isinstance(error, SinkRefused)
        self._control.send(Failed(error.where, error.rule, error.got, error.way_out, passing))

    def _pulse(self) -> None:
        """Report at every interval, from a thread of its own: while Spark holds the loop back because the next
        stage is slow, the driver must still hear that the slot lives."""
        while not self._input_ended and not self._control.lost:
            with contextlib.suppress(RuntimeError):  # the loop changed a table under our eyes: next time
                self._report(0)
            time.sleep(self._interval)

    def _report(self, probe: int) -> None:
        slot = self._slot
        with self._reporting:  # one at a time, so that reports leave in the order they were made
            # Counters first: where the loop changes one under our eyes, what is only told once is still there.
            tasks = {str(task): stats.to_json() for task, stats in slot.stats().items()}
            published, slot.published = slot.published, {}
            ended = [slot.segments.popleft() for _ in range(len(slot.segments))]
            segments = [[task, s.branch, s.target, s.offset, s.length] for task, s in ended]
            errors = [str(slot.errors.popleft()) for _ in range(len(slot.errors))]
            streams, machine = self._load_now()
            self._control.send(
                Report(
                    slot.frames_sent,
                    slot.frames_done(),
                    slot.pending(),
                    time.process_time(),
                    resident_bytes(),
                    tasks,
                    {str(task): rows for task, rows in list(published.items())},
                    errors,
                    segments,
                    probe,
                    streams,
                    machine,
                )
            )

    def _load_now(self) -> tuple[list[list[int]] | None, dict[str, Any]]:
        """What only the load monitor wants: not in every report, but in the last."""
        now = time.monotonic()
        if now < self._load_due and not self._closed:
            return None, {}
        self._load_due = now + self._load_interval
        pairs = list(self._slot.streams.items())
        return [[*pair, *count] for pair, count in pairs] if self._monitored else None, self._machine.read()


def as_batches(rows: list[Row]) -> Iterator[pa.RecordBatch]:
    """Rows for Spark. Small ones travel together: a frame and its nudge then cost one message, not two. A large
    frame goes alone and uncopied."""
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


def _as_ours(slot: SlotId, error: Exception) -> PenstockError:
    if isinstance(error, PenstockError):
        return error
    return PenstockError(f"slot {slot}", "penstock must not fail", "".join(traceback.format_exception(error)))


def node_name() -> str:
    """The Spark executor this process belongs to, as ``host/id``: named on the command line of the JVM that
    is the parent of our parent, the daemon. In local mode there is none: ``host/driver``."""
    executor = "driver"
    try:
        status = Path(f"/proc/{os.getppid()}/stat").read_text()
        jvm = status.rpartition(")")[2].split()[1]
        words = Path(f"/proc/{jvm}/cmdline").read_text().split("\0")
        executor = words[words.index("--executor-id") + 1]
    except (OSError, ValueError, IndexError):
        pass
    return f"{socket.gethostname()}/{executor}"


def resident_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
