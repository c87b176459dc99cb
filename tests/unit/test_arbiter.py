"""Which policy may change the topology, after what."""

from __future__ import annotations

import itertools

import pytest

from penstock.control.arbiter import PRIORITY, Arbiter, ChangeSource
from penstock.errors import SettingError

SCALING, REFIT, PLACEMENT, OPERATOR = (
    ChangeSource.SCALING,
    ChangeSource.REFIT,
    ChangeSource.PLACEMENT,
    ChangeSource.OPERATOR,
)


def after(*changes, **settings):
    arbiter = Arbiter(**settings)
    for source, time in changes:
        assert arbiter.may_change(source, time) == ""
        arbiter.changed(source, time)
    return arbiter


def allowed_at(arbiter, source, now):
    """The first whole second at which the source may act."""
    return next(time for time in range(now, now + 10_000) if not arbiter.may_change(source, time))


@pytest.mark.parametrize("source", ChangeSource)
def test_whoever_comes_first_may_act_at_once(source):
    assert Arbiter().may_change(source, 0.0) == ""


@pytest.mark.parametrize(
    ("first", "second", "waits"),
    [
        (SCALING, SCALING, 0),
        (SCALING, REFIT, 60),
        (SCALING, PLACEMENT, 60),
        (REFIT, SCALING, 0),
        (REFIT, REFIT, 0),
        (REFIT, PLACEMENT, 60),
        (PLACEMENT, SCALING, 0),
        (PLACEMENT, REFIT, 0),
        (OPERATOR, SCALING, 60),
        (OPERATOR, REFIT, 60),
        (OPERATOR, PLACEMENT, 60),
        (PLACEMENT, OPERATOR, 0),
    ],
)
def test_the_lower_priority_waits_until_its_samples_are_of_one_topology(first, second, waits):
    assert allowed_at(after((first, 1_000)), second, 1_000) == 1_000 + waits


def test_the_reason_is_a_clause_with_figures():
    assert after((SCALING, 100)).may_change(REFIT, 112) == (
        "scaling changed the topology 12 s ago, and refitting waits 60 s"
    )
    assert after((OPERATOR, 100)).may_change(PLACEMENT, 100) == (
        "the operator changed the topology 0 s ago, and placement waits 60 s"
    )


def test_the_wait_is_for_all_others_not_only_for_the_last():
    arbiter = after((SCALING, 100), (OPERATOR, 120), (OPERATOR, 125))
    assert allowed_at(arbiter, REFIT, 130) == 185
    arbiter = after((REFIT, 100), (SCALING, 140))
    assert allowed_at(arbiter, PLACEMENT, 150) == 200


# ---- policies that undo each other


def test_the_wait_of_a_policy_that_acts_again_after_another_one_doubles():
    arbiter, now, times = Arbiter(), 0, []
    for number in range(24):
        now = allowed_at(arbiter, (REFIT, SCALING)[number % 2], now)
        arbiter.changed((REFIT, SCALING)[number % 2], now)
        times.append(now)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert gaps[:9] == [0, 60, 0, 120, 120, 240, 240, 480, 480]
    assert gaps[-1] == 3_600


def test_a_policy_of_higher_priority_waits_too_once_there_is_a_conflict():
    arbiter = after((SCALING, 0), (REFIT, 60))
    assert arbiter.may_change(SCALING, 60) == ""
    arbiter.changed(SCALING, 100)
    arbiter.changed(REFIT, 400)
    assert arbiter.may_change(SCALING, 410) == "refitting changed the topology 10 s ago, and scaling waits 120 s"
    assert allowed_at(arbiter, SCALING, 410) == 520


def test_changes_far_from_each_other_are_no_conflict():
    arbiter = after((SCALING, 0), (REFIT, 700), (SCALING, 1_400), (REFIT, 2_100), (SCALING, 2_800))
    assert allowed_at(arbiter, REFIT, 2_800) == 2_860


def test_one_policy_alone_has_no_conflict_with_itself():
    arbiter = after(*((SCALING, 200 * number) for number in range(20)))
    assert arbiter.may_change(SCALING, 200 * 20) == ""
    assert allowed_at(arbiter, REFIT, 3_800) == 3_860


def test_after_a_quiet_time_the_wait_is_as_in_the_beginning():
    arbiter = after((SCALING, 0), (REFIT, 60), (SCALING, 100))
    arbiter.changed(SCALING, 100 + 3_600 + 120)
    assert arbiter._waits[SCALING] == 120
    arbiter.changed(SCALING, 100 + 3_600 + 121)
    arbiter.changed(REFIT, 4_000)
    assert arbiter.may_change(SCALING, 4_000) == ""


def test_the_operator_causes_no_conflict_and_is_never_refused():
    arbiter = Arbiter()
    for number in range(100):
        assert arbiter.may_change(OPERATOR, 10 * number) == ""
        arbiter.changed(OPERATOR, 10 * number)
    assert allowed_at(arbiter, SCALING, 1_000) == 1_050


# ---- limits


def test_a_policy_has_a_number_of_changes_per_hour():
    arbiter = after(*((SCALING, 10 * number) for number in range(20)))
    assert arbiter.may_change(SCALING, 200) == "scaling has changed the topology 20 times within an hour"
    assert allowed_at(arbiter, SCALING, 200) == 3_600
    assert arbiter.may_change(REFIT, 250) == ""


def test_a_policy_that_asks_for_an_hour_is_permitted_whatever_the_others_do():
    arbiter = Arbiter(most_per_hour=1_000)
    for now in range(0, 3_600, 10):
        arbiter.changed(SCALING, now)
        assert arbiter.may_change(PLACEMENT, now)
    arbiter.changed(SCALING, 3_600)
    assert arbiter.may_change(PLACEMENT, 3_600) == ""
    arbiter.changed(PLACEMENT, 3_600)
    arbiter.changed(SCALING, 3_610)
    assert arbiter.may_change(PLACEMENT, 3_610)


def test_a_wish_that_was_dropped_does_not_count_as_waiting():
    arbiter = after((SCALING, 0))
    assert arbiter.may_change(PLACEMENT, 10)
    arbiter.changed(SCALING, 3_600)
    assert arbiter.may_change(PLACEMENT, 3_620)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"settle": 0.0}, "the settling time must be more than 0 s, not 0.0"),
        ({"longest": 30.0}, "the longest wait must be at least the settling time, 60.0 s, not 30.0"),
        ({"calm": 60.0}, "the calm time must be at least 600.0 s, not 60.0"),
        ({"conflict": -1.0}, "the time between conflicts must be 0 s or more, not -1.0"),
        ({"most_per_hour": 0}, "the changes per hour must be at least 1, not 0"),
    ],
)
def test_impossible_settings_of_the_arbiter_are_refused(settings, message):
    with pytest.raises(SettingError, match=message):
        Arbiter(**settings)


def test_all_policies_have_a_priority():
    assert {*PRIORITY, OPERATOR} == set(ChangeSource)
