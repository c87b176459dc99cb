"""Rates: how fast something went lately, and how fast it may go. The caller brings the time."""

from __future__ import annotations

import math
from collections import deque

_BUCKET = 0.05  # seconds; ten of them make the half second a rate looks back
_BUCKETS = 10
_BURST = 0.05  # seconds of a rate that may be saved up: a pause is no licence to flood


class Meter:
    """Counts per second over the last half second; over less at the beginning."""

    def __init__(self) -> None:
        self._buckets: deque[tuple[int, int]] = deque()
        self._total = 0
        self._first: float | None = None

    def add(self, count: int, now: float) -> None:
        if self._first is None:
            self._first = now
        number = int(now / _BUCKET)
        buckets = self._buckets
        if buckets and buckets[-1][0] == number:
            buckets[-1] = (number, buckets[-1][1] + count)
        else:
            self._forget(number)
            buckets.append((number, count))
        self._total += count

    def rate(self, now: float) -> float:
        if self._first is None:
            return 0.0
        number = int(now / _BUCKET)
        self._forget(number)
        span = now - max(self._first, (number - _BUCKETS + 1) * _BUCKET)
        return self._total / max(span, _BUCKET)

    def _forget(self, number: int) -> None:
        buckets = self._buckets
        while buckets and buckets[0][0] <= number - _BUCKETS:
            self._total -= buckets.popleft()[1]


class Pace:
    """A token bucket: ``room`` says how many may go now, ``spend`` that they went. It may be overdrawn, for a
    batch goes whole or not at all; the debt is waited off, so the rate holds in the mean."""

    def __init__(self, rate: float = math.inf) -> None:
        self.rate = rate
        self._tokens = 0.0
        self._at: float | None = None

    def set(self, rate: float, now: float) -> None:
        """Another rate from now on. A debt made at a faster one is waited off in the time it would have taken."""
        self._fill(now)
        if math.isinf(rate):
            self._tokens = 0.0
        elif self._tokens < 0 and rate < self.rate:
            self._tokens *= rate / self.rate
        self.rate = rate

    def room(self, now: float) -> float:
        if math.isinf(self.rate):
            return math.inf
        self._fill(now)
        return self._tokens

    def spend(self, count: int) -> None:
        if not math.isinf(self.rate):
            self._tokens -= count

    def wait(self, now: float) -> float:
        """Seconds until the next may go."""
        if self.room(now) > 0:
            return 0.0
        return (1e-6 - self._tokens) / self.rate if self.rate > 0 else math.inf

    def _fill(self, now: float) -> None:
        if self._at is not None and not math.isinf(self.rate):
            most = max(1.0, self.rate * _BURST)
            self._tokens = min(most, self._tokens + self.rate * max(0.0, now - self._at))
        self._at = now
