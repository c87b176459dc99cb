"""Planning time of ERDM, and its growth with the size of the cluster, which should be linear."""

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
"""Share of the limits that may be used. With it a third of the executors move; without it nearly all find no room.
The former takes longer."""
RUNS = 3


def measure_energy_plan(results: Results, options: argparse.Namespace) -> None:
    times: dict[int, float] = {}
    for executors in SIZES[:3] if options.quick else SIZES:
        drawn = large(executors, executors // 10)
        times[executors], found = plan_seconds(drawn, FILL)
        results.row(
            what="planning time of ERDM",
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
    results.bar("erdm.plan_growth", growth, f"× time / × size, {least:,} to {most:,} executors (1: linear)")


def plan_seconds(drawn: PlacementSnapshot, fill: float | None, runs: int = RUNS) -> tuple[float, PlacementPlan]:
    """The median CPU time of a few runs, including the checks of the snapshot. CPU time, because planning is one
    thread that never waits, and other processes of the machine should not count."""
    times = []
    for _ in range(runs):
        gc.collect()
        begun = time.process_time()
        found = plan(PlacementSnapshot(drawn.nodes, drawn.executors, drawn.streams), fill=fill)
        times.append(time.process_time() - begun)
    return statistics.median(times), found
