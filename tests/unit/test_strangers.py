"""Many connections that say nothing."""

import contextlib
import http.client
import socket
import time

from penstock.driver.coordinator import Coordinator
from penstock.protocol import wire
from penstock.protocol.client import ControlClient
from penstock.web import server as web
from penstock.web.server import StatusServer

MANY = 300


def ended(connection):
    """True where the other end has closed it."""
    connection.settimeout(0.0)
    try:
        while connection.recv(4096):
            pass
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def open_after(connections, most):
    """How many are still open, as soon as there are no more than ``most``."""
    deadline = time.monotonic() + 20
    while (left := sum(not ended(each) for each in connections)) > most and time.monotonic() < deadline:
        time.sleep(0.01)
    return left


def test_silent_connections_are_bounded_and_do_not_keep_a_worker_out():
    coordinator = Coordinator()
    coordinator.start()
    with contextlib.ExitStack() as stack:
        stack.callback(coordinator.stop)
        silent = [stack.enter_context(socket.create_connection(coordinator.address)) for _ in range(MANY)]
        client = ControlClient(coordinator.address, coordinator.secret, lambda: None)
        stack.callback(client.close)
        assert open_after(silent, wire.MOST_HANDSHAKES) == wire.MOST_HANDSHAKES - 1
        assert not ended(silent[-1]), "the oldest are closed"
        assert not client.lost


def test_a_worker_that_is_turned_away_tries_again(monkeypatch):
    coordinator = Coordinator()
    coordinator.start()
    turned_away = []
    receive = coordinator._receive_stranger

    def refuse_first(writer):
        receive(writer)
        if not turned_away:
            turned_away.append(writer)
            writer.transport.abort()

    coordinator._receive_stranger = refuse_first
    try:
        ControlClient(coordinator.address, coordinator.secret, lambda: None).close()
        assert len(turned_away) == 1
    finally:
        coordinator.stop()


def test_silent_connections_to_the_web_server_are_bounded():
    with StatusServer(lambda: None) as server, contextlib.ExitStack() as stack:
        address = server._server.server_address
        silent = [stack.enter_context(socket.create_connection(address)) for _ in range(MANY)]
        page = http.client.HTTPConnection(*address, timeout=20)
        stack.callback(page.close)
        page.request("GET", "/healthz", headers={"Host": "localhost"})
        assert page.getresponse().read() == b"starting\n"
        assert open_after(silent, web._MOST_CONNECTIONS) == web._MOST_CONNECTIONS - 1
