"""Several ackers: what the driver decides when they start and are lost, and real processes without Spark."""

import io
import os
import signal
import socket
import threading
import time
from collections import deque

import numpy as np
import psutil
import pytest
from rich.console import Console

from penstock import ControlRefused, RichBolt, SettingError, Settings, Spout, TopologyBuilder
from penstock.acking import ledger
from penstock.acking.ids import edges_of_roots, roots
from penstock.acking.lineage import Entries
from penstock.acking.spread import BLOCK, owners, split
from penstock.cli.status import render
from penstock.driver.acker_roster import AckerPhase, AckerRoster, spread_over_nodes
from penstock.driver.ackers import AckerStatus
from penstock.driver.coordinator import Coordinator
from penstock.metrics.bus import MetricsBus
from penstock.plan.model import WorkerId
from penstock.plan.planner import make_plan
from penstock.plan.render import as_text
from penstock.protocol import wire
from penstock.protocol.client import ControlClient, connect, framed, read_message
from penstock.protocol.commands import FailRoots, RootsSettled, StartAcker, StopAcker, UseAcker
from penstock.protocol.events import (
    AckerLinked,
    AckerStarted,
    AckTally,
    Hello,
    JoinAcker,
    RootsFailed,
    SpoutProgress,
)
from penstock.testing import CaptureBolt, FeederSpout, LocalRunner
from penstock.web.exposition import exposition
from penstock.worker.acker_process import AckerSpec
from penstock.worker.ackers import SlotAckers
from penstock.worker.wake import Wake
from tests.unit.watched import Watched

SLOTS = {WorkerId(0, 0): "a/1", WorkerId(1, 0): "a/1", WorkerId(1, 1): "b/2"}
FIRST, SECOND, THIRD = WorkerId(0, 0), WorkerId(1, 1), WorkerId(1, 0)


def started(acker, incarnation, port=4000):
    return AckerStarted(0, acker, incarnation, 99 + acker + incarnation, "a/1", "127.0.0.1", port)


def run_all(roster, now=0.0):
    """Start all ackers and link all slots."""
    roster.begin(SLOTS, now)
    for place in roster.places:
        roster.on_started(started(place.index, place.incarnation), now)
        for slot in SLOTS:
            roster.on_linked(slot, AckerLinked(place.index, place.incarnation), now)
    roster.validate()
    return roster


# ---- decisions ---------------------------------------------------------------------------------------------


def test_ackers_are_spread_over_the_nodes():
    assert spread_over_nodes(SLOTS) == [FIRST, SECOND, THIRD]
    commands = AckerRoster(4, 20.0).begin(SLOTS, 0.0)
    assert [slot for slot, _ in commands] == [FIRST, SECOND, THIRD, FIRST]
    assert [command for _, command in commands] == [StartAcker(index, 1, 4) for index in range(4)]


def test_an_acker_is_ready_when_every_slot_uses_it():
    roster = AckerRoster(1, 20.0)
    assert not roster.ready
    roster.begin(SLOTS, 0.0)
    assert list(roster.on_started(started(0, 1), 0.1)) == [(None, UseAcker(0, 1, "127.0.0.1", 4000))]
    for slot in SLOTS:
        assert not roster.ready
        assert roster.on_linked(slot, AckerLinked(0, 1), 0.2) == [], "no root can have been lost"
    assert roster.ready
    assert roster.notes == []


def test_the_roots_of_a_lost_acker_fail_when_every_slot_uses_the_next():
    roster = run_all(AckerRoster(2, 20.0))
    commands = roster.on_lost(1, 1, "it has ended", 5.0)
    assert list(commands) == [(SECOND, StopAcker(1, 1)), (THIRD, StartAcker(1, 2, 2))]
    assert not roster.ready
    assert roster.on_started(started(1, 1), 5.1) is None, "that one is gone"
    roster.on_started(started(1, 2), 5.1)
    commands = [roster.on_linked(slot, AckerLinked(1, 2), 5.2) for slot in SLOTS]
    assert commands == [[], [], [(None, FailRoots(1))]]
    assert roster.ready
    assert roster.notes == [
        "acker 1 was lost (process 101 on a/1: it has ended). Process 102 on a/1 took its place, and its open "
        "tuples are emitted again"
    ]
    roster.validate()


def test_a_slot_that_cannot_reach_an_acker_has_it_replaced():
    roster = run_all(AckerRoster(1, 20.0))
    commands = roster.on_linked(SECOND, AckerLinked(0, 1, "connection refused"), 5.0)
    assert [command for _, command in commands] == [StopAcker(0, 1), StartAcker(0, 2, 1)]
    assert roster.on_lost(0, 1, "its connection has ended", 5.0) == [], "known already"
    assert roster.on_linked(THIRD, AckerLinked(0, 1, "connection refused"), 5.0) == []


def test_an_acker_that_is_lost_again_and_again_becomes_a_part_of_the_driver():
    roster, now, commands = run_all(AckerRoster(2, 20.0)), 10.0, []
    pauses = []
    for incarnation in (1, 2, 3):
        commands = roster.on_lost(0, incarnation, "killed", now)
        begun = now
        while roster.places[0].phase is AckerPhase.PAUSING:
            now += 0.125
            commands += roster.check(now)
        pauses.append(now - begun)
        assert list(commands)[-1][1] == StartAcker(0, incarnation + 1, 2)
    assert pauses == [0.0, 0.5, 1.0]
    commands = roster.on_lost(0, 4, "killed", now)
    assert list(commands)[-1] == (None, UseAcker(0, 5, "", 0))
    last = [roster.on_linked(slot, AckerLinked(0, 5), now) for slot in SLOTS][-1]
    assert last == [(None, FailRoots(0))]
    assert roster.places[0].phase is AckerPhase.IN_DRIVER
    assert roster.ready
    assert "The driver took its place" in roster.notes[0]
    roster.validate()


@pytest.mark.parametrize("phase", [AckerPhase.STARTING, AckerPhase.LINKING, AckerPhase.RUNNING])
def test_a_process_that_hangs_is_replaced(phase):
    roster = AckerRoster(1, 20.0)
    roster.begin(SLOTS, 0.0)
    if phase is not AckerPhase.STARTING:
        roster.on_started(started(0, 1), 0.0)
    if phase is AckerPhase.RUNNING:
        for slot in SLOTS:
            roster.on_linked(slot, AckerLinked(0, 1), 0.0)
        roster.on_report(0, 1, 1.0)
    assert roster.places[0].phase is phase
    assert roster.check(20.0) == []
    commands = roster.check(21.5)
    assert [command for _, command in commands] == [StopAcker(0, 1), StartAcker(0, 2, 1)]


def test_the_plan_shows_the_ackers():
    def text(guarantee, count):
        settings = Settings().with_values({"delivery": guarantee, "delivery.ackers": count})
        topology = two_hops(settings)
        return as_text(topology, make_plan(topology))

    assert "ackers\n  1, in the driver\n" in text("at_least_once", 1)
    assert "ackers\n  3 processes, spread over the nodes; each has 1/3 of the roots" in text("at_least_once", 3)
    assert "ackers" not in text("exactly_once", 3)
    with pytest.raises(SettingError, match=r"delivery.ackers: it must be greater than 0"):
        Settings().with_values({"delivery.ackers": 0})


def test_status_and_metrics_show_the_ackers():
    watched = Watched()
    watched.ackers = [
        AckerStatus(0, "node-a/1", 4242, "running", 1_500, 90_000, 12_000.0, 3.5, 0.25, 50_000_000),
        AckerStatus(1, "", None, "starting", 0, 0, 0.0, None, None, None),
    ]
    console = Console(width=200, file=io.StringIO())
    console.print(render(watched.status().to_json()))
    lines = [line.split() for line in console.file.getvalue().splitlines()]
    cells = [[cell for cell in line if cell != "│"] for line in lines]
    assert any(line[:4] == ["0", "node-a/1", "running", "4242"] and line[-1] == "0.25" for line in cells)
    assert any(line[:3] == ["1", "-", "starting"] for line in cells)
    text = exposition(watched.status())
    assert 'penstock_acker_open_roots{topology="word-count",acker="0",node="node-a/1"} 1500\n' in text
    assert 'penstock_acker_cpu_seconds_total{topology="word-count",acker="0",node="node-a/1"} 3.5\n' in text
    assert 'penstock_acker_cpu_seconds_total{topology="word-count",acker="1"' not in text, "not known"


def two_hops(settings):
    builder = TopologyBuilder()
    builder.set_spout("numbers", FeederSpout("n"))
    builder.set_bolt("count", CaptureBolt(), 2).fields_grouping("numbers", "n")
    return builder.build("t", settings)


def test_the_local_runner_runs_a_topology_of_several_ackers():
    settings = Settings().with_values({"delivery": "at_least_once", "delivery.ackers": 3, "workers.count": 3})
    runner = LocalRunner(two_hops(settings))
    runner.feed("numbers", [[n] for n in range(3 * BLOCK)])
    runner.run_until_idle()
    assert runner.stats("numbers")[0].acked == 3 * BLOCK
    runner.close()


class Holding(RichBolt):
    """Acks nothing until it is told."""

    def prepare(self, conf, context, collector):
        self.collector, self.held = collector, []

    def execute(self, tup):
        self.held.append(tup)


class Recording(Spout):
    """Emits each number once and again when it failed, and records the failures."""

    def declare_output_fields(self, declarer):
        declarer.declare(("n", int))

    def open(self, conf, context, collector):
        self.collector, self.left, self.failures, self.acked = collector, list(range(3 * BLOCK)), {}, set()

    def next_tuple(self):
        if self.left:
            n = self.left.pop(0)
            self.collector.emit([n], msg_id=n)

    def ack(self, msg_id):
        self.acked.add(msg_id)

    def fail(self, msg_id, failure):
        self.failures[msg_id] = failure
        self.left.append(msg_id)


def test_the_spouts_fail_the_open_roots_of_a_lost_acker_and_no_others():
    builder = TopologyBuilder()
    builder.set_spout("numbers", Recording())
    builder.set_bolt("holding", Holding()).shuffle_grouping("numbers")
    settings = Settings().with_values({"delivery": "at_least_once", "delivery.ackers": 3, "workers.count": 2})
    runner = LocalRunner(builder.build("t", settings))
    runner.run(1.0)
    (spout,), (holding,) = runner.component("numbers"), runner.component("holding")
    assert len(holding.held) == 3 * BLOCK
    runner._tell_all(FailRoots(2))
    lost = np.flatnonzero(owners(1, np.arange(3 * BLOCK), 3) == 2).tolist()
    assert sorted(spout.failures) == lost
    failure = spout.failures[lost[0]]
    assert (failure.component, failure.error, failure.handed_on) == ("", "its acker was lost", True)
    assert runner.stats("numbers")[0].failed == 0, "the tuples are not to blame"
    runner.run(1.0)
    assert len(holding.held) == 4 * BLOCK, "they are emitted again"
    for tup in holding.held:
        holding.collector.ack(tup)
    runner.run_until_idle()
    assert spout.acked == set(range(3 * BLOCK))
    assert runner.stats("numbers")[0].acked == 3 * BLOCK, "once each"
    runner.close()


# ---- real processes ----------------------------------------------------------------------------------------


class SlotDouble:
    """A slot without a worker: real connections, and everything that arrives."""

    def __init__(self, run, stage, index):
        self.wake = Wake()
        server = run.server
        self.control = ControlClient(server.address, server.secret, self.wake.set)
        spec = AckerSpec(
            server.address, server.secret, 0, run.key, self.control.host, f"node-{stage}/{index}", 0.05
        )
        self.ackers = SlotAckers(self.control, spec)
        self.control.send(Hello(stage, index, 0, os.getpid(), f"node-{stage}/{index}"))
        self.received = deque()

    def wait_for(self, kind, count=1):
        """The commands of this type, as soon as there are so many."""
        deadline = time.monotonic() + 20
        while True:
            while self.control.inbox:
                self.received.append(self.control.inbox.popleft())
            found = [each for each in self.received if isinstance(each, kind)]
            if len(found) >= count:
                return found
            assert time.monotonic() < deadline, f"only {len(found)} {kind.__name__}"
            self.wake.wait(0.05)

    def close(self):
        self.ackers.close()
        self.control.close()


class RunDouble:
    """A query run with three slots and so many acker processes."""

    key = 0xFEED

    def __init__(self, count):
        settings = Settings().with_values(
            {"delivery": "at_least_once", "delivery.ackers": count, "workers.count": 3}
        )
        self.plan = make_plan(two_hops(settings))
        self.server = Coordinator()
        self.server.start()
        self.bus = MetricsBus(self.plan)
        self.registry = self.server.begin(0, self.plan, self.bus, self.key, False, count, 20.0)
        self.slots = [SlotDouble(self, 0, 0), SlotDouble(self, 1, 0), SlotDouble(self, 1, 1)]
        assert self.server.wait(lambda: len(self.registry.workers) == 3, 20)
        self.registry.start_ackers()
        assert self.server.wait(lambda: self.registry.ackers.ready, 20)

    def pids(self):
        return [acker.pid for acker in self.registry.ackers.status()]

    def close(self):
        pids = self.pids()
        self.server.end(self.registry)
        for slot in self.slots:
            slot.close()
        self.server.stop()
        return pids


@pytest.fixture
def run(request):
    run = RunDouble(3)
    yield run
    run.close()


TASK = 1


def edges(first, count):
    """The entries with which all these roots are complete."""
    numbers = roots(TASK, first, count)
    return Entries(numbers, np.ones(count, np.int64), edges_of_roots(RunDouble.key, numbers))


def send(slot, entries):
    for acker, part in split(entries, 3):
        slot.ackers.links.send(AckTally(ledger.pack([part]), acker))


def settled(slot, count):
    """The numbers of settled roots, as soon as there are so many."""
    number = 1
    while True:
        found = slot.wait_for(RootsSettled, number)
        ranges = [np.frombuffer(each.data, np.int64).reshape(2, -1) for each in found]
        numbers = np.concatenate([ledger.numbers(*each) for each in ranges])
        if len(numbers) >= count:
            return sorted(numbers.tolist())
        number = len(found) + 1


def test_acker_processes_settle_the_roots_of_a_spout(run):
    spout, bolt, _ = run.slots
    send(bolt, edges(0, 5 * BLOCK))  # before any acker knows where the spout is
    spout.ackers.links.send(SpoutProgress({TASK: 0}))
    assert settled(spout, 5 * BLOCK) == list(range(5 * BLOCK))
    bolt.ackers.links.send(RootsFailed([int(roots(TASK, 6 * BLOCK, 1)[0])], [1], "count", "boom", 1))
    (failed,) = [each for each in spout.wait_for(RootsSettled, len(spout.received) + 1) if each.error]
    assert (failed.task, failed.component, failed.error) == (TASK, "count", "boom")
    assert not any(isinstance(each, RootsSettled) for each in bolt.received)

    def reported():
        return sum(acker.entries for acker in run.registry.ackers.status()) == 5 * BLOCK

    assert run.server.wait(reported, 20)
    assert [acker.open_roots for acker in run.registry.ackers.status()] == [0, 0, 0]
    assert {acker.node for acker in run.registry.ackers.status()} == {"node-0/0", "node-1/0", "node-1/1"}


def test_a_killed_acker_forgets_its_roots_and_another_one_goes_on(run):
    spout, bolt, _ = run.slots
    spout.ackers.links.send(SpoutProgress({TASK: 0}))
    half = edges(0, 3 * BLOCK)
    flipped = half._replace(value=half.value ^ np.uint64(1))
    send(bolt, flipped)  # no root is complete
    victim = run.pids()[1]
    os.kill(victim, signal.SIGKILL)
    assert [command.acker for command in spout.wait_for(FailRoots)] == [1]
    assert run.registry.ackers.ready
    assert run.pids()[1] not in (None, victim)
    send(bolt, half._replace(value=np.ones_like(half.value)))  # the other half of all
    lost = owners(TASK, np.arange(3 * BLOCK), 3) == 1
    assert settled(spout, 2 * BLOCK) == np.arange(3 * BLOCK)[~lost].tolist(), "the other ackers have both halves"
    send(bolt, edges(3 * BLOCK, 3 * BLOCK))
    assert settled(spout, 5 * BLOCK)[-3 * BLOCK :] == list(range(3 * BLOCK, 6 * BLOCK)), "new roots of all three"
    (note,) = [each.text for each in run.bus.notes() if each.kind == "acker"]
    assert f"acker 1 was lost (process {victim} on node-1/0:" in note


def test_a_frozen_acker_is_killed_when_another_one_takes_its_place(run):
    victim = run.pids()[0]
    os.kill(victim, signal.SIGSTOP)
    run.registry.handle(run.registry.workers[WorkerId(1, 1)], AckerLinked(0, 1, "it does not answer"))
    assert [command.acker for command in run.slots[0].wait_for(FailRoots)] == [0]
    await_end([victim])


def test_acker_processes_end_with_the_query_run(run):
    pids = run.pids()
    run.server.end(run.registry)
    await_end(pids)


def test_acker_processes_end_with_their_slot(run):
    pids = run.pids()
    run.slots[2].ackers.close()
    await_end(pids[2:])


def await_end(pids):
    deadline = time.monotonic() + 20
    while any(psutil.pid_exists(pid) for pid in pids) and time.monotonic() < deadline:
        threading.Event().wait(0.02)
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_an_acker_serves_only_slots_of_its_run(run):
    acker = psutil.Process(run.pids()[0])
    (address,) = {(each.laddr.ip, each.laddr.port) for each in acker.net_connections() if each.status == "LISTEN"}
    assert address[0] == "127.0.0.1"
    with pytest.raises(ControlRefused, match="could not prove that it knows the secret"):
        connect(address, b"wrong")
    with socket.create_connection(address) as stranger:
        stranger.sendall(b"x" * wire.ANSWER_BYTES)
        stranger.settimeout(20)
        while stranger.recv(4096):
            pass  # it closes the connection
    for first in (JoinAcker(0, 1, 1), JoinAcker(1, 0, 1), JoinAcker(0, 0, 2), Hello(0, 0, 0, 1, "here")):
        connection, file = connect(address, run.server.secret)
        with connection:
            connection.sendall(framed(first))
            assert read_message(file) is None, first
    connection, file = connect(address, run.server.secret)
    with connection:
        connection.sendall(framed(JoinAcker(0, 0, 1)) + framed(SpoutProgress({TASK: 0})))
        connection.sendall(wire.LENGTH.pack(wire.MOST_BYTES + 1))
        assert read_message(file) is None, "a message may not be longer than the limit"
    assert acker.is_running()
