"""The event loop of the simulated cluster: a heap, because a run has tens of millions of events."""

from __future__ import annotations

from collections.abc import Callable, Generator
from heapq import heappop, heappush
from typing import Any

Process = Generator[float, None, None]
"""Yields the time at which it wants to continue."""
_Event = tuple[float, int, Callable[..., None], tuple[Any, ...]]


class Loop:
    """Calls functions at simulated times. Events at the same time happen in the order in which they were
    scheduled."""

    __slots__ = ("_heap", "_number", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[_Event] = []
        self._number = 0

    def at(self, time: float, act: Callable[..., None], *args: Any) -> None:
        self._number += 1
        heappush(self._heap, (time, self._number, act, args))

    def process(self, process: Process) -> None:
        """Run a process; its first part runs immediately."""
        time = next(process, None)
        if time is not None:
            self.at(time, self.process, process)

    def run(self, until: float) -> None:
        """Handle all events up to and including this time."""
        heap = self._heap
        while heap and heap[0][0] <= until:
            self.now, _, act, args = heappop(heap)
            act(*args)
        self.now = until
