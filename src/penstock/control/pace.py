"""Measuring and limiting rates. The caller passes the time."""

from __future__ import annotations

import math
from collections import deque

_BUCKET = 0.05  # seconds; a rate is measured over ten buckets, that is half a second
_BUCKETS = 10
_SERVICE_HALF_LIFE = 1.0  # seconds with work; a rate from before has half of the weight then
_LATE = 2
"""A task is late when it has taken nothing in so many times the seconds that its last tuples usually take."""
_LEAST_GROWING = 2_000.0
"""Tuples per second at which a rate begins to grow: 200 at once, and a million per second after 0.9 s. A bolt that
takes 5 ms per tuple has 1 s of work when its first signal arrives."""
_DOUBLING = 0.1
"""Seconds: several times what a signal takes from the receiver to the sender."""
_ROUNDED = 0.99  # of what must be saved up is enough: a wait may end a rounding error too early
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


class ServiceRate:
    """How many tuples per second a task takes while some wait for it. Idle time does not count, so it is known
    also for a task with little to do. A batch bolt, which takes a whole frame at once, is measured from one to the
    next."""

    def __init__(self) -> None:
        self._count = self._seconds = 0.0
        self._last = 0
        """Tuples that it took last."""
        self._since: float | None = None
        """When it took tuples last, or when the first came after it had none. None: it has none."""

    def observe(self, now: float, taken: int, waiting: int) -> None:
        """``taken``: tuples since the last observation. ``waiting``: tuples that it has not processed yet."""
        if taken and self._since is not None and now > self._since:
            self._count, self._seconds = self._sums(taken, now - self._since)
        self._last = taken or self._last
        if not waiting:
            self._since = None
        elif taken or self._since is None:
            self._since = now

    def rate(self, now: float) -> float | None:
        """None if it is not known yet. A task that has taken none for longer than usual, because its own receivers
        hold it back, becomes slower from then on, not only when it takes some again."""
        if not self._count or not self._seconds:
            return None
        rate = self._count / self._seconds
        if self._since is None or (now - self._since) * rate <= _LATE * self._last:
            return rate
        count, seconds = self._sums(0, now - self._since)
        return count / seconds

    def _sums(self, taken: int, seconds: float) -> tuple[float, float]:
        kept = 0.5 ** (seconds / _SERVICE_HALF_LIFE)
        return self._count * kept + taken, self._seconds * kept + seconds


class Pace:
    """A token bucket: ``room`` returns how many may be sent now, ``spend`` records that they were sent. The
    balance may become negative, because a batch is sent as a whole. The next send then waits longer, so the mean
    rate is kept. ``saved``: seconds of the rate that are saved up before any may be sent."""

    def __init__(self, rate: float = math.inf, saved: float = 0.0) -> None:
        self.rate = rate
        self._saved = saved
        self._tokens = 0.0 if math.isinf(rate) else rate * saved
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
        return self._tokens if self._tokens >= _ROUNDED * self._least else min(self._tokens, 0.0)

    def spend(self, count: int) -> None:
        if not math.isinf(self.rate):
            self._tokens -= count

    def wait(self, now: float) -> float:
        """Seconds until the next may be sent."""
        if self.room(now) > 0:
            return 0.0
        return (self._least - self._tokens) / self.rate if self.rate > 0 else math.inf

    @property
    def _least(self) -> float:
        return max(1e-6, self.rate * self._saved)

    def _fill(self, now: float) -> None:
        if self._at is not None and not math.isinf(self.rate):
            most = max(1.0, self.rate * _BURST)
            self._tokens = min(most, self._tokens + self.rate * max(0.0, now - self._at))
        self._at = now


class GrowingPace:
    """Limits how fast a rate grows: from ``least`` tuples per second on, it may double every tenth of a second for
    as long as it is used up. So a burst does not reach the receiver as a whole before the receiver can tell that
    it is too much. A rate that is not used up falls by half every second, down to ``least``. At a steady rate
    nothing waits."""

    def __init__(self, least: float = _LEAST_GROWING) -> None:
        self._least = least
        self._rate = least
        self._tokens = least * _DOUBLING
        self._at: float | None = None

    def restart(self, rate: float, now: float) -> None:
        """Let the rate grow from this one on."""
        self._rate = max(self._least, rate)
        self._tokens, self._at = self._rate * _DOUBLING, now

    def room(self, now: float) -> float:
        if self._at is not None and now > self._at:
            self._fill(now - self._at)
        self._at = now
        return self._tokens

    def spend(self, count: int) -> None:
        self._tokens -= count

    def wait(self, now: float) -> float:
        """Seconds until the next may be sent; at most, because the rate grows meanwhile."""
        tokens = self.room(now)
        return 0.0 if tokens > 0 else min(_DOUBLING, (1e-6 - tokens) / self._rate)

    def _fill(self, seconds: float) -> None:
        while seconds > 0 and self._tokens < self._rate * _DOUBLING / 2:
            step = min(seconds, _DOUBLING)
            seconds -= step
            grown = self._rate * 2 ** (step / _DOUBLING)
            self._tokens += (grown - self._rate) * _DOUBLING / math.log(2)
            self._rate = grown
        self._tokens += self._rate * seconds
        if self._tokens > self._rate * _DOUBLING:
            self._rate = max(self._least, self._rate * 0.5**seconds)
            self._tokens = self._rate * _DOUBLING
