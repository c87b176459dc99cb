"""Bursty and skewed packets (D §3.1, figure 6), made from a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from penstock.sim.network import Packet

FLOWS = 64
"""Identities counted at the sink, so that a lost packet and a doubled one do not make up for each other."""


@dataclass(frozen=True)
class WorkloadShape:
    """Calm and bursts by turns. In a calm all branches get the same rate; in a burst one of them gets more, so the
    source's rate and the skew rise together, as in D figure 6, where nodes' peaks come at different times."""

    calm: tuple[float, float]
    """Seconds a calm lasts: least and most."""
    burst: tuple[float, float]
    """Seconds a burst lasts."""
    base: float
    """MB a second to each branch, always."""
    peak: float
    """MB a second more to one branch in a burst."""


def packets(count: int, branches: Sequence[str], shape: WorkloadShape, seed: int) -> Iterator[Packet]:
    """So many packets of 1 MB. Times are the source's own: what it is held up by comes on top."""
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
    """How long, and each branch's rate."""
    hot: int | None = None
    begun = chosen.random()  # a run begins somewhere in a calm
    while True:
        yield begun * chosen.uniform(*shape.calm), [shape.base] * len(branches)
        begun = 1.0
        hot = chosen.choice([index for index in range(len(branches)) if index != hot])
        rates = [shape.base + shape.peak * (index == hot) for index in range(len(branches))]
        yield chosen.uniform(*shape.burst), rates
