"""The scaling policies under any load: bounds, cool-down, reachable parallelism, and the number of steps."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from penstock.control.failure_policy import FailurePolicy
from penstock.control.scaling import (
    BoltLoad,
    Bounds,
    LoadSample,
    RatePolicy,
    SpoutLoad,
    TaskLoad,
    reachable,
    use_with,
    uses,
)

# ---- any looks at all

counts = st.integers(0, 100_000)
tasks = st.builds(TaskLoad, counts, st.floats(0.0, 2.0), counts, counts, st.integers(0, 200), st.just(1_000))
task_lists = st.tuples(st.lists(tasks, min_size=1, max_size=3), st.integers(1, 4)).map(
    lambda drawn: tuple(drawn[0] * drawn[1])
)
bounds = st.tuples(st.integers(1, 4), st.integers(0, 12), st.floats(0, 20)).map(
    lambda drawn: Bounds(drawn[0], drawn[0] + drawn[1], drawn[2])
)
policies = st.one_of(
    st.builds(FailurePolicy, bounds, st.integers(2, 8), st.floats(0, 1_000)),
    st.builds(RatePolicy, bounds, st.floats(0.1, 0.8), st.floats(0.01, 0.2), st.integers(1, 3), st.integers(1, 3)),
)


@st.composite
def samples(draw):
    """A chain with a side branch in any state; occasionally a spout reports what is offered to it."""
    offered = draw(st.none() | counts)
    spout = SpoutLoad("spout", draw(counts), draw(st.integers(0, 500)), draw(st.floats(0, 1)), offered)
    inputs = {"a": ("spout",), "b": ("a",), "c": ("spout", "b")}
    bolts = [BoltLoad(name, of, draw(task_lists), draw(st.booleans())) for name, of in inputs.items()]
    return spout, tuple(draw(st.permutations(bolts)))


@given(policies, st.lists(st.tuples(samples(), st.floats(0.1, 15.0)), max_size=6))
def test_decisions_keep_to_bounds_cool_down_and_what_can_be_reached(policy, moments):
    now, last = 0.0, -math.inf
    for (spout, bolts), seconds in moments:
        now += seconds
        found = policy.decide(LoadSample(now, seconds, (spout,), bolts))
        if found is None:
            continue
        assert now - last >= policy.bounds.cool_down - 1e-9
        last = now
        assert found.parallelism, "an empty decision would be a replacement for nothing"
        known = {bolt.name: bolt for bolt in bolts}
        for name, new in found.parallelism.items():
            old = len(known[name].tasks)
            assert not known[name].fixed
            assert new != old
            assert policy.bounds.least <= new <= policy.bounds.most
            assert new in reachable(old, policy.bounds)
            assert f"{old} -> {new}" in found.reason


@given(st.integers(1, 200), bounds)
def test_what_is_reachable_is_so_by_doubling_or_halving(old, bounds):
    found = reachable(old, bounds)
    assert found == sorted(set(found))
    for new in found:
        factor = max(new, old) / min(new, old)
        assert factor == 2 ** round(math.log2(factor))
    every = [old * 2**k for k in range(10)] + [old // 2**k for k in range(10) if old % 2**k == 0]
    assert set(found) == {new for new in every if bounds.least <= new <= bounds.most}


@given(st.lists(st.floats(0, 10), min_size=8, max_size=8))
def test_halving_a_doubled_bolt_leads_back(use):
    doubled = [each / 2 for each in use] * 2  # half of the keys of h move to h + 8
    assert math.isclose(use_with(doubled, 8), max(use), abs_tol=1e-12)
    assert math.isclose(use_with(use, 1), sum(use), abs_tol=1e-9)
    assert use_with(use, 4) >= max(use) - 1e-12 >= use_with(use, 16) - 1e-12


# ---- a topology whose numbers are known


@dataclass
class Fluid:
    """A deterministic chain of bolts: each processes what it can, the rest is queued. ``paced``: the spout only
    emits what the slowest bolt can process, and is held back for the rest of the time."""

    costs: list[float]
    emits: list[float]
    spreads: list[list[float]]
    """The share of each of up to two tasks of a bolt; more tasks repeat the pattern."""
    paced: bool = False
    now: float = 0.0

    def __post_init__(self):
        self.tasks = [1] * len(self.costs)

    def busiest(self, index):
        """The share of a bolt's tuples that its busiest task gets."""
        return max(self._shares(index))

    def _shares(self, index):
        spread = self.spreads[index]
        pattern = [spread[number % 2] if self.tasks[index] > 1 else 1.0 for number in range(self.tasks[index])]
        return [each / sum(pattern) for each in pattern]

    def arriving(self, load):
        """Tuples per second that arrive at each bolt if all bolts keep up."""
        found = []
        for emits in self.emits:
            found.append(load)
            load *= emits
        return found

    def use(self, load):
        """The use of each bolt's busiest task if all bolts keep up."""
        return [
            rate * cost * self.busiest(index)
            for index, (rate, cost) in enumerate(zip(self.arriving(load), self.costs, strict=True))
        ]

    def sample(self, load):
        self.now += 1.0
        bears = min([1.0, *(1.0 / use for use in self.use(load))])
        rate = load * bears if self.paced else load
        spout = SpoutLoad("0", rate, held_back=1.0 - bears if self.paced else 0.0)
        bolts = []
        for index, (cost, emits) in enumerate(zip(self.costs, self.emits, strict=True)):
            loads = []
            for share in self._shares(index):
                done = min(rate * share, 1.0 / cost)
                loads.append(TaskLoad(done, done * cost, rate * share, done * emits, 0, 1_000))
            bolts.append(BoltLoad(str(index + 1), (str(index),), tuple(loads)))
            rate = bolts[-1].emitted
        return LoadSample(self.now, 1.0, (spout,), tuple(bolts))

    def run(self, policy, load, seconds):
        """The decisions during this load."""
        found = []
        for _ in range(seconds):
            scale = policy.decide(self.sample(load))
            if scale:
                found.append(scale)
                for name, tasks in scale.parallelism.items():
                    self.tasks[int(name) - 1] = tasks
        return found


ROOM = Bounds(most=1 << 20, cool_down=4.0)
"""Bounds without practical limits."""
BASE = 100.0
"""Tuples per second; their cost is drawn."""
shares = st.floats(0.6, 1.0)
factors = st.floats(0.1, 24.0)


@st.composite
def fluids(draw, paced=False):
    """With the base load, each bolt has work for between zero and one and a half tasks."""
    length = draw(st.integers(1, 3))
    several = {"min_size": length, "max_size": length}
    emits = draw(st.lists(st.floats(0.1, 50.0), **several))
    spreads = draw(st.lists(st.tuples(shares, shares).map(list), **several))
    fluid = Fluid([1.0] * length, emits, spreads, paced)
    work = draw(st.lists(st.floats(0.01, 1.5), **several))
    fluid.costs = [each / rate for each, rate in zip(work, fluid.arriving(BASE), strict=True)]
    return fluid


@given(fluids(), factors, factors)
def test_rate_has_enough_tasks_for_all_bolts_after_one_or_two_steps(fluid, first, second):
    policy = RatePolicy(ROOM)
    for factor in (first, second):
        load = BASE * factor
        found = fluid.run(policy, load, 20)
        assert len(found) <= 2, [each.reason for each in found]
        assert max(fluid.use(load)) <= policy.target * (1 + policy.slack) + 1e-9


@given(fluids(), factors, factors)
def test_rate_comes_to_rest_under_a_constant_load_and_does_not_waste_tasks(fluid, first, second):
    policy = RatePolicy(ROOM)
    fluid.run(policy, BASE * first, 20)
    went: dict[str, set[bool]] = {}
    for scale, before in _traced(fluid, policy, BASE * second, 30):
        for name, new in scale.parallelism.items():
            went.setdefault(name, set()).add(new > before[int(name) - 1])
    assert all(len(ways) == 1 for ways in went.values()), "no bolt goes both ways under one load"
    assert fluid.run(policy, BASE * second, 30) == []
    low = policy.target * (1 - policy.slack)
    for bolt in fluid.sample(BASE * second).bolts:
        use = uses(bolt, bolt.arrived)
        fewer = [new for new in reachable(len(use), ROOM) if new < len(use)]
        assert all(use_with(use, new) > low - 1e-9 for new in fewer)


def _traced(fluid, policy, load, seconds):
    for _ in range(seconds):
        before = list(fluid.tasks)
        for scale in fluid.run(policy, load, 1):
            yield scale, before


@given(fluids(paced=True), st.floats(1.0, 24.0))
def test_a_spout_that_is_held_back_and_does_not_say_by_how_much_takes_a_step_for_each_doubling(fluid, factor):
    """Its demand counts as at most twice what it emits."""
    policy = RatePolicy(ROOM)
    fluid.run(policy, BASE, 30)
    load = BASE * factor
    over = max(fluid.use(load))
    found = fluid.run(policy, load, 60)
    assert max(fluid.use(load)) <= policy.target * (1 + policy.slack) + 1e-9
    assert len(found) <= 1 + max(1, math.ceil(math.log2(over)))


# ---- algorithm 2 needs a step for each doubling


@given(st.integers(1, 6), st.floats(0.55, 0.95), st.integers(0, 3))
def test_failures_needs_a_step_for_each_doubling(doublings, use, calm):
    """Nothing times out for two windows after a replacement; then, of 1,000 tuples per window, the excess does."""
    windows, needed = 4, 2**doublings
    policy = FailurePolicy(Bounds(most=4 * needed, cool_down=float(windows)), windows)
    seen, since = [1], -calm
    for time in range(20 * doublings):
        since += 1
        failed = max(0, round(1_000 * (needed * use / seen[-1] - 1))) if since > 2 else 0
        load = BoltLoad("count", ("spout",), (TaskLoad(1, 1.0, 1, 1),) * seen[-1])
        found = policy.decide(LoadSample(float(time), 1.0, (SpoutLoad("spout", 1, failed),), (load,)))
        if found:
            seen.append(found.parallelism["count"])
            since = 0
    assert seen == [2**step for step in range(doublings + 1)]


@given(st.lists(st.integers(0, 1_000), min_size=1, max_size=20), st.integers(2, 8))
def test_the_ring_against_the_formulas(failures, length):
    policy = FailurePolicy(Bounds(most=1), length)
    load = BoltLoad("count", ("spout",), (TaskLoad(1, 1.0, 1, 1),))
    for time, failed in enumerate(failures):
        policy.decide(LoadSample(float(time), 1.0, (SpoutLoad("spout", 1, failed),), (load,)))
    ring = failures[-length:]
    mean = sum(ring) / len(ring)
    assert policy.mean == mean
    ages = range(len(ring) - 1, -1, -1)
    squares = [(1 - age / length) * (x - mean) ** 2 for age, x in zip(ages, ring, strict=True)]
    assert math.isclose(policy.dispersion, sum(squares) / len(ring), rel_tol=1e-9, abs_tol=1e-9)
