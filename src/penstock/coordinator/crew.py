"""The crew: all slots of one start of a query, what they have said, and what belongs to them alone: the ledgers of
their acks, their boards, their epochs. While a topology is being replaced there are two."""

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
from penstock.control.signals import TaskMessage, TaskState
from penstock.coordinator import wire
from penstock.coordinator.boards import Boards
from penstock.coordinator.driver_clock import WARN_ABOVE
from penstock.coordinator.messages import (
    Ahead,
    Closed,
    Corrupt,
    Failed,
    Fails,
    Freed,
    Hello,
    HoldTimeouts,
    JoinBoards,
    Leaving,
    Left,
    Message,
    NotSnapped,
    Open,
    Probe,
    Published,
    ReadAhead,
    Ready,
    Report,
    Sending,
    Settled,
    Snapped,
    SpoutsCut,
    TakeSeat,
    Tally,
    Warm,
    dumps,
)
from penstock.errors import ControlRefused
from penstock.metrics.bus import MetricsBus
from penstock.plan.model import Plan, SlotId

log = logging.getLogger("penstock.coordinator")


@dataclass
class Connection:
    """One slot as the coordinator sees it."""

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
    answer: Report | None = None
    """The newest report that answered a probe."""
    free: bool = False
    """A seat that no slot has."""
    sending: dict[int, list[int]] = field(default_factory=dict)
    """Where it says that it sends what is for slots of the next stage, of those that moved."""
    leaving: int = 0
    """The commit with which it says that its slot leaves."""
    left: Left | None = None
    """Its slot does nothing more, and may be taken over."""
    left_at: float = 0.0
    """When that was heard, on the monotonic clock."""
    problem: str = ""
    """Why it cannot have the slot it was to take over."""
    gone_at: float = math.inf
    """When its connection ended, on the monotonic clock."""
    clock_skew: float = 0.0
    """Seconds by which its machine's wall clock is ahead of the driver's."""
    heard: float = field(default_factory=time.monotonic)
    id: SlotId = field(init=False)
    """Of its slot; until it has one, of its seat."""

    def __post_init__(self) -> None:
        self.id = SlotId(self.hello.stage, self.hello.slot)


class Crew:
    """``slots`` is looked at under ``changed``. ``take`` is called on the coordinator's loop, the rest from any
    thread."""

    def __init__(
        self,
        attempt: int,
        plan: Plan,
        bus: MetricsBus,
        key: int,
        changed: threading.Condition,
        soon: Callable[[Callable[[], None]], None],
        seated: bool = False,
    ) -> None:
        """``key`` is that of the ledgers; ``soon`` has something done on the loop. ``seated``: who comes has
        a seat and waits for its slot."""
        self.attempt = attempt
        """Which start it is: no other has this number."""
        self.slots: dict[SlotId, Connection] = {}
        self.seats: dict[SlotId, Connection] = {}
        """Where slots are placed: all that have connected, with or without a slot."""
        self.seating: dict[SlotId, SlotId] = {}
        """Where slots are placed: the seat of each."""
        self._seated = seated
        self.failure: Failed | None = None
        self.corrupt = ""
        """A slot could not restore its tasks."""
        self.epoch_events: queue.SimpleQueue[tuple[SlotId, Message] | tuple[()] | None] = queue.SimpleQueue()
        """What slots say of epochs, for the thread that commits them."""
        self.changed = changed
        self._plan, self._bus, self._soon = plan, bus, soon
        self._acker = Acker(key)
        self._boards = Boards(plan.routes.slot_of)
        self._probes = 0
        self._sinks_away: set[SlotId] = set()
        """Slots whose last report had a sink that is away."""
        self._skewed: set[str] = set()
        """Hosts whose clocks were found to differ from the driver's."""

    # ---- to the slots ----------------------------------------------------------------------------------

    def send(self, message: Message, to: SlotId | None = None) -> None:
        """Send a command to one slot, or to all."""
        data = framed(message)

        def write() -> None:
            for connection in list(self.slots.values()):
                if connection.connected and to in (None, connection.id):
                    connection.writer.write(data)

        self._soon(write)

    def take_seats(self, taken: Mapping[SlotId, SlotId]) -> None:
        """Give each slot its seat. Seats without one stay free."""
        with self.changed:
            self.seating.update(taken)
            for slot, seat in taken.items():
                self.seats[seat].id = slot
                self.slots[slot] = self.seats[seat]
            for seat in self.seats.keys() - set(taken.values()):
                self.seats[seat].free = True
        for slot in taken:
            self.send(TakeSeat(slot.slot, self._next_seats(slot)), slot)

    def _next_seats(self, slot: SlotId) -> list[list[int]]:
        """Those of the next stage, by its slots."""
        return [[seat.slot] for each, seat in sorted(self.seating.items()) if each.stage == slot.stage + 1]

    def stand_by(self, slot: SlotId, seat: SlotId) -> None:
        """Have a free seat prepare to take over the slot."""
        with self.changed:
            connection = self.seats[seat]
            connection.id, connection.free, connection.ready, connection.left = slot, False, False, None
            connection.closed, connection.problem, connection.ahead, connection.leaving = False, "", -1, 0
        self.tell(connection, TakeSeat(slot.slot, self._next_seats(slot), takes_over=True))

    def hand_over(self, slot: SlotId, to: SlotId) -> None:
        """From now on that seat has the slot: it is told and asked, and speaks for it. What is told to others
        behind this call is told after that."""

        def swap() -> None:
            self._boards.leave(slot)
            with self.changed:
                self.slots[slot], self.seating[slot] = self.seats[to], to
                self.slots[slot].heard = time.monotonic()
                self._bus.moved(slot)
                self.changed.notify_all()

        self._soon(swap)

    def tell(self, connection: Connection, message: Message) -> None:
        """Whatever slot it has."""
        self._soon(partial(connection.writer.write, framed(message)))

    def read_ahead(self, epoch: int, tasks: Mapping[str, Any]) -> None:
        """Tell the slots what their tasks are likely to begin with."""
        for slot in list(self.slots):
            self.send(ReadAhead(epoch, self.share(slot, tasks)), slot)

    def open(self, generation: int, epoch: int, tasks: Mapping[str, Any]) -> None:
        """Tell the slots to open, where each of them stands, and what their tasks begin with."""
        nodes = self.nodes()
        for id in nodes:
            slot = SlotId.parse(id)
            self.send(Open(nodes, generation, epoch, self.share(slot, tasks)), slot)

    def nodes(self) -> dict[str, str]:
        """Where each slot is."""
        with self.changed:
            return {str(id): connection.hello.node for id, connection in self.slots.items()}

    def probe(self) -> int:
        """Ask every slot for a report; returns the number the answers will carry."""
        self._probes += 1
        self.send(Probe(self._probes))
        return self._probes

    def dismiss(self) -> None:
        """Close all connections: who is still there learns that it is no longer wanted."""
        for connection in {id(each): each for each in (*self.slots.values(), *self.seats.values())}.values():
            self._soon(connection.writer.close)

    def share(self, slot: SlotId, tasks: Mapping[str, Any]) -> dict[str, Any]:
        """What is of the slot's tasks."""
        keys = {self._plan.task[task].key for task in self._plan.routes.tasks_of(slot)}
        return {key: entry for key, entry in tasks.items() if key in keys}

    # ---- what is known of them -------------------------------------------------------------------------

    @property
    def broken(self) -> bool:
        """A slot has failed or is gone."""
        return self.failure is not None or not all(slot.connected for slot in self.slots.values())

    @property
    def all_closed(self) -> bool:
        return all(slot.closed or not slot.connected for slot in self.slots.values())

    def silent_for(self) -> dict[SlotId, tuple[bool, float]]:
        """Whether each slot is connected, and the seconds since it was last heard."""
        now = time.monotonic()
        with self.changed:
            return {id: (c.connected, now - c.heard) for id, c in self.slots.items() if not c.closed}

    def in_flight(self, probe: int) -> tuple[int, int] | None:
        """Frames sent and done over all slots, as they answered the probe; None while anything is on its way."""
        reports = [slot.answer for slot in self.slots.values()]
        answers = [report for report in reports if report is not None and report.probe >= probe]
        if len(answers) < len(reports):
            return None
        sent, done = sum(r.frames_sent for r in answers), sum(r.frames_done for r in answers)
        return (sent, done) if sent == done and not any(r.pending for r in answers) else None

    def answered(self, probe: int) -> bool:
        return all(slot.answer is not None and slot.answer.probe >= probe for slot in self.slots.values())

    def refuse(self, connection: Connection, error: ControlRefused) -> None:
        """A slot said something that cannot be read: the topology fails with this reason, instead of losing the
        slot without one."""
        failed = Failed(f"slot {connection.id}, {error.where}", error.rule, error.got, error.way_out)
        with self.changed:
            self._note(connection, failed)
            self.changed.notify_all()

    # ---- from the slots --------------------------------------------------------------------------------

    def join(self, connection: Connection) -> None:
        with self.changed:
            (self.seats if self._seated else self.slots)[connection.id] = connection
            self.changed.notify_all()

    def leave(self, connection: Connection) -> None:
        with self.changed:
            connection.connected = connection.free = False
            connection.gone_at = time.monotonic()
            connection.problem = connection.problem or "its connection is gone"
            self.changed.notify_all()

    def take(self, connection: Connection, message: Message) -> None:
        """What a slot says. One that stands by to take over, or has left, does not speak for its slot."""
        connection.heard = time.monotonic()
        if isinstance(message, Tally | Fails):
            self._settle(message)
        elif isinstance(message, TaskMessage | TaskState | JoinBoards):
            for slot, each in self._boards.take(connection.id, message):
                self._tell(slot, each)
        else:
            with self.changed:
                self._note(connection, message)
                self.changed.notify_all()

    def _settle(self, message: Tally | Fails) -> None:
        """The acker's work: enter what a slot says, and tell the spouts what came of it."""
        if isinstance(message, Tally):
            settled, component, error = self._acker.apply(*ledger.unpack(message.data)), "", ""
        else:
            first, length = np.array(message.first, np.uint64), np.array(message.length, np.int64)
            settled, component, error = self._acker.close(first, length), message.component, message.error
        for task, numbers in settled.items():
            data = np.concatenate(ledger.ranges(numbers)).tobytes()
            self._tell(self._plan.routes.slot_of[task], Settled(task, component, error, data))

    def _tell(self, slot: SlotId, message: Message) -> None:
        """Write to a slot, if it is there. On the loop."""
        target = self.slots.get(slot)
        if target is not None and target.connected:
            target.writer.write(framed(message))

    def _note(self, connection: Connection, message: Message) -> None:
        current = self.slots.get(connection.id) is connection
        if isinstance(message, Sending):
            connection.sending[message.slot] = message.seats
        elif isinstance(message, Leaving):
            connection.leaving = message.commit
        elif isinstance(message, Left):
            connection.left, connection.left_at = message, time.monotonic()
        elif isinstance(message, Freed):
            connection.free = not connection.problem
        elif isinstance(message, Failed | Corrupt) and not current:
            what = message.error if isinstance(message, Corrupt) else f"{message.where}: {message.got}"
            connection.problem = what
        elif isinstance(message, Report) and not current:
            self._bus.note_errors(message.errors)
        elif isinstance(message, Report):
            if message.probe:
                connection.answer = message
            self._note_skew(connection, message.clock_skew)
            for task, number in message.settled_below.items():
                self._acker.settled_below(int(task), number)
            self._bus.record(self.attempt, connection.id, message)
            self._hold_timeouts(connection.id, message)
        elif isinstance(message, Ahead):
            connection.ahead = message.epoch
        elif isinstance(message, Warm):
            connection.warm = True
        elif isinstance(message, Ready):
            connection.ready, connection.stateful = True, message.stateful
        elif isinstance(message, SpoutsCut | Snapped | NotSnapped | Published):
            self.epoch_events.put((connection.id, message))
        elif isinstance(message, Corrupt):
            self.corrupt = self.corrupt or message.error
        elif isinstance(message, Closed):
            connection.closed = True
        elif isinstance(message, Failed) and self.failure is None:
            self.failure = message

    def _note_skew(self, connection: Connection, skew: float) -> None:
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

    def _hold_timeouts(self, slot: SlotId, report: Report) -> None:
        """While any slot reports a sink that is away, no tuple may time out anywhere. A slot is told with each of
        its reports, for it may have moved to another process. On the loop."""
        held = bool(self._sinks_away)
        if any(stats.get("away") for stats in report.tasks.values()):
            self._sinks_away.add(slot)
        else:
            self._sinks_away.discard(slot)
        if self._sinks_away:
            for each in self.slots if not held else (slot,):
                self._tell(each, HoldTimeouts(True))
        elif held:
            for each in self.slots:
                self._tell(each, HoldTimeouts(False))


def framed(message: Message) -> bytes:
    """A message as it stands on the wire. Raises ``ControlRefused`` for one that is too long."""
    return wire.framed(dumps(message))
