"""Lines from a TCP server."""

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

_BLOCK = 1 << 18  # bytes taken from the socket at a time: about what the kernel holds
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0  # s between two attempts to connect; doubles each time
_CONNECT_TIMEOUT = 10.0  # s until an unanswered attempt to connect is given up
_LONGEST_LINE = 16 << 20  # bytes; a peer that sends no newline must not fill the memory

_log = logging.getLogger(__name__)


class SocketSpout(BatchSpout):
    """Connects to a TCP server and emits the lines it sends; connects again, with growing pauses, when the
    connection is lost. Each task has a connection of its own: with several tasks a server that sends the same to
    all gives each line several times.

    A socket cannot be read twice. Lines that were read when the process died, or sent while nobody was connected,
    are lost at every delivery level, and a failed tuple is not emitted again: at the source this is at most once,
    and no wrapper can change that. Where that will not do, have the sender append to a ``DiskQueue`` or a Kafka
    topic instead, and read those.

    A line ends with a newline; carriage returns before it are cut off, bytes that are not UTF-8 replaced. What
    comes before an orderly end of the connection counts as a line, what comes before a broken one does not.
    ``host`` should be an address or a name that resolves quickly: looking it up blocks.
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
        self._since = 0.0  # when the attempt to connect began
        self._pause, self._due = _FIRST_PAUSE, 0.0
        self._part = b""  # of a line whose end has not come yet

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
