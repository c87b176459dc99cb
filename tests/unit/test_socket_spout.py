"""SocketSpout against a real server on loopback."""

from __future__ import annotations

import socket
import time

import pytest

from penstock.clock import SimulatedClock
from penstock.connectors.sockets import SocketSpout
from penstock.errors import SettingError
from penstock.topology.components import Context

DEADLINE = 20.0


class Bench:
    def __init__(self):
        self.server = socket.create_server(("127.0.0.1", 0))
        self.server.settimeout(DEADLINE)
        self.port = self.server.getsockname()[1]
        self.clock = SimulatedClock(100.0)
        self.lines = []
        self.spout = SocketSpout("127.0.0.1", self.port, clock=self.clock)
        self.spout.open({}, Context("t", "lines", 1, 0, {"lines": (1,)}), self)

    def emit_batch(self, columns, stream="default", msg_ids=None):
        assert msg_ids is None
        self.lines += columns[0].to_pylist()

    def until(self, condition):
        end = time.monotonic() + DEADLINE
        while not condition():
            self.spout.next_batch()
            assert time.monotonic() < end, self.lines

    def accept(self):
        self.until(lambda: self.spout._connected)
        return self.server.accept()[0]


@pytest.fixture
def bench():
    bench = Bench()
    yield bench
    bench.spout.close()
    bench.server.close()


def test_lines_arrive_whole_however_they_are_cut(bench):
    peer = bench.accept()
    peer.sendall(b"one\r\ntw")
    bench.until(lambda: bench.lines == ["one"])
    peer.sendall("o\nthrée\n".encode())
    bench.until(lambda: bench.lines == ["one", "two", "thrée"])
    peer.sendall(b"no newline")
    peer.close()
    bench.until(lambda: bench.lines[3:] == ["no newline"])


def test_connects_again_with_growing_pauses(bench, caplog):
    peer = bench.accept()
    peer.sendall(b"a\n")
    bench.until(lambda: bench.lines == ["a"])
    bench.server.close()
    peer.close()
    pauses = []
    for _ in range(8):
        bench.until(lambda: bench.spout._socket is None)
        pauses.append(round(bench.spout._due - bench.clock.monotonic(), 3))
        bench.spout.next_batch()
        assert bench.spout._socket is None  # not before the pause has passed
        bench.clock.advance(pauses[-1] + 0.001)
        bench.spout.next_batch()
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    assert "the server has closed the connection; trying again in 0.1 s" in caplog.text
    assert "refused" in caplog.text
    bench.server = socket.create_server(("127.0.0.1", bench.port))
    bench.server.settimeout(DEADLINE)
    bench.until(lambda: bench.spout._socket is None)
    bench.clock.advance(6)
    peer = bench.accept()
    peer.sendall(b"b\n")
    bench.until(lambda: bench.lines == ["a", "b"])
    assert bench.spout._pause == 0.1
    peer.close()


def test_a_server_that_does_not_answer_is_given_up(bench):
    bench.spout.next_batch()
    bench.spout._look_if_connected = lambda: (_ for _ in ()).throw(TimeoutError("no answer"))
    bench.spout.next_batch()
    assert bench.spout._socket is None


def test_a_name_that_does_not_resolve_is_tried_again(caplog):
    spout = SocketSpout("no-such-host.invalid", 9)
    spout.open({}, Context("t", "lines", 1, 0, {"lines": (1,)}), None)
    spout.next_batch()
    assert "connection to no-such-host.invalid:9" in caplog.text


def test_errors():
    with pytest.raises(SettingError, match=r"SocketSpout\(port\): 0 is not between 1 and 65535"):
        SocketSpout("h", 0)
    with pytest.raises(SettingError, match="a line is one field, but 2 are declared"):
        SocketSpout("h", 1, fields=("a", "b"))
