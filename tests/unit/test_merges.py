"""The partial and the result of each merge; ``tests/property/test_merges.py`` checks the algebraic laws."""

import math

import pytest

from penstock import TopologyError
from penstock.aggregates import Count, CountOf, Distinct, Max, Mean, Merge, Min, Sum, TopK, Variance


def test_partials_are_small_plain_values():
    assert Count().total(["a", "b"]) == 2
    assert CountOf("action", "buy").total(["buy", "view", "buy"]) == 2
    assert Sum("x").total([1, 2]) == 3
    assert Sum("x").total([0.5, 2]) == (2, 0.5)
    assert Mean("x").total([1, 2, 6]) == (9, 3)
    assert Variance("x").total([1, 2, 6]) == (3, 3.0, 14.0)
    assert (Min("x").total([2, 1]), Max("x").total([2, 3])) == (1, 3)
    assert Distinct("x").total("abca") == {"a", "b", "c"}
    assert TopK("x", 1).total("abca") == {"a": 2, "b": 1, "c": 1}


def test_results_of_nothing():
    merges = (
        Count(),
        CountOf("x", 1),
        Sum("x"),
        Mean("x"),
        Variance("x"),
        Min("x"),
        Max("x"),
        Distinct("x"),
        TopK("x"),
    )
    assert [merge.result(merge.zero()) for merge in merges] == [0, 0, 0, None, None, None, None, 0, []]
    assert [merge.total([]) for merge in merges] == [merge.zero() for merge in merges]


def test_the_mean_of_means_is_not_the_mean():
    """*Sun 2022*, Eq. 6 and 7: a partial contains its length."""
    mean = Mean("x")
    partial = mean.merge(mean.total([1, 1, 1, 1]), mean.total([6]))
    assert mean.result(partial) == 2.0


def test_a_sum_of_floats_loses_nothing_on_the_way():
    total = Sum("x")
    partial = total.zero()
    for value in [1e100, 1.0, -1e100, 0.1, 1e-20] * 10:
        partial = total.add(partial, value)
    assert total.result(partial) == math.fsum([1.0, 0.1, 1e-20] * 10)
    assert sum([1e100, 1.0, -1e100, 0.1, 1e-20] * 10) != total.result(partial)


def test_a_sum_beyond_the_range_of_floats_is_infinite():
    total = Sum("x")
    assert total.result(total.total([1.7e308, 1.7e308])) == math.inf
    assert total.result(total.merge(total.total([1.7e308]), total.total([1.7e308]))) == math.inf
    assert math.isnan(total.result(total.total([math.inf, -math.inf])))


def test_equally_frequent_values_have_a_fixed_order():
    top = TopK("x", 3)
    assert top.result(top.total("cbadd")) == top.result(top.total("dabcd")) == [("d", 2), ("a", 1), ("b", 1)]
    unordered = [2, "b", 1, "a", None]
    results = [top.result(top.total(values)) for values in (unordered, unordered[::-1])]
    assert results[0] == results[1] == [("a", 1), ("b", 1), (1, 1)], "by their repr"


def test_a_top_of_none_is_refused():
    with pytest.raises(TopologyError, match=r"TopK\('x', 0\): k must be a whole number of at least 1, not 0."):
        TopK("x", 0)


def test_a_merge_of_ones_own_needs_four_methods():
    class Longest(Merge[str, int]):
        def zero(self):
            return ""

        def add(self, partial, value):
            return max(partial, value, key=lambda text: (len(text), text))

        merge = add

        def result(self, partial):
            return len(partial)

    longest = Longest("word")
    assert longest.field == "word"
    assert longest.result(longest.merge(longest.total(["a", "bbb"]), longest.total(["cc"]))) == 3
