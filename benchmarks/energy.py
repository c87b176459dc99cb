"""Placement by ERDM (C §4): what it saves in the simulator. Parts on a cluster of real workers come beside it."""

from __future__ import annotations

import argparse

from benchmarks.energy_sim import measure_energy_sim, measure_energy_sim_scale
from benchmarks.harness import run_parts

PARTS = ("sim", "sim-scale")


def main(options: argparse.Namespace) -> int:
    """``penstock bench energy``"""
    measures = (measure_energy_sim, measure_energy_sim_scale)
    return run_parts("energy", dict(zip(PARTS, measures, strict=True)), options)
