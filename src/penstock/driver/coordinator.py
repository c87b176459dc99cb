"""The coordinator: the server on the driver that workers and the commands of operators connect to.

An asyncio loop in a thread of its own does all the network work. The driver's other threads hold the condition
``changed`` while they read what the workers of a registry have reported, and wait on it for changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
from collections.abc import Callable
from functools import partial

from penstock.clock import Clock
from penstock.driver.command_threads import CommandThreads
from penstock.driver.registry import WorkerConnection, WorkerRegistry, framed
from penstock.errors import ControlRefused, PortInUse
from penstock.metrics.bus import MetricsBus
from penstock.plan.model import Plan
from penstock.protocol import wire
from penstock.protocol.commands import DriverTime
from penstock.protocol.driver_clock import RunTime
from penstock.protocol.events import AckerReport, AckerStarted, AskDriverTime, Hello
from penstock.protocol.requests import OperatorAnswer, OperatorRequest
from penstock.protocol.server import ClientGate, listen, read_event

log = logging.getLogger("penstock.driver")

_ACKER_CHECK = 0.25
"""Seconds between two checks of the acker processes, which report as often."""


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
        self._gate = ClientGate(self.secret)
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
            self._server = asyncio.run_coroutine_threadsafe(
                listen(self._host, self._port, self._serve), self._loop
            ).result()
        except OSError as error:
            self.stop()
            raise PortInUse(
                "driver",
                f"it cannot listen on {self._host}:{self._port or 'a free port'} ({error.strerror or error})",
                "Choose another port with --port, or 0 for any free one.",
            ) from error
        self.address = self._server.sockets[0].getsockname()[:2]

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

    def begin(
        self,
        attempt: int,
        plan: Plan,
        bus: MetricsBus,
        key: int,
        placed: bool = False,
        ackers: int = 1,
        silence: float = math.inf,
    ) -> WorkerRegistry:
        """Accept the workers of the query run with the number ``attempt`` from now on, and return their registry.
        ``key``: the key of the ackers' ledgers. ``placed``: the driver assigns workers to slots. ``ackers`` and
        ``silence``: as in ``Ackers``."""
        registry = self._registries[attempt] = WorkerRegistry(
            attempt, plan, bus, key, self.changed, self._soon, placed, ackers, silence
        )
        if registry.ackers.has_processes:
            self._soon(partial(self._check_ackers, registry))
        return registry

    def _check_ackers(self, registry: WorkerRegistry) -> None:
        """Look for acker processes that hang, from now on until the query run ends. Called on the loop."""
        if self._registries.get(registry.attempt) is registry:
            with self.changed:
                registry.ackers.check()
            self._loop.call_later(_ACKER_CHECK, self._check_ackers, registry)

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
        self._gate.receive(writer)
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
            if isinstance(hello, AckerStarted):
                await self._serve_acker(registry, hello, reader, writer)
                return
            newcomer = WorkerConnection(hello, writer)
            registry.add(newcomer)
            connection = newcomer
            while True:
                message = await read_event(reader)
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
            self._gate.forget(writer)
            writer.close()
            if registry is not None and connection is not None:
                registry.connection_lost(connection)
            with self.changed:
                self.changed.notify_all()

    async def _serve_acker(
        self,
        registry: WorkerRegistry,
        started: AckerStarted,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """Take the reports of an acker process until its connection ends."""
        with self.changed:
            awaited = registry.ackers.connect(started, writer.close)
            self.changed.notify_all()
        if not awaited:
            return
        try:
            while True:
                report = await read_event(reader)
                if not isinstance(report, AckerReport):
                    raise ControlRefused("control connection", f"an acker sent {type(report).__name__}")
                with self.changed:
                    registry.ackers.report(started, report)
                    self.changed.notify_all()
        except (asyncio.IncompleteReadError, OSError):
            pass  # the process has ended, or another one has taken its place
        finally:
            if self._registries.get(registry.attempt) is registry:
                with self.changed:
                    registry.ackers.lost(started)
                    self.changed.notify_all()

    async def _admit(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> Hello | AckerStarted | OperatorRequest:
        """Perform the handshake and return the first message: that of a worker or an acker process, or the request
        of an operator. Raises ``ControlRefused`` if the handshake fails, or if the message is neither an
        operator's request nor the first one of a process of a current query run."""
        await self._gate.shake_hands(reader, writer)
        first = await read_event(reader)
        while isinstance(first, AskDriverTime):
            writer.write(framed(DriverTime(first.sent, self._time.now())))
            first = await read_event(reader)
        if isinstance(first, OperatorRequest):
            return first
        if isinstance(first, Hello | AckerStarted) and first.attempt in self._registries:
            return first
        runs = ", ".join(map(str, self._registries)) or "none"
        raise ControlRefused(
            "control connection", f"a message from outside the current query runs ({runs}) was refused: {first!r}"
        )
