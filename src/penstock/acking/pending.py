"""The pending table of a spout task: message ids by root number, in the order of emission.

Storm rotates buckets. Here tuples expire in the order in which they were emitted, which is as cheap and fails each
tuple on time instead of up to half a time-out late.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.acking.ledger import MAX_OPEN
from penstock.acking.lineage import I64

_FIRST_SIZE = 1 << 12
"""Places in a new table. It doubles when needed, so the value only matters for idle spouts."""


class Pending:
    """The open tuples of a spout task. Numbers start at 0. Each number is resolved once: acked, failed or expired,
    whichever comes first. Used by the worker's loop only."""

    def __init__(self, timeout: float) -> None:
        self.count = 0
        """The number of open tuples."""
        self.next = 0
        self._timeout = timeout
        self._oldest = 0
        self._blocks: deque[tuple[float, int, int]] = deque()
        """Triples of time, first number and end, one per batch of emitted tuples."""
        self._open = np.zeros(_FIRST_SIZE, np.bool_)
        self._born = np.zeros(_FIRST_SIZE, np.float64)
        self._ids: list[Any] = [None] * _FIRST_SIZE

    @property
    def room(self) -> int:
        """How many tuples may be added before the ledgers are full."""
        return MAX_OPEN // 2 - (self.next - self._oldest)

    @property
    def oldest(self) -> int:
        """All smaller numbers are resolved."""
        return self._oldest

    def add(self, ids: Sequence[Any], now: float) -> int:
        """Assign a number to each message id. Returns the first number."""
        first, count = self.next, len(ids)
        while first + count - self._oldest > len(self._ids):
            self._grow()
        places = np.arange(first, first + count) & (len(self._ids) - 1)
        self._open[places] = True
        self._born[places] = now
        begin, size = first & (len(self._ids) - 1), len(self._ids)
        if begin + count <= size:
            self._ids[begin : begin + count] = ids
        else:
            for place, id in zip(places.tolist(), ids, strict=True):
                self._ids[place] = id
        self._blocks.append((now, first, first + count))
        self.next += count
        self.count += count
        return first

    def resolve(self, numbers: I64) -> tuple[list[Any], npt.NDArray[np.float64]]:
        """Remove these numbers. Returns the message ids of those that were open, and their emission times."""
        numbers = numbers[(numbers >= self._oldest) & (numbers < self.next)]
        places = numbers & (len(self._ids) - 1)
        places = places[self._open[places]]
        self._open[places] = False
        self.count -= len(places)
        taken = self._take_ids(places)
        self._forget()
        return taken, self._born[places]

    def _take_ids(self, places: I64) -> list[Any]:
        ids, count = self._ids, len(places)
        if count and int(places[-1] - places[0]) == count - 1:  # consecutive, which is the usual case
            begin = int(places[0])
            taken = ids[begin : begin + count]
            ids[begin : begin + count] = [None] * count
            return taken
        taken = []
        for place in places.tolist():
            taken.append(ids[place])
            ids[place] = None
        return taken

    def expire(self, now: float) -> list[Any]:
        """Remove the message ids that have been open for longer than the time-out, and return them."""
        taken: list[Any] = []
        while self._blocks and self._blocks[0][0] <= now - self._timeout:
            _, first, end = self._blocks.popleft()
            taken += self.resolve(np.arange(first, end))[0]
        return taken

    def take_all(self) -> list[Any]:
        """Remove all open tuples, and return their message ids."""
        return self.resolve(np.arange(self._oldest, self.next))[0]

    def restart(self, now: float) -> None:
        """Restart the time-out of all open tuples."""
        self._blocks = deque((now, first, end) for _, first, end in self._blocks)

    def next_expiry(self) -> float | None:
        """The earliest time at which ``expire`` can return anything. None if nothing is open."""
        return self._blocks[0][0] + self._timeout if self._blocks else None

    def validate(self) -> None:
        """Check the invariants of the table."""
        assert self.count == int(self._open.sum())
        assert self._oldest <= self.next
        inside = np.arange(self._oldest, self.next) & (len(self._ids) - 1)
        assert int(self._open[inside].sum()) == self.count, "an open number outside the window"

    def _forget(self) -> None:
        """Drop the oldest blocks that are completely resolved."""
        mask = len(self._ids) - 1
        while self._blocks:
            _, first, end = self._blocks[0]
            if self._open[np.arange(first, end) & mask].any():
                break
            self._blocks.popleft()
        self._oldest = self._blocks[0][1] if self._blocks else self.next

    def _grow(self) -> None:
        old, size = len(self._ids) - 1, 2 * len(self._ids)
        numbers = np.arange(self._oldest, self.next)
        open_, born, ids = self._open, self._born, self._ids
        self._open, self._born, self._ids = np.zeros(size, np.bool_), np.zeros(size), [None] * size
        self._open[numbers & (size - 1)] = open_[numbers & old]
        self._born[numbers & (size - 1)] = born[numbers & old]
        for number in numbers.tolist():
            self._ids[number & (size - 1)] = ids[number & old]
