"""The worker's and the operator's end of a control connection."""

from __future__ import annotations

import queue
import random
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, BinaryIO, TypeVar

import msgspec

from penstock.clock import Clock
from penstock.errors import ControlRefused
from penstock.protocol import codec, wire
from penstock.protocol.commands import Command, DriverTime
from penstock.protocol.driver_clock import SAMPLES, DriverClock
from penstock.protocol.events import AskDriverTime, Event, WorkerFailed, WorkerReport
from penstock.protocol.requests import OperatorAnswer, OperatorRequest

C = TypeVar("C", bound=Command)

_RETRIES = (0.1, 0.3, 1.0, 3.0)
"""Seconds between the attempts to connect, roughly."""


class _Dropped(Exception):
    """The driver ended the connection before it said anything."""


def connect(address: tuple[str, int], secret: bytes) -> tuple[socket.socket, BinaryIO]:
    """A connection to the driver after the handshake, and the file to read from it. Tries again where the driver
    ends the connection at once: it does so when too many connect together that have not proved yet who they are.
    Raises ``ControlRefused`` where one end refuses the other, ``OSError`` where nobody answers."""
    for pause in (*_RETRIES, None):
        connection = socket.create_connection(address, wire.HANDSHAKE_TIMEOUT)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        file = connection.makefile("rb")
        try:
            _shake_hands(connection, file, secret)
            return connection, file
        except _Dropped as error:
            connection.close()
            if pause is None:
                raise ControlRefused(
                    "control connection",
                    "the driver ended it before the handshake was done",
                    "Too many connections may be waiting for their handshake there.",
                ) from error
            time.sleep(pause * random.uniform(0.5, 1.5))
        except BaseException:
            connection.close()
            raise
    raise AssertionError("the last attempt returns or raises")


def _shake_hands(connection: socket.socket, file: BinaryIO, secret: bytes) -> None:
    try:
        greeting = file.read(wire.GREETING_BYTES)
    except ConnectionError as error:
        raise _Dropped from error
    if not greeting:
        raise _Dropped
    theirs, mine = wire.read_greeting(greeting), wire.new_nonce()
    connection.sendall(wire.answer(secret, theirs, mine))
    wire.check_driver_proof(file.read(wire.PROOF_BYTES), secret, theirs, mine)


def ask(
    address: tuple[str, int], secret: bytes, request: OperatorRequest, timeout: float | None
) -> OperatorAnswer | None:
    """What a person asks of a running topology, and its answer; None: it ended the connection without one, or said
    nothing for ``timeout`` seconds. Raises as ``connect`` does."""
    connection, file = connect(address, secret)
    with connection:
        connection.settimeout(timeout)
        try:
            connection.sendall(wire.framed(codec.encode(request)))
            data = _read(file)
        except OSError:
            return None
    return None if data is None else codec.decode_answer(data)


class ControlClient:
    """A worker's end. Sending and receiving have threads of their own, so that the loop never waits for the
    network.

    ``inbox`` fills as commands come, and ``wake`` is called for each, from another thread. ``lost`` turns true
    when the connection ends. ``clock`` tells the driver's time. Messages are encoded by whoever sends them, at
    once: what they refer to may change afterwards."""

    def __init__(
        self, address: tuple[str, int], secret: bytes, wake: Callable[[], None], clock: Clock | None = None
    ) -> None:
        """``clock``: that of this machine."""
        self.inbox: deque[Command] = deque()
        self.lost = False
        self.lost_because = ""
        """What could not be read, where the connection did not just end."""
        self.clock = DriverClock(clock)
        self._wake = wake
        self._listeners: dict[type, Callable[[Any], None]] = {}
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._queued = 0
        """Messages in the outbox, and the one that the thread is writing."""
        self._counting, self._writing = threading.Lock(), threading.Lock()
        self._rest = b""
        """What ``send_now`` could not write; goes before anything else."""
        self._socket, self._file = connect(address, secret)
        self._measure_clock()
        self._socket.settimeout(None)
        threading.Thread(target=self._receive, name="control-receive", daemon=True).start()
        threading.Thread(target=self._transmit, name="control-send", daemon=True).start()

    def send(self, event: Event) -> None:
        """Put an event on its way; never blocks. From any thread."""
        self._queue(framed(event))

    def send_now(self, event: Event) -> None:
        """The same, straight from the caller's thread if the socket takes it: for acks, which come hundreds of
        times a second from a busy loop. Another thread would wait up to 5 ms for the interpreter each time."""
        data = framed(event)
        with self._counting:
            straight = not self._queued  # else it would overtake what waits or is just being written
        if not straight or not self._writing.acquire(blocking=False):
            self._queue(data)
            return
        try:
            data = self._rest + data
            self._rest = data[self._socket.send(data, socket.MSG_DONTWAIT) :]
        except BlockingIOError:
            self._rest = data
        except OSError:
            return  # the other threads notice a lost connection
        finally:
            self._writing.release()
        if self._rest:
            self._queue(b"")  # lets the thread write the rest

    def listen(self, kind: type[C], listener: Callable[[C], None]) -> None:
        """Hand commands of this kind to ``listener`` instead of ``inbox``, straight from the receiving thread. It
        must be quick and not raise."""
        self._listeners[kind] = listener

    def ask_time(self) -> None:
        """Measure once more how far the clocks differ; the answer is entered in ``clock`` when it comes."""
        self.send_now(AskDriverTime(self.clock.monotonic()))

    def close(self) -> None:
        """End the connection when everything is sent."""
        self._outbox.put(None)

    def _queue(self, data: bytes) -> None:
        with self._counting:
            self._queued += 1
        self._outbox.put(data)

    def _measure_clock(self) -> None:
        """Before anything else: whatever the driver sends later comes to a worker that knows the driver's time."""
        for _ in range(SAMPLES):
            self._socket.sendall(framed(AskDriverTime(self.clock.monotonic())))
            answer = self._read()
            if not isinstance(answer, DriverTime):
                raise ControlRefused(
                    "control connection", f"the driver answered AskDriverTime with {answer!r} instead of its time"
                )
            self.clock.add(answer.sent, answer.time, self.clock.monotonic())

    def _read(self) -> Command | None:
        """The next command; None: the connection has ended."""
        data = _read(self._file)
        return None if data is None else codec.decode_command(data)

    def _receive(self) -> None:
        try:
            while (command := self._read()) is not None:
                if isinstance(command, DriverTime):
                    self.clock.add(command.sent, command.time, self.clock.monotonic())
                    continue
                listener = self._listeners.get(type(command))
                if listener is not None:
                    listener(command)
                else:
                    self.inbox.append(command)
                    self._wake()
        except ControlRefused as error:
            self.lost_because = str(error)
            self.send(WorkerFailed(error.where, error.problem, error.hint))
        except (OSError, ValueError):
            pass  # however it ended, what matters is that it did
        self.lost = True
        self._wake()

    def _transmit(self) -> None:
        try:
            while (data := self._outbox.get()) is not None:
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


def _read(file: BinaryIO) -> bytes | None:
    """The next message's bytes; None: the connection has ended."""
    head = file.read(wire.LENGTH.size)
    if len(head) < wire.LENGTH.size:
        return None
    length = wire.length_of(head)
    data = file.read(length)
    return data if len(data) == length else None


def framed(event: Event) -> bytes:
    """As it stands on the wire. A report that cannot be sent goes without what users' code put in it, and with the
    reason; in place of any other event the worker reports that it has failed."""
    try:
        return wire.framed(codec.encode(event))
    except ControlRefused as error:
        refused = error
    if isinstance(event, WorkerReport):
        try:
            bare = msgspec.structs.replace(event, published={}, errors=[str(refused)], segments=[], streams=None)
            return wire.framed(codec.encode(bare))
        except ControlRefused:
            pass  # then the worker has failed
    return wire.framed(codec.encode(WorkerFailed(refused.where, refused.problem, refused.hint)))
