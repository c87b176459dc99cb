"""The driver's time as a worker reads it: the clocks of two machines may differ by more than a message time-out.

A worker asks for the driver's time several times while it connects, and again every ``INTERVAL`` seconds. An
answer holds for the middle of the round trip, so the error of a sample is at most half of its round trip; of the
newest samples the one with the shortest round trip counts.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from penstock.clock import Clock, SystemClock

SAMPLES = 5
"""Taken while a worker connects: one of them is likely not to be delayed by a busy driver."""
INTERVAL = 10.0
"""Seconds between two later samples. Clocks of machines drift by at most 1 ms in that time."""
WARN_ABOVE = 1.0
"""Seconds. From here on dates that users see in logs and in their data differ visibly between nodes."""
_KEPT = 8
"""Samples that are compared: those of the last 80 s. An older one no longer holds after a clock was set."""


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
        """The driver was asked at ``sent`` and had answered ``driver_time`` by ``received``; both are times of
        ``monotonic``."""
        self._samples.append(_ClockSample(received - sent, driver_time - (sent + received) / 2))
        self._offset = min(self._samples, key=lambda sample: sample.round_trip).offset

    @property
    def skew(self) -> float:
        """Seconds by which the wall clock of this machine is ahead of the driver's."""
        return self._local.now() - self.now()


class RunTime:
    """The driver's side: its wall time when it started, plus what has passed since. Setting the driver's wall
    clock does not change it, so tuples on their way do not appear older or younger."""

    def __init__(self, clock: Clock | None = None) -> None:
        clock = clock or SystemClock()
        self._monotonic = clock.monotonic
        self._offset = clock.now() - clock.monotonic()

    def now(self) -> float:
        return self._monotonic() + self._offset
