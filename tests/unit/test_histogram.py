"""The histogram of durations."""

import dataclasses
import random

import msgspec
import pytest

from penstock.metrics.histogram import Histogram
from penstock.metrics.stats import TaskStats


def recorded(*seconds):
    histogram = Histogram()
    for value in seconds:
        histogram.record(value)
    return histogram


def test_nothing_recorded():
    assert Histogram().percentile(0.5) is None


@pytest.mark.parametrize("seconds", [2e-6, 1e-5, 0.00123, 0.1, 1.0, 1.0905, 60, 86400])
def test_one_value_is_found_within_five_percent(seconds):
    assert recorded(seconds).percentile(0.5) == pytest.approx(seconds, rel=0.05)


@pytest.mark.parametrize("seconds", [0.0, -1.0, 1e-9, 1e-6])
def test_the_shortest_times_share_the_first_bucket(seconds):
    assert recorded(seconds).percentile(0.5) == pytest.approx(1e-6, rel=0.05)


@pytest.mark.parametrize("share", [0.01, 0.5, 0.9, 0.99, 1.0])
def test_percentiles_of_many_values(share):
    draw = random.Random(3)
    values = sorted(draw.lognormvariate(-6, 2) for _ in range(2000))
    true = values[max(0, round(share * len(values)) - 1)]
    assert recorded(*values).percentile(share) == pytest.approx(true, rel=0.051)


def test_many_at_once_weigh_as_much_as_one_by_one():
    at_once = recorded(1.0)
    at_once.record(0.001, 9)
    assert at_once.counts == recorded(1.0, *[0.001] * 9).counts
    assert at_once.percentile(0.9) == pytest.approx(0.001, rel=0.05)
    assert at_once.percentile(0.91) == pytest.approx(1.0, rel=0.05)


def test_plus_and_minus_leave_their_parts_alone():
    one, other = recorded(0.1, 0.2), recorded(0.2, 5)
    both = one.plus(other)
    assert sum(both.counts.values()) == 4
    assert both.minus(other).counts == one.counts
    assert (one.counts, other.counts) == (recorded(0.1, 0.2).counts, recorded(0.2, 5).counts)


def test_minus_of_an_earlier_copy_is_what_came_since():
    histogram = recorded(*[0.001] * 100)
    earlier = Histogram(histogram.counts)
    histogram.record(1.0)
    assert histogram.minus(earlier).percentile(0.5) == pytest.approx(1.0, rel=0.05)


def test_stats_travel_as_json():
    plain = [spec for spec in dataclasses.fields(TaskStats) if spec.name not in ("latency", "lag")]
    # none equals a default
    values = {spec.name: type(spec.default)(number + 1) for number, spec in enumerate(plain)}
    stats = TaskStats(**values, latency=recorded(0.1, 0.1, 3), lag={"orders/0": 7})
    back = msgspec.msgpack.decode(msgspec.msgpack.encode(stats), type=TaskStats)
    assert back.latency.counts == stats.latency.counts
    back.latency = stats.latency
    assert back == stats


def test_what_lies_above_a_value():
    histogram = recorded(0.01, 1.0, 4.9, 5.6, 5.6, 60.0)
    assert [histogram.above(seconds) for seconds in (0.0, 0.005, 0.5, 5.0, 30.0, 100.0)] == [6, 6, 5, 3, 1, 0]


def test_above_leaves_out_no_more_than_nine_percent():
    for number in range(1, 400):
        bound = 0.001 * 1.03**number
        assert recorded(bound * 1.0906).above(bound) == 1
        assert recorded(bound * 0.9999).above(bound) == 0
