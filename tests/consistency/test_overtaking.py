"""Markers that overtake what waits: whenever a run dies, and with whatever number of tasks the next one begins,
the outcome is that of a sequential run."""

import random
from collections import Counter

import pytest

from penstock import Delivery, Settings, SimulatedClock, StateError, TopologyBuilder
from penstock.driver.recovery import StateDirectory
from penstock.driver.savepoint_requests import save_at_rest
from penstock.faults import STEPS
from penstock.plan.planner import make_plan
from penstock.state import manifest as manifests
from penstock.state.store import StateStore
from penstock.testing import LocalRunner
from tests.consistency.components import (
    INTERVAL,
    SHAPES,
    WORLDS,
    Count,
    Crash,
    Numbers,
    Outside,
    Pass,
    counts,
    die,
    key_of,
    pairs,
    run_to_the_end,
)
from tests.helpers import settings_with

COUNT = 300
CLOCK = SimulatedClock()
"""Of the test that runs (``own_clock``)."""
PATIENCES = (0.0, INTERVAL / 2)
"""The marker of every epoch overtakes; only those of slow epochs do."""


@pytest.fixture(autouse=True)
def own_clock(monkeypatch):
    """So that no test depends on the time at which those before it ended."""
    monkeypatch.setitem(globals(), "CLOCK", SimulatedClock())


class SlowPass(Pass):
    """Takes so long for a tuple that much waits for it."""

    def execute(self, tup, collector):
        CLOCK.advance(INTERVAL / 10)
        super().execute(tup, collector)


def words(world, tasks, middle=None, **settings):
    """Much of what is emitted waits: frames are small, and so are inboxes."""
    builder = TopologyBuilder()
    builder.set_spout("numbers", Numbers(COUNT, burst=40), 2)
    builder.set_bolt("middle", SlowPass(), middle or tasks).shuffle_grouping("numbers")
    builder.set_bolt("count", Count(), tasks).fields_grouping("middle", "key").fields_grouping("numbers", "key")
    builder.set_bolt("sink", Outside(world), 2).shuffle_grouping("count")
    few = {"frame_bytes": 200, "inbox_capacity": 16, "epoch_interval": INTERVAL, **settings}
    return builder.build("t", settings_with(delivery="exactly_once", **few))


ORACLE = Counter(key_of(n) for _ in range(4) for n in range(COUNT))


class Runs:
    """A topology that is started again and again from one folder."""

    def __init__(self, world, folder):
        self._world, self._folder = world, folder
        self.overtaken = 0
        """Tuples that waited in the epochs from which it was started."""

    def start(self, tasks, seed, topology=words, **more):
        found = manifests.newest(StateStore(self._folder).child("t"))
        if found is not None and found.overtaken is not None:
            self.overtaken += sum(part.rows for each in found.overtaken.entries.values() for part in each.parts)
        built = topology(self._world, tasks, **more)
        runner = LocalRunner(built, seed=seed, clock=CLOCK, folder=self._folder, die=die, uneven=True)
        rows = Counter(WORLDS[self._world].rows)
        assert not rows - Counter(pairs(counts(runner))), "sinks hold only what is counted"
        assert not counts(runner) - ORACLE, "counted too often"
        return runner

    def finish(self, runner):
        run_to_the_end(runner)
        assert counts(runner) == ORACLE
        assert sorted(WORLDS[self._world].rows) == pairs(ORACLE)
        assert not runner.errors
        owners = [key for bolt in runner.component("count") for key in bolt.counts]
        assert len(owners) == len(set(owners)), "a key has one owner"


@pytest.mark.parametrize("patience", PATIENCES)
@pytest.mark.parametrize("seed", range(6))
def test_a_run_that_is_killed_at_any_time_goes_on_with_any_number_of_tasks(seed, patience, world, folder):
    draw = random.Random(f"{seed} {patience}")
    runs = Runs(world, folder)
    for turn in range(8):
        runner = runs.start(draw.randrange(1, 5), seed * 10 + turn, overtake_after=patience)
        for _ in range(draw.randrange(3, 12)):
            runner.run(draw.uniform(0, INTERVAL))  # and then it is dropped, as if it were killed
        if runner.commits.published < runner.commits.committed:
            # sinks keep their number, so what they have prepared is published by the next run
            assert runner.plan.tasks_of["sink"]
    runs.finish(runs.start(3, seed, overtake_after=patience))
    assert runs.overtaken > COUNT, "or it proves nothing"


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("epoch", [1, 2, 4])
def test_a_crash_at_every_step(step, epoch, world, folder):
    runs = Runs(world, folder)
    with pytest.raises(Crash):
        runs.start(2, epoch, overtake_after=0.0, crash_at=f"{step}:{epoch}").run(1.0)
    runner = runs.start(4, 1, overtake_after=0.0)
    runner.run(3 * INTERVAL)
    runs.finish(runs.start(1, 2, overtake_after=0.0))


@pytest.mark.parametrize("epoch", [1, 3])
def test_a_crash_of_the_driver_after_it_has_asked_for_overtaking(epoch, world, folder):
    runs = Runs(world, folder)
    with pytest.raises(Crash):
        runs.start(2, epoch, overtake_after=INTERVAL / 2, crash_at=f"overtaken:{epoch}").run(1.0)
    runs.finish(runs.start(3, 1, overtake_after=INTERVAL / 2))


@pytest.mark.parametrize("flow", ["step", "spout", "credit", "none"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("capacity", "overflow"), [(1, 0), (8, 300), (16_384, 1 << 20)])
def test_in_every_mode_of_flow_control(shape, flow, capacity, overflow, world, folder):
    def topology():
        builder = TopologyBuilder()
        copies = SHAPES[shape](builder, 150, Outside(world))
        settings = settings_with(
            delivery="exactly_once",
            flow=flow,
            inbox_capacity=capacity,
            overflow_bytes=overflow,
            frame_bytes=200,
            epoch_interval=INTERVAL,
            overtake_after=0.0,
        )
        return builder.build("t", settings), copies

    draw = random.Random(f"{shape} {flow} {capacity}")
    for turn in range(4):
        built, copies = topology()
        runner = LocalRunner(built, seed=turn, folder=folder, die=die, uneven=True)
        runner.run(draw.uniform(0, 4 * INTERVAL))
    oracle = Counter()
    for n in range(150):
        oracle[key_of(n)] += sum(copies.values())
    runner = LocalRunner(topology()[0], seed=9, folder=folder, die=die, uneven=True)
    run_to_the_end(runner)
    assert counts(runner) == oracle
    assert sorted(WORLDS[world].rows) == pairs(oracle)
    assert not runner.errors, "no frame lost, doubled or out of order"


def test_a_savepoint_holds_what_waited(world, folder):
    runs = Runs(world, folder)
    store = StateStore(folder).child("t")
    runner = runs.start(2, 1, overtake_after=0.0)
    while (found := manifests.newest(store)) is None or found.overtaken is None:
        runner.run(INTERVAL)
    runner.run(0)
    while runner.commits.published < runner.commits.committed:
        runner.run(0.0005)
    savepoint = StateStore(f"{folder}-savepoint")
    save_at_rest(store, savepoint)
    copied = manifests.newest(savepoint)
    assert copied.overtaken is not None
    assert all(file in savepoint.list() for file in copied.files)
    topology = words(world, 3)
    StateDirectory(make_plan(topology), topology, f"{folder}-other").adopt(savepoint)
    again = Runs(world, f"{folder}-other")
    again.finish(again.start(3, 2))
    assert again.overtaken


def test_a_form_that_cannot_process_what_waits_is_refused(world, folder):
    def other(world, tasks, **_):
        builder = TopologyBuilder()
        builder.set_spout("numbers", Numbers(COUNT), 2)
        builder.set_bolt("count", Count(), tasks).fields_grouping("numbers", "key")
        builder.set_bolt("sink", Outside(world), 2).shuffle_grouping("count")
        return builder.build("t", Settings(delivery=Delivery("exactly_once")))

    runs = Runs(world, folder)
    runner = runs.start(2, 1, overtake_after=0.0, middle=1)
    store = StateStore(folder).child("t")
    while (found := manifests.newest(store)) is None or not any(
        key.startswith("middle") for key in (found.overtaken.entries if found.overtaken else ())
    ):
        runner.run(INTERVAL)
    with pytest.raises(StateError, match=r"'(middle|count)': .*(no such component|does not read stream)"):
        runs.start(2, 1, topology=other)
    runs.finish(runs.start(2, 1))


@pytest.mark.parametrize("patience", [INTERVAL, 1e9])
def test_commits_are_made_while_a_bolt_is_saturated(patience, world, folder):
    """Without overtaking, an epoch is committed when the bolt has processed all that waits."""
    runs = Runs(world, folder)
    runner = runs.start(1, 1, overtake_after=patience, inbox_capacity=1 << 20)
    longest, committed, at = 0.0, 0, CLOCK.now()
    while counts(runner) != ORACLE:
        runner.run(INTERVAL / 10)
        longest = max(longest, CLOCK.now() - at)
        if runner.commits.committed > committed:
            committed, at = runner.commits.committed, CLOCK.now()
    bolt_time = 2 * COUNT * INTERVAL / 10
    assert (longest < bolt_time / 2) == (patience == INTERVAL), longest
    runs.finish(runner)


@pytest.mark.parametrize("now", [1, 2, 4])
def test_after_the_last_epoch_nothing_is_executed_and_the_next_form_goes_on(now, world, folder):
    """As in a replacement: the spouts pause, the marker of the last epoch overtakes, the next form takes over."""
    runs = Runs(world, folder)
    runner = runs.start(2, 1)
    runner.run(2 * INTERVAL)
    runner.deactivate()
    while not runner.commits.start_commit(CLOCK.now(), last=True, patience=0.0):
        runner.run(INTERVAL / 10)
    last = runner.commits.newest
    while runner.commits.published < last:
        runner.run(INTERVAL / 10)
    before = sum(stats.executed for stats in runner.stats("middle"))
    runner.run(10 * INTERVAL)
    assert sum(stats.executed for stats in runner.stats("middle")) == before
    assert runner.commits.committed >= last
    runs.finish(runs.start(now, 2))
    assert runs.overtaken
