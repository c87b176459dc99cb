"""A snapshot of a large cluster, for measuring plans in benchmarks and tests."""

from __future__ import annotations

import random

from penstock.control.placement import ExecutorStream, PlacedExecutor, PlacementNode, PlacementSnapshot, Use

NODE = Use(cpu=4.0, memory=8e9, bandwidth=12.5e6)
"""*Pu 2021*, table 1: four cores, 8 GB, 100 Mb/s."""


def large(executors: int, nodes: int, components: int = 4, fan_out: int = 10, seed: int = 1) -> PlacementSnapshot:
    """Executors placed round robin, each with ``fan_out`` receivers; nodes at about 60 % CPU."""
    draw, each = random.Random(seed), executors // components
    share = 0.6 * NODE.cpu * nodes / executors
    return PlacementSnapshot(
        tuple(PlacementNode(f"n{index}", NODE) for index in range(nodes)),
        tuple(
            PlacedExecutor(
                f"c{component}/{index}",
                f"c{component}",
                f"n{(component * each + index) % nodes}",
                draw.uniform(0.5 * share, 1.5 * share),
                draw.uniform(1e7, 3e8),
            )
            for component in range(components)
            for index in range(each)
        ),
        tuple(
            ExecutorStream(
                f"c{component}/{index}",
                f"c{component + 1}/{(index * 7 + step) % each}",
                100.0,
                draw.uniform(1e3, 5e4),
            )
            for component in range(components - 1)
            for index in range(each)
            for step in range(fan_out)
        ),
    )
