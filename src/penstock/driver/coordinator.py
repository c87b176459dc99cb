"""The coordinator: the server on the driver that workers and the commands of operators connect to.

An asyncio loop in a thread of its own does all the network work. The driver's other threads hold the condition
``changed`` while they read what the workers of a registry have reported, and wait on it for changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import Callable

from penstock.clock import Clock
from penstock.driver.command_threads import CommandThreads
from penstock.driver.registry import WorkerConnection, WorkerRegistry, framed
from penstock.errors import ControlRefused, PortInUse
from penstock.metrics.bus import MetricsBus
from penstock.plan.model import Plan
from penstock.protocol import codec, wire
from penstock.protocol.commands import DriverTime
from penstock.protocol.driver_clock import RunTime
from penstock.protocol.events import AskDriverTime, Event, Hello
from penstock.protocol.requests import OperatorAnswer, OperatorRequest

log = logging.getLogger("penstock.driver")


class Coordinator:
    """The driver's end of all control connections of one topology."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0, clock: Clock | None = None) -> None:
        self.operator: Callable[[OperatorRequest], OperatorAnswer] = lambda command: OperatorAnswer(
            "", ["topology", "it takes no commands"]
        )
        """Carries out the command of an operator. Each call has a thread of its own, so that a long command delays
        neither the loop nor other commands."""
        self.secret = wire.new_secret()
        self.refused = 0
        self.changed = threading.Condition()
        self._commands = CommandThreads()
        self._time = RunTime(clock)
        self._strangers: dict[asyncio.StreamWriter, None] = {}
        """Connections that have not yet proved that they know the secret, oldest first."""
        self._registries: dict[int, WorkerRegistry] = {}
        self._host, self._port = host, port
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="coordinator", daemon=True)
        self._server: asyncio.Server | None = None
        self.address = ("", 0)

    def start(self) -> None:
        """Start to listen. Raises ``PortInUse`` if the port is in use or cannot be opened for another reason."""
        self._thread.start()
        try:
            self._server = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result()
        except OSError as error:
            self.stop()
            raise PortInUse(
                "driver",
                f"it cannot listen on {self._host}:{self._port or 'a free port'} ({error.strerror or error})",
                "Choose another port with --port, or 0 for any free one.",
            ) from error
        self.address = self._server.sockets[0].getsockname()[:2]

    async def _listen(self) -> asyncio.Server:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        listener = socket.create_server((self._host, self._port), family=family)
        server = await asyncio.start_server(self._serve, sock=listener, backlog=wire.ACCEPTED_AT_ONCE)
        listener.listen(wire.QUEUE)
        return server

    def stop(self) -> None:
        """Close every connection and stop listening. Does no harm if the coordinator was not started, or is
        stopped already."""

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
            self._thread.join(5)  # seconds; the loop ends within milliseconds unless it hangs
        if not self._thread.is_alive():
            self._loop.close()

    def begin(self, attempt: int, plan: Plan, bus: MetricsBus, key: int, placed: bool = False) -> WorkerRegistry:
        """Accept the workers of the query run with the number ``attempt`` from now on, and return their registry.
        ``key``: the key of the acker's ledgers. ``placed``: the driver assigns workers to slots."""
        registry = self._registries[attempt] = WorkerRegistry(
            attempt, plan, bus, key, self.changed, self._soon, placed
        )
        return registry

    def end(self, registry: WorkerRegistry) -> None:
        """Close the connections of a query run's workers, and accept no more of them."""
        self._registries.pop(registry.attempt, None)
        registry.dismiss()

    @property
    def registries(self) -> list[WorkerRegistry]:
        """The registries of the query runs whose workers may connect, oldest first. During a replacement there are
        two."""
        return [registry for _, registry in sorted(dict(self._registries).items())]

    def _soon(self, call: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and so have all connections
            self._loop.call_soon_threadsafe(call)

    def wait(self, condition: Callable[[], bool], timeout: float) -> bool:
        """Wait until the condition holds, at most ``timeout`` seconds, and return whether it does. It is evaluated
        whenever a worker reports something."""
        with self.changed:
            return self.changed.wait_for(condition, timeout)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = writer.get_extra_info("peername")
        connection: WorkerConnection | None = None
        registry: WorkerRegistry | None = None
        self._receive_stranger(writer)
        try:
            hello = await asyncio.wait_for(self._admit(reader, writer), wire.HANDSHAKE_TIMEOUT)
            if isinstance(hello, OperatorRequest):
                answer = await self._commands.run(self.operator, hello)
                writer.write(framed(answer))
                await writer.drain()
                return
            registry = self._registries.get(hello.attempt)
            if registry is None:  # ended since the handshake
                return
            newcomer = WorkerConnection(hello, writer)
            registry.add(newcomer)
            connection = newcomer
            while True:
                message = await _read(reader)
                if isinstance(message, AskDriverTime):
                    writer.write(framed(DriverTime(message.sent, self._time.now())))
                elif isinstance(message, OperatorRequest):
                    raise ControlRefused("control connection", "a worker sent an operator's request")
                elif self._registries.get(registry.attempt) is registry:  # otherwise the query run has ended
                    registry.handle(connection, message)
        except ControlRefused as error:
            self.refused += 1
            if registry is not None and connection is not None:
                registry.refuse(connection, error)
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
            self._strangers.pop(writer, None)
            writer.close()
            if registry is not None and connection is not None:
                registry.connection_lost(connection)
            with self.changed:
                self.changed.notify_all()

    def _receive_stranger(self, writer: asyncio.StreamWriter) -> None:
        """Record a new connection. If too many are in their handshake, abort the oldest. Called on the loop."""
        self._strangers[writer] = None
        if len(self._strangers) > wire.MOST_HANDSHAKES:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.transport.abort()

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Hello | OperatorRequest:
        """Perform the handshake and return the first message: the ``Hello`` of a worker, or the request of an
        operator. As soon as the client has proved that it knows the secret, its connection does not count as one
        in its handshake any more. Raises ``ControlRefused`` if the handshake fails, or if the message is neither
        an operator's request nor the ``Hello`` of a worker of a current query run."""
        mine = wire.new_nonce()
        writer.write(wire.greeting(mine))
        answer = await reader.readexactly(wire.ANSWER_BYTES)
        try:
            theirs = wire.read_answer(answer, self.secret, mine)
        except ControlRefused:
            writer.write(wire.REFUSAL)
            raise
        self._strangers.pop(writer, None)
        writer.write(wire.driver_proof(self.secret, mine, theirs))
        first = await _read(reader)
        while isinstance(first, AskDriverTime):
            writer.write(framed(DriverTime(first.sent, self._time.now())))
            first = await _read(reader)
        if isinstance(first, OperatorRequest) or (isinstance(first, Hello) and first.attempt in self._registries):
            return first
        runs = ", ".join(map(str, self._registries)) or "none"
        raise ControlRefused(
            "control connection", f"a message from outside the current query runs ({runs}) was refused: {first!r}"
        )


async def _read(reader: asyncio.StreamReader) -> Event | OperatorRequest:
    length = wire.length_of(await reader.readexactly(wire.LENGTH.size))
    return codec.decode_event(await reader.readexactly(length))
