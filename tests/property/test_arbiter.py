"""Policies that want to change the topology at random times: few changes, and every policy gets its turn."""

from __future__ import annotations

import itertools
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.control.arbiter import PRIORITY, Arbiter, ChangeSource

DAY = 86_400
HOUR = 3_600
MOST_PER_HOUR = 20
MOST_SWITCHES = 200
"""In a day, changes by another policy than the last change. Two policies that always answer each other come to an
hour's wait after six doublings each, and then change the topology twice an hour, together with the third one and
with what a policy gets after an hour of asking."""

wishes = st.fixed_dictionaries(
    {source: st.sampled_from([10, 30, 60, 130, 310, 700, 1_900]) | st.none() for source in PRIORITY}
)
"""Mean seconds between two wishes of each policy."""


def simulate(means, operator, seed, seconds=DAY, step=10):
    """Each policy asks in each step in which it has a wish, and acts if it may. Returns the changes, and the times
    at which each policy asked."""
    arbiter, chance = Arbiter(most_per_hour=MOST_PER_HOUR), random.Random(seed)
    changes, asked = [], {source: [] for source in PRIORITY}
    for now in range(0, seconds, step):
        if operator and chance.random() < step / operator:
            arbiter.changed(ChangeSource.OPERATOR, now)
        for source in chance.sample(PRIORITY, 3):
            mean = means[source]
            if mean is not None and chance.random() < step / mean:
                asked[source].append(now)
                if not arbiter.may_change(source, now):
                    arbiter.changed(source, now)
                    changes.append((now, source))
    return changes, asked


@settings(max_examples=30)
@given(wishes, st.sampled_from([0, 40, 5_000]), st.integers(0, 1_000))
def test_the_changes_of_a_day_are_bounded(means, operator, seed):
    changes, _ = simulate(means, operator, seed)
    sources = [source for _, source in changes]
    switches = sum(one is not other for one, other in itertools.pairwise(sources))
    assert switches <= MOST_SWITCHES
    for source in PRIORITY:
        times = [time for time, of in changes if of is source]
        assert len(times) <= 24 * MOST_PER_HOUR
        for earlier, later in zip(times, times[MOST_PER_HOUR:], strict=False):
            assert later - earlier >= HOUR


@settings(max_examples=30)
@given(wishes, st.sampled_from([0, 40, 5_000]), st.integers(0, 1_000))
def test_no_policy_that_goes_on_asking_is_kept_waiting_for_ever(means, operator, seed):
    """At most an hour, and then until it asks the next time."""
    changes, asked = simulate(means, operator, seed)
    for source in PRIORITY:
        if means[source] is None or means[source] > 60:
            continue  # it asks so rarely that its wish may be another one
        times = [0, *(time for time, of in changes if of is source), DAY]
        for earlier, later in itertools.pairwise(times):
            assert later - earlier <= HOUR + 600
        assert asked[source]


@settings(max_examples=30)
@given(st.sampled_from(PRIORITY), st.sampled_from(PRIORITY), st.integers(10, 300))
def test_two_policies_that_answer_each_other_come_to_rest(one, other, delay):
    """Each wants back what the other one has changed, ``delay`` seconds later."""
    if one is other:
        return
    arbiter, last, since, changes = Arbiter(), other, 0, []
    for now in range(0, DAY, 10):
        wants = one if last is other else other
        if now - since >= delay and not arbiter.may_change(wants, now):
            arbiter.changed(wants, now)
            changes.append(now)
            last, since = wants, now
    assert len(changes) <= 40
    assert sum(time >= DAY - 4 * HOUR for time in changes) <= 4
