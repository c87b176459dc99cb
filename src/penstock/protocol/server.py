"""The server side of control connections, for the coordinator and for acker processes: both listen in the same way
and make each client prove that it knows the run's secret."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

from penstock.errors import ControlRefused
from penstock.protocol import codec, wire
from penstock.protocol.events import Event
from penstock.protocol.requests import OperatorRequest

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
_READ_AHEAD = 1 << 16  # bytes; the default of asyncio


async def listen(host: str, port: int, serve: Serve, read_ahead: int = _READ_AHEAD) -> asyncio.Server:
    """Listen on this address; port 0 means any free one. ``read_ahead``: bytes that may wait in a connection's
    reader. Raises ``OSError``."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family)
    server = await asyncio.start_server(serve, sock=listener, limit=read_ahead, backlog=wire.ACCEPTED_AT_ONCE)
    listener.listen(wire.QUEUE)
    return server


class ClientGate:
    """Authenticates clients. Used on the loop that serves them."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._strangers: dict[asyncio.StreamWriter, None] = {}
        """Connections that have not yet proved that they know the secret, oldest first."""

    def receive(self, writer: asyncio.StreamWriter) -> None:
        """Record a new connection. If too many are in their handshake, abort the oldest."""
        self._strangers[writer] = None
        if len(self._strangers) > wire.MOST_HANDSHAKES:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.transport.abort()

    def forget(self, writer: asyncio.StreamWriter) -> None:
        """Called when a connection ends."""
        self._strangers.pop(writer, None)

    async def shake_hands(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Perform the handshake. As soon as the client has proved that it knows the secret, its connection does
        not count as one in its handshake any more. Raises ``ControlRefused`` if it does not know the secret, and
        what the reader raises."""
        mine = wire.new_nonce()
        writer.write(wire.greeting(mine))
        answer = await reader.readexactly(wire.ANSWER_BYTES)
        try:
            theirs = wire.read_answer(answer, self._secret, mine)
        except ControlRefused:
            writer.write(wire.REFUSAL)
            raise
        self.forget(writer)
        writer.write(wire.driver_proof(self._secret, mine, theirs))


async def read_event(reader: asyncio.StreamReader) -> Event | OperatorRequest:
    """The next message of a client. Raises ``ControlRefused`` if it is not valid, and what the reader raises."""
    length = wire.length_of(await reader.readexactly(wire.LENGTH.size))
    return codec.decode_event(await reader.readexactly(length))


def take_events(data: bytearray) -> list[Event | OperatorRequest]:
    """Remove all complete messages from the bytes that have arrived. Raises ``ControlRefused`` if one is not
    valid."""
    events: list[Event | OperatorRequest] = []
    at, end = 0, len(data)
    with memoryview(data) as view:
        while end - at >= wire.LENGTH.size:
            begin = at + wire.LENGTH.size
            length = wire.length_of(bytes(view[at:begin]))
            if end - begin < length:
                break
            at = begin + length
            events.append(codec.decode_event(bytes(view[begin:at])))
    del data[:at]
    return events
