"""The input queue of a task, bounded in tuples, with an overflow on disk."""

from __future__ import annotations

import threading
from collections import deque

from penstock.worker.parcel import Parcel
from penstock.worker.spill import Spill, SpillView

_OVERFLOW_MEMORY = 4 * 1024 * 1024
"""Bytes of the overflow that are kept in memory: about thirty full frames, so that a short burst does not reach
the disk."""


class Inbox:
    """The input queue of one task. The reader's thread adds parcels and the worker's loop takes them; the class
    is thread-safe for these two.

    The inbox is full when ``capacity`` tuples wait. The last frame may exceed the capacity, so that a frame
    larger than the inbox is accepted too. Further frames go to the overflow, which keeps a few of them in memory
    and the rest on disk. When the overflow holds ``overflow`` bytes, ``offer`` returns False and the reader has
    to wait. Tuples from the same worker are always accepted, because their sender cannot wait; instead the
    worker does not run a sender whose receiver's inbox is full.
    """

    def __init__(self, capacity: int, overflow: int = 0) -> None:
        self.capacity = capacity
        self.arrived_bytes = 0
        """Bytes that have entered the inbox so far."""
        self.executing = 0
        """Tuples of the parcel that the task is executing, which are not executed yet. Set by the executor."""
        self.behind = 0
        """Tuples of later epochs that are buffered outside the inbox only because the worker's tasks are slow."""
        self._arrived = 0
        self._limit = overflow
        self._inside = 0
        self._parcels: deque[Parcel] = deque()
        self._overflow = Spill(_OVERFLOW_MEMORY)
        self._closed = False
        self._lock = threading.Lock()

    @property
    def arrived(self) -> int:
        """Tuples that have arrived so far."""
        return self._arrived + self.behind

    @property
    def length(self) -> int:
        """Tuples that wait, including the overflow and ``behind``."""
        return self._inside + self._overflow.rows + self.behind

    @property
    def overflowing(self) -> int:
        """Tuples in the overflow."""
        return self._overflow.rows

    @property
    def has_room(self) -> bool:
        """True if ``offer_inside`` would accept a parcel."""
        return self._inside < self.capacity and not self._overflow

    @property
    def full(self) -> bool:
        return self.length >= self.capacity

    def offer(self, parcel: Parcel, beyond_limit: bool = False) -> bool:
        """Add a parcel. Returns False if the overflow is full, unless ``beyond_limit``. A closed inbox drops the
        parcel and returns True, because a refused frame blocks its sender."""
        with self._lock:
            if self._closed:
                return True
            if self._inside < self.capacity and not self._overflow:
                self._put(parcel)
            elif beyond_limit or self._overflow.bytes < self._limit:
                self._overflow.add(parcel)
                self._count(parcel)
            else:
                return False
            return True

    def offer_inside(self, parcel: Parcel) -> bool:
        """As ``offer``, without the overflow: for frames that are already buffered on disk."""
        with self._lock:
            if self._inside >= self.capacity or self._overflow:
                return False
            self._put(parcel)
            return True

    def put(self, parcel: Parcel) -> None:
        """Add a parcel from the same worker; never refused."""
        with self._lock:
            self._put(parcel)

    def take(self) -> Parcel | None:
        """Remove and return the oldest parcel; None if the inbox is empty."""
        if not self._parcels:
            return None
        with self._lock:
            parcel = self._parcels.popleft()
            self._inside -= parcel.header.rows
            while self._overflow and (self._inside < self.capacity or not self._parcels):
                oldest = self._overflow.first()
                assert oldest is not None
                self._parcels.append(oldest)
                self._inside += oldest.header.rows
                self._overflow.drop()
            return parcel

    def view(self) -> tuple[list[Parcel], SpillView]:
        """The parcels that wait now, oldest first: those in the inbox and those in the overflow. The caller closes
        the view."""
        with self._lock:
            return list(self._parcels), self._overflow.view()

    def close(self) -> None:
        """Delete the temporary files. The loop calls it while the reader may still offer parcels."""
        with self._lock:
            self._closed = True
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
