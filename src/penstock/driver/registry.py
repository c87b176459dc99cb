"""The worker registry: the workers of one query run and what they have reported, with the ledgers of their acks,
their message board and their events about epochs. During a replacement there are two registries."""

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

from penstock.control.signals import TaskFlowState, TaskMessage
from penstock.driver.ackers import Ackers
from penstock.driver.message_board import MessageBoardTables
from penstock.driver.overtaken import waiting_of, waiting_rows
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
)
from penstock.protocol.events import (
    AckerLinked,
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
    UnfinishedHandedOn,
    WorkerFailed,
    WorkerLeft,
    WorkerReport,
    WorkerRouted,
)
from penstock.protocol.requests import OperatorAnswer
from penstock.protocol.task_states import TaskStates
from penstock.state.manifest import OvertakenFrames

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
    prefetched_epoch: int = 0
    """The newest epoch whose state the worker has prefetched."""
    warm: bool = False
    """Whether every channel into the worker has been used. On a new node the first frame takes half a second."""
    ready: bool = False
    stateful: bool = False
    closed: bool = False
    connected: bool = True
    answer: WorkerReport | None = None
    """The newest report that answered a probe."""
    free: bool = False
    """Whether this slot has no worker and can be given one."""
    sending: dict[int, list[int]] = field(default_factory=dict)
    """The slots to which the worker sends rows for a worker of the next stage, by that worker's index. Only for
    workers that moved."""
    leaving: int = 0
    """The commit with which the worker will leave this slot, as it has confirmed. 0 if none."""
    left: WorkerLeft | None = None
    """Set when the worker has stopped, so that another slot may take it over."""
    left_at: float = 0.0
    """When ``left`` arrived, on the monotonic clock."""
    problem: str = ""
    """Why this slot cannot take over a worker. Empty if it can."""
    left_unfinished: int | None = None
    """Tuples that its spouts could not hand on to another query run. None until it has answered."""
    gone_at: float = math.inf
    """When the connection ended, on the monotonic clock."""
    clock_skew: float = 0.0
    """Seconds by which the wall clock of the worker's machine is ahead of the driver's."""
    last_event_at: float = field(default_factory=time.monotonic)
    """When the last event arrived, on the monotonic clock."""
    id: WorkerId = field(init=False)
    """The id of the worker. Before one is assigned, the id of the slot."""

    def __post_init__(self) -> None:
        self.id = WorkerId(self.hello.stage, self.hello.slot)

    def record(self, event: Event) -> bool:
        """Record an event about this connection. Returns False if the event is about something else."""
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
                self.prefetched_epoch = event.epoch
            case ChannelsWarm():
                self.warm = True
            case TasksOpened():
                self.ready, self.stateful = True, event.stateful
            case UnfinishedHandedOn():
                self.left_unfinished = event.left
            case TasksClosed():
                self.closed = True
            case _:
                return False
        return True


class WorkerRegistry:
    """The workers of one query run. Other threads read ``workers`` and ``slots`` under ``changed``. ``add``,
    ``handle``, ``refuse`` and ``connection_lost`` are called on the coordinator's loop, the other methods by any
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
        ackers: int = 1,
        silence: float = math.inf,
    ) -> None:
        """``key``: the key of the ledgers. ``soon`` schedules a call on the coordinator's loop. ``placed``: what
        connects is a slot, to which a worker is assigned later. ``ackers`` and ``silence``: as in ``Ackers``."""
        self.attempt = attempt
        """The number of the query run, which no other has."""
        self.workers: dict[WorkerId, WorkerConnection] = {}
        self.slots: dict[WorkerId, WorkerConnection] = {}
        """If workers are placed: all slots that have connected, with or without a worker."""
        self.slot_of_worker: dict[WorkerId, WorkerId] = {}
        """If workers are placed: the slot of each worker."""
        self._placed = placed
        self._begun = False
        """Whether workers were told anything about their tasks. A process that connects later cannot replace
        another one."""
        self.failure: WorkerFailed | None = None
        self.corrupt = ""
        """Why a worker could not restore its tasks. Empty if all could."""
        self.epoch_events: queue.SimpleQueue[tuple[WorkerId, EpochEvent] | tuple[()] | None] = queue.SimpleQueue()
        """Events about epochs, for the thread that commits them."""
        self.changed = changed
        self._plan, self._bus, self._soon = plan, bus, soon
        self.ackers = Ackers(key, ackers, silence, partial(_write_to_slot, self), partial(bus.note, "acker", ""))
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
        """Assign a slot to each worker. The other slots are free."""
        with self.changed:
            self._begun = True
            self.slot_of_worker.update(taken)
            for worker, slot in taken.items():
                self.slots[slot].id = worker
                self.workers[worker] = self.slots[slot]
            for slot in self.slots.keys() - set(taken.values()):
                self.slots[slot].free = self.slots[slot].connected
        for worker in taken:
            self.send(AssignWorker(worker.index, _next_slots(worker, self.slot_of_worker)), worker)

    def stand_by(self, worker: WorkerId, slot: WorkerId) -> None:
        """Make a free slot prepare to take over the worker."""
        with self.changed:
            connection = self.slots[slot]
            connection.id, connection.free, connection.ready, connection.left = worker, False, False, None
            connection.closed, connection.problem = False, ""
            connection.prefetched_epoch, connection.leaving = -1, 0
        self.send_to(
            connection, AssignWorker(worker.index, _next_slots(worker, self.slot_of_worker), takes_over=True)
        )

    def hand_over(self, worker: WorkerId, to: WorkerId) -> None:
        """Give the worker to the slot ``to``. From then on that slot gets the worker's commands, and its events
        are the worker's. Commands that are sent after this call are written after the change."""

        def swap() -> None:
            self._message_board.detach(worker)
            with self.changed:
                self.workers[worker], self.slot_of_worker[worker] = self.slots[to], to
                self.workers[worker].last_event_at = time.monotonic()
                self._bus.forget_process_of(worker)
                self.changed.notify_all()

        self._soon(swap)

    def send_to(self, connection: WorkerConnection, command: Command) -> None:
        """Send a command to a connection, whichever worker it has."""
        self._soon(partial(connection.writer.write, framed(command)))

    def prefetch(self, epoch: int, tasks: TaskStates) -> None:
        """Tell the workers to prefetch the state with which their tasks will probably begin."""
        self._begun = True
        for worker in list(self.workers):
            self.send(PrefetchState(epoch, self.share(worker, tasks)), worker)

    def open(self, generation: int, epoch: int, tasks: TaskStates, waiting: OvertakenFrames | None = None) -> None:
        """Tell the workers to open their tasks with this state, and to process the tuples ``waiting`` first. They
        also learn the node of each worker."""
        self._begun = True
        nodes, behind = self.nodes(), waiting_rows(self._plan, waiting)
        for id in nodes:
            worker = WorkerId.parse(id)
            first = None if waiting is None else waiting_of(self._plan, worker, waiting)
            share = self.share(worker, tasks)
            self.send(OpenTasks(nodes, generation, epoch, share, waiting=first, behind=behind), worker)

    def nodes(self) -> dict[str, str]:
        """Return the node of each worker."""
        with self.changed:
            return {str(id): connection.hello.node for id, connection in self.workers.items()}

    def probe(self) -> int:
        """Ask every worker for a report. Returns the number that the answers will have."""
        self._probes += 1
        self.send(RequestReport(self._probes))
        return self._probes

    def start_ackers(self) -> None:
        """Have acker processes started, if there are several ackers. All slots have connected."""
        self._begun = True
        with self.changed:
            nodes = {slot_of(each): each.hello.node for each in processes_of(self)}
        self._soon(partial(self.ackers.begin, nodes))

    def dismiss(self) -> None:
        """Close all connections, so that workers and acker processes that still run end."""
        self._soon(self.ackers.close)
        for connection in processes_of(self):
            self._soon(connection.writer.close)

    def share(self, worker: WorkerId, tasks: TaskStates) -> TaskStates:
        """Return the states of the worker's tasks."""
        keys = {self._plan.task[task].key for task in self._plan.routes.tasks_of(worker)}
        return {key: entry for key, entry in tasks.items() if key in keys}

    # ---- state of the workers --------------------------------------------------------------------------

    @property
    def broken(self) -> bool:
        """Whether a worker has failed or lost its connection."""
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
                id: (c.connected, now - (c.last_event_at if c.connected else c.gone_at))
                for id, c in self.workers.items()
                if not c.closed
            }

    def in_flight(self, probe: int) -> tuple[int, int] | None:
        """Return the numbers of frames that all workers have sent and processed, from their answers to the probe.
        None if an answer is missing or anything is in flight."""
        reports = [worker.answer for worker in self.workers.values()]
        answers = [report for report in reports if report is not None and report.probe >= probe]
        if len(answers) < len(reports):
            return None
        sent, done = sum(r.frames_sent for r in answers), sum(r.frames_done for r in answers)
        return (sent, done) if sent == done and not any(r.pending for r in answers) else None

    def answered(self, probe: int) -> bool:
        return all(worker.answer is not None and worker.answer.probe >= probe for worker in self.workers.values())

    def refuse(self, connection: WorkerConnection, error: ControlRefused) -> None:
        """Called for an invalid message of a worker. The topology fails with this error, instead of losing the
        worker without a reason."""
        failed = WorkerFailed(f"worker {connection.id}, {error.where}", error.problem, error.hint)
        with self.changed:
            self._note(connection, failed)
            self.changed.notify_all()

    # ---- from the workers --------------------------------------------------------------------------------

    def add(self, connection: WorkerConnection) -> None:
        """Add a process that has connected. Raises ``ControlRefused`` if another one has connected from the same
        slot before: the engine may start a task again whose process has died, but the new process does not know
        what the first one was told. The first one stays in the registry, so its loss is detected. Until workers
        are told anything, a process may replace one that is gone."""
        with self.changed:
            known = self.slots if self._placed else self.workers
            first = known.get(connection.id)
            if first is not None and (first.connected or self._begun):
                raise _second(connection, first)
            known[connection.id] = connection
            self.changed.notify_all()

    def connection_lost(self, connection: WorkerConnection) -> None:
        with self.changed:
            connection.connected = connection.free = False
            connection.gone_at = time.monotonic()
            connection.problem = connection.problem or "its connection is gone"
            self.changed.notify_all()

    def handle(self, connection: WorkerConnection, event: Event) -> None:
        """Handle an event of a worker. Reports, heartbeats and errors of a slot that stands by to take over a
        worker, or that its worker has left, are not taken as the worker's."""
        connection.last_event_at = time.monotonic()
        if isinstance(event, AckTally | RootsFailed):
            for settled in self.ackers.settle(event):
                self._tell(self._plan.routes.worker_of[settled.task], settled)
        elif isinstance(event, TaskMessage | TaskFlowState | JoinMessageBoard):
            for worker, each in self._message_board.handle(connection.id, event):
                self._tell(worker, each)
        else:
            with self.changed:
                if isinstance(event, AckerLinked):
                    self.ackers.linked(slot_of(connection), event)
                self._note(connection, event)
                self.changed.notify_all()

    def _tell(self, worker: WorkerId, command: Command) -> None:
        """Write a command to a worker, if it is connected. Called on the loop."""
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
        self.ackers.settled_below(report.settled_below)
        self._bus.record(self.attempt, connection.id, report)
        away = any(stats.away for stats in report.tasks.values())
        for worker, held in self._outages.note(connection.id, away, self.workers):
            self._tell(worker, HoldTimeouts(held))


def processes_of(registry: WorkerRegistry) -> list[WorkerConnection]:
    """Return all processes that have connected, each once."""
    return list({id(each): each for each in (*registry.workers.values(), *registry.slots.values())}.values())


def _write_to_slot(registry: WorkerRegistry, slot: WorkerId | None, command: Command) -> None:
    """Write a command to a slot, or to all. Called on the loop."""
    for each in processes_of(registry):
        if each.connected and slot in (None, slot_of(each)):
            each.writer.write(framed(command))


def slot_of(connection: WorkerConnection) -> WorkerId:
    """Return the slot of a process, whichever worker it runs."""
    return WorkerId(connection.hello.stage, connection.hello.slot)


def _second(second: WorkerConnection, first: WorkerConnection) -> ControlRefused:
    gone = "" if first.connected else ", which is gone; the query has to be started again"
    return ControlRefused(
        f"worker {second.id}",
        f"process {second.hello.pid} on {second.hello.node} connected in addition to process {first.hello.pid} on "
        f"{first.hello.node}{gone}",
    )


def _next_slots(worker: WorkerId, slot_of_worker: Mapping[WorkerId, WorkerId]) -> list[list[int]]:
    """Return the slots of the workers of the next stage, as in ``AssignWorker.next``."""
    return [[slot.index] for each, slot in sorted(slot_of_worker.items()) if each.stage == worker.stage + 1]


def framed(message: Command | OperatorAnswer) -> bytes:
    """Return the encoded message, preceded by its length. Raises ``ControlRefused`` if it cannot be sent."""
    return wire.framed(codec.encode(message))
