"""Bursty and skewed packets (*Sun 2022*, section 3.1 and figure 6), generated from a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from penstock.sim.network import Packet

FLOWS = 64
"""Identities counted separately at the sink, so that a lost packet and a duplicate cannot cancel each other
out."""


@dataclass(frozen=True)
class WorkloadShape:
    """Alternating calm phases and bursts. In a calm phase all branches have the same rate; in a burst one of them
    has a higher rate. So the source's rate and the skew rise together, as in *Sun 2022*, figure 6, where the
    nodes' peaks come at different times."""

    calm: tuple[float, float]
    """Shortest and longest duration of a calm phase, in seconds."""
    burst: tuple[float, float]
    """Shortest and longest duration of a burst, in seconds."""
    base: float
    """MB per second to each branch, at all times."""
    peak: float
    """Additional MB per second to one branch in a burst."""


def packets(count: int, branches: Sequence[str], shape: WorkloadShape, seed: int) -> Iterator[Packet]:
    """Generate this many packets of 1 MB. Their gaps are those of the source alone; delays by flow control come on
    top."""
    chosen = random.Random(seed)
    phases = _phases(branches, shape, chosen)
    left, rates = next(phases)
    for number in range(count):
        while left <= 0:
            more, rates = next(phases)
            left += more
        gap = chosen.expovariate(sum(rates))
        left -= gap
        (bound,) = chosen.choices(branches, rates)
        yield Packet(number, bound, gap, flow=chosen.randrange(FLOWS), value=chosen.randrange(1, 1_000_000))


def _phases(
    branches: Sequence[str], shape: WorkloadShape, chosen: random.Random
) -> Iterator[tuple[float, list[float]]]:
    """Duration of each phase, and the rate of each branch in it."""
    hot: int | None = None
    begun = chosen.random()  # a run begins at a random point of a calm phase
    while True:
        yield begun * chosen.uniform(*shape.calm), [shape.base] * len(branches)
        begun = 1.0
        hot = chosen.choice([index for index in range(len(branches)) if index != hot])
        rates = [shape.base + shape.peak * (index == hot) for index in range(len(branches))]
        yield chosen.uniform(*shape.burst), rates
