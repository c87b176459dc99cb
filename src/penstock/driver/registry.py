"""the worker registry: all workers of one start of a query, what they have said, and what belongs to them alone:
the ledgers of their acks, their boards, their epochs. While a topology is being replaced there are two."""

from __future__ import annotations

import asyncio
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from penstock.acking import ledger
from penstock.acking.ledger import Acker
from penstock.control.signals import TaskFlowState, TaskMessage
from penstock.errors import ControlRefused
from penstock.metrics.bus import MetricsBus
from penstock.plan.model import Plan, WorkerId
from penstock.protocol import wire
from penstock.protocol.driver_clock import WARN_ABOVE
from penstock.protocol.message_board import MessageBoardTables
from penstock.protocol.messages import (
    AckTally,
    AssignWorker,
    ChannelsWarm,
    EpochPublished,
    Hello,
    HoldTimeouts,
    JoinMessageBoard,
    LeavePrepared,
    Message,
    OpenTasks,
    PrefetchState,
    RequestReport,
    RootsFailed,
    RootsSettled,
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
    dumps,
)

log = logging.getLogger("penstock.driver")


@dataclass
class WorkerConnection:
    """One worker as the coordinator sees it."""

    hello: Hello
    writer: asyncio.StreamWriter
    ahead: int = 0
    """The newest epoch whose state it has read ahead."""
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
        self.epoch_events: queue.SimpleQueue[tuple[WorkerId, Message] | tuple[()] | None] = queue.SimpleQueue()
        """What workers say of epochs, for the thread that commits them."""
        self.changed = changed
        self._plan, self._bus, self._soon = plan, bus, soon
        self._acker = Acker(key)
        self._message_board = MessageBoardTables(plan.routes.worker_of)
        self._probes = 0
        self._sinks_away: set[WorkerId] = set()
        """Workers whose last report had a sink that is away."""
        self._skewed: set[str] = set()
        """Hosts whose clocks were found to differ from the driver's."""

    # ---- to the workers ----------------------------------------------------------------------------------

    def send(self, message: Message, to: WorkerId | None = None) -> None:
        """Send a command to one worker, or to all."""
        data = framed(message)

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
            self.send(AssignWorker(worker.index, self._next_slots(worker)), worker)

    def _next_slots(self, worker: WorkerId) -> list[list[int]]:
        """Those of the next stage, by its workers."""
        return [
            [slot.index] for each, slot in sorted(self.slot_of_worker.items()) if each.stage == worker.stage + 1
        ]

    def stand_by(self, worker: WorkerId, slot: WorkerId) -> None:
        """Have a free slot prepare to take over the worker."""
        with self.changed:
            connection = self.slots[slot]
            connection.id, connection.free, connection.ready, connection.left = worker, False, False, None
            connection.closed, connection.problem, connection.ahead, connection.leaving = False, "", -1, 0
        self.tell(connection, AssignWorker(worker.index, self._next_slots(worker), takes_over=True))

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

    def tell(self, connection: WorkerConnection, message: Message) -> None:
        """Whatever worker it has."""
        self._soon(partial(connection.writer.write, framed(message)))

    def read_ahead(self, epoch: int, tasks: Mapping[str, Any]) -> None:
        """Tell the workers what their tasks are likely to begin with."""
        for worker in list(self.workers):
            self.send(PrefetchState(epoch, self.share(worker, tasks)), worker)

    def open(self, generation: int, epoch: int, tasks: Mapping[str, Any]) -> None:
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

    def share(self, worker: WorkerId, tasks: Mapping[str, Any]) -> dict[str, Any]:
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
        """Whether each worker is connected, and the seconds since it was last heard."""
        now = time.monotonic()
        with self.changed:
            return {id: (c.connected, now - c.heard) for id, c in self.workers.items() if not c.closed}

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

    def join(self, connection: WorkerConnection) -> None:
        with self.changed:
            (self.slots if self._placed else self.workers)[connection.id] = connection
            self.changed.notify_all()

    def leave(self, connection: WorkerConnection) -> None:
        with self.changed:
            connection.connected = connection.free = False
            connection.gone_at = time.monotonic()
            connection.problem = connection.problem or "its connection is gone"
            self.changed.notify_all()

    def take(self, connection: WorkerConnection, message: Message) -> None:
        """What a worker says. One that stands by to take over, or has left, does not speak for its worker."""
        connection.heard = time.monotonic()
        if isinstance(message, AckTally | RootsFailed):
            self._settle(message)
        elif isinstance(message, TaskMessage | TaskFlowState | JoinMessageBoard):
            for worker, each in self._message_board.handle(connection.id, message):
                self._tell(worker, each)
        else:
            with self.changed:
                self._note(connection, message)
                self.changed.notify_all()

    def _settle(self, message: AckTally | RootsFailed) -> None:
        """The acker's work: enter what a worker says, and tell the spouts what came of it."""
        if isinstance(message, AckTally):
            settled, component, error = self._acker.apply(*ledger.unpack(message.data)), "", ""
        else:
            first, length = np.array(message.first, np.uint64), np.array(message.length, np.int64)
            settled, component, error = self._acker.close(first, length), message.component, message.error
        for task, numbers in settled.items():
            data = np.concatenate(ledger.ranges(numbers)).tobytes()
            self._tell(self._plan.routes.worker_of[task], RootsSettled(task, component, error, data))

    def _tell(self, worker: WorkerId, message: Message) -> None:
        """Write to a worker, if it is there. On the loop."""
        target = self.workers.get(worker)
        if target is not None and target.connected:
            target.writer.write(framed(message))

    def _note(self, connection: WorkerConnection, message: Message) -> None:
        current = self.workers.get(connection.id) is connection
        if isinstance(message, WorkerRouted):
            connection.sending[message.worker] = message.slots
        elif isinstance(message, LeavePrepared):
            connection.leaving = message.commit
        elif isinstance(message, WorkerLeft):
            connection.left, connection.left_at = message, time.monotonic()
        elif isinstance(message, SlotFreed):
            connection.free = not connection.problem
        elif isinstance(message, WorkerFailed | StateUnreadable) and not current:
            what = message.error if isinstance(message, StateUnreadable) else f"{message.where}: {message.problem}"
            connection.problem = what
        elif isinstance(message, WorkerReport) and not current:
            self._bus.note_errors(message.errors)
        elif isinstance(message, WorkerReport):
            if message.probe:
                connection.answer = message
            self._note_skew(connection, message.clock_skew)
            for task, number in message.settled_below.items():
                self._acker.settled_below(int(task), number)
            self._bus.record(self.attempt, connection.id, message)
            self._hold_timeouts(connection.id, message)
        elif isinstance(message, StatePrefetched):
            connection.ahead = message.epoch
        elif isinstance(message, ChannelsWarm):
            connection.warm = True
        elif isinstance(message, TasksOpened):
            connection.ready, connection.stateful = True, message.stateful
        elif isinstance(message, SpoutsSnapshotted | SnapshotWritten | SnapshotFailed | EpochPublished):
            self.epoch_events.put((connection.id, message))
        elif isinstance(message, StateUnreadable):
            self.corrupt = self.corrupt or message.error
        elif isinstance(message, TasksClosed):
            connection.closed = True
        elif isinstance(message, WorkerFailed) and self.failure is None:
            self.failure = message

    def _note_skew(self, connection: WorkerConnection, skew: float) -> None:
        """Warn once of each node whose clock is wrong."""
        connection.clock_skew = skew
        host = connection.hello.node.partition("/")[0]
        if abs(skew) <= WARN_ABOVE or host in self._skewed:
            return
        self._skewed.add(host)
        text = (
            f"The clock of node {host} is {abs(skew):,.1f} s {'ahead of' if skew > 0 else 'behind'} the driver's. "
            "Time-outs and latencies are corrected for it; times that your code reads are not. "
            "Synchronise the clocks of the nodes (NTP)."
        )
        log.warning("%s", text)
        self._bus.note("clock", "", text)

    def _hold_timeouts(self, worker: WorkerId, report: WorkerReport) -> None:
        """While any worker reports a sink that is away, no tuple may time out anywhere. A worker is told with each
        of its reports, for it may have moved to another process. On the loop."""
        held = bool(self._sinks_away)
        if any(stats.get("away") for stats in report.tasks.values()):
            self._sinks_away.add(worker)
        else:
            self._sinks_away.discard(worker)
        if self._sinks_away:
            for each in self.workers if not held else (worker,):
                self._tell(each, HoldTimeouts(True))
        elif held:
            for each in self.workers:
                self._tell(each, HoldTimeouts(False))


def framed(message: Message) -> bytes:
    """A message as it stands on the wire. Raises ``ControlRefused`` for one that is too long."""
    return wire.framed(dumps(message))
