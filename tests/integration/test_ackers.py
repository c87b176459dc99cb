"""Several ackers on Spark: processes of their own, one of which is killed."""

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from penstock import BasicBolt, Spout, TopologyBuilder
from penstock.spark import ports
from tests.helpers import settings_with
from tests.integration.components import FIELDS, Pass, Witness

pytestmark = pytest.mark.spark

RATE = 5_000.0  # tuples a second


class Tracked(Spout):
    """⟨origin, n, key, sent⟩ for n = 0, 1, …, each until it is acked. Nothing new when the file ``enough`` is
    there."""

    def declare_output_fields(self, declarer):
        declarer.declare(*FIELDS)

    def open(self, conf, context, collector):
        self.collector, self.task, self.sent = collector, context.task, 0
        self.failed, self.n, self.enough = [], 0, Path(conf["folder"]) / "enough"
        self.told = (Path(conf["folder"]) / "failed").open("a", buffering=1)  # line by line

    def next_tuple(self):
        if self.failed:
            n = self.failed.pop()
        elif self.n % 100 or not self.enough.exists():
            n, self.n = self.n, self.n + 1
        else:
            return
        self.collector.emit((self.task, n, "key", self.sent), msg_id=n)
        self.sent += 1

    def fail(self, msg_id, failure):
        self.failed.append(msg_id)
        self.told.write(f"{msg_id}\n")


class Refuses(BasicBolt):
    """Emits what it gets, but raises once on every 1,000th number."""

    def declare_output_fields(self, declarer):
        declarer.declare(*FIELDS)

    def prepare(self, conf, context):
        self.refused, self.sent = set(), 0

    def execute(self, tup, collector):
        if tup.n % 1_000 == 0 and tup.n not in self.refused:
            self.refused.add(tup.n)
            raise ValueError("not the first time")
        collector.emit((tup.origin, tup.n, tup.key, self.sent))
        self.sent += 1


def topology(run, name):
    builder = TopologyBuilder()
    builder.set_spout("numbers", Tracked()).set_max_rate(RATE)
    builder.set_bolt("refuses", Refuses()).shuffle_grouping("numbers")
    builder.set_bolt("pass", Pass(), 2).shuffle_grouping("refuses")
    builder.set_bolt("witness", Witness()).shuffle_grouping("pass")
    settings = settings_with(
        delivery="at_least_once", state_dir=str(run.folder / "state"), conf={"folder": str(run.folder)}, ackers=3
    )
    return builder.build(name, settings)


def test_a_killed_acker_is_replaced_at_once_and_nothing_is_lost(run, request):
    running = run.submit(topology(run, "ackers"))
    internals = running.internals
    totals = lambda: internals.bus.totals()["numbers"]  # noqa: E731
    ackers = internals.ackers
    assert [acker.state for acker in ackers] == ["running"] * 3
    pids = {acker.pid for acker in ackers}
    assert len(pids - {os.getpid()}) == 3
    if not request.config.getoption("--cluster"):
        listening = {address for pid in pids for address in ports.listening(pid)}
        assert len(listening) == 3
        assert ports.beyond_loopback(listening) == []
    assert internals.server.wait(lambda: totals().acked > 2_000, 30)
    os.kill(ackers[1].pid, signal.SIGKILL)

    def replaced():
        now = internals.ackers
        return now[1].pid not in (None, ackers[1].pid) and now[1].state == "running" and now[1].entries > 1_000

    assert internals.server.wait(replaced, 20), "well before a tuple times out"
    (run.folder / "enough").touch()
    assert running.drain(20)
    pids |= {acker.pid for acker in internals.ackers}
    assert len(pids) == 4, "the others go on"
    assert all(acker.entries > 0 for acker in internals.ackers), "each has a part of the roots"
    assert internals.server.wait(lambda: not any(acker.open_roots for acker in internals.ackers), 5)
    assert internals.restarts == 0
    notes = [note.text for note in internals.bus.notes() if note.kind == "acker"]
    assert len(notes) == 1
    assert "acker 1 was lost" in notes[0]
    acked = totals().acked
    assert totals().timed_out == 0
    told = {int(line) for line in (run.folder / "failed").read_text().split()}
    assert told >= set(range(0, acked, 1_000)), "the spout is told of each that was refused, whoever its acker was"
    running.kill()
    (witness,) = run.witnessed("witness")
    (counts,) = witness["counts"].values()
    assert sum(counts[1:]) == acked, "each number arrived"
    deadline = time.monotonic() + 10
    while any(map(psutil.pid_exists, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(psutil.pid_exists, pids)), "acker processes end with the query run"
