"""A worker's clock that follows the driver's, because the clocks of two machines may differ by more than a
message timeout.

A worker asks for the driver's time several times while it connects, and again every ``INTERVAL`` seconds. The
driver's answer is taken as its time in the middle of the round trip, so the error of a sample is at most half
its round trip. The clock uses the sample with the shortest round trip among the newest ones.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from penstock.clock import Clock, SystemClock

SAMPLES = 5
"""Number of samples taken while a worker connects: at least one of them is probably not delayed by a busy
driver."""
INTERVAL = 10.0
"""Seconds between two later samples. The clocks of two machines drift apart by at most about 1 ms in that time."""
WARN_ABOVE = 1.0
"""Seconds of clock skew above which the driver warns: times in logs and data then differ visibly between nodes."""
_KEPT = 8
"""Number of samples that are compared: those of the last 80 s. Older ones may be wrong, because a clock may have
been set since."""


@dataclass(frozen=True)
class _ClockSample:
    round_trip: float
    offset: float
    """Driver's time minus the worker's monotonic time."""


class DriverClock:
    """A ``Clock`` whose ``now`` is the driver's time. ``monotonic`` is the worker's own.

    Before the first sample ``now`` is the worker's own time. ``add`` is called by one thread at a time; the other
    methods by any thread.
    """

    def __init__(self, local: Clock | None = None) -> None:
        self._local = local or SystemClock()
        self.monotonic = self._local.monotonic
        self._samples: deque[_ClockSample] = deque(maxlen=_KEPT)
        self._offset = self._local.now() - self._local.monotonic()

    def now(self) -> float:
        return self.monotonic() + self._offset

    def add(self, sent: float, driver_time: float, received: float) -> None:
        """Add a sample: the worker asked at ``sent`` and received ``driver_time`` at ``received``, both in times
        of ``monotonic``."""
        self._samples.append(_ClockSample(received - sent, driver_time - (sent + received) / 2))
        self._offset = min(self._samples, key=lambda sample: sample.round_trip).offset

    @property
    def skew(self) -> float:
        """Seconds by which the wall clock of this machine is ahead of the driver's."""
        return self._local.now() - self.now()


class RunTime:
    """The driver's time: its wall time at the start plus the monotonic time since then. Setting the driver's
    wall clock does not change it, so tuples in flight do not appear older or younger."""

    def __init__(self, clock: Clock | None = None) -> None:
        clock = clock or SystemClock()
        self._monotonic = clock.monotonic
        self._offset = clock.now() - clock.monotonic()

    def now(self) -> float:
        return self._monotonic() + self._offset
