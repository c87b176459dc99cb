"""A plan for 10,000 executors on 1,000 nodes takes less than a second, and twice as many take twice as long."""

from __future__ import annotations

import gc
import statistics
import time

import pytest

from penstock.control.erdm import plan
from penstock.control.placement import Snapshot
from tests.placements import large

RUNS = 3


def seconds(executors, fill):
    """The median of a few runs, the snapshot's own checks included. CPU time: the plan is one thread that waits
    for nothing, and other processes of the machine are not its business."""
    drawn = large(executors, executors // 10)
    times = []
    for _ in range(RUNS):
        gc.collect()
        begun = time.process_time()
        plan(Snapshot(drawn.nodes, drawn.executors, drawn.streams), fill=fill)
        times.append(time.process_time() - begun)
    return statistics.median(times)


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
