"""The client side of a control connection, for workers and operators."""

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
"""Seconds between two attempts to connect, varied by up to a half so that workers do not retry together. The
driver needs milliseconds for a handshake; four seconds are enough even for a large topology."""


def connect(
    address: tuple[str, int], secret: bytes, begin: Callable[[socket.socket, BinaryIO], None] | None = None
) -> tuple[socket.socket, BinaryIO]:
    """Connect to the driver, do the handshake and call ``begin``, which may exchange the first messages. Returns
    the socket and a file to read from it. Blocks the caller.

    If the connection ends meanwhile, the function tries again: the driver closes connections when too many
    clients are in their handshake. ``begin`` raises ``ConnectionError`` in this case. Raises ``ControlRefused``
    if either side refuses the other or all attempts fail, ``OSError`` if there is no answer."""
    for pause in (*_RETRIES, None):
        connection = socket.create_connection(address, wire.HANDSHAKE_TIMEOUT)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        file = connection.makefile("rb")
        try:
            _shake_hands(connection, file, secret)
            if begin is not None:
                begin(connection, file)
            return connection, file
        except ConnectionError as error:
            _close(connection, file)
            if pause is None:
                raise ControlRefused(
                    "control connection",
                    "the driver closed it before the handshake was complete",
                    "Too many clients may be connecting to the driver at the same time.",
                ) from error
            time.sleep(pause * random.uniform(0.5, 1.5))
        except BaseException:
            _close(connection, file)
            raise
    raise AssertionError("the last attempt returns or raises")


def _shake_hands(connection: socket.socket, file: BinaryIO, secret: bytes) -> None:
    """Raises ``ConnectionError`` if the connection ends, ``ControlRefused`` if either side refuses the other."""
    greeting = file.read(wire.GREETING_BYTES)
    if not greeting:
        raise ConnectionError("the connection ended before the greeting")
    theirs, mine = wire.read_greeting(greeting), wire.new_nonce()
    connection.sendall(wire.answer(secret, theirs, mine))
    proof = file.read(wire.PROOF_BYTES)
    if len(proof) < wire.PROOF_BYTES:
        raise ConnectionError("the connection ended before the driver's proof")
    wire.check_driver_proof(proof, secret, theirs, mine)


def _close(connection: socket.socket, file: BinaryIO) -> None:
    file.close()
    connection.close()


def ask(
    address: tuple[str, int], secret: bytes, request: OperatorRequest, timeout: float | None
) -> OperatorAnswer | None:
    """Send an operator's request to a running topology and return the answer. Returns None if the driver closes
    the connection without an answer or does not answer within ``timeout`` seconds. Raises as ``connect``
    does."""
    connection, file = connect(address, secret)
    with connection:
        connection.settimeout(timeout)
        try:
            connection.sendall(wire.framed(codec.encode(request)))
            data = read_message(file)
        except OSError:
            return None
    return None if data is None else codec.decode_answer(data)


class EventSender:
    """Sends events over a connection. Its thread writes what the callers' threads could not write. Events are
    encoded by the callers, because the objects in them may change afterwards."""

    def __init__(self, connection: socket.socket, on_lost: Callable[[], None], thread: str) -> None:
        """``on_lost`` is called on the thread if the connection has ended."""
        connection.settimeout(None)
        self._socket, self._on_lost = connection, on_lost
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._queued = 0
        """Number of messages in the outbox, including the one that the sending thread is writing."""
        self._counting, self._writing = threading.Lock(), threading.Lock()
        self._rest = b""
        """Bytes that ``send_now`` could not write; they are sent before anything else."""
        threading.Thread(target=self._transmit, name=thread, daemon=True).start()

    def send(self, event: Event) -> None:
        """Send an event. Never blocks. May be called from any thread."""
        self._queue(framed(event))

    def send_now(self, event: Event) -> None:
        """As ``send``, but write from the caller's thread if the socket accepts the data. Used for acks, which a
        busy loop sends hundreds of times a second: the sending thread would wait up to 5 ms for the interpreter
        lock each time."""
        data = framed(event)
        with self._counting:
            is_queue_empty = not self._queued  # otherwise the event would overtake earlier ones
        if not is_queue_empty or not self._writing.acquire(blocking=False):
            self._queue(data)
            return
        try:
            data = self._rest + data
            self._rest = data[self._socket.send(data, socket.MSG_DONTWAIT) :]
        except BlockingIOError:
            self._rest = data
        except OSError:
            return  # the receiving thread detects the lost connection
        finally:
            self._writing.release()
        if self._rest:
            self._queue(b"")  # makes the sending thread write the rest

    def close(self) -> None:
        """Close the connection after all queued events are sent. Returns at once."""
        self._outbox.put(None)

    def _queue(self, data: bytes) -> None:
        with self._counting:
            self._queued += 1
        self._outbox.put(data)

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
            self._on_lost()
        finally:
            self._socket.close()


class ControlClient:
    """A worker's connection to the driver. Sending and receiving have threads of their own, so that the worker's
    loop never waits for the network.

    Commands are appended to ``inbox``, and ``wake`` is called for each, on the receiving thread. ``lost``
    becomes True when the connection ends. ``clock`` tells the driver's time."""

    def __init__(
        self, address: tuple[str, int], secret: bytes, wake: Callable[[], None], clock: Clock | None = None
    ) -> None:
        """``clock`` is the clock of this machine. Raises as ``connect`` does."""
        self.inbox: deque[Command] = deque()
        self.lost = False
        self.lost_because = ""
        """Why the connection ended, if a command could not be decoded; otherwise empty."""
        self.clock = DriverClock(clock)
        self._wake = wake
        self._listeners: dict[type, Callable[[Any], None]] = {}
        connection, self._file = connect(address, secret, self._measure_clock)
        self.host: str = connection.getsockname()[0]
        """The address of this machine from which the driver is reached."""
        self._sender = EventSender(connection, self._on_lost, "control-send")
        threading.Thread(target=self._receive, name="control-receive", daemon=True).start()

    def send(self, event: Event) -> None:
        """Send an event. Never blocks. May be called from any thread."""
        self._sender.send(event)

    def send_now(self, event: Event) -> None:
        """As ``send``, but at once if possible (``EventSender.send_now``)."""
        self._sender.send_now(event)

    def receive(self, command: Command) -> None:
        """Handle a command that another connection has brought as one of the driver. May be called from any
        thread."""
        listener = self._listeners.get(type(command))
        if listener is not None:
            listener(command)
        else:
            self.inbox.append(command)
            self._wake()

    def listen(self, kind: type[C], listener: Callable[[C], None]) -> None:
        """Pass commands of this type to ``listener`` instead of ``inbox``. It is called on the receiving thread,
        and must be quick and not raise."""
        self._listeners[kind] = listener

    def ask_time(self) -> None:
        """Ask for the driver's time once more; the receiving thread adds the answer to ``clock``."""
        self.send_now(AskDriverTime(self.clock.monotonic()))

    def close(self) -> None:
        """Close the connection after all queued events are sent. Returns at once."""
        self._sender.close()

    def _measure_clock(self, connection: socket.socket, file: BinaryIO) -> None:
        """Measure the driver's time before any other message, so that the worker knows it when the first command
        arrives. Raises ``ConnectionError`` if the connection ends."""
        for _ in range(SAMPLES):
            connection.sendall(framed(AskDriverTime(self.clock.monotonic())))
            data = read_message(file)
            if data is None:
                raise ConnectionError("the connection ended before the driver told its time")
            answer = codec.decode_command(data)
            if not isinstance(answer, DriverTime):
                raise ControlRefused(
                    "control connection", f"the driver answered AskDriverTime with {answer!r} instead of its time"
                )
            self.clock.add(answer.sent, answer.time, self.clock.monotonic())

    def _read(self) -> Command | None:
        """The next command; None if the connection has ended."""
        data = read_message(self._file)
        return None if data is None else codec.decode_command(data)

    def _receive(self) -> None:
        try:
            while (command := self._read()) is not None:
                if isinstance(command, DriverTime):
                    self.clock.add(command.sent, command.time, self.clock.monotonic())
                    continue
                self.receive(command)
        except ControlRefused as error:
            self.lost_because = str(error)
            self.send(WorkerFailed(error.where, error.problem, error.hint))
        except (OSError, ValueError):
            pass  # the connection has ended, for whatever reason
        self._on_lost()

    def _on_lost(self) -> None:
        self.lost = True
        self._wake()


def read_message(file: BinaryIO) -> bytes | None:
    """The bytes of the next message; None if the connection has ended."""
    head = file.read(wire.LENGTH.size)
    if len(head) < wire.LENGTH.size:
        return None
    length = wire.length_of(head)
    data = file.read(length)
    return data if len(data) == length else None


def framed(event: Event) -> bytes:
    """The bytes of an event on the wire. If a report cannot be encoded, it is sent without the values of user
    code and with the error. Any other event that cannot be encoded is replaced by ``WorkerFailed``."""
    try:
        return wire.framed(codec.encode(event))
    except ControlRefused as error:
        refused = error
    if isinstance(event, WorkerReport):
        try:
            return wire.framed(codec.encode(_bare(event, str(refused))))
        except ControlRefused:
            pass  # send WorkerFailed instead
    return wire.framed(codec.encode(WorkerFailed(refused.where, refused.problem, refused.hint)))


def _bare(report: WorkerReport, error: str) -> WorkerReport:
    """The report without anything that user code has produced, and without what may be long."""
    tasks = {task: stats.without_user_values() for task, stats in report.tasks.items()}
    return msgspec.structs.replace(report, tasks=tasks, published={}, errors=[error], segments=[], streams=None)
