"""The transport of the local runner: control messages pass through memory, encoded as on a socket."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from penstock.driver.registry import WorkerConnection, WorkerRegistry
from penstock.protocol import codec, wire
from penstock.protocol.client import framed
from penstock.protocol.commands import Command
from penstock.protocol.events import Event, Hello
from penstock.protocol.requests import OperatorRequest


class MemoryTransport:
    """Both sides of one worker's control connection. The worker's host calls ``send`` and ``listen`` and reads
    ``inbox``; the driver's registry calls ``write``. All on one thread."""

    def __init__(self, registry: WorkerRegistry, hello: Hello) -> None:
        self.inbox: deque[Command] = deque()
        self.connection = WorkerConnection(hello, self)
        self._registry = registry
        self._listeners: dict[type, Callable[[Any], None]] = {}
        registry.add(self.connection)

    # ---- the worker's side -----------------------------------------------------------------------------

    def send(self, event: Event) -> None:
        received = codec.decode_event(framed(event)[wire.LENGTH.size :])
        assert not isinstance(received, OperatorRequest)
        self._registry.handle(self.connection, received)

    send_now = send

    def listen(self, kind: type[Any], listener: Callable[[Any], None]) -> None:
        self._listeners[kind] = listener

    # ---- the driver's side -----------------------------------------------------------------------------

    def write(self, data: bytes) -> None:
        command = codec.decode_command(data[wire.LENGTH.size :])
        self._listeners.get(type(command), self.inbox.append)(command)

    def close(self) -> None:
        """Does nothing, because a connection in memory has no resources to release."""
