"""A slot's end of the control connection. Sending and receiving have threads of their own, so that the slot's
loop never waits for the network."""

from __future__ import annotations

import queue
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from penstock.coordinator import wire
from penstock.coordinator.messages import Failed, Message, dumps, loads
from penstock.errors import ControlRefused

M = TypeVar("M", bound=Message)


class ControlClient:
    """Connects, shakes hands, then moves messages. ``inbox`` fills as they come; ``wake`` is called for
    each, from another thread. ``lost`` turns true when the connection ends."""

    def __init__(self, address: tuple[str, int], secret: bytes, wake: Callable[[], None]) -> None:
        self.inbox: deque[Message] = deque()
        self.lost = False
        self._wake = wake
        self._listeners: dict[type, Callable[[Any], None]] = {}
        self._outbox: queue.SimpleQueue[Message | bytes | None] = queue.SimpleQueue()
        self._queued = 0
        """Messages in the outbox, and the one the thread has in hand."""
        self._counting, self._writing = threading.Lock(), threading.Lock()
        self._rest = b""
        """What ``send_now`` could not get rid of; goes before anything else."""
        self._socket = socket.create_connection(address, wire.HANDSHAKE_TIMEOUT)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._file = self._socket.makefile("rb")
        self._shake_hands(secret)
        self._socket.settimeout(None)
        threading.Thread(target=self._receive, name="control-receive", daemon=True).start()
        threading.Thread(target=self._transmit, name="control-send", daemon=True).start()

    def send(self, message: Message) -> None:
        """Put a message on its way; never blocks."""
        self._queue(message)

    def send_now(self, message: Message) -> None:
        """The same, straight from the caller's thread if the socket takes it: for acks, which come hundreds of
        times a second from a busy loop. Another thread would wait up to 5 ms for the interpreter each time."""
        with self._counting:
            straight = not self._queued  # else it would overtake what waits or is just being written
        if not straight or not self._writing.acquire(blocking=False):
            self._queue(message)
            return
        try:
            data = self._rest + _framed(message)
            self._rest = data[self._socket.send(data, socket.MSG_DONTWAIT) :]
        except BlockingIOError:
            self._rest = data
        except OSError:
            return  # the other threads notice a lost connection
        finally:
            self._writing.release()
        if self._rest:
            self._queue(b"")  # lets the thread write the rest

    def listen(self, kind: type[M], listener: Callable[[M], None]) -> None:
        """Hand messages of this kind to ``listener`` instead of ``inbox``, straight from the receiving thread: for
        signals, which must not wait for the slot's loop. It must be quick and not raise."""
        self._listeners[kind] = listener

    def _queue(self, message: Message | bytes) -> None:
        with self._counting:
            self._queued += 1
        self._outbox.put(message)

    def close(self) -> None:
        self._outbox.put(None)

    def _shake_hands(self, secret: bytes) -> None:
        greeting = self._file.read(len(wire.GREETING) + wire.NONCE_BYTES)
        theirs, mine = greeting[len(wire.GREETING) :], wire.new_nonce()
        if not greeting.startswith(wire.GREETING) or len(theirs) != wire.NONCE_BYTES:
            raise ControlRefused("control connection", "the other end speaks penstock's protocol", repr(greeting))
        self._socket.sendall(mine + wire.slot_proof(secret, theirs, mine))
        if not wire.same(self._file.read(wire.PROOF_BYTES), wire.coordinator_proof(secret, theirs, mine)):
            raise ControlRefused(
                "control connection",
                "both ends must know the secret of this run",
                "the coordinator refused or could not prove it",
                "Slots of another run cannot join; start the topology again.",
            )

    def _receive(self) -> None:
        try:
            while head := self._file.read(wire.LENGTH.size):
                (length,) = wire.LENGTH.unpack(head)
                message = loads(self._file.read(length))
                listener = self._listeners.get(type(message))
                if listener is not None:
                    listener(message)
                else:
                    self.inbox.append(message)
                    self._wake()
        except (OSError, ValueError, struct.error, ControlRefused):
            pass  # however it ended, what matters is that it did
        self.lost = True
        self._wake()

    def _transmit(self) -> None:
        try:
            while (message := self._outbox.get()) is not None:
                data = message if isinstance(message, bytes) else _framed(message)
                with self._writing:
                    rest, self._rest = self._rest, b""
                    self._socket.sendall(rest + data)
                with self._counting:
                    self._queued -= 1
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            self.lost = True
            self._wake()
        finally:
            self._socket.close()


def _framed(message: Message) -> bytes:
    try:
        data = dumps(message)
    except (TypeError, ValueError) as error:  # what a user published is not JSON
        data = dumps(Failed("control connection", "a message must be JSON", str(error), ""))
    return wire.LENGTH.pack(len(data)) + data
