"""A spout that reads lines from a TCP server."""

from __future__ import annotations

import logging
import os
import select
import socket
from collections.abc import Sequence

from penstock.clock import Clock, SystemClock
from penstock.connectors.lines import split_lines
from penstock.errors import SettingError
from penstock.topology.components import BatchSpout, BatchSpoutCollector, Conf, Context
from penstock.topology.streams import FieldSpec, OutputDeclarer

_BLOCK = 1 << 18  # bytes per receive call: about the size of the kernel's buffer
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0  # seconds between two attempts to connect; doubles each time
_CONNECT_TIMEOUT = 10.0  # seconds; an attempt to connect without an answer is then given up
_LONGEST_LINE = 16 << 20  # bytes; a peer that sends no newline must not fill the memory

_log = logging.getLogger(__name__)


class SocketSpout(BatchSpout):
    """Connects to a TCP server and emits the lines it sends. Reconnects with increasing pauses when the connection
    is lost. Each task has its own connection: if the server sends the same lines to all clients, each line is
    emitted once per task.

    A socket cannot be read twice. Lines that had been read when the process died, and lines sent while no client
    was connected, are lost whatever the delivery guarantee, and a failed tuple is not emitted again. The source is
    at most once, and no wrapper can change that. If this is not acceptable, let the sender append to a
    ``DiskQueue`` or a Kafka topic and read that.

    A line ends with a newline. Carriage returns before it are removed; bytes that are not UTF-8 are replaced. An
    unterminated line at an orderly end of the connection is emitted; at a broken connection it is discarded.
    ``host`` should be an address or a name that resolves quickly, because the lookup blocks the task.
    """

    def __init__(
        self, host: str, port: int, *, fields: Sequence[FieldSpec] = ("line",), clock: Clock | None = None
    ) -> None:
        if not 0 < port < 65536:
            raise SettingError("SocketSpout(port)", f"{port!r} is not between 1 and 65535")
        if len(fields) != 1:
            raise SettingError(
                "SocketSpout(fields)",
                f"a line is one field, but {len(fields)} are declared",
                "Split lines in a bolt.",
            )
        self._address = (host, port)
        self._fields = tuple((field, str) if isinstance(field, str) else field for field in fields)
        self._clock = clock or SystemClock()
        self._socket: socket.socket | None = None
        self._connected = False
        self._since = 0.0  # when the current attempt to connect began
        self._pause, self._due = _FIRST_PAUSE, 0.0
        self._part = b""  # the beginning of a line that is not yet complete

    def declare_output_fields(self, declarer: OutputDeclarer) -> None:
        declarer.declare(*self._fields)

    def open(self, conf: Conf, context: Context, collector: BatchSpoutCollector) -> None:
        self._component, self._collector = context.component, collector

    def next_batch(self) -> None:
        try:
            if self._socket is None:
                self._begin_to_connect()
            elif not self._connected:
                self._look_if_connected()
            else:
                self._receive()
        except OSError as error:
            self._lose(f"{error.strerror or error}")

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _begin_to_connect(self) -> None:
        if self._clock.monotonic() < self._due:
            return
        family, kind, protocol, _, address = socket.getaddrinfo(*self._address, type=socket.SOCK_STREAM)[0]
        self._socket = socket.socket(family, kind, protocol)
        self._socket.setblocking(False)
        self._connected = False
        self._since = self._clock.monotonic()
        self._socket.connect_ex(address)

    def _look_if_connected(self) -> None:
        assert self._socket is not None
        if not select.select((), (self._socket,), (), 0)[1]:
            if self._clock.monotonic() - self._since > _CONNECT_TIMEOUT:
                raise TimeoutError("no answer")
            return
        if code := self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(code, os.strerror(code))
        self._connected = True

    def _receive(self) -> None:
        assert self._socket is not None
        try:
            data = self._socket.recv(_BLOCK)
        except (BlockingIOError, InterruptedError):
            return
        self._pause = _FIRST_PAUSE
        if not data:
            if self._part:
                self._emit(self._part + b"\n")
            raise ConnectionError("the server has closed the connection")
        end = data.rfind(b"\n") + 1
        if end:
            whole, self._part = self._part + data[:end], data[end:]
            self._emit(whole)
        else:
            self._part += data
            if len(self._part) > _LONGEST_LINE:
                raise ConnectionError(f"no newline within {_LONGEST_LINE} bytes")

    def _emit(self, data: bytes) -> None:
        self._collector.emit_batch([split_lines(data)])

    def _lose(self, why: str) -> None:
        _log.warning(
            "component '%s': connection to %s:%d: %s; trying again in %.1f s",
            self._component,
            *self._address,
            why,
            self._pause,
        )
        self.close()
        self._part = b""
        self._due = self._clock.monotonic() + self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
