"""Which branch is heavy, which branch takes its data, and what the sender records (Sun 2022)."""

from __future__ import annotations

import pytest

from penstock.control.migration import (
    Branch,
    BranchNodeLoad,
    Migrate,
    MigrationPolicy,
    Restore,
    scores,
)
from penstock.control.segments import Segment, SegmentLedger
from penstock.errors import SettingError


def branch(name, use, into=0.0, out=0.0, bandwidth=10.0):
    return Branch(name, (BranchNodeLoad(use, into, out),), bandwidth)


def heavy(name):
    return branch(name, 0.9, into=8.0, out=4.0)


def test_pressure_follows_the_formula():
    a = branch("a", 0.5, into=6.0, out=2.0, bandwidth=20.0)
    b = branch("b", 0.4, into=3.0, out=2.0, bandwidth=5.0)
    c = branch("c", 0.2, into=1.0, out=2.0, bandwidth=10.0)
    found = scores([a, b, c], alpha=0.3, beta=0.5)
    assert found["a"] == pytest.approx(0.3 * 0.5 + 0.7 * 1.0)
    assert found["b"] == pytest.approx((0.3 * 0.4 + 0.7 * 0.25) / 0.25**0.5)
    assert found["c"] == pytest.approx(0.3 * 0.2 / 0.5**0.5)  # its queue becomes shorter, so its Δ counts as 0


def test_a_branch_is_as_full_as_its_fullest_node_and_as_far_behind_as_all_together():
    long = Branch("long", (BranchNodeLoad(0.2, 5.0, 4.0), BranchNodeLoad(0.7, 4.0, 1.0)), 10.0)
    assert long.queue_use == 0.7
    assert long.surplus == 4.0


def test_a_larger_beta_gives_bandwidth_more_weight():
    wide, narrow = branch("wide", 0.4, bandwidth=16.0), branch("narrow", 0.2, bandwidth=4.0)
    low, high = (scores([wide, narrow], 0.3, beta) for beta in (0.3, 2.0))
    assert low["narrow"] < low["wide"]
    assert high["wide"] < high["narrow"]


def test_a_bandwidth_of_nothing_is_refused():
    with pytest.raises(ValueError, match="dead has 0"):
        scores([branch("dead", 0.1, bandwidth=0.0)], 0.3, 0.5)


def test_data_of_a_heavy_branch_goes_to_the_branch_with_least_pressure():
    policy = MigrationPolicy()
    (found,) = policy.decide([heavy("a"), branch("b", 0.4), branch("c", 0.1)])
    assert (found.heavy, found.light) == ("a", "c")
    assert found.reason == (
        "branch a uses 90% of a queue, more than 80%, and receives 8 B/s but processes 4 B/s; "
        "lowest score of b 0.120, c 0.030"
    )
    assert dict(policy.routes) == {"a": "c"}


@pytest.mark.parametrize("load", [(0.9, 4.0, 4.0), (0.8, 8.0, 4.0), (1.0, 0.0, 4.0)])
def test_a_full_queue_that_does_not_grow_and_one_that_is_not_full_are_not_heavy(load):
    assert MigrationPolicy().decide([branch("a", *load), branch("b", 0.0)]) == []


def test_any_node_makes_its_branch_heavy():
    long = Branch("long", (BranchNodeLoad(0.1, 5.0, 5.0), BranchNodeLoad(0.9, 5.0, 3.0)), 10.0)
    (found,) = MigrationPolicy().decide([long, branch("b", 0.3)])
    assert isinstance(found, Migrate)


def test_a_migrated_branch_is_restored_below_the_recovery_threshold_only():
    policy = MigrationPolicy()
    policy.decide([heavy("a"), branch("b", 0.1)])
    assert policy.decide([branch("a", 0.5), branch("b", 0.3)]) == []
    assert policy.decide([branch("a", 0.49), branch("b", 0.3)]) == [
        Restore("a", "branch a uses 49% of its queue, less than 50%")
    ]
    assert not policy.routes


def test_a_light_branch_that_became_heavy_is_replaced_and_migrated_itself():
    policy = MigrationPolicy()
    policy.decide([heavy("a"), branch("b", 0.1), branch("c", 0.3)])
    found = policy.decide([branch("a", 0.7), heavy("b"), branch("c", 0.3)])
    assert [(each.heavy, each.light) for each in found] == [("a", "c"), ("b", "c")]
    policy.validate()


def test_where_no_light_branch_is_left_data_goes_its_own_way_again():
    policy = MigrationPolicy()
    policy.decide([heavy("a"), branch("b", 0.1)])
    (found,) = policy.decide([branch("a", 0.7), heavy("b")])
    assert isinstance(found, Restore)
    assert "no branch can take its data" in found.reason
    assert not policy.routes, "b is not sent to a, which has not recovered"


def test_with_no_light_branch_nothing_is_suggested():
    policy = MigrationPolicy()
    assert policy.decide([heavy("a"), heavy("b"), heavy("c")]) == []
    assert policy.decide([heavy("a")]) == []
    assert policy.decide([]) == []


def test_a_branch_that_is_migrated_takes_nothing():
    policy = MigrationPolicy()
    policy.decide([heavy("a"), branch("b", 0.1), branch("c", 0.3)])
    (found,) = policy.decide([branch("a", 0.55), branch("b", 0.7, 5.0, 1.0), heavy("c")])
    assert (found.heavy, found.light) == ("c", "b"), "a has less pressure, but has not recovered"


def test_a_branch_that_stands_still_because_it_was_stopped_takes_nothing():
    policy = MigrationPolicy()
    stopped = branch("b", 1.0, into=0.0, out=4.0)
    assert policy.decide([heavy("a"), stopped]) == []


def test_branches_that_are_gone_are_forgotten():
    policy = MigrationPolicy()
    policy.decide([heavy("a"), branch("b", 0.1), branch("c", 0.3)])
    (moved,) = policy.decide([branch("a", 0.7), branch("c", 0.3)])
    assert (moved.heavy, moved.light) == ("a", "c")
    (restored,) = policy.decide([branch("c", 0.3)])
    assert restored == Restore("a", "branch a no longer exists")


def test_two_branches_of_one_name_are_refused():
    with pytest.raises(ValueError, match="must be unique"):
        MigrationPolicy().decide([branch("a", 0.1), branch("a", 0.2)])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"alpha": 1.0}, "migration: alpha must be between 0 and 1, not 1.0."),
        ({"beta": 0.0}, "migration: beta must be above 0, not 0.0."),
        ({"overload": 1.5}, "migration: overload must be between 0 and 1, not 1.5."),
        ({"recovery": 0.9}, "migration: recovery must be between 0 and the overload threshold 0.8, not 0.9."),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(SettingError) as caught:
        MigrationPolicy(**settings)
    assert str(caught.value).startswith(message)


def test_a_segment_is_where_it_began_and_how_long_it_became():
    ledger = SegmentLedger()
    ledger.open("a", "c", 100)
    ledger.extend("a", 20)
    ledger.extend("a", 5)
    assert ledger.segments == [Segment("a", "c", 100, 25)]
    assert ledger.close("a") == Segment("a", "c", 100, 25)
    assert ledger.close("a") is None
    ledger.open("a", "b", 125)  # another target, so another segment
    ledger.extend("a")
    ledger.open("a", "c", 126)
    assert ledger.segments == [Segment("a", "c", 100, 25), Segment("a", "b", 125, 1)]
    assert ledger.migrated == {"a": 26}
    assert ledger.count == 2


def test_segments_never_overlap():
    ledger = SegmentLedger()
    ledger.open("a", "c", 100)
    ledger.extend("a", 20)
    with pytest.raises(ValueError, match="offset 119 lies in an earlier segment of a, which ends at 120"):
        ledger.open("a", "c", 119)
    ledger.open("b", "c", 119)


def test_what_is_not_migrated_does_not_grow():
    with pytest.raises(ValueError, match="'a' has no open segment that can grow by 3 rows"):
        SegmentLedger().extend("a", 3)


def test_the_ledger_keeps_the_newest_and_all_totals():
    ledger = SegmentLedger(keep=3)
    for number in range(10):
        ledger.open("a", "b", 10 * number)
        ledger.extend("a", 4)
        ledger.validate()
    ledger.close("a")
    assert [segment.offset for segment in ledger.segments] == [70, 80, 90]
    assert (ledger.count, ledger.migrated) == (10, {"a": 40})
