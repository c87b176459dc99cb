"""Measures the bandwidth of the links into a worker, with a few large frames that each worker of the previous
stage sends at once (``ProbeLinks``)."""

from __future__ import annotations

import statistics
from itertools import pairwise

PROBE_BYTES = 64 * 1024
"""As large as frames are under load, so that the fixed cost of a frame counts as much as it does there."""
PROBES = 5
"""Frames of one measurement. The first only marks the beginning."""


class LinkMeter:
    """The reader's thread enters the frames of a measurement, the worker's loop reads the result.

    Frames that were sent without a pause arrive as fast as the link between the two carries them, so no clock of
    the sender is needed. The median of a few distances is not disturbed by one pause on the way."""

    def __init__(self) -> None:
        self._arrivals: dict[int, list[float]] = {}
        self._found: dict[int, float] = {}

    def arrived(self, source: int, now: float) -> None:
        """A frame of a measurement has arrived from this worker of the previous stage."""
        arrivals = self._arrivals.setdefault(source, [])
        arrivals.append(now)
        if len(arrivals) < PROBES:
            return
        del self._arrivals[source]
        distance = statistics.median(b - a for a, b in pairwise(arrivals))
        if distance > 0:
            self._found[source] = PROBE_BYTES / distance

    def speeds(self) -> list[tuple[int, float]]:
        """⟨Worker of the previous stage, bytes per second⟩, as last measured."""
        return list(self._found.copy().items())
