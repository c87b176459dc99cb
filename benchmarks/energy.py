"""Placement by ERDM (C §4): what it saves on a cluster of four nodes, and in the simulator."""

from __future__ import annotations

import argparse

from benchmarks.energy_cluster import measure_energy_cluster, measure_energy_dedup, measure_energy_moves
from benchmarks.energy_sim import measure_energy_sim, measure_energy_sim_scale
from benchmarks.harness import run_parts

PARTS = {
    "cluster": measure_energy_cluster,
    "moves": measure_energy_moves,
    "dedup": measure_energy_dedup,
    "sim": measure_energy_sim,
    "sim-scale": measure_energy_sim_scale,
}


def main(options: argparse.Namespace) -> int:
    """``penstock bench energy``"""
    return run_parts("energy", PARTS, options)
