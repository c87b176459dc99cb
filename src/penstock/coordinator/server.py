"""The coordinator: listens on the driver, knows every slot, keeps their reports, passes commands on.

An asyncio loop in a thread of its own does all the network work; the driver's other threads look at ``slots``
under ``changed`` and wait on it.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock.acking import ledger
from penstock.acking.ledger import Acker
from penstock.control.signals import TaskMessage, TaskState
from penstock.coordinator import wire
from penstock.coordinator.boards import Boards
from penstock.coordinator.messages import (
    Answer,
    Closed,
    Command,
    Corrupt,
    Failed,
    Fails,
    Hello,
    JoinBoards,
    Message,
    NotSnapped,
    Open,
    Probe,
    Published,
    Ready,
    Report,
    Settled,
    Snapped,
    SpoutsCut,
    Tally,
    dumps,
    loads,
)
from penstock.errors import ControlRefused, PortInUse
from penstock.metrics.bus import MetricsBus
from penstock.plan.model import Plan, SlotId

log = logging.getLogger("penstock.coordinator")


@dataclass
class Connection:
    """One slot as the coordinator sees it."""

    hello: Hello
    writer: asyncio.StreamWriter
    acker: Acker
    boards: Boards
    """Both of its attempt: what it says late does not reach the next one's."""
    ready: bool = False
    stateful: bool = False
    closed: bool = False
    connected: bool = True
    answer: Report | None = None
    """The newest report that answered a probe."""
    heard: float = field(default_factory=time.monotonic)

    @property
    def id(self) -> SlotId:
        return SlotId(self.hello.stage, self.hello.slot)


class Coordinator:
    """The driver's end of all control connections of one topology."""

    def __init__(self, bus: MetricsBus, plan: Plan, host: str = "127.0.0.1", port: int = 0) -> None:
        self.epoch_events: queue.SimpleQueue[tuple[SlotId, Message] | None] = queue.SimpleQueue()
        """What slots say of epochs, for the thread that commits them."""
        self.corrupt: str = ""
        """A slot could not restore its tasks."""
        self.operator: Callable[[Command], Answer] = lambda command: Answer("", ["topology", "takes no commands"])
        """Carries out what a person wants. Called from a thread of its own."""
        self._plan = plan
        self._acker = Acker(0)
        self._boards = Boards(plan.routes.slot_of)
        self.secret = wire.new_secret()
        self.slots: dict[SlotId, Connection] = {}
        self.failure: Failed | None = None
        self.refused = 0
        self.changed = threading.Condition()
        self.attempt = 0
        self._bus, self._host, self._port = bus, host, port
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="coordinator", daemon=True)
        self._probes = 0
        self._server: asyncio.Server | None = None
        self.address = ("", 0)

    def start(self) -> None:
        """Listen. Raises ``PortInUse`` where the port is taken."""
        self._thread.start()
        try:
            self._server = asyncio.run_coroutine_threadsafe(
                asyncio.start_server(self._serve, self._host, self._port, backlog=1024), self._loop
            ).result()
        except OSError as error:
            self.stop()
            raise PortInUse(
                "coordinator",
                f"must be able to listen on {self._host}:{self._port or 'a free port'}",
                str(error),
                "Choose another with --port, or 0 for any free one.",
            ) from error
        self.address = self._server.sockets[0].getsockname()[:2]

    def stop(self) -> None:
        """Close every connection and stop listening."""

        async def shut() -> None:
            if self._server is not None:
                self._server.close()
            serving = asyncio.all_tasks() - {asyncio.current_task()}
            for task in serving:
                task.cancel()
            await asyncio.gather(*serving, return_exceptions=True)
            self._loop.stop()

        if self._loop.is_running():
            asyncio.run_coroutine_threadsafe(shut(), self._loop)
            self._thread.join(5)
            if not self._thread.is_alive():
                self._loop.close()

    def begin(self, attempt: int, key: int) -> None:
        """Forget the slots of an earlier start; only those of ``attempt`` may join from now on. ``key`` is that of
        the ledgers."""
        with self.changed:
            for zombie in self.slots.values():  # it learns that it is one
                self._loop.call_soon_threadsafe(zombie.writer.close)
            self.attempt = attempt
            self.slots = {}
            self.failure = None
            self.corrupt = ""
            self.epoch_events = queue.SimpleQueue()
            self._acker = Acker(key)
            self._boards = Boards(self._plan.routes.slot_of)

    def send(self, message: Message, to: SlotId | None = None) -> None:
        """Send a command to one slot, or to all."""
        data = _framed(message)

        def write() -> None:
            for connection in list(self.slots.values()):
                if connection.connected and to in (None, connection.id):
                    connection.writer.write(data)

        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(write)

    def open(self, generation: int, epoch: int, tasks: Mapping[str, Any]) -> None:
        """Tell the slots to open, where each of them stands, and what their tasks begin with."""
        with self.changed:
            nodes = {str(id): connection.hello.node for id, connection in self.slots.items()}
        for id in nodes:
            slot = SlotId.parse(id)
            keys = {self._plan.task[task].key for task in self._plan.routes.tasks_of(slot)}
            mine = {key: entry for key, entry in tasks.items() if key in keys}
            self.send(Open(nodes, generation, epoch, mine), slot)

    def probe(self) -> int:
        """Ask every slot for a report; returns the number the answers will carry."""
        self._probes += 1
        self.send(Probe(self._probes))
        return self._probes

    def wait(self, condition: Callable[[], bool], timeout: float) -> bool:
        """Wait until the condition, looked at whenever a slot says something, holds."""
        with self.changed:
            return self.changed.wait_for(condition, timeout)

    def silent_for(self) -> dict[SlotId, tuple[bool, float]]:
        """Whether each slot is connected, and the seconds since it was last heard."""
        now = time.monotonic()
        with self.changed:
            return {id: (c.connected, now - c.heard) for id, c in self.slots.items() if not c.closed}

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = writer.get_extra_info("peername")
        connection: Connection | None = None
        try:
            admitted = await asyncio.wait_for(self._admit(reader, writer), wire.HANDSHAKE_TIMEOUT)
            if isinstance(admitted, Command):
                answer = await self._loop.run_in_executor(None, self.operator, admitted)
                writer.write(_framed(answer))
                await writer.drain()
                return
            connection = admitted
            while True:
                message = await _read(reader)
                if isinstance(message, Tally | Fails):
                    self._settle(connection, message)
                    continue
                if isinstance(message, TaskMessage | TaskState | JoinBoards):
                    self._pass_on(connection, message)
                    continue
                with self.changed:
                    self._take(connection, message)
                    self.changed.notify_all()
        except ControlRefused as error:
            self.refused += 1
            log.warning("refused %s: %s", peer, error)
        except TimeoutError:
            self.refused += 1
            log.warning("refused %s: no handshake within %g s", peer, wire.HANDSHAKE_TIMEOUT)
        except (asyncio.IncompleteReadError, OSError):
            if connection is None:
                self.refused += 1
                log.warning("refused %s: the connection ended before the handshake was done", peer)
        except asyncio.CancelledError:
            pass  # the coordinator stops
        finally:
            writer.close()
            with self.changed:
                if connection is not None:
                    connection.connected = False
                self.changed.notify_all()

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Connection | Command:
        """A slot, or what an operator wants."""
        mine = wire.new_nonce()
        writer.write(wire.GREETING + mine)
        answer = await reader.readexactly(wire.NONCE_BYTES + wire.PROOF_BYTES)
        theirs, proof = answer[: wire.NONCE_BYTES], answer[wire.NONCE_BYTES :]
        if not wire.same(proof, wire.slot_proof(self.secret, mine, theirs)):
            raise ControlRefused("control connection", "a slot must know the secret of this run", "a wrong proof")
        writer.write(wire.coordinator_proof(self.secret, mine, theirs))
        hello = await _read(reader)
        if isinstance(hello, Command):
            return hello
        if not isinstance(hello, Hello) or hello.attempt != self.attempt:
            raise ControlRefused(
                "control connection", f"only slots of attempt {self.attempt} may join", repr(hello)
            )
        connection = Connection(hello, writer, self._acker, self._boards)
        with self.changed:
            self.slots[connection.id] = connection
            self.changed.notify_all()
        return connection

    def _settle(self, connection: Connection, message: Tally | Fails) -> None:
        """The acker's work: enter what a slot says, and tell the spouts what came of it."""
        if connection.hello.attempt != self.attempt:
            return
        connection.heard = time.monotonic()
        if isinstance(message, Tally):
            settled, component, error = connection.acker.apply(*ledger.unpack(message.data)), "", ""
        else:
            first, length = np.array(message.first, np.uint64), np.array(message.length, np.int64)
            settled, component, error = connection.acker.close(first, length), message.component, message.error
        for task, numbers in settled.items():
            data = np.concatenate(ledger.ranges(numbers)).tobytes()
            self._tell(connection, self._plan.routes.slot_of[task], Settled(task, component, error, data))

    def _pass_on(self, connection: Connection, message: TaskMessage | TaskState | JoinBoards) -> None:
        """The boards' work."""
        if connection.hello.attempt != self.attempt:
            return
        connection.heard = time.monotonic()
        for slot, each in connection.boards.take(connection.id, message):
            self._tell(connection, slot, each)

    def _tell(self, source: Connection, slot: SlotId, message: Message) -> None:
        """Write to a slot of the same attempt as ``source``, if it is there. On the loop."""
        target = self.slots.get(slot)
        if target is not None and target.connected and target.hello.attempt == source.hello.attempt:
            target.writer.write(_framed(message))

    def _take(self, connection: Connection, message: Message) -> None:
        if connection.hello.attempt != self.attempt:
            return  # a straggler of an earlier start
        connection.heard = time.monotonic()
        if isinstance(message, Report):
            if message.probe:
                connection.answer = message
            self._bus.record(self.attempt, connection.id, message)
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


def _framed(message: Message) -> bytes:
    data = dumps(message)
    return wire.LENGTH.pack(len(data)) + data


async def _read(reader: asyncio.StreamReader) -> Message:
    (length,) = wire.LENGTH.unpack(await reader.readexactly(wire.LENGTH.size))
    if length > wire.MOST_BYTES:
        raise ControlRefused("control connection", f"a message has at most {wire.MOST_BYTES} bytes", str(length))
    return loads(await reader.readexactly(length))
