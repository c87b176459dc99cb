"""The delivery levels on Spark: acks and replays, epochs and restarts, savepoints."""

import os
import re
import signal
import subprocess
import sys

import pytest

from penstock import BasicBolt, RichBolt, Spout, TopologyBuilder
from penstock.state.store import StateStore
from tests.helpers import settings_with
from tests.integration.components import FIELDS, Witness

pytestmark = pytest.mark.spark


class Messages(Spout):
    """Numbered messages, emitted again when they fail; says at the end what became of them. Goes on from the
    position in its state."""

    def __init__(self, count):
        self.count = count

    def declare_output_fields(self, declarer):
        declarer.declare(*FIELDS)

    def open(self, conf, context, collector):
        self.collector, self.context = collector, context
        self.next = context.state.value("next", 0)
        self.acked, self.failed = set(), []

    def next_tuple(self):
        if self.next.value < self.count:
            self.emit(self.next.value)
            self.next.value += 1

    def emit(self, n):
        self.collector.emit((self.context.task, n, f"key-{n % 10}", n), msg_id=n)
        if self.context.delivery == "at_least_once":
            self.context.publish([["acked", len(self.acked)], ["failed", len(self.failed)]])

    def ack(self, msg_id):
        assert msg_id not in self.acked
        self.acked.add(msg_id)
        self.context.publish([["acked", len(self.acked)], ["failed", len(self.failed)]])

    def fail(self, msg_id, failure):
        self.failed.append(str(failure))
        self.emit(msg_id)


class FailsOnce(BasicBolt):
    """Raises the first time it sees one of every hundred."""

    def declare_output_fields(self, declarer):
        declarer.declare(*FIELDS)

    def prepare(self, conf, context):
        self.seen = set()

    def execute(self, tup, collector):
        if tup.n % 100 == 7 and tup.n not in self.seen:
            self.seen.add(tup.n)
            raise ValueError("not yet")
        collector.emit(tup)


class Forgets(RichBolt):
    """Never acks one of them the first time; anchors and acks the others in pairs."""

    def declare_output_fields(self, declarer):
        declarer.declare(*FIELDS)

    def prepare(self, conf, context, collector):
        self.collector, self.held, self.forgotten = collector, [], False

    def execute(self, tup):
        if tup.n == 13 and not self.forgotten:
            self.forgotten = True
            return
        self.held.append(tup)
        if len(self.held) == 2:
            for one in self.held:
                self.collector.emit(one, anchors=self.held)
            for one in self.held:
                self.collector.ack(one)
            self.held = []


class KeepsCounts(BasicBolt):
    def prepare(self, conf, context):
        self.counts, self.publish = context.state.map("counts", 0), context.publish

    def execute(self, tup, collector):
        self.counts[tup.key] += 1
        self.publish([["counted", sum(self.counts.values())]])


def settings(run, **more):
    conf = {"folder": str(run.folder)}
    return settings_with(**{"conf": conf, "state_dir": str(run.folder / "state"), "epoch_interval": 0.3, **more})


def shown(running, component):
    return dict(running.internals.bus.published().get(component, []))


def test_failed_tuples_come_again(run):
    builder = TopologyBuilder()
    builder.set_spout("messages", Messages(2_000))
    builder.set_bolt("middle", FailsOnce()).shuffle_grouping("messages")
    builder.set_bolt("witness", Witness()).all_grouping("middle")
    running = run.submit(builder.build("replays", settings(run, delivery="at_least_once")))
    assert running.internals.server.wait(lambda: shown(running, "messages").get("acked") == 2_000, 60)
    running.kill()
    (witness,) = run.witnessed("witness")
    assert witness["counts"]["1"][1] == 2_000
    totals = running.internals.bus.totals()
    assert (totals["messages"].acked, totals["messages"].failed) == (2_000, 20)
    assert totals["middle"].errors == 20


def test_a_tuple_that_is_forgotten_times_out_and_comes_again(run):
    builder = TopologyBuilder()
    builder.set_spout("messages", Messages(101))
    builder.set_bolt("middle", Forgets()).shuffle_grouping("messages")
    builder.set_bolt("witness", Witness()).shuffle_grouping("middle")
    running = run.submit(
        builder.build("forgets", settings(run, delivery="at_least_once", message_timeout=1.0, drain_timeout=1.0))
    )
    assert running.internals.server.wait(lambda: running.internals.bus.totals()["messages"].failed >= 1, 30)
    # 101 is odd: the one without a partner waits, fails, and meets itself again.
    assert running.internals.server.wait(lambda: shown(running, "messages").get("acked") == 101, 30)
    running.kill()


def test_max_spout_pending_holds(run):
    builder = TopologyBuilder()
    builder.set_spout("messages", Messages(10**9))
    builder.set_bolt("middle", Never()).shuffle_grouping("messages")
    running = run.submit(
        builder.build("pending", settings(run, delivery="at_least_once", max_spout_pending=77, drain_timeout=0.1))
    )
    assert running.internals.server.wait(lambda: running.internals.bus.totals()["middle"].executed == 77, 20)
    assert running.internals.server.wait(lambda: running.internals.bus.totals()["messages"].emitted == 77, 20)
    running.kill()


class Never(RichBolt):
    def execute(self, tup):
        pass


def test_exactly_once_over_a_killed_worker_a_savepoint_and_two_starts(run):
    def topology(count, **more):
        builder = TopologyBuilder()
        builder.set_spout("messages", Messages(count), 2)
        builder.set_bolt("counts", KeepsCounts()).shuffle_grouping("messages")
        return builder.build("exact", settings(run, delivery="exactly_once", **more))

    running = run.submit(topology(10_000_000))
    assert running.internals.server.wait(lambda: running.internals.committed >= 2, 30)
    os.kill(running.internals.workers[sorted(running.internals.workers)[0]].hello.pid, signal.SIGKILL)
    assert running.internals.server.wait(
        lambda: running.internals.restarts == 1 and running.internals.committed >= 4, 60
    )
    running.deactivate()
    assert running.drain(60)
    epoch = running.commit()
    counted = shown(running, "counts")["counted"]
    positions = sum(value for _, value in _values(run, "exact", "messages", "next"))
    assert counted == positions, "every message is counted, and none twice"
    command = [sys.executable, "-m", "penstock.cli.main", "savepoint", "exact", str(run.folder / "saved")]
    asked = subprocess.run([*command, "--state-dir", str(run.folder / "state")], capture_output=True, text=True)
    found = re.search(r"epoch (\d+) of 'exact' is saved in", asked.stdout)
    assert found, asked.stdout + asked.stderr
    saved = int(found[1])
    assert saved > epoch
    running.kill()
    assert running.internals.committed >= epoch

    again = run.submit(topology(10_000_000), savepoint=str(run.folder / "saved"))
    assert again.internals.epoch == saved
    assert again.internals.server.wait(lambda: shown(again, "counts").get("counted", 0) > counted, 30)
    again.kill()

    fresh = run.submit(topology(100), fresh=True)
    assert fresh.internals.server.wait(lambda: shown(fresh, "counts").get("counted") == 200, 30)
    fresh.kill()


class Chokes(BasicBolt):
    """Never digests some lines, and digests others only at the second attempt."""

    def declare_output_fields(self, declarer):
        declarer.declare("line")

    def prepare(self, conf, context):
        self.seen = set()

    def execute(self, tup, collector):
        if tup.line.startswith("bad") or (tup.line.startswith("late") and tup.line not in self.seen):
            self.seen.add(tup.line)
            raise ValueError("cannot digest this")
        collector.emit(tup)


class KeepsLines(BasicBolt):
    def prepare(self, conf, context):
        self.lines, self.publish = context.state.map("lines", 0), context.publish

    def execute(self, tup, collector):
        self.lines[tup.line] += 1
        self.publish([["lines", len(self.lines)]])


def test_replay_queues_and_dead_letters(run):
    from penstock.connectors.file_eden import FileEden
    from penstock.replay import ReplaySpout

    lines = [f"line {n}" for n in range(500)] + ["bad apple"] + [f"late {n}" for n in range(5)]
    (run.folder / "lines.txt").write_text("\n".join(lines) + "\n")
    builder = TopologyBuilder()
    builder.set_spout("lines", ReplaySpout(FileEden(str(run.folder / "lines.txt")), max_attempts=3))
    builder.set_bolt("chokes", Chokes()).shuffle_grouping("lines")
    builder.set_bolt("keeps", KeepsLines()).shuffle_grouping("chokes")
    running = run.submit(builder.build("replay", settings(run, delivery="at_least_once")))
    assert running.internals.server.wait(lambda: shown(running, "keeps").get("lines") == 505, 60)
    assert running.internals.server.wait(lambda: running.internals.bus.totals()["lines"].failed >= 3 + 5, 60)

    def dlq(*arguments):
        command = [sys.executable, "-m", "penstock.cli.main", "dlq", *arguments]
        options = ["--topology", "replay", "--state-dir", str(run.folder / "state")]
        return subprocess.run([*command, *options], capture_output=True, text=True, check=True).stdout

    def dead():
        return "bad apple" in dlq("list")

    assert running.internals.server.wait(dead, 30)
    shown_dead_letter = dlq("show", re.search(r"lines\.0\.\d+", dlq("list"))[0])
    assert "cannot digest this" in shown_dead_letter
    assert "chokes" in shown_dead_letter
    dlq("send-back", "--all")
    assert running.internals.server.wait(lambda: running.internals.bus.totals()["lines"].failed >= 6 + 5, 60), (
        "it fails again"
    )
    assert running.internals.server.wait(dead, 30), "and is dead again"
    running.kill()


def _values(run, topology, component, name):
    """A value of all tasks of a component, as last committed."""
    from penstock.state import manifest
    from penstock.state.snapshots import read_parts
    from penstock.state.values import TaskState

    store = StateStore(str(run.folder / "state")).child(topology)
    for key, parts in read_parts(store, manifest.newest(store).chains).items():
        if key.startswith(f"{component}/"):
            state = TaskState()
            state.restore(parts)
            yield key, state.value(name, 0).value
