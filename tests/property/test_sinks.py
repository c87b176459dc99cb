"""Sinks that fail in any way the contract allows, at random: no row is lost, doubled or blamed for another.

Pauses are a twentieth of their usual length: rows are blamed after 1.4 s instead of half a minute. The scenarios
are seeded, not drawn by Hypothesis, which needs minutes to shrink one. The message names the seed that failed.
"""

import random
import tempfile
from dataclasses import dataclass

import pytest

from penstock import Delivery, Settings, Spout, TopologyBuilder, TransactionalSink
from penstock.errors import ComponentError, SinkBusy
from penstock.replay.state_dead_letters import FOLDER, StateDeadLetterStore
from penstock.state.store import StateStore
from penstock.testing import LocalRunner
from penstock.worker import sinks

CALLS = ("write", "prepare_commit", "commit")
REJECTS = {
    "says so": lambda: ComponentError("the sink", "takes it never"),
    "does not say": lambda: ValueError("bad row"),
}
AWAY = {
    "busy": lambda: SinkBusy("the sink", "takes it later"),
    "no server": lambda: ConnectionRefusedError("no server"),
}
UNKNOWN = {"unknown": lambda: RuntimeError("a client library's own error")}
BLAMED_AFTER = 1.5  # s, for three rows at most
LONGEST_OUTAGE = 0.7  # s
SEEDS = (*range(12), 18, 58, 148, 152, 182, 212)
"""Some, and those that found a fault: a parcel of rejected rows only (18), rows that join a piece that is half
committed (58, 148), what a refused piece left in the transaction (152), a commit in doubt while a parcel waits."""


class Fed(Spout):
    """Emits each row when the time has come."""

    def declare_output_fields(self, declarer):
        declarer.declare(("n", int))

    def open(self, conf, context, collector):
        self.collector, self.rows, self.acked, self.failed = collector, [], [], []
        self.now = lambda: 0.0

    def next_tuple(self):
        while self.rows and self.rows[0][0] <= self.now():
            n = self.rows.pop(0)[1]
            self.collector.emit([n], msg_id=n)

    def ack(self, msg_id):
        self.acked.append(msg_id)

    def fail(self, msg_id, failure):
        self.failed.append(msg_id)


class Fickle(TransactionalSink):
    """A transaction in memory. Each call fails for bad rows, during outages, and now and then."""

    def prepare(self, conf, context):
        self.begun, self.visible, self.breaches = [], [], []
        self.owes_prepare = False
        self.calls = 0
        self.bad, self.outages, self.blips = {}, [], set()
        self.now = lambda: 0.0

    def recover(self, tokens):
        pass

    def _check(self, call, rows):
        self.calls += 1
        if self.calls in self.blips:
            raise ConnectionResetError("a blip")
        for begin, end, calls, error in self.outages:
            if begin <= self.now() < end and call in calls:
                raise error()
        for row in rows:
            if row in self.bad and self.bad[row][0] == call:
                raise self.bad[row][1]()

    def write(self, batch, source):
        rows = batch.column(0).to_pylist()
        if self.owes_prepare:
            self.breaches.append(f"write of {rows} before prepare_commit was called again")
        self._check("write", rows)
        self.begun += rows

    def prepare_commit(self, epoch):
        self.owes_prepare = False
        try:
            self._check("prepare_commit", self.begun)
        except (SinkBusy, OSError):
            self.owes_prepare = True
            raise
        except Exception:
            self.begun = []
            raise
        token, self.begun = self.begun, []
        return token or None

    def commit(self, token):
        self._check("commit", token)
        self.visible += token


class Interval(Fickle):
    commit_interval = 0.05


class Eager(Fickle):
    commit_interval = 0.0


@dataclass
class Scenario:
    bad: dict[int, tuple[str, str]]
    arrivals: list[tuple[float, int]]
    outages: list[tuple[float, float, tuple[str, ...], str]]
    blips: set[int]


def any_scenario(rnd, exactly_once):
    time, arrivals, sizes = 0.3, [], rnd.choice([(1,), (1, 2), (1, 2, 8)])
    for _ in range(rnd.randint(1, 6)):
        time += rnd.choice([0.0, 0.002, 0.02, 0.1, 0.3, 0.6])
        arrivals += [time] * rnd.choice(sizes)
    arrivals = [(time, n) for n, time in enumerate(arrivals, start=1)]
    # Exactly once an unknown error of prepare_commit means another start of the topology: no matter of this test.
    at = ("write",) if exactly_once else CALLS
    many = rnd.choice([0, 1, 1, 2, 3, len(arrivals)])
    bad = {rnd.randint(1, len(arrivals)): (rnd.choice(at), rnd.choice(sorted(REJECTS))) for _ in range(many)}
    # One outage that does not say so at most: two look like a bad row.
    kinds = rnd.choices(sorted(AWAY), k=rnd.randint(0, 3)) + rnd.choice([[], ["unknown"]])
    rnd.shuffle(kinds)
    time, outages = 0.3, []
    for kind in kinds:
        begin = max(time, rnd.choice([time, rnd.choice(arrivals)[0] + 0.001]))
        time = begin + rnd.uniform(0.001, LONGEST_OUTAGE)
        calls = at if kind == "unknown" else CALLS
        outages.append((begin, time, rnd.choice([calls, (rnd.choice(calls),)]), kind))
    # A sink that has never taken anything is waited for: it gets a good row first, or at last.
    first = exactly_once or rnd.random() < 0.5
    arrivals.append((0.0 if first else max(time, *arrivals[-1][:1]) + 0.5, 0))
    arrivals.sort()
    return Scenario(bad, arrivals, outages, set(rnd.sample(range(2, 60), rnd.randint(0, 6))))


def live(scenario, form, delivery, folder):
    builder = TopologyBuilder()
    builder.set_spout("numbers", Fed())
    builder.set_bolt("sink", form()).shuffle_grouping("numbers")
    settings = Settings(delivery=Delivery(delivery, epoch_interval=0.1, message_timeout=1.0))
    runner = LocalRunner(builder.build("sinks", settings), folder=folder)
    (spout,), (sink,) = runner.component("numbers"), runner.component("sink")
    began = runner.clock.now()
    spout.now = sink.now = lambda: runner.clock.now() - began
    spout.rows = list(scenario.arrivals)
    sink.bad = {row: (call, REJECTS[kind]) for row, (call, kind) in scenario.bad.items()}
    sink.outages = [(*rest, (AWAY | UNKNOWN)[kind]) for *rest, kind in scenario.outages]
    sink.blips = scenario.blips
    every = sorted(n for _, n in scenario.arrivals)
    good = [n for n in every if n not in scenario.bad]
    exactly_once = delivery == "exactly_once"
    runner.run(scenario.arrivals[-1][0])
    limit = spout.now() + 2.0 + len(scenario.outages) + BLAMED_AFTER * (1 + len(scenario.bad))
    before = 0
    while spout.now() < limit:
        runner.run(0.2)
        if exactly_once and runner.stats("sink")[0].executed == len(every) and len(sink.visible) >= len(good):
            before = before or runner.commits.committed
            if runner.commits.committed > before + 1:
                break
        elif not exactly_once and len(spout.acked) == len(every):
            break
    store = StateStore(f"{runner._job.dead_letters or runner._job.shared}/sink/{FOLDER}/0")
    dead_letters = sorted(dead_letter.record.payload[0] for dead_letter in StateDeadLetterStore(store).read_all())
    assert sink.breaches == []
    assert sorted(sink.visible) == good
    assert dead_letters == sorted(scenario.bad)
    if exactly_once:
        assert runner.commits.committed > before + 1, "it goes on"
    else:
        assert (sorted(spout.acked), spout.failed) == (every, [])
    sink.blips, sink.outages = set(), []
    runner.run(0.2)
    (stats,) = runner.stats("sink")
    assert stats.away == 0
    assert (stats.written, stats.given_up) == (len(good), len(scenario.bad))


@pytest.mark.parametrize(
    ("form", "delivery"), [(Interval, "at_least_once"), (Eager, "at_least_once"), (Interval, "exactly_once")]
)
def test_every_good_row_is_visible_once_and_every_bad_one_is_a_dead_letter(form, delivery, monkeypatch):
    monkeypatch.setattr(sinks, "_LONGEST_PAUSE", 0.05)
    for seed in SEEDS:
        scenario = any_scenario(random.Random(seed), delivery == "exactly_once")
        with tempfile.TemporaryDirectory() as folder:
            try:
                live(scenario, form, delivery, folder)
            except Exception as error:
                raise AssertionError(f"seed {seed}: {scenario}") from error
