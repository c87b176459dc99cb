"""A plan for 10,000 executors on 1,000 nodes takes less than a second, and twice as many take twice as long."""

from __future__ import annotations

import argparse

import pytest

from benchmarks.energy_plan import measure_energy_plan, plan_seconds
from benchmarks.harness import Results
from benchmarks.large_cluster import large
from penstock.control.erdm import plan


def seconds(executors, fill):
    return plan_seconds(large(executors, executors // 10), fill)[0]


@pytest.mark.parametrize("fill", [None, 0.95], ids=["one path", "widened"])
def test_a_large_cluster_is_planned_within_a_second_and_time_grows_in_a_straight_line(fill):
    """Without ``fill`` nearly all executors find no room, with it a third of them move. A straight line has the
    ratios 2 and 10, a parabola 4 and 100; the bounds leave room for caches, which small cases fit into and large
    do not."""
    small, middle, big = (seconds(executors, fill) for executors in (1_000, 10_000, 20_000))
    assert middle < 1.0
    assert big / middle < 3.5
    assert middle / small < 30


def test_what_is_measured_is_a_plan_that_does_something():
    found = plan(large(1_000, 100), fill=0.95)
    assert len(found.releases) > 20
    assert len(found.moves) > 200


def test_the_benchmark_tells_how_long_a_plan_takes_and_how_that_grows():
    results = Results("energy")
    measure_energy_plan(results, argparse.Namespace(quick=True))
    assert [row["executors"] for row in results.rows] == [2_500, 5_000, 10_000]
    assert all(row["moves"] > row["executors"] / 5 for row in results.rows)
    bars = {bar["name"]: bar["value"] for bar in results.bars}
    assert bars["erdm.plan_s"] < 1.0
    assert bars["erdm.plan_growth"] < 1.75
