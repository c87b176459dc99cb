"""The bounded queue in front of a task, counted in tuples, and what overflows it."""

from __future__ import annotations

import threading
from collections import deque

from penstock.worker.parcel import Parcel
from penstock.worker.spill import Spill

_OVERFLOW_MEMORY = 4 * 1024 * 1024  # bytes of the overflow kept in memory: thirty full frames


class Inbox:
    """Written by the worker's reader, read by its main loop; safe between those two threads.

    Full means: ``capacity`` tuples wait; one frame may reach over it (a single frame larger than the inbox must
    still get in). What comes then goes to the overflow, on disk beyond a few frames, as long as that holds less
    than ``overflow`` bytes; only then is it refused, and its reader has to wait. What is handed over within the
    worker is never refused, as its sender could not wait; instead the worker does not run the sender of a full
    inbox.
    """

    def __init__(self, capacity: int, overflow: int = 0) -> None:
        self.capacity = capacity
        self.arrived_bytes = 0
        """Ever taken in."""
        self.behind = 0
        """Tuples that wait outside only because the tasks are behind: those of the next epochs."""
        self._arrived = 0
        self._limit = overflow
        self._inside = 0
        self._parcels: deque[Parcel] = deque()
        self._overflow = Spill(_OVERFLOW_MEMORY)
        self._lock = threading.Lock()

    @property
    def arrived(self) -> int:
        """Tuples that ever came."""
        return self._arrived + self.behind

    @property
    def length(self) -> int:
        """Tuples that wait."""
        return self._inside + self._overflow.rows + self.behind

    @property
    def overflowing(self) -> int:
        """Those of them that overflow."""
        return self._overflow.rows

    @property
    def has_room(self) -> bool:
        """``offer_inside`` would take something."""
        return self._inside < self.capacity and not self._overflow

    @property
    def full(self) -> bool:
        return self.length >= self.capacity

    def offer(self, parcel: Parcel) -> bool:
        """Take the parcel, or say no because even the overflow is full."""
        with self._lock:
            if self._inside < self.capacity and not self._overflow:
                self._put(parcel)
            elif self._overflow.bytes < self._limit:
                self._overflow.add(parcel)
                self._count(parcel)
            else:
                return False
            return True

    def offer_inside(self, parcel: Parcel) -> bool:
        """The same without the overflow: for what waits on disk already."""
        with self._lock:
            if self._inside >= self.capacity or self._overflow:
                return False
            self._put(parcel)
            return True

    def put(self, parcel: Parcel) -> None:
        """Take the parcel in any case: for tuples from within the worker."""
        with self._lock:
            self._put(parcel)

    def take(self) -> Parcel | None:
        if not self._parcels:
            return None
        with self._lock:
            parcel = self._parcels.popleft()
            self._inside -= parcel.header.rows
            while self._overflow and (self._inside < self.capacity or not self._parcels):
                waited = self._overflow.first()
                assert waited is not None
                self._parcels.append(waited)
                self._inside += waited.header.rows
                self._overflow.drop()
            return parcel

    def close(self) -> None:
        self._overflow.close()

    def __bool__(self) -> bool:
        return bool(self._parcels)

    def _put(self, parcel: Parcel) -> None:
        self._parcels.append(parcel)
        self._inside += parcel.header.rows
        self._count(parcel)

    def _count(self, parcel: Parcel) -> None:
        self._arrived += parcel.header.rows
        self.arrived_bytes += parcel.bytes
