"""The listening sockets of a run, and what other processes can do there."""

import contextlib
import os
import socket
import time

import psutil
import pytest

from penstock import Settings, TopologyBuilder
from penstock.spark import ports
from penstock.spark.jvm import JVM
from tests.integration.components import Numbers, Witness

pytestmark = pytest.mark.spark

STRAY = (
    b"\0\0\0\0\0\0\0\x15\x09\0\0\0\x08stranger",  # a one-way message of Spark's transport
    b"\0\0\0\0\0\0\0\x1d\x03\0\0\0\0\0\0\0\x01\0\0\0\x08stranger",  # a request
    b"\0\0\0\0\0\0\0\x0a\xff\0",  # a message of a type that does not exist
    b"\x7f" * 16,  # a frame longer than any
    b"GET / HTTP/1.0\r\n\r\n",
)


@pytest.fixture
def running(run, request):
    builder = TopologyBuilder()
    builder.set_spout("numbers", Numbers(10**9))
    builder.set_bolt("witness", Witness(), 2).fields_grouping("numbers", "key")
    return run.submit(builder.build("ports", Settings(conf={"folder": str(run.folder)})))


def jvm_listeners():
    return ports.listening(JVM.process.pid)


def test_a_run_listens_on_loopback_only_and_on_what_is_documented(running, request):
    if request.config.getoption("--cluster"):
        pytest.skip("nodes of a cluster listen on their own addresses")
    workers = {worker.hello.pid for worker in running.internals.workers.values()}
    assert workers
    assert ports.listening(os.getpid()) >= {running.internals.server.address}
    jvm = psutil.Process(JVM.process.pid)  # not servers that other tests of this process have started
    for process in [jvm, *jvm.children(recursive=True)]:
        found = ports.listening(process.pid)
        assert ports.beyond_loopback(found) == [], process.cmdline()
        assert process.pid == JVM.process.pid or not found, "only the driver and its JVM listen"
    purposes = [each.purpose for each in ports.LISTENERS if each.process == "jvm"]
    writers = len(running.internals.plan.worker_ids()) - running.internals.plan.stages[-1].workers
    assert len(jvm_listeners()) == len(purposes) - 1 + writers, "one for each purpose, a shuffle's for each sender"
    assert {each.address for each in ports.LISTENERS} == {"127.0.0.1"}
    assert [note for note in running.internals.bus.notes() if note.kind == "security"] == []


def test_stray_frames_do_not_end_the_query(running):
    executed = lambda: running.internals.bus.totals()["witness"].executed  # noqa: E731
    for address in sorted(jvm_listeners()):
        for frame in STRAY:
            with socket.create_connection(address, 5) as stranger:
                stranger.sendall(frame)
                stranger.settimeout(0.05)
                with contextlib.suppress(OSError):
                    stranger.recv(100)
    before, deadline = executed(), time.monotonic() + 20
    assert running.internals.server.wait(lambda: executed() > before + 1000, deadline - time.monotonic())
    assert (running.internals.restarts, running.state) == (0, "active")


def test_secrets_are_not_on_a_command_line(spark):
    conf = spark.sparkContext.getConf()
    hidden = [conf.get("spark.penstock.shuffle.secret"), conf.get("spark.authenticate.secret")]
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):  # a worker of the test before that has just ended
            assert not any(secret in word for secret in hidden for word in process.cmdline())
