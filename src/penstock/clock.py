"""Time as a dependency: decision code asks a Clock, so tests and the simulator can own the time."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """``now`` is wall time in seconds since the epoch, comparable between machines as far as their
    clocks agree; ``monotonic`` never goes back and is only good for differences within a process."""

    def now(self) -> float: ...

    def monotonic(self) -> float: ...


class SystemClock:
    """The machine's own clocks."""

    now = staticmethod(time.time)
    monotonic = staticmethod(time.monotonic)


class SimulatedClock:
    """A clock that moves only when told to. Both readings are the same number."""

    def __init__(self, start: float = 0.0) -> None:
        self._time = start

    def now(self) -> float:
        return self._time

    def monotonic(self) -> float:
        return self._time

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"time only moves forward; got {seconds} s")
        self._time += seconds
