"""Measuring and limiting rates. The caller passes the time."""

from __future__ import annotations

import math
from collections import deque

_BUCKET = 0.05  # seconds; a rate is measured over ten buckets, that is half a second
_BUCKETS = 10
_BURST = 0.05  # seconds of a rate that may be saved up, so that a pause does not permit a flood


class Meter:
    """Counts per second over the last half second, or since the start if that is shorter."""

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
    """A token bucket: ``room`` returns how many may be sent now, ``spend`` records that they were sent. The
    balance may become negative, because a batch is sent as a whole. The next send then waits longer, so the mean
    rate is kept."""

    def __init__(self, rate: float = math.inf) -> None:
        self.rate = rate
        self._tokens = 0.0
        self._at: float | None = None

    def set(self, rate: float, now: float) -> None:
        """Change the rate. A negative balance from a faster rate takes as long to settle as it would have taken at
        that rate."""
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
        """Seconds until the next may be sent."""
        if self.room(now) > 0:
            return 0.0
        return (1e-6 - self._tokens) / self.rate if self.rate > 0 else math.inf

    def _fill(self, now: float) -> None:
        if self._at is not None and not math.isinf(self.rate):
            most = max(1.0, self.rate * _BURST)
            self._tokens = min(most, self._tokens + self.rate * max(0.0, now - self._at))
        self._at = now
