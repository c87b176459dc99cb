"""Runs one measurement of the reproduction that needs no Spark. Those on Spark are parts of ``penstock bench``."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping

from benchmarks.harness import Results
from benchmarks.reproduction.acker import measure_acker
from benchmarks.reproduction.branch_sim import measure_grid, measure_load, measure_sizes
from benchmarks.reproduction.cluster_sim import PAIRS, measure_cluster, measure_critical
from benchmarks.reproduction.flow_local import measure_flow
from benchmarks.reproduction.groupings import measure_groupings
from penstock.sim.storm_benchmarks import BENCHMARKS

PARTS: Mapping[str, Callable[[Results, argparse.Namespace], None]] = {
    "groupings": measure_groupings,
    "acker": measure_acker,
    "sizes": measure_sizes,
    "grid": measure_grid,
    "load": measure_load,
    "critical": measure_critical,
    "flow": measure_flow,
    **dict.fromkeys(BENCHMARKS, measure_cluster),
    **dict.fromkeys([f"{name}{PAIRS}" for name in BENCHMARKS], measure_cluster),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", help="write rows, bars and curves to this file")
    options = parser.parse_args()
    results = Results(options.part)
    PARTS[options.part](results, options)
    return results.finish(options)


if __name__ == "__main__":
    raise SystemExit(main())
