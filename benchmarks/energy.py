"""Placement by ERDM (*Pu 2021*, section 4): savings on a cluster of four nodes, planning time, savings in the
simulator."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

from benchmarks.energy_auto import RATES, measure_energy_auto
from benchmarks.energy_calibration import measure_energy_calibration
from benchmarks.energy_cluster import measure_energy_cluster, measure_energy_dedup, measure_energy_moves
from benchmarks.energy_plan import measure_energy_plan
from benchmarks.energy_sim import MEASURES
from benchmarks.energy_sim import PARTS as SIM_PARTS
from benchmarks.harness import Results, run_parts

PARTS: dict[str, Callable[[Results, argparse.Namespace], None]] = {
    "auto": measure_energy_auto,
    "cluster": measure_energy_cluster,
    "moves": measure_energy_moves,
    "dedup": measure_energy_dedup,
    "calibrate": measure_energy_calibration,
    "plan": measure_energy_plan,
    **dict(zip(SIM_PARTS, MEASURES, strict=True)),
}


AUTO: dict[str, Callable[[Results, argparse.Namespace], None]] = {
    f"auto-{name}": partial(measure_energy_auto, names=[name]) for name in RATES
}
"""One benchmark of the part ``auto`` each."""


def main(options: argparse.Namespace) -> int:
    """``penstock bench energy``"""
    return run_parts("energy", {**PARTS, **AUTO} if options.only else PARTS, options)
