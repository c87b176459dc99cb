"""A worker's end of the control connection. Sending and receiving have threads of their own, so that the worker's
loop never waits for the network."""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import random
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from penstock.clock import Clock
from penstock.errors import ControlRefused
from penstock.protocol import wire
from penstock.protocol.driver_clock import SAMPLES, DriverClock
from penstock.protocol.messages import AskDriverTime, DriverTime, Message, WorkerFailed, WorkerReport, dumps, loads

M = TypeVar("M", bound=Message)


_RETRIES = (0.1, 0.3, 1.0, 3.0)
"""Seconds between the attempts to connect, roughly."""


class _Dropped(Exception):
    """The coordinator ended the connection before it said anything."""


class ControlClient:
    """Connects, shakes hands, then moves messages. ``inbox`` fills as they come; ``wake`` is called for
    each, from another thread. ``lost`` turns true when the connection ends. ``clock`` tells the driver's time."""

    def __init__(
        self, address: tuple[str, int], secret: bytes, wake: Callable[[], None], clock: Clock | None = None
    ) -> None:
        """``clock``: that of this machine."""
        self.inbox: deque[Message] = deque()
        self.lost = False
        self.lost_because = ""
        """What could not be read, where the connection did not just end."""
        self.clock = DriverClock(clock)
        self._wake = wake
        self._listeners: dict[type, Callable[[Any], None]] = {}
        self._outbox: queue.SimpleQueue[Message | bytes | None] = queue.SimpleQueue()
        self._queued = 0
        """Messages in the outbox, and the one the thread has in hand."""
        self._counting, self._writing = threading.Lock(), threading.Lock()
        self._rest = b""
        """What ``send_now`` could not get rid of; goes before anything else."""
        self._connect(address, secret)
        threading.Thread(target=self._receive, name="control-receive", daemon=True).start()
        threading.Thread(target=self._transmit, name="control-send", daemon=True).start()

    def _connect(self, address: tuple[str, int], secret: bytes) -> None:
        """Try again where the coordinator ends the connection at once: it does so when too many connect together
        that have not proved yet who they are."""
        for pause in (*_RETRIES, None):
            self._socket = socket.create_connection(address, wire.HANDSHAKE_TIMEOUT)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._file = self._socket.makefile("rb")
            try:
                self._shake_hands(secret)
                self._measure_clock()
                self._socket.settimeout(None)
                return
            except _Dropped as error:
                self._socket.close()
                if pause is None:
                    raise ControlRefused(
                        "control connection",
                        "the driver ended it before the handshake was done",
                        "Too many connections may be waiting for their handshake there.",
                    ) from error
                time.sleep(pause * random.uniform(0.5, 1.5))

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
        signals, which must not wait for the worker's loop. It must be quick and not raise."""
        self._listeners[kind] = listener

    def _queue(self, message: Message | bytes) -> None:
        with self._counting:
            self._queued += 1
        self._outbox.put(message)

    def close(self) -> None:
        self._outbox.put(None)

    def _shake_hands(self, secret: bytes) -> None:
        try:
            greeting = self._file.read(len(wire.GREETING) + wire.NONCE_BYTES)
        except ConnectionError as error:
            raise _Dropped from error
        if not greeting:
            raise _Dropped
        theirs, mine = greeting[len(wire.GREETING) :], wire.new_nonce()
        if not greeting.startswith(wire.GREETING) or len(theirs) != wire.NONCE_BYTES:
            raise ControlRefused(
                "control connection", f"the other end does not speak Penstock's protocol: it sent {greeting!r}"
            )
        self._socket.sendall(mine + wire.worker_proof(secret, theirs, mine))
        if not wire.same(self._file.read(wire.PROOF_BYTES), wire.coordinator_proof(secret, theirs, mine)):
            raise ControlRefused(
                "control connection",
                "the driver refused this end, or could not prove that it knows the secret of this run",
                "Workers of another run cannot join. Start the topology again.",
            )

    def _measure_clock(self) -> None:
        """Before anything else: whatever the driver sends later comes to a worker that knows the driver's time."""
        for _ in range(SAMPLES):
            self._socket.sendall(_framed(AskDriverTime(self.clock.monotonic())))
            answer = self._read()
            if not isinstance(answer, DriverTime):
                raise ControlRefused(
                    "control connection", f"the driver answered {answer!r} to a question for its time"
                )
            self.clock.add(answer.sent, answer.time, self.clock.monotonic())

    def ask_time(self) -> None:
        """Measure once more how far the clocks differ; the answer is entered in ``clock`` when it comes."""
        self.send_now(AskDriverTime(self.clock.monotonic()))

    def _read(self) -> Message | None:
        """The next message; None: the connection has ended."""
        head = self._file.read(wire.LENGTH.size)
        if len(head) < wire.LENGTH.size:
            return None
        (length,) = wire.LENGTH.unpack(head)
        if length > wire.MOST_BYTES:
            raise wire.too_long(length)
        return loads(self._file.read(length))

    def _receive(self) -> None:
        try:
            while (message := self._read()) is not None:
                if isinstance(message, DriverTime):
                    self.clock.add(message.sent, message.time, self.clock.monotonic())
                    continue
                listener = self._listeners.get(type(message))
                if listener is not None:
                    listener(message)
                else:
                    self.inbox.append(message)
                    self._wake()
        except ControlRefused as error:
            self.lost_because = str(error)
            self.send(WorkerFailed(error.where, error.problem, error.hint))
        except (OSError, ValueError, struct.error):
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
    """As it stands on the wire. A report that cannot be sent goes without what users' code put in it, and with the
    reason; in place of any other message the worker reports that it has failed."""
    try:
        return wire.framed(dumps(message))
    except (TypeError, ValueError, RecursionError) as error:  # what a user published is not JSON
        refused = ControlRefused("control connection", f"a message cannot be written as JSON ({error})")
    except ControlRefused as error:
        refused = error
    if isinstance(message, WorkerReport):
        with contextlib.suppress(ControlRefused, TypeError, ValueError, RecursionError):
            bare = dataclasses.replace(message, published={}, errors=[str(refused)], segments=[], streams=None)
            return wire.framed(dumps(bare))
    return wire.framed(dumps(WorkerFailed(refused.where, refused.problem, refused.hint)))
