"""Bloom filters never miss a key they contain, and report others at most at the requested rate."""

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.bolts.bloom import BloomFilter, BloomShape
from penstock.bolts.recent_keys import RecentKeys, join

keys = st.lists(st.integers(0, 2**64 - 1), max_size=200, unique=True).map(lambda found: np.array(found, np.uint64))
SIX_SIGMA = 6  # one test in a billion would fail by chance; the seeds are fixed, so the result does not vary


def draw(count, seed, tasks=1):
    """Hashes of different keys, as a fields grouping sends them to the first of ``tasks`` tasks."""
    hashes = np.random.default_rng(seed).integers(0, 2**64, count, dtype=np.uint64)
    return np.unique(hashes // np.uint64(tasks) * np.uint64(tasks))


def most(rate, trials):
    """An upper bound of a count of rare events: the mean plus six standard deviations of a binomial
    distribution."""
    return trials * rate + SIX_SIGMA * math.sqrt(trials * rate * (1 - rate))


@given(st.integers(1, 100_000), st.floats(1e-9, 0.5))
@example(10_000, 0.36)  # log2 is 1.47, but two probes per key are better than one
def test_a_shape_is_large_enough_and_hardly_larger(count, rate):
    shape = BloomShape.fit(count, rate)
    assert shape.bits % 8 == 0
    assert shape.error_rate(count) <= rate * (1 + 1e-9)
    assert shape.bits <= max(64, 1.45 * count * math.log2(1 / rate) * 1.04 + 8), (
        "4 % beyond the textbook's n·log2(1/p)/ln 2"
    )


@given(keys, keys)
def test_what_was_added_is_held_before_and_after_a_copy_and_a_join(some, more):
    shape = BloomShape.fit(50, 0.01)
    one, other = BloomFilter(shape), BloomFilter(shape)
    one.add(some)
    other.add(more)
    assert BloomFilter.thaw(one.freeze()).holds(some).all()
    both = one.joined(other)
    assert both.holds(some).all()
    assert both.holds(more).all()
    assert max(len(some), len(more)) <= both.added <= len(some) + len(more)


@pytest.mark.parametrize("tasks", [1, 8, 1024], ids="of {} tasks".format)
@pytest.mark.parametrize(("count", "rate"), [(20_000, 0.1), (20_000, 0.01), (50_000, 0.001)])
def test_a_full_filter_is_wrong_as_often_as_was_asked_for(count, rate, tasks):
    drawn = draw(count + 200_000, 1, tasks)
    filter = BloomFilter(BloomShape.fit(count, rate))
    filter.add(drawn[::5][:count])
    strangers = np.setdiff1d(drawn, drawn[::5])
    wrong, trials = int(filter.holds(strangers).sum()), len(strangers)
    share = filter.added / count
    assert share > 0.85
    assert wrong <= most(rate, trials)
    assert filter.fill == pytest.approx(
        1 - math.exp(-filter.shape.probes * filter.added / filter.shape.bits), rel=0.02
    )
    assert wrong >= 0.5 * trials * filter.error_rate, "the estimate tells of what happens"


@given(st.lists(st.lists(st.integers(0, 60), max_size=30), max_size=20), st.sets(st.integers(0, 19)))
def test_a_memory_drops_exactly_what_its_two_generations_hold(columns, rotations):
    """Compares with sets, at an error rate at which none of these few keys is mistaken."""
    memory, now, before = RecentKeys(25, 1e-9), set(), set()
    for number, column in enumerate(columns):
        if number in rotations:
            memory.rotate()
            now, before = set(), now
        hashes = np.array(column, np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        known, expected = now | before, []
        fresh = []
        for key in column:
            expected.append(key not in known)
            if key not in known:
                known.add(key)
                fresh.append(key)
        for key in fresh:
            now.add(key)
            if len(now) == 25:
                now, before = set(), now
        assert memory.new(hashes).tolist() == expected
        assert memory.keys == len(now) + len(before)


def test_the_error_rate_holds_however_many_keys_come():
    memory = RecentKeys(20_000, 0.01)
    drawn = draw(400_000, 2)
    np.random.default_rng(3).shuffle(drawn)
    dropped = sum(int((~memory.new(column)).sum()) for column in np.array_split(drawn, 100))
    assert 0 < dropped <= most(0.01, len(drawn))
    assert memory.early == pytest.approx(len(drawn) / 20_000, abs=1)
    assert memory.bytes == 2 * memory.shape.bytes
    assert memory.error_rate <= 0.01


def test_memories_of_two_tasks_become_one():
    one, other = RecentKeys(1_000, 0.01), RecentKeys(1_000, 0.01)
    some, more = draw(400, 4), draw(900, 5)
    one.new(some)
    other.new(more)
    kept = join(1_000, one.freeze_now(), other.freeze_now())
    assert len(kept) == 2, "1,300 keys are more than one filter is made for"
    assert len(join(1_000, kept, kept)) == 2, "the same again adds nothing"
    half = RecentKeys(1_000, 0.01)
    half.new(more[:500])
    assert len(join(1_000, one.freeze_now(), half.freeze_now())) == 1
    both = RecentKeys(1_000, 0.01)
    both.thaw(kept, ())
    assert not both.new(np.concatenate([some, more])).any()
    assert both.error_rate <= 0.01
    strangers = draw(100_000, 6)
    assert sum(int(each.holds(strangers).sum()) for each in both._filters()) <= most(0.01, len(strangers))


def test_a_memory_goes_on_with_what_one_of_another_size_saw():
    small, large = RecentKeys(1_000, 0.01), RecentKeys(50_000, 0.0001)
    keys = draw(900, 7)
    small.new(keys)
    large.thaw(small.freeze_now(), ())
    assert not large.new(keys).any()
    large.new(draw(10_000, 8))
    large.rotate()
    assert not large.new(keys).any()
    large.rotate()
    assert large.new(keys).all(), "forgotten with its generation"
