"""A slot in its seat: moves rows between it and ``runtime.Slot``, and commands and reports between the coordinator
and it."""

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
from penstock.control.signals import TaskMessage, TaskState
from penstock.coordinator.boards import Board, open_board
from penstock.coordinator.client import ControlClient
from penstock.coordinator.driver_clock import INTERVAL
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
    Freed,
    HoldTimeouts,
    Leave,
    Leaving,
    Left,
    NotSnapped,
    Open,
    Probe,
    Published,
    ReadAhead,
    Ready,
    Report,
    Reroute,
    Rest,
    Sending,
    SendTo,
    SetRate,
    Settled,
    Snapped,
    SpoutsCut,
    Stay,
    TakeSeat,
    Tally,
    Warm,
)
from penstock.errors import FramesLost, PenstockError, SinkRefused, SnapshotCorrupt, StateError, StateUnavailable
from penstock.faults import CrashPoint
from penstock.frames.header import Header, Kind, unpack
from penstock.metrics.machine import Machine, spark_jvm
from penstock.plan.model import SlotId
from penstock.runtime.archive import SlotArchive
from penstock.runtime.job import Job
from penstock.runtime.memo import Memo
from penstock.runtime.outgoing import Row
from penstock.runtime.slot import Slot, SlotCut
from penstock.spark.rows import as_batches
from penstock.spark.wake import Wake
from penstock.topology.components import Failure

LONGEST_WAIT = 1.0  # seconds; whatever happens sooner wakes the loop
_PUBLISH_RETRY = 1.0  # seconds until another system is asked again to take an epoch
_KIND = 3  # where a header has its kind
_READER_RETRY = 0.05  # seconds; the loop wakes the reader sooner
LOADS_IN_A_WINDOW = 4
"""How often in a window of the load monitor a slot tells its streams: what a window misses of its end, and has of
the one before, is then less than a quarter, and as much in every window."""


class SlotDriver:
    """Runs a slot for as long as the query lives, or until it has moved to another seat."""

    def __init__(
        self, id: SlotId, job: Job, attempt: int, control: ControlClient, wake: Wake, seat: TakeSeat
    ) -> None:
        self._following = [list(seats) for seats in seat.next]
        """Seats of the next stage by its slots' numbers; empty where each has its own number."""
        self._slot = Slot(id, job, control.clock, seat.takes_over)
        self._job, self._attempt = job, attempt
        self._upstream = job.plan.stages[id.stage - 1].slots if id.stage else 0
        self._last: set[int] = set()
        """Slots of the stage before that send nothing more here."""
        self._unheard: list[TaskMessage] = []
        """What came for the tasks after the slot had left."""
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
        self._over = False
        self._reader_error: PenstockError | None = None
        self._opened = self._said_warm = self._said_ready = self._failed = self._closed = self._said_left = False
        self._control = control
        self._own_rows: list[Row] = []
        """For seats; before what the slot sends."""
        self._told: deque[TaskMessage | TaskState] = deque()
        """The trigger queue: what the board has for the slot's tasks."""
        self._posting = threading.Lock()
        self._board: Board | None = None
        if not seat.takes_over:  # else its tasks are another's until it opens
            self._join()

    def _join(self) -> None:
        job, slot = self._job, self._slot.id
        run = f"{job.plan.topology}-{job.key:016x}-{self._attempt}"
        tasks = job.plan.routes.tasks_of(slot)
        self._board = open_board(job.settings.board, run, tasks, self._tell, self._tell, self._control)

    def rows(self, ended: Callable[[], bool]) -> Iterator[pa.RecordBatch]:
        """What goes to the next stage, until there is no more input, or the slot has gone."""
        slot = self._slot
        threading.Thread(target=self._pulse, name="slot-pulse", daemon=True).start()
        try:
            yield from as_batches(self._seated(slot.warm_up()))
            self._load()
            while not ended() and not self._control.lost and not self._gone:
                try:
                    self._obey()
                    own, self._own_rows = self._own_rows, []
                    rows = self._seated(slot.turn()) if self._runs else []
                    self._hand_over()
                    output = list(as_batches(own + rows)) if own or rows else []
                    self._check()
                except BaseException as error:  # whatever it is, the driver must hear of it before the task dies
                    self._fail(error)
                    output = []
                yield from output
                if self._reader_waits:
                    self._space.set()
                wait = slot.idle_for() if self._runs else LONGEST_WAIT
                if wait > 0:
                    self._wake.wait(wait)
            if self._control.lost and not self._closed:
                reason = self._control.lost_because
                raise ConnectionError(f"slot {slot.id} lost its connection to the coordinator. {reason}".rstrip())
            if self._gone:
                self._control.send(Freed())
        finally:
            self._over = True
            self._chores.put(None)
            if self._board is not None:
                self._board.close(moved=slot.left)

    @property
    def _gone(self) -> bool:
        """It was closed, and nobody sends to it any more; or it never was to be opened after all."""
        return self._closed and (not self._opened or (self._slot.left and len(self._last) == self._upstream))

    def _seated(self, rows: list[Row]) -> list[Row]:
        """Rows for slots as rows for the seats they have."""
        following = self._following
        return [(seat, frame) for slot, frame in rows for seat in following[slot]] if following else rows

    def _send_to(self, message: SendTo) -> None:
        """The first frame to a seat that is new warms it; to one that is left, the last says so."""
        id, slot = self._slot.id, message.slot
        before, self._following[slot] = self._following[slot], list(message.seats)
        for seats, kind in (
            (set(message.seats) - set(before), Kind.WARM),
            (set(before) - set(message.seats), Kind.LAST),
        ):
            frame = Header(kind, id.stage + 1, slot, id.stage, id.slot).pack()
            self._own_rows += [row for seat in seats for row in ((seat, frame), (seat, None))]
        self._control.send(Sending(slot, message.seats))

    def _load(self) -> None:
        try:
            self._slot.load()
        except BaseException as error:  # a user's module may raise anything; the driver must hear of it
            self._fail(error)

    @property
    def _runs(self) -> bool:
        """The tasks are open: not before ``Open``, not after ``Close`` or a failure."""
        return self._opened and not self._failed and not self._closed

    # ---- input -----------------------------------------------------------------------------------------

    def fail_reading(self, error: Exception) -> None:
        """By the reader: it can read no more."""
        self._reader_error = _as_ours(self._slot.id, error)
        self._wake.set()

    def deliver(self, frame: pa.Buffer) -> None:
        """By the reader: put a frame in its inbox; while even an overflow is full, wait."""
        if memoryview(frame)[_KIND] == Kind.LAST:
            self._last.add(unpack(memoryview(frame)).source_slot)
            self._wake.set()
            return
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
        flow, board = self._slot.flow, self._board
        if board is None or (not flow.messages and not flow.states):
            return
        with self._posting:
            while flow.messages:
                board.post(flow.messages.popleft())
            while flow.states:
                board.publish(flow.states.popleft())

    def _obey(self) -> None:
        flow = self._slot.flow
        while self._told:
            told = self._told.popleft()
            if isinstance(told, TaskMessage) and self._slot.left:
                self._pass_on(told)
            elif isinstance(told, TaskMessage):
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
            elif isinstance(message, HoldTimeouts):
                self._slot.hold_timeouts(message.held)
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
            elif isinstance(message, SendTo):
                self._send_to(message)
            elif isinstance(message, Leave):
                self._slot.leave(message.commit, message.epoch)
                self._control.send(Leaving(message.commit))
            elif isinstance(message, Stay):
                self._stay()
            elif isinstance(message, Close):
                self._close()
        if not self._said_warm and self._slot.warm:
            self._said_warm = True
            self._control.send(Warm())
        if self._opened and not self._said_ready and self._said_warm:
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
        memo = Memo(message.epoch, message.memo) if message.memo else None
        self._slot.open(nodes, restored, message.epoch, memo, message.generation)
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
        self._slot.stay()
        self._said_left = False
        while self._unheard:
            self._slot.flow.receive(self._unheard.pop(0))

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
        if slot.left and not self._said_left:
            self._said_left = True
            memo = slot.memo()
            self._report(0)
            self._control.send(Left(memo.epoch, memo.data))

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
        except PenstockError:  # its task has reported it
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
            self._hand_over()  # what sinks acked with their last commit
            for message in self._unheard:
                self._pass_on(message)
            self._report(0)
            self._control.send(Closed())

    def _check(self) -> None:
        """Raise what ends the topology: a fatal user error, or a frame that could not be read."""
        if self._slot.fatal is not None:
            raise self._slot.fatal
        if self._reader_error is not None:
            raise self._reader_error

    def _fail(self, error: BaseException) -> None:
        if self._failed:
            return
        self._failed = True
        error = _as_ours(self._slot.id, error)
        self._report(0)
        passing = isinstance(error, SinkRefused | FramesLost | StateUnavailable)  # the last commit is a way out
        self._control.send(Failed(error.where, error.rule, error.got, error.way_out, passing))

    def _pulse(self) -> None:
        """Report at every interval, from a thread of its own: while Spark holds the loop back because the next
        stage is slow, the driver must still hear that the slot lives."""
        ask_at = time.monotonic() + INTERVAL
        while not self._over and not self._control.lost:
            if time.monotonic() >= ask_at:
                ask_at = time.monotonic() + INTERVAL
                self._control.ask_time()
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
                    self._control.clock.skew,
                    slot.settled_below(),
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


def _as_ours(slot: SlotId, error: BaseException) -> PenstockError:
    if isinstance(error, PenstockError):
        return error
    told = "".join(traceback.format_exception(error))
    return PenstockError(f"slot {slot}", f"Internal error (please report it): {told}")


def resident_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
