"""Clocks as a dependency: decision code uses a ``Clock``, so tests and the simulator can control the time."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """``now`` is wall-clock time in seconds since 1970, comparable between machines as far as their clocks agree.
    ``monotonic`` never decreases and is only comparable within a process."""

    def now(self) -> float: ...

    def monotonic(self) -> float: ...


class SystemClock:
    """The clocks of the machine."""

    now = staticmethod(time.time)
    monotonic = staticmethod(time.monotonic)


class SimulatedClock:
    """A clock that only advances when its owner calls ``advance``. Both readings are the same number."""

    def __init__(self, start: float = 0.0) -> None:
        self._time = start

    def now(self) -> float:
        return self._time

    def monotonic(self) -> float:
        return self._time

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"a clock cannot advance by {seconds} s")
        self._time += seconds
