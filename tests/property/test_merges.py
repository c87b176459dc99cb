"""However values are split into partials and partials are merged, the result equals the sequential one."""

import copy
import functools
import math
import pickle
import random
import statistics
from collections import Counter as Tally
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.aggregates import Count, CountOf, Distinct, Max, Mean, Min, Reduce, Sum, TopK, Variance
from penstock.aggregates.rows import reduce_rows
from penstock.columns import to_column, to_values
from penstock.frames import codec
from penstock.frames.header import Header, Kind, unpack
from penstock.testing import CaptureBolt, FeederSpout, LocalRunner
from penstock.topology.builder import TopologyBuilder

ints = st.integers(-(2**70), 2**70)
floats = st.floats(-1e300, 1e300)
words = st.text("ab", max_size=2)
mixed = st.one_of(st.integers(-3, 3), words)


def true_sum(values):
    if not any(isinstance(value, float) for value in values):
        return sum(values)
    total = sum(map(Fraction, values))
    return float(total)  # rounded once


def spread(values):
    return float(statistics.pvariance(map(Fraction, values))) if values else None


def most_frequent(values):
    return sorted(Tally(values).items(), key=lambda item: (-item[1], item[0]))[:3]


CASES = {
    "count": (Count(), ints, len),
    "count of a value": (CountOf("x", "a"), words, lambda values: values.count("a")),
    "sum of ints": (Sum("x"), ints, sum),
    "sum of floats": (Sum("x"), floats, true_sum),
    "sum of both": (Sum("x"), st.one_of(st.integers(-(2**40), 2**40), st.floats(-1e9, 1e9)), true_sum),
    "mean of ints": (Mean("x"), ints, lambda values: sum(values) / len(values) if values else None),
    "mean of floats": (Mean("x"), floats, lambda values: true_sum(values) / len(values) if values else None),
    "variance": (Variance("x"), st.floats(-1e6, 1e6).map(lambda x: round(x, 3)), spread),
    "least": (Min("x"), floats, lambda values: min(values, default=None)),
    "least word": (Min("x"), words, lambda values: min(values, default=None)),
    "largest": (Max("x"), ints, lambda values: max(values, default=None)),
    "distinct": (Distinct("x"), mixed, lambda values: len(set(values))),
    "top": (TopK("x", 3), words, most_frequent),
}


def is_same(name, result, expected):
    """Equal to the last bit, except for the merge that documents a tolerance."""
    if name != "variance" or expected is None:
        return result == expected and type(result) is type(expected)
    return math.isclose(result, expected, rel_tol=1e-9, abs_tol=1e-9)  # values are up to 1e6, squares 1e12


def by_pickle(partials):
    return pickle.loads(pickle.dumps(partials))


def by_frame(partials):
    """A value as an untyped field transfers it between workers."""
    batch = pa.RecordBatch.from_arrays([to_column(partials, None)], names=["part"])
    frame = codec.encode(Header(Kind.DATA, 0, 0, 0, 0), batch, None)
    return to_values(codec.decode(unpack(frame), pa.py_buffer(frame), None).column(0))


@st.composite
def splits(draw, values):
    """The values in another order, divided into lists, some of them empty."""
    values = draw(st.permutations(values))
    cuts = sorted(draw(st.lists(st.integers(0, len(values)), max_size=6)))
    return [values[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(values)], strict=True)]


@pytest.mark.parametrize("name", CASES)
@given(st.data())
def test_any_split_in_any_order_gives_the_sequential_result(name, data):
    merge, values, oracle = CASES[name]
    values = data.draw(st.lists(values, max_size=30))
    partials = []
    for piece in data.draw(splits(values)):
        one_by_one = data.draw(st.booleans())
        partials.append(functools.reduce(merge.add, piece, merge.zero()) if one_by_one else merge.total(piece))
    partials = data.draw(st.sampled_from([by_pickle, by_frame]))(partials)
    while len(partials) > 1:
        first = partials.pop(data.draw(st.integers(0, len(partials) - 1)))
        second = data.draw(st.integers(0, len(partials) - 1))
        partials[second] = merge.merge(partials[second], first)
    assert is_same(name, merge.result(partials[0]), oracle(values))
    sequential = functools.reduce(merge.add, values, merge.zero())
    assert is_same(name, merge.result(sequential), oracle(values))


@pytest.mark.parametrize("name", CASES)
@given(st.data())
def test_the_laws_of_a_merge(name, data):
    """Zero is neutral, merging is associative and commutative, and only the first argument may change."""
    merge, values, _ = CASES[name]
    some = st.lists(values, max_size=6).map(merge.total)
    a, b, c = data.draw(some), data.draw(some), data.draw(some)

    def joined(one, other):
        kept = copy.deepcopy(other)
        result = merge.merge(copy.deepcopy(one), other)
        assert other == kept
        return result

    def same(one, other):
        kept = copy.deepcopy(one)
        assert is_same(name, merge.result(one), merge.result(other))
        assert one == kept

    same(joined(a, merge.zero()), a)
    same(joined(merge.zero(), a), a)
    same(joined(a, b), joined(b, a))
    same(joined(joined(a, b), c), joined(a, joined(b, c)))


@given(st.lists(st.floats(), max_size=12), st.data())
def test_sums_of_anything_that_is_a_float(values, data):
    """Infinities and sums beyond the range of a float give the sequential result; nothing raises."""
    merge = Sum("x")
    partials = [merge.total(piece) for piece in data.draw(splits(values))]
    result = merge.result(functools.reduce(merge.merge, partials, merge.zero()))
    if any(math.isnan(value) for value in values) or {math.inf, -math.inf} <= set(values):
        assert math.isnan(result)
    elif math.inf in values or -math.inf in values:
        assert result == sum(value for value in values if math.isinf(value))
    elif sum(map(abs, values)) < math.inf:
        assert result == true_sum(values)


# -- batches by key

keys = st.one_of(
    st.lists(words, max_size=30),
    st.lists(st.one_of(st.none(), st.integers(-2, 2)), max_size=30),
    st.lists(st.one_of(st.integers(-2, 2), words, st.tuples(st.booleans())), max_size=30),
)


@given(keys, st.data())
@example([], None)
def test_rows_are_reduced_by_key(first, data):
    rows = len(first)
    second = data.draw(st.lists(st.booleans(), min_size=rows, max_size=rows)) if rows else []
    numbers = st.one_of(st.none(), st.floats(-1e9, 1e9), st.just(math.nan), st.integers(-9, 9))
    values = data.draw(st.lists(numbers, min_size=rows, max_size=rows)) if rows else []
    columns = [to_column(column, None) for column in (first, second, values)]
    batch = pa.RecordBatch.from_arrays(columns, names=["a", "b", "x"])
    merges = {"count": Count(), "values": Count("x"), "sum": Sum("x")}
    expected = {}
    for a, b, x in zip(first, second, values, strict=True):
        count, present = expected.setdefault((a, b), ([], []))
        count.append(x)
        if x is not None and x == x:
            present.append(x)
    a, b, *partials = reduce_rows(batch, columns[:2], merges)
    found = dict(zip(zip(to_values(a), to_values(b), strict=True), zip(*partials, strict=True), strict=True))
    assert len(a) == len(found), "one row a key"
    assert found == {
        key: (len(every), len(present), Sum("x").total(present)) for key, (every, present) in expected.items()
    }


# -- windows

WINDOW, SLIDE, LATENESS = 6, 2, 3
END = 1_000  # a last tuple, long after the others: all windows before it are complete


@settings(max_examples=40)
@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 40)), max_size=40), st.randoms())
def test_windows_hold_what_happened_in_them(events, random):
    """The result does not depend on the order of tuples that are not too late."""
    events = sorted(events, key=lambda event: (event[1] + random.randint(0, LATENESS), -event[1]))
    expected = Tally()
    for word, time in events:
        for end in range(SLIDE * (time // SLIDE + 1), time + WINDOW + 1, SLIDE):
            expected[word, end] += 1
    counts = Reduce("word", count=Count()).window("time", WINDOW, SLIDE, LATENESS)
    builder = TopologyBuilder()
    builder.set_spout("events", FeederSpout("word", "time"))
    builder.set_bolt("count", counts.partials()).shuffle_grouping("events")
    builder.set_bolt("total", counts.merged(), 2).fields_grouping("count", "word")
    builder.set_bolt("capture", CaptureBolt()).global_grouping("total")
    builder.set_bolt("late", CaptureBolt()).global_grouping("total", stream="late")
    runner = LocalRunner(builder.build("t"))
    events += [("a", END), ("b", END)]
    while events:  # in separate batches
        size = random.randint(1, 5)
        runner.feed("events", events[:size])
        runner.run_until_idle()
        del events[:size]
    assert runner.errors == []
    assert runner.captured("late") == []
    results = runner.captured("capture")
    assert {(tup.word, tup.window_end): tup.count for tup in results} == expected
    assert len(results) == len(expected), "each window once"
    kept = [key for bolt in runner.component("total") for key in bolt.partials["count"]]
    assert sorted(kept) == [(END // SLIDE, "a"), (END // SLIDE, "b")], "windows that are over leave nothing behind"


@pytest.mark.parametrize(
    ("values", "total"),
    [
        ([2**53 + 1, 1.0], 2.0**53 + 2),
        ([2**53 + 1, 0.5, -(2**53)], 1.5),
        ([2**60 + 1, 1.0, -(2**60)], 2.0),
        ([10**400, -(10**400), 0.25], 0.25),
        ([1e308, 1e308, -1e308], 1e308),
        ([1e308, 1e308, 1e308, -1e308, -1e308, 7.0, -1e308], 7.0),
        ([1e308, 1e308], math.inf),
        ([Decimal("0.1"), 10**40, -(10**40)], Decimal("0.1")),
        ([np.int64(2**63 - 1), np.int64(1)], 2**63),
        ([np.float32(0.5), 2**53 + 1, -(2**53)], 1.5),
    ],
)
def test_large_numbers_are_summed_exactly_in_any_order(values, total):
    """Regression: an integer beyond 2**53 was converted to a float before floats were added; Decimals and numpy
    numbers were rounded or overflowed."""
    draw = random.Random(1)
    for merge, expected in ((Sum("x"), total), (Mean("x"), None)):
        results = set()
        for _ in range(30):
            shuffled = draw.sample(values, len(values))
            cut = draw.randrange(len(values) + 1)
            one = merge.total(shuffled[:cut])
            other = merge.zero()
            for value in shuffled[cut:]:
                other = merge.add(other, value)
            results.add(merge.result(merge.merge(one, other)))
        assert len(results) == 1, merge
        assert expected is None or results == {expected}
    exact = sum(map(Fraction, (value.item() if isinstance(value, np.generic) else value for value in values)))
    if total != math.inf and not isinstance(total, Decimal):
        assert results == {float(exact / len(values))}
