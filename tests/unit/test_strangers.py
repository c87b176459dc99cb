"""Many connections that say nothing."""

import contextlib
import http.client
import socket
import time

import pytest

from penstock.driver.coordinator import Coordinator
from penstock.errors import ControlRefused
from penstock.protocol import wire
from penstock.protocol.client import ControlClient, connect
from penstock.protocol.driver_clock import SAMPLES
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
    receive = coordinator._gate.receive

    def refuse_first(writer):
        receive(writer)
        if not turned_away:
            turned_away.append(writer)
            writer.transport.abort()

    coordinator._gate.receive = refuse_first
    try:
        ControlClient(coordinator.address, coordinator.secret, lambda: None).close()
        assert len(turned_away) == 1
    finally:
        coordinator.stop()


@pytest.fixture
def coordinator():
    coordinator = Coordinator()
    coordinator.start()
    yield coordinator
    coordinator.stop()


def test_who_has_proved_the_secret_is_no_stranger_any_more(coordinator):
    """However long it takes until its first message."""
    with contextlib.ExitStack() as stack:
        known = stack.enter_context(connect(coordinator.address, coordinator.secret)[0])
        silent = [stack.enter_context(socket.create_connection(coordinator.address)) for _ in range(MANY)]
        assert open_after(silent, wire.MOST_HANDSHAKES) == wire.MOST_HANDSHAKES
        assert not ended(known)


def cut_off_at(coordinator, monkeypatch, step):
    """The first connection is aborted before this step of the handshake. Returns the list of those cut off."""
    cut = []
    admit = coordinator._admit

    class Writer:
        def __init__(self, writer):
            self._writer, self._steps = writer, 0

        def __getattr__(self, name):
            return getattr(self._writer, name)

        def write(self, data):
            if self._steps == step and not cut:
                cut.append(self._writer)
                self._writer.transport.abort()
            self._steps += 1
            self._writer.write(data)

    monkeypatch.setattr(coordinator, "_admit", lambda reader, writer: admit(reader, Writer(writer)))
    return cut


@pytest.mark.parametrize("step", range(2 + SAMPLES), ids=lambda step: ["greeting", "proof", *"12345"][step])
def test_a_worker_tries_again_wherever_its_connection_ends_before_hello(coordinator, monkeypatch, step):
    cut = cut_off_at(coordinator, monkeypatch, step)
    client = ControlClient(coordinator.address, coordinator.secret, lambda: None)
    assert len(cut) == 1
    assert not client.lost
    client.close()


def test_who_does_not_know_the_secret_is_refused_at_once(coordinator, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("it tries again in vain"))
    with pytest.raises(ControlRefused, match="the driver refused this client"):
        ControlClient(coordinator.address, wire.new_secret(), lambda: None)


def test_a_driver_that_always_hangs_up_is_given_up(coordinator, monkeypatch):
    pauses = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    monkeypatch.setattr(coordinator._gate, "receive", lambda writer: writer.transport.abort())
    with pytest.raises(ControlRefused, match="the driver closed it before the handshake was complete"):
        ControlClient(coordinator.address, coordinator.secret, lambda: None)
    assert len(pauses) == 4


def test_silent_connections_to_the_web_server_are_bounded():
    with StatusServer(lambda: None) as server, contextlib.ExitStack() as stack:
        address = server._server.server_address
        silent = [stack.enter_context(socket.create_connection(address)) for _ in range(MANY)]
        page = http.client.HTTPConnection(*address, timeout=20)
        stack.callback(page.close)
        page.request("GET", "/healthz", headers={"Host": "localhost"})
        assert page.getresponse().read() == b"starting\n"
        assert open_after(silent, web._MOST_CONNECTIONS) == web._MOST_CONNECTIONS - 1
