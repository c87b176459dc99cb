"""Overload on Spark: which senders are slowed, how rates recover, and that nothing is lost."""

import math
from collections import Counter

import pytest

from penstock import TopologyBuilder
from tests.helpers import settings_with
from tests.integration.flow_components import Offers, Takes, branches_with_partials, oracle

pytestmark = pytest.mark.spark

RATE = 1_500  # tuples per second of each stream
SLOW = 0.004  # seconds per tuple: the bolt can process a sixth of its input
CAPACITY = 200  # tuples; so that an overloaded inbox is full at once
PATIENCE = 30.0  # seconds; enough on a busy machine


class Running:
    """A running topology with what these tests observe."""

    def __init__(self, run, topology):
        self.folder = run.folder
        self.handle = run.submit(topology)

    def until(self, condition, what):
        assert self.handle.internals.server.wait(condition, PATIENCE), f"{what}\n{self.story()}"

    def say(self, switch):
        """To the components: ``healed``, or ``enough``."""
        (self.folder / switch).touch()

    def offered(self, stream):
        """What the source was to emit, has emitted and was acked."""
        for name, *numbers in self.handle.internals.bus.published().get("source", []):
            if name == stream:
                return numbers
        return [0, 0, 0]

    def got(self, component, source="source"):
        """How many a bolt got from a source, and their sum."""
        found = Counter()
        for name, what, value in self.handle.internals.bus.published().get(component, []):
            found[name, what] += value
        return found[source, "count"], found[source, "sum"]

    def queue(self, task):
        return next(queue for queue in self.handle.internals.bus.queues() if queue.task == task)

    def slowed(self, task="source/0"):
        return math.isfinite(self.queue(task).limit)

    def overloaded(self, task="slow/0"):
        """Its inbox is full and its sender held back."""
        return self.queue(task).length > 0.8 * CAPACITY and self.slowed()

    def end(self, expected):
        """The source has come to its end: everything of it must come to ``expected``, a map of ⟨component,
        source⟩ to stream; then all are back at their rate."""
        self.until(lambda: ["enough", True] in self.handle.internals.bus.published()["source"], "told")
        self.until(lambda: all(self.emitted_all(stream) for stream in expected.values()), "all is emitted")

        def complete():
            return all(self.got(*key) == all_of(self.offered(stream)[1]) for key, stream in expected.items())

        self.until(complete, f"{expected} complete")
        self.until(
            lambda: not any(math.isfinite(q.limit) for q in self.handle.internals.bus.queues()), "nobody is slowed"
        )
        assert self.handle.drain(30)
        assert complete(), "not one more"

    def emitted_all(self, stream):
        offered, emitted, _ = self.offered(stream)
        return emitted == offered

    def story(self):
        published, decisions = (
            self.handle.internals.bus.published(),
            list(self.handle.internals.migrations.decisions),
        )
        inside = self.handle.internals
        return f"{inside.bus.queues()}\n{published}\n{decisions}\ncommitted {inside.committed}"


def all_of(count):
    """How many 0 .. count - 1 are, and their sum."""
    return count, count * (count - 1) // 2


def settings(run, **more):
    return settings_with(
        **{
            "conf": {"folder": str(run.folder)},
            "state_dir": str(run.folder / "state"),
            "inbox_capacity": CAPACITY,
            "migration_interval": 0.2,
            "epoch_interval": 0.3,
            "metrics_interval": 0.1,
            "message_timeout": 120.0,
            "drain_timeout": 5.0,
            **more,
        }
    )


def two_branches(run, source=None, **more):
    """Two branches on separate streams of one source; the bolt of one is too slow."""
    builder = TopologyBuilder()
    builder.set_spout("source", source or Offers(("left", "right"), RATE))
    builder.set_bolt("slow", Takes(SLOW)).shuffle_grouping("source", "left")
    builder.set_bolt("healthy", Takes()).shuffle_grouping("source", "right")
    return builder.build("two-branches", settings(run, **more))


def behind_the_slow(run, source=None, **more):
    """All the join gets comes through the worker of the slow bolt: what the bolt emits, and what the source sends
    the join past it, which is relayed there."""
    builder = TopologyBuilder()
    builder.set_spout("source", source or Offers(("left", "right"), RATE))
    builder.set_bolt("slow", Takes(SLOW)).shuffle_grouping("source", "left")
    builder.set_bolt("healthy", Takes()).shuffle_grouping("slow").shuffle_grouping("source", "right")
    return builder.build("relayed", settings(run, **more))


BRANCHES = {("slow", "source"): "left", ("healthy", "source"): "right"}


def healthy_share(running):
    """What the healthy branch got of what it was offered, while the sender of the other was slowed."""
    return share(running, lambda: running.got("healthy")[0])


def emitted_share(running):
    """What was emitted to it."""
    return share(running, lambda: running.offered("right")[1])


def share(running, count, tuples=2 * RATE):
    samples = []

    def passed():
        samples.append(running.slowed())
        return running.offered("right")[0] >= first + tuples

    first, before = running.offered("right")[0], count()
    running.until(passed, "the source offers")
    found = (count() - before) / (running.offered("right")[0] - first)
    assert sum(samples) > 0.8 * len(samples), "the other branch was overloaded meanwhile"
    return found


# ---- step ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("delivery", ["at_most_once", "at_least_once", "exactly_once"])
def test_a_slow_bolt_does_not_slow_the_other_branch(run, delivery):
    running = Running(run, two_branches(run, delivery=delivery))
    running.until(running.overloaded, "the slow bolt is overloaded")
    committed, acked = running.handle.internals.committed, running.offered("right")[2]
    assert healthy_share(running) > 0.9
    offered, emitted, _ = running.offered("left")
    assert emitted < 0.7 * offered, "the source is held back where it is too fast"
    if delivery == "at_least_once":
        _, emitted, now = running.offered("right")
        assert now - acked > RATE, "acks flow"
        assert emitted - now < 0.5 * RATE, "a tuple is acked in less than half a second, in the mean"
        _, emitted, now = running.offered("left")
        assert emitted - now > 0.5 * CAPACITY, "while those of the other branch wait"
    if delivery == "exactly_once":
        running.until(
            lambda: running.handle.internals.committed >= committed + 3, "epochs are committed meanwhile"
        )
        assert running.slowed()
        waiting = running.offered("left")[1] - running.got("slow")[0]
        assert waiting < RATE, "what waits for the next epochs counts as waiting: its sender is slowed for it too"
    running.say("enough")
    running.say("healed")
    running.end(BRANCHES)


@pytest.mark.parametrize("delivery", ["at_most_once", "exactly_once"])
def test_frames_are_relayed_past_a_slow_bolt(run, delivery):
    running = Running(run, behind_the_slow(run, delivery=delivery))
    assert len(running.handle.internals.plan.stages[1].fused_groups) == 1, "the slow bolt's worker is the only way"
    running.until(running.overloaded, "the slow bolt is overloaded")
    if delivery == "at_most_once":
        assert healthy_share(running) > 0.9
    else:  # what is relayed waits until the slow bolt has ended its epoch: it comes in lumps, but all of it
        assert emitted_share(running) > 0.9
        emitted = running.offered("right")[1]
        running.until(lambda: running.got("healthy")[0] >= emitted, "all of it comes")
        assert running.slowed()
    offered, emitted, _ = running.offered("left")
    assert emitted < 0.7 * offered
    running.say("enough")
    running.say("healed")
    running.end({**BRANCHES, ("healthy", "slow"): "left"})


# ---- all modes, and little room on disk --------------------------------------------------------------------


@pytest.mark.parametrize("flow", ["none", "spout", "credit"])
@pytest.mark.parametrize(
    ("shape", "delivery"), [(two_branches, "at_most_once"), (behind_the_slow, "exactly_once")]
)
def test_the_other_modes_come_to_the_same(run, flow, shape, delivery):
    count = 1_500
    running = Running(run, shape(run, Offers(("left", "right"), 10**6, count), flow=flow, delivery=delivery))
    running.until(lambda: running.got("slow")[0] > 100, "the slow bolt goes on")
    if flow == "spout":
        running.until(running.slowed, "it stops the source")
        assert running.queue("source/0").limit == 0.0
    running.say("healed")
    everything = all_of(count)
    running.until(lambda: running.got("slow") == everything == running.got("healthy"), "all has come")
    running.until(lambda: not running.slowed(), "nobody is held")
    assert running.handle.drain(30)
    assert running.got("slow") == everything == running.got("healthy"), "not one more"


@pytest.mark.parametrize(("delivery", "overflow"), [("at_most_once", 0), ("exactly_once", 3_000)])
def test_with_little_room_on_disk_senders_wait(run, delivery, overflow):
    """Spark's own backpressure then acts: slower, but all of it arrives."""
    count = 15_000  # many frames: what arrives in one frame is there before anybody can be slowed
    source = Offers(("left", "right"), 10**6, count)
    running = Running(
        run, behind_the_slow(run, source, delivery=delivery, overflow_bytes=overflow, inbox_capacity=50)
    )
    running.until(running.slowed, "the source is slowed")
    running.until(lambda: running.got("slow")[0] > 100, "the slow bolt goes on")
    running.say("healed")
    everything = all_of(count)
    running.until(lambda: running.got("slow") == everything == running.got("healthy"), "all has come")
    running.until(lambda: running.got("healthy", "slow") == everything, "all of it twice")
    running.until(lambda: not running.slowed(), "rates return")


# ---- the board on ZooKeeper --------------------------------------------------------------------------------


def test_signals_over_zookeeper_outlive_its_outages(request, run, zookeeper_server):
    if request.config.getoption("--cluster"):
        pytest.skip("nodes with a loopback of their own do not reach a server on this one")
    board = f"zookeeper://{zookeeper_server.address}/penstock"
    running = Running(run, two_branches(run, board=board, delivery="exactly_once"))

    def goes_on(why):
        before = running.got("healthy")[0]
        running.until(lambda: running.got("healthy")[0] > before + RATE / 2, why)

    running.until(running.overloaded, "the slow bolt is overloaded, and its sender hears of it")
    assert healthy_share(running) > 0.9
    zookeeper_server.pause()
    try:
        goes_on("while the server hangs")
    finally:
        zookeeper_server.resume()
    goes_on("when it is back")
    zookeeper_server.kill()
    try:
        running.say("healed")
        goes_on("while there is no server")
        assert running.slowed(), "nobody could tell the source that the overload is over"
    finally:
        zookeeper_server.start()
    running.until(lambda: not running.slowed(), "rates return with the server")
    running.say("enough")
    running.end(BRANCHES)
    assert running.handle.internals.restarts == 0


# ---- data migration ----------------------------------------------------------------------------------------


def migrating(run, count, **more):
    return branches_with_partials(Offers(("left",), 800, count), settings(run, **more))


@pytest.mark.parametrize("delivery", ["at_most_once", "exactly_once"])
def test_data_of_a_slow_branch_is_migrated_and_the_merged_result_is_exact(run, delivery):
    count = 4_000
    running = Running(run, migrating(run, count, delivery=delivery))
    handle = running.handle
    running.until(lambda: handle.internals.migrations.decisions, "a decision")
    running.until(lambda: handle.internals.bus.segments(), "a segment has ended")
    running.until(lambda: sorted(handle.internals.bus.published().get("merge", [])) == oracle(count), "merged")
    assert handle.drain(30)
    assert sorted(handle.internals.bus.published()["merge"]) == oracle(count)
    tasks = {task.key for task in handle.internals.plan.tasks}
    for sender, segment in handle.internals.bus.segments():
        assert handle.internals.plan.task[sender].component == "source"
        assert {segment.branch, segment.target} <= tasks
        assert segment.branch != segment.target
        assert 0 <= segment.offset < segment.offset + segment.length <= count


def test_with_migration_off_the_result_is_the_same(run):
    count = 1_000
    running = Running(run, migrating(run, count, migration=False))
    running.until(running.slowed, "the same overload")
    running.until(
        lambda: sorted(running.handle.internals.bus.published().get("merge", [])) == oracle(count), "merged"
    )
    assert running.handle.drain(30)
    assert not running.handle.internals.migrations.decisions
    assert not running.handle.internals.bus.segments()
