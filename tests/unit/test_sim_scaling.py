"""The simulated topology: nothing is lost, times are what they must be, and how many steps each policy needs."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from penstock.control.failure_policy import FailurePolicy
from penstock.control.scaling import Bounds, RatePolicy, Scale, ScalingPolicy
from penstock.sim.scaling import WORDS, BoltSpec, ScalingChange, ScalingOutcome, ScalingSetUp, run

STEP = replace(WORDS, load=WORDS.load[:2], seconds=80)
"""The load rises eightfold at 30 s; long enough for the rate policy to come to rest."""
LONG_STEP = replace(WORDS, load=WORDS.load[:2], seconds=150)
"""Long enough for three doublings by time-outs."""
SMALL = ScalingSetUp((BoltSpec("a", 1 / 50, emits=2), BoltSpec("b", 1 / 100, fields=True)), ((0.0, 30.0),), 40)


def rate(cool_down=20.0):
    return RatePolicy(Bounds(cool_down=cool_down))


def failures():
    return FailurePolicy(Bounds(cool_down=6 * WORDS.sample_interval), samples=6)


class Told(ScalingPolicy):
    """Does as it is told, and keeps the load samples."""

    def __init__(self, *requests):
        super().__init__(Bounds(cool_down=0.0))
        self.requests, self.samples = list(requests), []

    def wanted(self, sample):
        self.samples.append(sample)
        if self.requests and sample.time >= self.requests[0][0]:
            return Scale(self.requests.pop(0)[1], "told")
        return None


# ---- the model


@pytest.mark.parametrize("make", [lambda: None, rate, failures, lambda: Told((4.0, {"a": 4}), (20.0, {"a": 1}))])
@pytest.mark.parametrize("load", [30.0, 120.0])
def test_every_tuple_is_completed_once_or_still_there(make, load):
    outcome = run(make(), replace(SMALL, load=((0.0, 10.0), (10.0, load))), seed=3)
    assert outcome.came == outcome.completed + outcome.left
    assert outcome.completed == sum(tick.completed for tick in outcome.ticks)
    assert outcome.failed == sum(tick.failed for tick in outcome.ticks)
    assert len(outcome.ticks) == 40
    assert outcome.came == pytest.approx(10 * 10 + 30 * load, rel=0.15)


def test_the_same_seed_is_the_same_run():
    first, again, other = run(rate(), SMALL, 7), run(rate(), SMALL, 7), run(rate(), SMALL, 8)
    assert first == again
    assert first.came != other.came


def test_load_samples_tell_what_the_set_up_says():
    policy = Told()
    run(policy, SMALL, 1)
    samples = policy.samples
    assert [sample.time for sample in samples] == pytest.approx([2.0 * number for number in range(1, 21)])
    (a, b), (spout,) = (
        zip(*(sample.bolts for sample in samples), strict=True),
        zip(*(e.spouts for e in samples), strict=True),
    )
    assert sum(each.arrived for each in b) == 2 * sum(each.processed for each in a)
    assert sum(each.arrived for each in a) == sum(each.emitted for each in spout)
    busy, processed = (sum(getattr(t, name) for each in a for t in each.tasks) for name in ("busy", "processed"))
    assert busy / processed == pytest.approx(1 / 50, rel=0.1)
    assert [each.offered for each in spout] == [each.emitted for each in spout]
    assert not any(each.held_back or each.failed for each in spout)


def test_a_spout_with_too_many_pending_is_held_back():
    policy = Told()
    outcome = run(policy, replace(SMALL, load=((0.0, 100.0),), max_pending=20, reports_lag=False), 1)
    (last,) = policy.samples[-1].spouts
    assert last.held_back > 0.95
    assert last.offered is None
    assert last.emitted == pytest.approx(2.0 * 50, rel=0.2), "what split bears, in two seconds"
    assert outcome.failed == 0, "twenty tuples wait for less than half a second"
    assert outcome.ticks[-1].waiting > 1_000


def test_what_times_out_comes_back_and_counts():
    policy = Told()
    outcome = run(policy, replace(SMALL, load=((0.0, 100.0),)), 1)
    assert outcome.failed == sum(sample.failed for sample in policy.samples) > 500
    first = next(tick.time for tick in outcome.ticks if tick.failed)
    assert first > SMALL.time_out


def test_a_replacement_is_prepared_while_the_old_topology_works_and_then_takes_its_gap():
    busy = replace(SMALL, load=((0.0, 40.0),), hand_over=1.5)
    outcome = run(Told((10.0, {"a": 2, "b": 2})), busy, 2)
    (change,) = outcome.changes
    assert change.decided == pytest.approx(10.0)
    assert 13.0 + 1.5 <= change.done < 13.0 + 1.5 + busy.time_out
    assert all(tick.completed for tick in outcome.ticks if 10 < tick.time <= 13)
    assert 1.5 <= outcome.longest_gap < 2.0
    assert [tick.parallelism["a"] for tick in outcome.ticks] == [
        1 if tick.time < change.done else 2 for tick in outcome.ticks
    ]


def test_no_load_sample_spans_a_replacement():
    policy = Told((10.0, {"a": 2}))
    (change,) = run(policy, SMALL, 2).changes
    assert not [
        sample
        for sample in policy.samples
        if sample.time - sample.seconds < change.done - 1e-9 and sample.time > 10.01
    ]
    assert len(policy.samples[-1].bolts[0].tasks) == 2


@pytest.mark.parametrize(
    ("load", "tasks"), [(36.0, (1, 1, 1)), (100.0, (2, 2, 1)), (288.0, (8, 8, 1)), (5_000.0, (128, 128, 1))]
)
def test_enough_tasks_for_a_load(load, tasks):
    assert tuple(WORDS.enough(load).values()) == tasks
    assert WORDS.enough(load)["persist"] == 1, "it is fixed, even where it is too slow"


def test_enough_counts_down_too():
    four = ScalingSetUp(
        (BoltSpec("a", 0.01, parallelism=4), BoltSpec("b", 0.01, parallelism=6)), ((0.0, 10.0),), 10
    )
    assert four.enough(10.0) == {"a": 1, "b": 3}


def test_what_an_outcome_says_of_a_phase():
    def change(decided, done, **tasks):
        return ScalingChange(decided, done, Scale(tasks, ""))

    changes = (
        change(34.0, 40.0, split=4, count=4),
        change(60.0, 70.0, split=16, count=8),
        change(100.0, 104.0, split=8),
        change(190.0, math.inf, split=1),
    )
    outcome = ScalingOutcome(WORDS, (), changes, 0.0, 0, 0, 0, 0)
    assert [outcome.steps(phase) for phase in range(3)] == [0, 3, 1]
    assert outcome.steps_up(1) == 2
    assert outcome.overshoot(1) == 2.0
    assert outcome.settled(1) == 74.0
    assert outcome.overshoot(0) == 1.0
    assert replace(outcome, changes=changes[:1]).settled(1) is None, "four are not enough"


# ---- the policies in it


def test_without_a_policy_the_topology_stays_as_it_is_and_drowns():
    outcome = run(None, STEP, 1)
    assert outcome.changes == ()
    assert outcome.ticks[25].latency < 0.5
    assert outcome.left > 5_000


@pytest.mark.parametrize("seed", [0, 4])
@pytest.mark.parametrize(
    ("pending", "tells", "steps"),
    [(2_000, True, 1), (100, True, 1), (2_000, False, 1), (100, False, 2)],
    ids=["told", "told and held back", "not told", "not told and held back"],
)
def test_rate_needs_one_or_two_steps_for_eight_times_the_load(pending, tells, steps, seed):
    """The bar ``scaling.rate.steps``."""
    outcome = run(rate(), replace(STEP, max_pending=pending, reports_lag=tells), seed)
    assert outcome.steps_up(1) == outcome.steps(1) == steps
    assert outcome.settled(1) < 40.0
    assert outcome.overshoot(1) <= 2.0
    assert outcome.longest_gap < 1.0
    assert outcome.ticks[-1].latency < 1.0


@pytest.mark.parametrize("seed", [0, 2])
def test_failures_needs_a_step_for_each_doubling(seed):
    outcome = run(failures(), LONG_STEP, seed)
    assert outcome.steps_up(1) == math.log2(8)
    tasks = [change.scale.parallelism["split"] for change in outcome.changes[:3]]
    assert tasks == [2, 4, 8]


@pytest.mark.parametrize("pending", [100, 500])
def test_failures_sees_a_load_that_the_spout_holds_back(pending):
    """Few pending tuples never time out, and their latency does not vary: the backlog is in the source."""
    outcome = run(failures(), replace(LONG_STEP, max_pending=pending), 0)
    assert outcome.ticks[-1].parallelism == {"split": 8, "count": 8, "persist": 1}
    assert outcome.steps_up(1) == math.log2(8)


def test_a_short_cool_down_takes_catching_up_for_a_load_where_the_source_does_not_tell():
    held = replace(
        STEP, max_pending=1_000, reports_lag=False
    )  # held back until the backlog is gone, after some 15 s
    hasty, patient = (run(rate(cool_down), held, 0) for cool_down in (10.0, 20.0))
    assert (hasty.overshoot(1), patient.overshoot(1)) == (4.0, 1.0)
    assert run(rate(10.0), replace(held, reports_lag=True), 0).overshoot(1) == 1.0


def test_both_policies_give_tasks_back_when_the_load_falls():
    falls = replace(WORDS, load=((0.0, 200.0), (10.0, 24.0)), seconds=60)
    eight = tuple(replace(bolt, parallelism=1 if bolt.fixed else 8) for bolt in falls.bolts)
    falls = replace(falls, bolts=eight)
    for policy in (rate(), failures()):
        outcome = run(policy, falls, 1)
        assert outcome.ticks[-1].parallelism == {"split": 1, "count": 1, "persist": 1}
        assert all(change.decided > 10.0 for change in outcome.changes)
        assert outcome.longest_gap < 1.0
