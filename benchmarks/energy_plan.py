"""How long ERDM plans, and how that grows with the cluster (SPEC 6.4: O(n))."""

from __future__ import annotations

import argparse
import gc
import statistics
import time

from benchmarks.harness import Results, say
from benchmarks.large_cluster import large
from penstock.control.erdm import PlacementPlan, plan
from penstock.control.placement import PlacementSnapshot

SIZES = (2_500, 5_000, 10_000, 20_000)
"""Executors, on a tenth as many nodes."""
JUDGED = 10_000
FILL = 0.95
"""Without it nearly all executors find no room, with it a third of them move: the longer of both."""
RUNS = 3


def measure_energy_plan(results: Results, options: argparse.Namespace) -> None:
    times: dict[int, float] = {}
    for executors in SIZES[:3] if options.quick else SIZES:
        drawn = large(executors, executors // 10)
        times[executors], found = plan_seconds(drawn, FILL)
        results.row(
            what="ERDM's plan",
            executors=executors,
            nodes=len(drawn.nodes),
            streams=len(drawn.streams),
            moves=len(found.moves),
            released=len(found.releases),
            **{"CPU s": round(times[executors], 3)},
        )
        say(f"  {executors:,} executors: {times[executors]:.3f} s")
    results.bar(
        "erdm.plan_s", times[JUDGED], f"CPU s for {JUDGED:,} executors on {JUDGED // 10:,} nodes (below 1)"
    )
    least, most = min(times), max(times)
    growth = times[most] / times[least] / (most / least)
    results.bar(
        "erdm.plan_growth", growth, f"× the time over × the size, {least:,} to {most:,} executors (1: a line)"
    )


def plan_seconds(drawn: PlacementSnapshot, fill: float | None, runs: int = RUNS) -> tuple[float, PlacementPlan]:
    """The median of a few runs, the snapshot's own checks included. CPU time: the plan is one thread that waits
    for nothing, and other processes of the machine are not its business."""
    times = []
    for _ in range(runs):
        gc.collect()
        begun = time.process_time()
        found = plan(PlacementSnapshot(drawn.nodes, drawn.executors, drawn.streams), fill=fill)
        times.append(time.process_time() - begun)
    return statistics.median(times), found
