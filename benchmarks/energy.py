"""Placement by ERDM (C §4): how long it plans, what it saves in the simulator. Parts on a cluster of real workers
come beside it."""

from __future__ import annotations

import argparse

from benchmarks.energy_plan import measure_energy_plan
from benchmarks.energy_sim import MEASURES
from benchmarks.energy_sim import PARTS as SIM_PARTS
from benchmarks.harness import run_parts

PARTS = ("plan", *SIM_PARTS)


def main(options: argparse.Namespace) -> int:
    """``penstock bench energy``"""
    return run_parts("energy", dict(zip(PARTS, (measure_energy_plan, *MEASURES), strict=True)), options)
