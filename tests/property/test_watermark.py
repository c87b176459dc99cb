"""The low-water mark, compared with a set of offsets in flight."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.connectors.watermark import LowWater

steps = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 5), st.integers(1, 3000)),
        st.tuples(st.just("ack"), st.integers(0, 2**32), st.floats(0, 1)),
        st.tuples(st.just("ack_oldest"), st.integers(0, 2**32), st.floats(0, 1)),
    ),
    max_size=40,
)


@given(start=st.integers(0, 2**40), steps=steps)
def test_the_mark_is_the_lowest_offset_under_way(start, steps):
    low, under_way, end = LowWater(start), set(), start
    for kind, number, amount in steps:
        if kind == "add":
            end += number  # a gap
            low.add(end, amount)
            under_way.update(range(end, end + amount))
            end += amount
        elif under_way:
            count = max(1, int(amount * len(under_way)))
            offsets = np.array(sorted(under_way), np.int64)
            if kind == "ack":
                offsets = np.random.default_rng(number).permutation(offsets)
            low.ack(offsets[:count])
            under_way.difference_update(offsets[:count].tolist())
        assert low.mark == (min(under_way) if under_way else end)
        assert low.end == end


def test_acks_that_come_twice_change_nothing():
    low = LowWater(10)
    low.add(10, 5)
    low.ack(np.array([10, 11, 10]))
    low.ack(np.array([10, 13]))
    assert low.mark == 12


def test_acks_of_nothing_change_nothing():
    low = LowWater(0)
    low.ack(np.array([], np.int64))
    assert low.mark == 0


def test_a_stuck_offset_holds_the_mark_while_others_pass():
    low = LowWater(0)
    for first in range(0, 1_000_000, 1000):
        low.add(first, 1000)
        low.ack(np.arange(first + (first == 0), first + 1000))
    assert low.mark == 0
    low.ack(np.array([0]))
    assert low.mark == 1_000_000


def test_offsets_must_ascend():
    low = LowWater(0)
    low.add(0, 5)
    with pytest.raises(ValueError, match="ascending"):
        low.add(4, 1)


def test_only_added_offsets_are_acked():
    low = LowWater(0)
    low.add(0, 5)
    with pytest.raises(ValueError, match="not below 5"):
        low.ack(np.array([5]))
