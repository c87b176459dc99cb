"""The HTTP endpoint ``/status``, ``/metrics``, ``/healthz``. It listens on loopback only and is read-only."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import sys
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from penstock.driver.status import TopologyStatus
from penstock.errors import PortInUse
from penstock.web.exposition import CONTENT_TYPE, exposition

log = logging.getLogger("penstock.web")

_HOST = "127.0.0.1"
_NAMES = ("127.0.0.1", "localhost")
_IDLE = (
    30.0  # seconds without a request after which a connection is closed; Prometheus scrapes every 15 s by default
)
_MOST_CONNECTIONS = 32
"""Open connections at a time; each costs a thread and a file descriptor of the driver. A further connection closes
the oldest one, whose client simply connects again."""
_HEALTHY = ("active", "inactive", "ending")

_Page = tuple[HTTPStatus, str, str]
"""HTTP status, content type and text."""


class StatusServer:
    """Serves the result of ``take_status``, which is None while the topology is being started. It listens as soon
    as it is created, and answers requests inside its ``with`` block."""

    def __init__(self, take_status: Callable[[], TopologyStatus | None], port: int = 0) -> None:
        """Raises ``PortInUse`` if the port is taken. Port 0 means any free port."""
        try:
            self._server = _Server((_HOST, port), _handler(take_status))
        except OSError as error:
            raise PortInUse(
                "HTTP endpoint",
                f"it cannot listen on {_HOST}:{port or 'a free port'} ({error.strerror or error})",
                "Choose another port with --http, or 0 for any free port.",
            ) from error
        self.url = f"http://{_HOST}:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="http", daemon=True)

    def __enter__(self) -> StatusServer:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._connections: dict[socket.socket, None] = {}
        """Ordered by age, the oldest first."""
        self._lock = threading.Lock()
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._connections[request] = None
            if len(self._connections) > _MOST_CONNECTIONS:
                oldest = next(iter(self._connections))
                del self._connections[oldest]
                with contextlib.suppress(OSError):  # the connection has just ended
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread reads the end of the stream and closes it
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._connections.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # a client may disconnect before the answer
            log.warning("HTTP endpoint: a request failed", exc_info=True)


def _handler(take_status: Callable[[], TopologyStatus | None]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = _IDLE

        def do_GET(self) -> None:  # the name is given by http.server
            code, kind, text = self._page()
            data = text.encode()
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        do_HEAD = do_GET  # noqa: N815

        def _page(self) -> _Page:
            # DNS rebinding: a web page whose host name resolves to loopback must not read the status in a browser.
            if self.headers.get("Host", "").partition(":")[0] not in _NAMES:
                return _text(HTTPStatus.FORBIDDEN, f"the Host header must be {' or '.join(_NAMES)}\n")
            return page(self.path.partition("?")[0], take_status())

        def log_message(self, format: str, *arguments: Any) -> None:
            """Log nothing: the terminal shows the live view."""

    return Handler


def page(path: str, status: TopologyStatus | None) -> _Page:
    """The answer to a request for a path."""
    if path not in ("/status", "/metrics", "/healthz"):
        return _text(HTTPStatus.NOT_FOUND, "not found; the paths are /status, /metrics and /healthz\n")
    if status is None:
        return _text(HTTPStatus.SERVICE_UNAVAILABLE, "starting\n")
    if path == "/healthz":
        healthy = status.state in _HEALTHY
        return _text(HTTPStatus.OK if healthy else HTTPStatus.SERVICE_UNAVAILABLE, f"{status.state}\n")
    if path == "/metrics":
        return HTTPStatus.OK, CONTENT_TYPE, exposition(status)
    return HTTPStatus.OK, "application/json", json.dumps(status.to_json(), default=str)


def _text(code: HTTPStatus, text: str) -> _Page:
    return code, "text/plain; charset=utf-8", text
