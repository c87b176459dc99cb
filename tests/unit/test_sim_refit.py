"""A topology under the load of a day: how often it is packed again, and that this helps."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest

from penstock.control.packing import PackedGroup
from penstock.control.refit import RefitKind, RefitPolicy, same_packing
from penstock.sim.refit import DAY, ChainStep, RefitSetUp, day_curve, run

WORDS = (
    ChainStep("lines", 20e-6),
    ChainStep("split", 60e-6, parallelism=2, local=True),
    ChainStep("count", 90e-6, parallelism=4),
    ChainStep("persist", 30e-6),
)
"""One worker can process 5,000 tuples per second."""
ONE = (PackedGroup(("lines", "split", "count", "persist"), 1),)
MOST_A_DAY = 8
"""Of refits under the load of a day: one at the start, and for each of the two peaks and the burst one when it
begins and one when it is over; and one more, because the load may rest where half of the hops are avoidable."""


@cache
def day(mode, noise=0.3, seed=0, night=300.0):
    load = day_curve(night, 5_500.0, burst=4_000.0, noise=0.1, seed=seed)
    return run(RefitPolicy(mode, 4) if mode else None, RefitSetUp(WORDS, load, noise=noise), seed)


@cache
def constant(rate, mode="always", hours=6, start=(), **changes):
    return run(RefitPolicy(mode, 4), RefitSetUp(WORDS, (rate,) * (360 * hours), start=start, **changes))


def kinds(outcome):
    return [change.refit.kind for change in outcome.changes]


# ---- the model


def test_a_worker_processes_at_most_what_a_core_can():
    outcome = run(None, RefitSetUp(WORDS, (6_000.0,) * 100, start=ONE))
    assert outcome.ticks[-1].throughput == pytest.approx(5_000)
    assert outcome.ticks[-1].busiest == pytest.approx(1.0)
    assert outcome.ticks[-1].backlog == pytest.approx(1_000 * 1_000)


def test_all_workers_share_the_cores_of_the_machine():
    wide = run(None, RefitSetUp(WORDS, (20_000.0,) * 100, cores=8))
    narrow = run(None, RefitSetUp(WORDS, (20_000.0,) * 100, cores=1))
    assert wide.ticks[-1].busiest == pytest.approx(1.0)
    assert narrow.ticks[-1].busiest < 0.5
    assert narrow.ticks[-1].throughput < 5_000, "what hops cost is missing"


def test_hops_that_cost_more_and_waits_lower_the_throughput():
    usual = run(None, RefitSetUp(WORDS, (20_000.0,) * 10))
    dear = run(None, RefitSetUp(WORDS, (20_000.0,) * 10, hop_cost=3.0))
    waits = run(None, RefitSetUp((*WORDS[:3], ChainStep("persist", 30e-6, wait=1e-3)), (20_000.0,) * 10))
    assert dear.ticks[-1].throughput < 0.7 * usual.ticks[-1].throughput
    assert waits.ticks[-1].throughput < 1_000


def test_the_load_of_a_day_has_two_peaks_and_a_burst():
    load = day_curve(100.0, 1_000.0, burst=500.0)
    assert len(load) == DAY / 10
    by_hour = [load[hour * 360] for hour in range(24)]
    assert by_hour[10] == pytest.approx(1_000, rel=0.01)
    assert by_hour[19] == pytest.approx(1_000, rel=0.01)
    assert by_hour[3] == pytest.approx(100, rel=0.01)
    assert by_hour[15] - load[15 * 360 - 1] == pytest.approx(500, rel=0.05)


def test_the_same_seed_is_the_same_run_of_refits():
    load = day_curve(300.0, 5_500.0)[: 360 * 11]
    first, again = (run(RefitPolicy("always", 4), RefitSetUp(WORDS, load, noise=0.3), 5) for _ in range(2))
    assert first == again


# ---- the load of a day


@pytest.mark.parametrize(("noise", "seed"), [(0.0, 0), (0.3, 0), (0.3, 1), (0.3, 2)])
def test_the_load_of_a_day_is_followed_with_a_handful_of_refits(noise, seed):
    outcome = day("always", noise, seed)
    assert 5 <= len(outcome.changes) <= MOST_A_DAY
    assert set(kinds(outcome)) == {RefitKind.REPACK}
    assert same_packing(outcome.groups, ONE), "at night one worker is enough"
    assert max(tick.backlog for tick in outcome.ticks) == 0


@pytest.mark.parametrize(("noise", "seed"), [(0.0, 0), (0.3, 0), (0.3, 1), (0.3, 2)])
def test_no_refit_is_undone_within_the_cool_down(noise, seed):
    seen, seconds = set(), 300.0
    for earlier, later in pairwise(day("always", noise, seed).changes):
        seen.add(frozenset(earlier.before))
        seconds = min(3_600.0, 2 * seconds) if frozenset(earlier.refit.groups) in seen else seconds
        assert later.time - earlier.time >= seconds
    assert seconds > 300.0


def test_without_the_policy_or_with_a_decision_for_the_night_the_peaks_are_not_served():
    once = day("once")
    assert len(once.changes) == 1
    assert max(tick.backlog for tick in once.ticks) > 100_000
    assert day("").changes == ()


# ---- constant loads


@pytest.mark.parametrize("start", [(), ONE])
@pytest.mark.parametrize("rate", [300.0, 2_300.0, 2_500.0, 3_500.0, 4_100.0, 4_500.0, 6_000.0, 9_000.0])
def test_a_constant_load_leads_to_at_most_one_refit(rate, start):
    """With weights that are wrong by up to 30 %, also where a limit lies."""
    outcome = constant(rate, start=start, noise=0.3)
    assert len(outcome.changes) <= 1
    assert outcome.ticks[-1].backlog == 0


def test_an_overloaded_worker_is_relieved_for_good():
    outcome = constant(6_000.0, start=ONE)
    (change,) = outcome.changes
    assert change.time <= 70
    assert outcome.ticks[-1].throughput == 6_000
    assert outcome.ticks[-1].busiest < 0.8


# ---- a wrong model


@pytest.mark.parametrize("rate", [4_500.0, 5_500.0, 7_000.0])
@pytest.mark.parametrize("mode", ["once", "always"])
def test_a_packing_that_is_worse_than_predicted_is_taken_back_and_stays_so(mode, rate):
    outcome = constant(rate, mode, hours=12, start=ONE, hop_cost=3.0, cores=2)
    assert kinds(outcome) == [RefitKind.REPACK, RefitKind.REVERT]
    assert outcome.groups == ONE
    assert outcome.changes[1].time - outcome.changes[0].time == 60
    assert outcome.ticks[-1].throughput == pytest.approx(min(rate, 5_000))


@pytest.mark.parametrize("seed", [1, 2])
def test_noise_does_not_lead_to_more_than_one_attempt_for_each_packing(seed):
    set_up = RefitSetUp(WORDS, (7_000.0,) * 8_640, start=ONE, hop_cost=3.0, cores=2, noise=0.3)
    outcome = run(RefitPolicy("always", 4), set_up, seed)
    tried = [change.refit.groups for change in outcome.changes if change.refit.kind is RefitKind.REPACK]
    assert len({frozenset(groups) for groups in tried}) == len(tried) <= 3
    assert kinds(outcome) == [RefitKind.REPACK, RefitKind.REVERT] * len(tried)


# ---- blocking components


@pytest.mark.parametrize("mode", ["once", "always"])
def test_a_component_that_waits_gets_its_own_worker_and_nothing_else_moves(mode):
    steps = (*WORDS[:3], ChainStep("persist", 30e-6, wait=2e-3))
    outcome = run(RefitPolicy(mode, 4), RefitSetUp(steps, (400.0,) * 2_000, start=ONE))
    (change,) = outcome.changes
    assert change.refit.kind is RefitKind.BLOCKING
    assert change.time == 20
    assert outcome.groups == (PackedGroup(("lines", "split", "count"), 1), PackedGroup(("persist",), 1))
    assert change.refit.blocking == {"persist"}
