"""Time that passes only while somebody waits, and events that happen meanwhile."""

import heapq
import itertools

from penstock import SimulatedClock


class SimulatedWaiter:
    """A ``Waiter`` without threads: what others would do meanwhile is scheduled with ``after``, and is done by
    whoever waits, in the order of time."""

    def __init__(self):
        self.clock = SimulatedClock()
        self.pumps = []
        """Called whenever somebody waits: loops that would have a thread of their own."""
        self._events = []
        self._order = itertools.count()

    def now(self):
        return self.clock.monotonic()

    def after(self, seconds, event):
        heapq.heappush(self._events, (self.now() + seconds, next(self._order), event))

    def wait_for(self, condition, seconds):
        deadline = self.now() + max(0.0, seconds)
        while not self._holds(condition):
            if self._events and self._events[0][0] <= deadline:
                at, _, event = heapq.heappop(self._events)
                self.clock.advance(max(0.0, at - self.now()))
                event()
            else:
                assert deadline < float("inf"), "nothing will ever happen, and it waits for ever"
                self.clock.advance(max(0.0, deadline - self.now()))
                return self._holds(condition)
        return True

    def _holds(self, condition):
        for pump in list(self.pumps):
            pump()
        return condition()
