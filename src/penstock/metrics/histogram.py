"""A histogram of durations with buckets of equal ratio: percentiles are accurate to 5 % at a few bytes per
bucket."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

_PER_DOUBLING = 8  # buckets per factor of two: each is 9 % wide, so a value is at most 5 % off
_FLOOR = 1e-6  # seconds; shorter durations are counted in the first bucket


@dataclass(slots=True)
class Histogram:
    """Counts per bucket, which only grow. ``minus`` an earlier copy gives the interval in between."""

    counts: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.counts = dict(self.counts)

    def record(self, seconds: float, times: int = 1) -> None:
        bucket = int(math.log2(seconds / _FLOOR) * _PER_DOUBLING) if seconds > _FLOOR else 0
        self.counts[bucket] = self.counts.get(bucket, 0) + times

    def record_many(self, seconds: npt.NDArray[np.float64]) -> None:
        buckets = (np.log2(np.maximum(seconds, _FLOOR) / _FLOOR) * _PER_DOUBLING).astype(np.int64)
        for bucket, times in zip(
            *(column.tolist() for column in np.unique(buckets, return_counts=True)), strict=True
        ):
            self.counts[bucket] = self.counts.get(bucket, 0) + times

    def percentile(self, share: float) -> float | None:
        """The duration in seconds that ``share`` (0 to 1) of the values do not exceed. None if there are no
        values."""
        total = self.count
        if total == 0:
            return None
        seen = 0
        for bucket in sorted(self.counts):
            seen += self.counts[bucket]
            if seen >= share * total:
                break
        return _middle(bucket)

    @property
    def count(self) -> int:
        return sum(self.counts.values())

    @property
    def seconds(self) -> float:
        """The sum of all durations. Accurate to 5 %, because each value counts as the middle of its bucket."""
        return float(sum(count * _middle(bucket) for bucket, count in self.counts.items()))

    def below(self, doublings: int) -> tuple[float, int]:
        """A bound of 1 µs · 2^doublings in seconds, and the number of shorter durations. Exact, because a bucket
        ends there."""
        end = doublings * _PER_DOUBLING
        return float(_FLOOR * 2**doublings), sum(n for bucket, n in self.counts.items() if bucket < end)

    def above(self, seconds: float) -> int:
        """The number of longer durations. Those less than 9 % longer may be missing, because they share a bucket
        with the bound."""
        begin = math.ceil(math.log2(seconds / _FLOOR) * _PER_DOUBLING) if seconds > _FLOOR else 1
        return sum(count for bucket, count in self.counts.items() if bucket >= begin)

    def plus(self, other: Histogram) -> Histogram:
        result = Histogram(self.counts)
        for bucket, count in other.counts.items():
            result.counts[bucket] = result.counts.get(bucket, 0) + count
        return result

    def minus(self, earlier: Histogram) -> Histogram:
        changed = {bucket: count - earlier.counts.get(bucket, 0) for bucket, count in self.counts.items()}
        return Histogram({bucket: count for bucket, count in changed.items() if count > 0})


def _middle(bucket: int) -> float:
    return float(_FLOOR * 2 ** ((bucket + 0.5) / _PER_DOUBLING))
