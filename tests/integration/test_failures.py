"""Failures on Spark, and the messages the user gets."""

import logging
import os
import re
import signal
import socket

import pytest

from penstock import (
    ControlRefused,
    Delivery,
    Lifecycle,
    NotEnoughSlots,
    PortInUse,
    Settings,
    TopologyBuilder,
    TopologyFailed,
)
from penstock.protocol.client import ControlClient
from tests.helpers import settings_with
from tests.integration.components import Away, Numbers, Pass, RaisesAt, Witness, WrongCount, WrongType

pytestmark = pytest.mark.spark


def topology(run, bolt, count=2_000, **more):
    builder = TopologyBuilder()
    builder.set_spout("numbers", Numbers(count))
    builder.set_bolt("middle", bolt).shuffle_grouping("numbers")
    builder.set_bolt("witness", Witness()).shuffle_grouping("middle")
    return builder.build("failing", settings_with(conf={"folder": str(run.folder)}, **more))


@pytest.mark.parametrize(
    ("bolt", "error"),
    [
        (RaisesAt(7), r"component 'middle' \(components.py:\d+ in execute\): execute raised "
                      r"ValueError: cannot digest this, on Tuple\(origin=1, n=7, key='key-7', sent=7\)"),
        (WrongCount(7), r"component 'middle', stream 'default' \(components.py:\d+ in execute\): it has 4 fields "
                        r"\(origin, n, key, sent\), but 1 value was emitted: \[7\]"),
        (WrongType(7), r"component 'middle', stream 'default': field 'n' is declared int64, but 'three'"),
    ],
)  # fmt: skip
def test_a_bad_tuple_is_dropped_counted_and_explained(run, bolt, error):
    running = run.submit(topology(run, bolt))
    assert running.internals.server.wait(lambda: running.internals.bus.totals()["numbers"].emitted == 2_000, 30)
    assert running.drain(30)
    running.kill()
    totals = running.internals.bus.totals()["middle"]
    assert totals.errors == 1
    assert re.search(error, totals.last_error), totals.last_error
    assert run.witnessed("witness")[0]["received"] == 1_999


def test_on_error_stop_ends_the_topology_with_the_users_error(run):
    running = run.submit(topology(run, RaisesAt(7), on_error="stop"))
    with pytest.raises(TopologyFailed, match=r"component 'middle'.*cannot digest this"):
        running.wait(30)
    assert running.state == "failed"


def test_a_prepare_that_raises_fails_the_start(run):
    with pytest.raises(TopologyFailed, match=r"component 'middle' \(components.py:\d+ in prepare\).*no database"):
        run.submit(topology(run, RaisesAt(0, where="prepare")))


def test_a_killed_worker_is_replaced(run):
    running = run.submit(topology(run, Pass(), count=10**9))
    executed = lambda: running.internals.bus.totals()["witness"].executed  # noqa: E731
    assert running.internals.server.wait(lambda: executed() > 0, 20)
    os.kill(running.internals.workers[sorted(running.internals.workers)[1]].hello.pid, signal.SIGKILL)
    assert running.internals.server.wait(lambda: running.internals.restarts == 1 and running.state == "active", 30)
    before = executed()
    assert running.internals.server.wait(lambda: executed() > before, 30)


def test_it_gives_up_after_max_restarts(run):
    running = run.submit(topology(run, Pass(), count=10**9, max_restarts=0))
    pid = running.internals.workers[sorted(running.internals.workers)[1]].hello.pid
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(TopologyFailed) as caught:
        running.wait(30)
    said = str(caught.value)
    assert "failed again after 0 restarts" in said
    assert re.search(rf"worker 1\.0 \(.*; process {pid} on .*\) was killed by signal 9 \(SIGKILL\)", said)


def test_an_end_before_the_last_epoch_is_committed_is_no_success(run):
    builder = TopologyBuilder()
    builder.set_spout("numbers", Numbers(100))
    builder.set_bolt("away", Away()).shuffle_grouping("numbers")
    settings = Settings(
        delivery=Delivery("exactly_once", state_dir=str(run.folder / "state")),
        lifecycle=Lifecycle(drain_timeout=0.5),
    )
    running = run.submit(builder.build("unfinished", settings))
    assert running.internals.server.wait(lambda: running.internals.bus.totals()["away"].executed == 100, 20)
    running.kill()
    outcome = running.internals.outcome()
    assert outcome.code == 5
    assert "the last epoch is not committed" in outcome.sentences[0]


def test_a_stranger_is_refused_and_logged(run, caplog):
    running = run.submit(topology(run, Pass()))
    with caplog.at_level(logging.WARNING, "penstock.driver"):
        with pytest.raises(ControlRefused, match="could not prove that it knows the secret"):
            ControlClient(running.internals.server.address, b"wrong", lambda: None)
        with socket.create_connection(running.internals.server.address) as mute:
            mute.shutdown(socket.SHUT_WR)
            while mute.recv(4096):
                pass
        assert running.internals.server.wait(lambda: running.internals.server.refused == 2, 10)
    assert "does not know the secret of this run" in caplog.text
    assert "ended before the handshake" in caplog.text


def test_a_port_in_use_is_named(run):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortInUse, match=f"listen on 127.0.0.1:{port}.*--port"):
            run.submit(topology(run, Pass()), port=port)


def test_too_few_workers_are_said_before_the_start(run):
    builder = TopologyBuilder()
    builder.set_spout("numbers", Numbers(1), 70)
    with pytest.raises(NotEnoughSlots, match=r"needs 70 task slots.*only 64 of 64 are free on local\[64\]"):
        run.submit(builder.build("wide"))
