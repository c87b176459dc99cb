"""How a query run that is replaced hands its unfinished tuples on (at-least-once delivery)."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import Delivery, Failure, RichBolt, Settings, Spout, TopologyBuilder
from penstock.connectors.files import FileSpout
from penstock.driver.handing_on import PATIENCE, backlog_seconds
from penstock.driver.requests import ReplaceRequest
from penstock.metrics.stats import TaskStats
from penstock.protocol import events as m
from penstock.protocol.commands import HandOnUnfinished
from penstock.replay.records import ReplayRecord
from penstock.testing import CaptureBolt, LocalRunner
from tests.unit import fake_world
from tests.unit.fake_world import World

# ---- what the spouts do --------------------------------------------------------------------------------


class Forgetful(Spout):
    """Keeps no state: it would emit a failed tuple again, but its successor would not."""

    def declare_output_fields(self, declarer):
        declarer.declare("n")

    def open(self, conf, context, collector):
        self.collector, self.next, self.failed, self.acked = collector, 0, [], []

    def next_tuple(self):
        if self.next < 10:
            self.collector.emit([self.next], msg_id=self.next)
            self.next += 1

    def fail(self, msg_id, failure):
        self.failed.append((msg_id, failure))

    def ack(self, msg_id):
        self.acked.append(msg_id)


class Remembering(Forgetful):
    """Emits again what was under way when its state was saved."""

    def open(self, conf, context, collector):
        super().open(conf, context, collector)
        self.under_way = context.state.value("under way", ())
        self.again, self.open_ids = list(self.under_way.value), set()
        if self.again:
            self.next = 10

    def next_tuple(self):
        if self.again:
            number = self.again.pop()
            self.collector.emit([number], msg_id=number)
            return
        super().next_tuple()

    def fail(self, msg_id, failure):
        super().fail(msg_id, failure)
        self.again.append(msg_id)

    def before_snapshot(self):
        self.under_way.value = tuple(self.again)


class Holds(RichBolt):
    """Never acks, as if all tuples waited in a long queue."""

    def prepare(self, conf, context, collector):
        self.collector, self.held = collector, []

    def execute(self, tup):
        self.held.append(tup)


def topology(spout, bolt, folder, timeout=30.0):
    builder = TopologyBuilder()
    builder.set_spout("numbers", spout)
    builder.set_bolt("last", bolt).shuffle_grouping("numbers")
    return builder.build(
        "handing-on",
        Settings(delivery=Delivery("at_least_once", state_dir=str(folder), message_timeout=timeout)),
    )


def handed_on(runner):
    """Deactivate, hand on, and return how many tuples are left."""
    runner.deactivate()
    runner.registry.send(HandOnUnfinished())
    runner.run(0.1)
    return sum(worker.left_unfinished for worker in runner.registry.workers.values())


def test_unfinished_tuples_fail_at_once_and_the_next_run_has_them(tmp_path):
    runner = LocalRunner(topology(Remembering(), Holds(), tmp_path), folder=str(tmp_path))
    runner.run(1.0)
    (spout,), (bolt,) = runner.component("numbers"), runner.component("last")
    assert len(bolt.held) == 10
    assert handed_on(runner) == 0
    assert sorted(number for number, _ in spout.failed) == list(range(10))
    assert all(failure.handed_on for _, failure in spout.failed)
    (stats,) = runner.stats("numbers")
    assert (stats.failed, stats.timed_out) == (0, 0), "these are no failures for the policy of scaling"
    for tup in bolt.held:  # late acks of the old run
        bolt.collector.ack(tup)
    runner.run(0.1)
    assert spout.acked == []
    runner.commit()
    runner.close()
    following = LocalRunner(topology(Remembering(), CaptureBolt(), tmp_path), folder=str(tmp_path))
    following.run_until_idle()
    assert sorted(tup[0] for tup in following.captured("last")) == list(range(10))
    following.close()


def test_what_a_spout_would_forget_stays_in_flight(tmp_path):
    runner = LocalRunner(topology(Forgetful(), Holds(), tmp_path))
    runner.run(1.0)
    (spout,), (bolt,) = runner.component("numbers"), runner.component("last")
    assert handed_on(runner) == 10
    assert spout.failed == []
    for tup in bolt.held:
        bolt.collector.ack(tup)
    runner.run(0.1)
    assert sorted(spout.acked) == list(range(10))
    runner.close()


def test_the_driver_hears_of_it_when_everything_is_stored(tmp_path):
    class Stores(Remembering):
        stored = False

        def settled(self):
            return self.stored

    runner = LocalRunner(topology(Stores(), Holds(), tmp_path))
    runner.run(1.0)
    runner.deactivate()
    runner.registry.send(HandOnUnfinished())
    runner.run(2.0)
    assert {worker.left_unfinished for worker in runner.registry.workers.values()} == {0, None}
    runner.component("numbers")[0].stored = True
    runner.run(2.0)
    assert {worker.left_unfinished for worker in runner.registry.workers.values()} == {0}
    runner.close()


def test_nothing_in_flight_is_nothing_to_hand_on(tmp_path):
    runner = LocalRunner(topology(Remembering(), CaptureBolt(), tmp_path))
    runner.run_until_idle()
    assert handed_on(runner) == 0
    assert runner.component("numbers")[0].failed == []
    runner.close()


# ---- attempts --------------------------------------------------------------------------------------------


HANDED_ON = Failure("", "replaced", handed_on=True)


@given(st.lists(st.booleans(), max_size=10))
def test_only_failures_count_as_attempts(handed_on):
    record = ReplayRecord(("x",))
    for each in handed_on:
        record = record.failed(HANDED_ON if each else Failure("count", "boom"), 1.0)
    assert record.attempts == handed_on.count(False)
    assert (record.error == "boom") == (False in handed_on)


def test_a_line_that_is_handed_on_does_not_use_up_its_only_attempt(tmp_path):
    (tmp_path / "in.txt").write_text("a\nb\n")
    form = topology(FileSpout(str(tmp_path / "in.txt"), max_attempts=1), Holds(), tmp_path / "state")
    runner = LocalRunner(form, folder=str(tmp_path / "state"))
    runner.run(1.0)
    assert handed_on(runner) == 0
    runner.commit()
    assert runner.stats("numbers")[0].given_up == 0
    runner.close()
    form = topology(FileSpout(str(tmp_path / "in.txt"), max_attempts=1), CaptureBolt(), tmp_path / "state")
    following = LocalRunner(form, folder=str(tmp_path / "state"))
    following.run_until_idle()
    assert sorted(tup[0] for tup in following.captured("last")) == ["a", "b"]
    following.close()


# ---- the steps of the driver -----------------------------------------------------------------------------


def stats(executed, busy, queued):
    return TaskStats(executed=executed, busy=busy, queued=queued)


def test_the_longest_queue_decides():
    assert backlog_seconds([]) == 0.0
    assert backlog_seconds([stats(0, 0.0, 1_000)]) == 0.0, "nothing is known about its speed"
    assert backlog_seconds([stats(100, 1.0, 50), stats(100, 0.1, 100)]) == pytest.approx(0.5)


class Worker(fake_world.FakeWorker):
    """The first form has ``world.pending`` tuples in flight, which never finish by themselves."""

    def _on_RequestReport(self, message):  # noqa: N802
        pending = self.world.pending if self.launch.attempt == 0 else 0
        self.say(m.WorkerReport(7, 7, pending, 0.0, 0, {}, probe=message.number))

    def _on_HandOnUnfinished(self, message):  # noqa: N802
        if self.world.answers:
            self.say(m.UnfinishedHandedOn(self.world.left if self.id.stage == 0 else 0))


@pytest.fixture
def world(tmp_path, monkeypatch):
    monkeypatch.setattr(fake_world, "FakeWorker", Worker)
    World.pending, World.left, World.answers = 5, 0, True
    made = World(tmp_path, "at_least_once")
    yield made
    made.settle()
    made.check()


def replaced(world):
    """The seconds between the steps of a replacement, by the step that ended them, and what it says."""
    supervisor = world.supervisor
    request = ReplaceRequest(supervisor.runs.current.deployment.topology, "test")
    supervisor.request(request)
    world.turn_until(request.answer.done)
    done = request.answer.result()
    names = list(done.steps)
    return {now: done.steps[now] - done.steps[was] for was, now in itertools.pairwise(names)}, done


def test_a_long_queue_costs_a_moment(world):
    steps, done = replaced(world)
    assert steps["finished"] == pytest.approx(PATIENCE, abs=0.05)
    assert steps["handed_on"] < 0.1
    assert "rest_finished" not in steps
    assert done.gap < 0.5


def test_no_time_is_lost_if_the_queue_is_known_to_be_long(world, monkeypatch):
    bus = world.supervisor.runs.current.bus
    monkeypatch.setattr(bus, "tasks", lambda: {1: stats(100, 1.0, 1_000)})
    steps, done = replaced(world)
    assert "finished" not in steps
    assert done.gap < 0.3


def test_short_queues_finish_and_nothing_is_handed_on(world):
    world.pending = 0
    steps, done = replaced(world)
    assert "handed_on" not in steps
    assert done.left_behind == ""


def test_tuples_that_would_be_forgotten_get_the_time_of_a_drain(world):
    world.left = 3
    steps, done = replaced(world)
    assert steps["rest_finished"] == pytest.approx(5.0, abs=0.1)
    assert done.left_behind == "tuples in flight were not processed within 5 s; the new form processes them"


def test_a_worker_that_does_not_answer_delays_the_replacement_no_longer_than_a_drain(world):
    world.answers = False
    steps, _ = replaced(world)
    assert steps["handed_on"] == pytest.approx(5.0, abs=0.1)
