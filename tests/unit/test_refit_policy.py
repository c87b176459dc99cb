"""When a running topology is packed again: one rule after the other, in samples of 10 s."""

from __future__ import annotations

from itertools import pairwise

import pytest

from penstock.control.call_waits import separate
from penstock.control.packing import Link, PackedGroup, Part
from penstock.control.refit import CallWait, RefitKind, RefitPolicy, RefitSample, RefitTuning, same_packing
from penstock.errors import SettingError

LINKS = (Link("spout", "split", True), Link("split", "count", False))
ONE = (PackedGroup(("spout", "split", "count"), 1),)
TWO = (PackedGroup(("spout", "split"), 1), PackedGroup(("count",), 1))
THREE = (PackedGroup(("spout",), 1), PackedGroup(("split",), 1), PackedGroup(("count",), 1))
HEAVY = {"spout": 0.25, "split": 0.25, "count": 0.44}
"""0.94 of a core; two workers would use 0.625 and 0.66."""
LIGHT = {"spout": 0.01, "split": 0.04, "count": 0.05}


class Topology:
    """Shows samples to a policy, and carries out what it decides."""

    def __init__(self, mode="always", groups=ONE, obeys=True, workers=2):
        self.policy = RefitPolicy(mode, workers)
        self.groups, self.obeys = tuple(groups), obeys
        self.now, self.blocking, self.refits = 0.0, frozenset(), []

    def show(self, weights, times=1, busiest=None, throughput=1_000.0, behind=False, waits=None, parallelism=1):
        """Returns what the policy decides in the course of these samples."""
        before = len(self.refits)
        for _ in range(times):
            self.now += 10.0
            parts = tuple(Part(name, w, parallelism, name in self.blocking) for name, w in weights.items())
            if busiest is None:
                used = max(sum(weights[name] for name in group.names) / group.workers for group in self.groups)
            else:
                used = busiest
            sample = RefitSample(self.now, 10.0, parts, LINKS, self.groups, used, throughput, behind, waits or {})
            refit = self.policy.decide(sample)
            if refit is not None:
                self.refits.append(refit)
                if self.obeys:
                    self.carry_out(refit)
        return self.refits[before:]

    def carry_out(self, refit):
        self.groups, self.blocking = refit.groups, refit.blocking
        self.policy.replaced(self.now, by_refit=True)


def kinds(refits):
    return [refit.kind for refit in refits]


# ---- by load


def test_an_overloaded_worker_is_divided_after_the_first_minute():
    topology = Topology()
    assert topology.show(HEAVY, 5) == []
    (refit,) = topology.show(HEAVY)
    assert refit.kind is RefitKind.REPACK
    assert same_packing(refit.groups, TWO)
    assert refit.blocking == frozenset()
    assert refit.reason == (
        "the worker of 'spout', 'split' and 'count' uses 94 % of a core; with 2 workers the busiest would use 66 %"
    )


@pytest.mark.parametrize("busiest", [0.2, 0.79])
def test_a_worker_that_is_not_overloaded_stays_as_it_is(busiest):
    assert Topology().show(HEAVY, 100, busiest=busiest) == []


def test_a_shorter_burst_is_not_worth_a_replacement():
    topology = Topology()
    for _ in range(10):
        assert topology.show(HEAVY, 3) == []
        assert topology.show(LIGHT, 5) == []


def test_a_topology_that_is_behind_is_divided_at_a_lower_load():
    weights = {name: 0.7 * weight for name, weight in HEAVY.items()}
    assert Topology().show(weights, 20, busiest=0.7) == []
    (refit,) = Topology().show(weights, 6, busiest=0.7, behind=True)
    assert "70 % of a core and the topology is behind; with 2 workers" in refit.reason


def test_a_topology_that_is_behind_is_packed_for_a_higher_load():
    (enough,) = Topology(workers=4).show(HEAVY, 6, busiest=0.82, parallelism=2)
    (more,) = Topology(workers=4).show(HEAVY, 6, busiest=0.82, parallelism=2, behind=True)
    assert sum(group.workers for group in enough.groups) == 2
    assert sum(group.workers for group in more.groups) == 4


def test_a_topology_that_is_behind_while_its_workers_are_idle_waits_for_something_else():
    assert Topology(groups=THREE, workers=3).show(LIGHT, 100, behind=True) == []


def test_no_gain_no_repacking():
    # One component has nearly all of the load, and each hop costs half of its weight at the receiver.
    assert Topology().show({"spout": 0.02, "split": 0.02, "count": 0.92}, 50) == []


def test_hops_that_a_small_load_does_not_need_are_removed():
    topology = Topology(groups=THREE, workers=3)
    (refit,) = topology.show(LIGHT, 6)
    assert same_packing(refit.groups, ONE)
    assert "and 0 instead of 2 streams would cross between workers" in refit.reason
    assert "with 1 worker it would use" in refit.reason


def test_hops_are_kept_if_without_them_a_worker_would_use_more_than_half_a_core():
    weights = {"spout": 0.2, "split": 0.3, "count": 0.3}
    assert Topology(groups=TWO).show(weights, 100, busiest=0.7) == []


@pytest.mark.parametrize("nothing", [{"throughput": 0.0}, {"busiest": 0.0}])
def test_nothing_is_decided_about_a_topology_that_does_nothing(nothing):
    assert Topology(groups=THREE, workers=3).show(LIGHT, 20, **nothing) == []
    assert Topology(groups=THREE, workers=3).show(dict.fromkeys(LIGHT, 0.0), 20) == []


def test_samples_are_in_a_row_only_without_an_idle_one_between_them():
    topology = Topology()
    topology.show(HEAVY, 5)
    topology.show(LIGHT, throughput=0.0)
    assert topology.show(HEAVY, 5) == []
    assert len(topology.show(HEAVY)) == 1


def test_off_is_off():
    waits = {"split": CallWait(0.9, 0.1)}
    assert Topology("off").show(HEAVY, 100, behind=True, waits=waits) == []


# ---- carrying out


def test_a_proposal_is_repeated_until_it_is_carried_out():
    topology = Topology("once", obeys=False)
    assert len(topology.show(HEAVY, 9)) == 4
    assert topology.show(LIGHT, 12) == []
    (refit,) = Topology("once").show(HEAVY, 30)
    assert refit.kind is RefitKind.REPACK


def test_a_replacement_starts_the_measuring_again():
    topology = Topology()
    topology.show(HEAVY, 5)
    topology.policy.replaced(topology.now, by_refit=False)
    assert topology.show(HEAVY, 5) == []
    assert len(topology.show(HEAVY)) == 1


def test_a_packing_that_changed_without_a_word_starts_the_measuring_again():
    topology = Topology(groups=THREE)
    topology.show(HEAVY, 5)
    topology.groups = ONE
    assert topology.show(HEAVY, 5) == []
    assert len(topology.show(HEAVY)) == 1


def test_a_replacement_that_failed_is_tried_again_after_the_cool_down():
    topology = Topology(obeys=False)
    topology.show(HEAVY, 6)
    topology.policy.replaced(topology.now, by_refit=True)
    assert topology.show(HEAVY, 29) == []
    assert len(topology.show(HEAVY)) == 1
    assert topology.policy.cool_down == 300.0


# ---- modes and the cool-down


def test_once_decides_once():
    topology = Topology("once", groups=THREE, workers=3)
    assert len(topology.show(LIGHT, 20)) == 1
    assert topology.show(HEAVY, 100, behind=True, throughput=2_000.0) == []


def test_once_may_decide_to_keep_the_packing():
    topology = Topology("once")
    assert topology.show(LIGHT, 6) == []
    assert topology.show(HEAVY, 100) == []


def test_always_follows_the_load_with_a_cool_down_that_doubles():
    topology = Topology(workers=2)
    times, seconds = [], []
    for _ in range(6):
        for weights in (HEAVY, LIGHT):
            for _ in range(400):
                if topology.show(weights):
                    times.append(topology.now)
                    topology.show(weights)
                    seconds.append(topology.policy.cool_down)
    assert seconds == [300, 600, 1_200, 2_400, 3_600, *[3_600] * (len(seconds) - 5)]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert len(times) >= 8
    assert all(gap >= wait for gap, wait in zip(gaps, seconds, strict=False))


def test_after_the_first_decision_hops_are_removed_without_haste():
    topology = Topology("always")
    assert len(topology.show(HEAVY, 6)) == 1
    topology.show(HEAVY, 300)
    topology.policy.replaced(topology.now, by_refit=False)
    assert topology.show(LIGHT, 59) == []
    assert len(topology.show(LIGHT)) == 1


def test_a_second_step_needs_a_change_of_the_load():
    weights = {"spout": 0.1, "split": 0.2, "count": 0.25}
    topology = Topology(groups=THREE, workers=3)
    (first,) = topology.show(weights, 6, busiest=0.38)
    assert same_packing(first.groups, TWO)
    assert topology.show(weights, 200, busiest=0.36) == []
    less = {name: 0.8 * weight for name, weight in weights.items()}
    assert topology.show(less, 200, busiest=0.3) == []
    (second,) = topology.show(less, 70, busiest=0.25)
    assert same_packing(second.groups, ONE)


# ---- trials


def overloaded_and_divided(mode="always", behind=True):
    topology = Topology(mode)
    topology.show(HEAVY, 6, behind=behind, busiest=0.95)
    assert same_packing(topology.groups, TWO)
    return topology


@pytest.mark.parametrize("mode", ["once", "always"])
def test_a_repacking_that_does_not_help_is_taken_back_and_not_tried_again(mode):
    topology = overloaded_and_divided(mode)
    assert topology.show(HEAVY, 5, behind=True, busiest=0.8, throughput=1_040.0) == []
    (refit,) = topology.show(HEAVY, behind=True, busiest=0.8, throughput=1_040.0)
    assert refit.kind is RefitKind.REVERT
    assert refit.groups == ONE
    assert "is behind at 1,040 tuples/s, and with 1 worker it did 1,000 tuples/s" in refit.reason
    assert topology.show(HEAVY, 1_000, behind=True, busiest=0.95) == []
    assert topology.show({n: 0.4 * w for n, w in HEAVY.items()}, 100, behind=True, busiest=0.95) == []


@pytest.mark.parametrize(("throughput", "behind"), [(1_060.0, True), (700.0, False)])
def test_a_repacking_that_helped_or_cannot_be_judged_stays(throughput, behind):
    topology = overloaded_and_divided()
    assert topology.show(HEAVY, 50, behind=behind, busiest=0.7, throughput=throughput) == []


@pytest.mark.parametrize(("throughput", "kept"), [(990.0, False), (1_010.0, True)])
def test_a_repacking_after_which_a_topology_falls_behind_is_taken_back(throughput, kept):
    topology = overloaded_and_divided(behind=False)
    found = topology.show(HEAVY, 6, behind=True, busiest=0.7, throughput=throughput)
    assert kinds(found) == ([] if kept else [RefitKind.REVERT])


def test_a_useless_packing_is_possible_again_when_the_load_mix_is_another():
    topology = overloaded_and_divided()
    assert kinds(topology.show(HEAVY, 6, behind=True, busiest=0.8)) == [RefitKind.REVERT]
    other = {"spout": 0.5, "split": 0.1, "count": 0.35}
    (refit,) = topology.show(other, 200, behind=True, busiest=0.95, throughput=2_000.0)[:1]
    assert refit.kind is RefitKind.REPACK
    assert same_packing(refit.groups, TWO)


def test_a_revert_that_failed_is_not_insisted_on():
    topology = overloaded_and_divided()
    topology.obeys = False
    topology.show(HEAVY, 6, behind=True, busiest=0.8)
    topology.policy.replaced(topology.now, by_refit=True)
    assert topology.show(HEAVY, 50, behind=True, busiest=0.5) == []


def test_a_change_by_someone_else_ends_a_trial():
    topology = overloaded_and_divided()
    topology.show(HEAVY, 3, behind=True, busiest=0.8)
    topology.groups = THREE
    topology.policy.replaced(topology.now, by_refit=False)
    assert RefitKind.REVERT not in kinds(topology.show(HEAVY, 20, behind=True, busiest=0.5))


# ---- blocking


@pytest.mark.parametrize("mode", ["once", "always"])
def test_a_component_that_waits_in_its_calls_gets_its_own_worker(mode):
    topology = Topology(mode)
    waits = {"split": CallWait(0.62, 0.005), "count": CallWait(0.1, 0.005)}
    assert topology.show(LIGHT, waits=waits) == []
    (refit,) = topology.show(LIGHT, waits=waits)
    assert refit.kind is RefitKind.BLOCKING
    assert refit.blocking == {"split"}
    assert refit.reason == "calls of 'split' wait 62 % of the time, 5.0 ms each: own workers"
    assert refit.groups == THREE
    assert topology.show(LIGHT, 100, waits=waits) == []


@pytest.mark.parametrize("wait", [CallWait(0.29, 0.5), CallWait(0.9, 0.0009)])
def test_short_or_rare_waits_are_not_blocking(wait):
    assert Topology().show(LIGHT, 20, waits={"split": wait}) == []


def test_waits_must_be_in_samples_in_a_row():
    topology, waits = Topology(), {"count": CallWait(0.9, 0.1)}
    for _ in range(5):
        assert topology.show(LIGHT, waits=waits) == []
        assert topology.show(LIGHT) == []


def test_a_component_alone_in_its_worker_may_wait_and_is_not_packed_with_others_later():
    topology, waits = Topology(groups=TWO), {"count": CallWait(0.9, 0.1)}
    assert topology.show(LIGHT, 100, waits=waits) == []


def test_executors_that_wait_must_not_share_a_worker_with_each_other():
    topology, waits = Topology(groups=TWO), {"count": CallWait(0.9, 0.1)}
    (refit,) = topology.show(LIGHT, 2, waits=waits, parallelism=3)
    assert refit.groups == (TWO[0], PackedGroup(("count",), 3))


def test_a_spout_that_a_waiting_component_keeps_from_emitting_does_not_hide_it():
    (refit,) = Topology().show(LIGHT, 2, throughput=0.0, waits={"count": CallWait(1.0, 30.0)})
    assert same_packing(refit.groups, TWO)


def test_a_component_that_is_still_blocking_but_not_separated_is_named_again_after_the_cool_down():
    topology, waits = Topology(obeys=False), {"count": CallWait(0.9, 0.1)}
    topology.show(LIGHT, 2, waits=waits)
    topology.policy.replaced(topology.now, by_refit=True)
    assert topology.show(LIGHT, 29) == []
    assert kinds(topology.show(LIGHT)) == [RefitKind.BLOCKING]


def test_a_blocking_component_at_the_end_takes_nothing_else_along():
    parts = [Part(name, 1, 1) for name in ("a", "b", "c")]
    links = [Link("a", "b", False), Link("a", "c", False)]
    assert separate(parts, links, [PackedGroup(("a", "b", "c"), 1)], {"b"}) == [
        PackedGroup(("a", "c"), 1),
        PackedGroup(("b",), 1),
    ]


def test_what_is_on_the_same_side_of_blocking_components_stays_together():
    parts = [Part(name, 1, 1) for name in "abcdefg"]
    links = [Link(one, other, False) for one, other in zip("abcdef", "bcdefg", strict=True)]
    found = separate(parts, links, [PackedGroup(tuple("abcdefg"), 1)], {"c", "f"})
    assert [group.names for group in found] == [("a", "b"), ("c",), ("d", "e"), ("f",), ("g",)]


# ---- settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"light": 0.8}, "the light load must be between 0 and 0.8, not 0.8"),
        ({"enough": 0.9}, "the sufficient load must be between 0 and 0.8, not 0.9"),
        ({"samples": 0}, "the number of samples must be at least 1, not 0"),
        ({"light_samples": 2}, "the number of light samples must be at least 6, not 2"),
        ({"cool_down": -1.0}, "the cool-down must be 0 s or more, not -1.0"),
    ],
)
def test_impossible_settings_are_refused(settings, message):
    with pytest.raises(SettingError, match=message):
        RefitTuning(**settings)


def test_impossible_modes_and_numbers_of_workers_are_refused():
    with pytest.raises(SettingError, match="the mode must be off, once or always, not 'sometimes'"):
        RefitPolicy("sometimes", 2)
    with pytest.raises(SettingError, match="the maximum number of workers must be at least 1, not 0"):
        RefitPolicy("once", 0)
