"""The bounded queue in front of a task, counted in tuples."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

import pyarrow as pa

from penstock.acking.lineage import Lineage
from penstock.frames.header import Header


@dataclass(slots=True)
class Parcel:
    """Tuples that wait for a task: a frame from another slot, or a batch handed over within the slot."""

    header: Header
    content: pa.Buffer | pa.RecordBatch
    lineage: Lineage | None = None
    """What the tuples stem from, where acks are tracked and the batch comes from within the slot."""


class Inbox:
    """Written by the slot's reader, read by its main loop; safe between those two threads.

    Full means: no further frame is taken once ``capacity`` tuples wait, so one frame may reach over it (a
    single frame larger than the inbox must still get in). What is handed over within the slot is never
    refused, as its sender could not wait; the slot runs receivers before senders instead.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self._parcels: deque[Parcel] = deque()
        self._lock = threading.Lock()

    def offer(self, parcel: Parcel) -> bool:
        """Take the parcel, or say no because the inbox is full."""
        with self._lock:
            if self.length >= self.capacity:
                return False
            self._put(parcel)
            return True

    def put(self, parcel: Parcel) -> None:
        """Take the parcel in any case: for tuples from within the slot."""
        with self._lock:
            self._put(parcel)

    def take(self) -> Parcel | None:
        with self._lock:
            if not self._parcels:
                return None
            parcel = self._parcels.popleft()
            self.length -= parcel.header.rows
            return parcel

    def __bool__(self) -> bool:
        return bool(self._parcels)

    def _put(self, parcel: Parcel) -> None:
        self._parcels.append(parcel)
        self.length += parcel.header.rows
