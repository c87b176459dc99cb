"""The worker registry: all workers of one query run, what they have said, and what belongs to them alone: the
ledgers of their acks, their message board, their epochs. While a topology is being replaced there are two."""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np

from penstock.acking import ledger
from penstock.acking.ledger import Acker
from penstock.control.signals import TaskFlowState, TaskMessage
from penstock.driver.message_board import MessageBoardTables
from penstock.driver.worker_health import SinkOutages, SkewWarnings
from penstock.errors import ControlRefused
from penstock.metrics.bus import MetricsBus
from penstock.plan.model import Plan, WorkerId
from penstock.protocol import codec, wire
from penstock.protocol.commands import (
    AssignWorker,
    Command,
    HoldTimeouts,
    OpenTasks,
    PrefetchState,
    RequestReport,
    RootsSettled,
)
from penstock.protocol.events import (
    AckTally,
    ChannelsWarm,
    EpochPublished,
    Event,
    Heartbeat,
    Hello,
    JoinMessageBoard,
    LeavePrepared,
    RootsFailed,
    SlotFreed,
    SnapshotFailed,
    SnapshotWritten,
    SpoutsSnapshotted,
    StatePrefetched,
    StateUnreadable,
    TasksClosed,
    TasksOpened,
    WorkerFailed,
    WorkerLeft,
    WorkerReport,
    WorkerRouted,
)
from penstock.protocol.requests import OperatorAnswer
from penstock.protocol.task_states import TaskStates

log = logging.getLogger("penstock.driver")

EpochEvent = SpoutsSnapshotted | SnapshotWritten | SnapshotFailed | EpochPublished


class CommandWriter(Protocol):
    """The driver's end of a worker's connection: a socket's ``StreamWriter``, or memory in the local runner."""

    def write(self, data: bytes) -> None: ...

    def close(self) -> None: ...


@dataclass
class WorkerConnection:
    """One worker as the coordinator sees it."""

    hello: Hello
    writer: CommandWriter
    ahead: int = 0
    """The newest epoch whose state it has prefetched."""
    warm: bool = False
    """Every channel into it has been used: on a node that is new, the first frame takes half a second."""
    ready: bool = False
    stateful: bool = False
    closed: bool = False
    connected: bool = True
    answer: WorkerReport | None = None
    """The newest report that answered a probe."""
    free: bool = False
    """A slot that no worker has."""
    sending: dict[int, list[int]] = field(default_factory=dict)
    """Where it says that it sends what is for workers of the next stage, of those that moved."""
    leaving: int = 0
    """The commit with which it says that its worker leaves."""
    left: WorkerLeft | None = None
    """Its worker does nothing more, and may be taken over."""
    left_at: float = 0.0
    """When that was heard, on the monotonic clock."""
    problem: str = ""
    """Why it cannot have the worker it was to take over."""
    gone_at: float = math.inf
    """When its connection ended, on the monotonic clock."""
    clock_skew: float = 0.0
    """Seconds by which its machine's wall clock is ahead of the driver's."""
    heard: float = field(default_factory=time.monotonic)
    id: WorkerId = field(init=False)
    """Of its worker; until it has one, of its slot."""

    def __post_init__(self) -> None:
        self.id = WorkerId(self.hello.stage, self.hello.slot)

    def record(self, event: Event) -> bool:
        """Note what the worker says of itself. False: the event is about something else."""
        match event:
            case WorkerRouted():
                self.sending[event.worker] = event.slots
            case LeavePrepared():
                self.leaving = event.commit
            case WorkerLeft():
                self.left, self.left_at = event, time.monotonic()
            case SlotFreed():
                self.free = not self.problem
            case StatePrefetched():
                self.ahead = event.epoch
            case ChannelsWarm():
                self.warm = True
            case TasksOpened():
                self.ready, self.stateful = True, event.stateful
            case TasksClosed():
                self.closed = True
            case _:
                return False
        return True


class WorkerRegistry:
    """``workers`` is looked at under ``changed``. ``take`` is called on the coordinator's loop, the rest from any
    thread."""

    def __init__(
        self,
        attempt: int,
        plan: Plan,
        bus: MetricsBus,
        key: int,
        changed: threading.Condition,
        soon: Callable[[Callable[[], None]], None],
        placed: bool = False,
    ) -> None:
        """``key`` is that of the ledgers; ``soon`` has something done on the loop. ``placed``: who comes has
        a slot and waits for its worker."""
        self.attempt = attempt
        """Which start it is: no other has this number."""
        self.workers: dict[WorkerId, WorkerConnection] = {}
        self.slots: dict[WorkerId, WorkerConnection] = {}
        """Where workers are placed: all that have connected, with or without a worker."""
        self.slot_of_worker: dict[WorkerId, WorkerId] = {}
        """Where workers are placed: the slot of each."""
        self._placed = placed
        self.failure: WorkerFailed | None = None
        self.corrupt = ""
        """A worker could not restore its tasks."""
        self.epoch_events: queue.SimpleQueue[tuple[WorkerId, EpochEvent] | tuple[()] | None] = queue.SimpleQueue()
        """What workers say of epochs, for the thread that commits them."""
        self.changed = changed
        self._plan, self._bus, self._soon = plan, bus, soon
        self._acker = Acker(key)
        self._message_board = MessageBoardTables(plan.routes.worker_of)
        self._probes = 0
        self._outages, self._skews = SinkOutages(), SkewWarnings()

    # ---- to the workers ----------------------------------------------------------------------------------

    def send(self, command: Command, to: WorkerId | None = None) -> None:
        """Send a command to one worker, or to all."""
        data = framed(command)

        def write() -> None:
            for connection in list(self.workers.values()):
                if connection.connected and to in (None, connection.id):
                    connection.writer.write(data)

        self._soon(write)

    def assign_slots(self, taken: Mapping[WorkerId, WorkerId]) -> None:
        """Give each worker its slot. Slots without one stay free."""
        with self.changed:
            self.slot_of_worker.update(taken)
            for worker, slot in taken.items():
                self.slots[slot].id = worker
                self.workers[worker] = self.slots[slot]
            for slot in self.slots.keys() - set(taken.values()):
                self.slots[slot].free = True
        for worker in taken:
            self.send(AssignWorker(worker.index, _next_slots(worker, self.slot_of_worker)), worker)

    def stand_by(self, worker: WorkerId, slot: WorkerId) -> None:
        """Have a free slot prepare to take over the worker."""
        with self.changed:
            connection = self.slots[slot]
            connection.id, connection.free, connection.ready, connection.left = worker, False, False, None
            connection.closed, connection.problem, connection.ahead, connection.leaving = False, "", -1, 0
        self.send_to(
            connection, AssignWorker(worker.index, _next_slots(worker, self.slot_of_worker), takes_over=True)
        )

    def hand_over(self, worker: WorkerId, to: WorkerId) -> None:
        """From now on that slot has the worker: it is told and asked, and speaks for it. What is told to others
        behind this call is told after that."""

        def swap() -> None:
            self._message_board.detach(worker)
            with self.changed:
                self.workers[worker], self.slot_of_worker[worker] = self.slots[to], to
                self.workers[worker].heard = time.monotonic()
                self._bus.forget_process_of(worker)
                self.changed.notify_all()

        self._soon(swap)

    def send_to(self, connection: WorkerConnection, command: Command) -> None:
        """Whatever worker it has."""
        self._soon(partial(connection.writer.write, framed(command)))

    def prefetch(self, epoch: int, tasks: TaskStates) -> None:
        """Tell the workers what their tasks are likely to begin with."""
        for worker in list(self.workers):
            self.send(PrefetchState(epoch, self.share(worker, tasks)), worker)

    def open(self, generation: int, epoch: int, tasks: TaskStates) -> None:
        """Tell the workers to open, where each of them stands, and what their tasks begin with."""
        nodes = self.nodes()
        for id in nodes:
            worker = WorkerId.parse(id)
            self.send(OpenTasks(nodes, generation, epoch, self.share(worker, tasks)), worker)

    def nodes(self) -> dict[str, str]:
        """Where each worker is."""
        with self.changed:
            return {str(id): connection.hello.node for id, connection in self.workers.items()}

    def probe(self) -> int:
        """Ask every worker for a report; returns the number the answers will carry."""
        self._probes += 1
        self.send(RequestReport(self._probes))
        return self._probes

    def dismiss(self) -> None:
        """Close all connections: who is still there learns that it is no longer wanted."""
        for connection in {id(each): each for each in (*self.workers.values(), *self.slots.values())}.values():
            self._soon(connection.writer.close)

    def share(self, worker: WorkerId, tasks: TaskStates) -> TaskStates:
        """What is of the worker's tasks."""
        keys = {self._plan.task[task].key for task in self._plan.routes.tasks_of(worker)}
        return {key: entry for key, entry in tasks.items() if key in keys}

    # ---- what is known of them -------------------------------------------------------------------------

    @property
    def broken(self) -> bool:
        """A worker has failed or is gone."""
        return self.failure is not None or not all(worker.connected for worker in self.workers.values())

    @property
    def all_closed(self) -> bool:
        return all(worker.closed or not worker.connected for worker in self.workers.values())

    def silent_for(self) -> dict[WorkerId, tuple[bool, float]]:
        """Whether each worker is connected, and the seconds since its last message or since its connection
        ended."""
        now = time.monotonic()
        with self.changed:
            return {
                id: (c.connected, now - (c.heard if c.connected else c.gone_at))
                for id, c in self.workers.items()
                if not c.closed
            }

    def in_flight(self, probe: int) -> tuple[int, int] | None:
        """Frames sent and done over all workers, as they answered the probe; None while anything is on its way."""
        reports = [worker.answer for worker in self.workers.values()]
        answers = [report for report in reports if report is not None and report.probe >= probe]
        if len(answers) < len(reports):
            return None
        sent, done = sum(r.frames_sent for r in answers), sum(r.frames_done for r in answers)
        return (sent, done) if sent == done and not any(r.pending for r in answers) else None

    def answered(self, probe: int) -> bool:
        return all(worker.answer is not None and worker.answer.probe >= probe for worker in self.workers.values())

    def refuse(self, connection: WorkerConnection, error: ControlRefused) -> None:
        """A worker said something that cannot be read: the topology fails with this reason, instead of losing the
        worker without one."""
        failed = WorkerFailed(f"worker {connection.id}, {error.where}", error.problem, error.hint)
        with self.changed:
            self._note(connection, failed)
            self.changed.notify_all()

    # ---- from the workers --------------------------------------------------------------------------------

    def add(self, connection: WorkerConnection) -> None:
        with self.changed:
            (self.slots if self._placed else self.workers)[connection.id] = connection
            self.changed.notify_all()

    def connection_lost(self, connection: WorkerConnection) -> None:
        with self.changed:
            connection.connected = connection.free = False
            connection.gone_at = time.monotonic()
            connection.problem = connection.problem or "its connection is gone"
            self.changed.notify_all()

    def handle(self, connection: WorkerConnection, event: Event) -> None:
        """What a worker says. One that stands by to take over, or has left, does not speak for its worker."""
        connection.heard = time.monotonic()
        if isinstance(event, AckTally | RootsFailed):
            self._settle(event)
        elif isinstance(event, TaskMessage | TaskFlowState | JoinMessageBoard):
            for worker, each in self._message_board.handle(connection.id, event):
                self._tell(worker, each)
        else:
            with self.changed:
                self._note(connection, event)
                self.changed.notify_all()

    def _settle(self, event: AckTally | RootsFailed) -> None:
        """The acker's work: enter what a worker says, and tell the spouts what came of it."""
        if isinstance(event, AckTally):
            settled, component, error = self._acker.apply(*ledger.unpack(event.data)), "", ""
        else:
            first, length = np.array(event.first, np.uint64), np.array(event.length, np.int64)
            settled, component, error = self._acker.close(first, length), event.component, event.error
        for task, numbers in settled.items():
            data = np.concatenate(ledger.ranges(numbers)).tobytes()
            self._tell(self._plan.routes.worker_of[task], RootsSettled(task, component, error, data))

    def _tell(self, worker: WorkerId, command: Command) -> None:
        """Write to a worker, if it is there. On the loop."""
        target = self.workers.get(worker)
        if target is not None and target.connected:
            target.writer.write(framed(command))

    def _note(self, connection: WorkerConnection, event: Event) -> None:
        current = self.workers.get(connection.id) is connection
        match event:
            case WorkerReport() if current:
                self._note_report(connection, event)
            case WorkerReport():
                self._bus.note_errors(event.errors)
            case Heartbeat() if current:
                self._bus.note_call(self.attempt, event.task, event.in_call)
            case WorkerFailed() if not current:
                connection.problem = f"{event.where}: {event.problem}"
            case WorkerFailed():
                self.failure = self.failure or event
            case StateUnreadable() if not current:
                connection.problem = event.error
            case StateUnreadable():
                self.corrupt = self.corrupt or event.error
            case SpoutsSnapshotted() | SnapshotWritten() | SnapshotFailed() | EpochPublished():
                self.epoch_events.put((connection.id, event))
            case _:
                connection.record(event)

    def _note_report(self, connection: WorkerConnection, report: WorkerReport) -> None:
        if report.probe:
            connection.answer = report
        connection.clock_skew = report.clock_skew
        warning = self._skews.check(connection.hello.node, report.clock_skew)
        if warning:
            log.warning("%s", warning)
            self._bus.note("clock", "", warning)
        for task, number in report.settled_below.items():
            self._acker.settled_below(task, number)
        self._bus.record(self.attempt, connection.id, report)
        away = any(stats.away for stats in report.tasks.values())
        for worker, held in self._outages.note(connection.id, away, self.workers):
            self._tell(worker, HoldTimeouts(held))


def _next_slots(worker: WorkerId, slot_of_worker: Mapping[WorkerId, WorkerId]) -> list[list[int]]:
    """The slots of the next stage, by its workers."""
    return [[slot.index] for each, slot in sorted(slot_of_worker.items()) if each.stage == worker.stage + 1]


def framed(message: Command | OperatorAnswer) -> bytes:
    """A message as it stands on the wire. Raises ``ControlRefused`` for one that cannot be sent."""
    return wire.framed(codec.encode(message))
