"""The pending table of a spout task: message ids by root number, in the order of emission.

Storm rotates buckets. Here tuples expire in the order in which they were emitted, which is as cheap and fails each
tuple on time instead of up to half a time-out late.

Message ids that a spout emits as numpy arrays are kept as numbers: an open tuple takes 17 bytes, and as much
again in reserve. Other ids are kept as the objects they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.acking.ledger import MAX_OPEN
from penstock.acking.lineage import I64

MessageIdArray: TypeAlias = list[Any] | I64
"""Message ids: a list, or an array if the spout emitted all its ids as arrays."""

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
        self._restarted = -math.inf
        """When the time-out of all open tuples began again."""
        self._open = np.zeros(_FIRST_SIZE, np.bool_)
        self._born = np.zeros(_FIRST_SIZE, np.float64)
        self._ids: MessageIdArray = np.zeros(_FIRST_SIZE, np.int64)

    @property
    def room(self) -> int:
        """How many tuples may be added before the ledgers are full."""
        return MAX_OPEN // 2 - (self.next - self._oldest)

    @property
    def oldest(self) -> int:
        """The first open number; all smaller ones are resolved."""
        return self._oldest

    def add(self, ids: Sequence[Any] | I64, now: float) -> int:
        """Assign a number to each message id. Returns the first number."""
        first, count = self.next, len(ids)
        while first + count - self._oldest > len(self._open):
            self._grow()
        size = len(self._open)
        if not isinstance(ids, np.ndarray) and isinstance(self._ids, np.ndarray) and count:
            self._ids = self._ids.tolist()
        table: Any = self._ids
        given: Any = ids.tolist() if isinstance(ids, np.ndarray) and isinstance(table, list) else ids
        begin = first & (size - 1)
        before = min(count, size - begin)  # the rest continues at the front of the table
        for to, of in ((begin, slice(0, before)), (0, slice(before, count))):
            there = slice(to, to + of.stop - of.start)
            self._open[there], self._born[there], table[there] = True, now, given[of]
        self.next += count
        self.count += count
        return first

    def resolve(self, numbers: I64) -> tuple[MessageIdArray, npt.NDArray[np.float64]]:
        """Remove these numbers. Returns the message ids of those that were open, and their emission times."""
        numbers = numbers[(numbers >= self._oldest) & (numbers < self.next)]
        places = numbers & (len(self._open) - 1)
        places = places[self._open[places]]
        self._open[places] = False
        self.count -= len(places)
        taken = self._take_ids(places)
        self._forget()
        return taken, self._born[places]

    def _take_ids(self, places: I64) -> MessageIdArray:
        ids, count = self._ids, len(places)
        if isinstance(ids, np.ndarray):
            return ids[places]
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

    def expire(self, now: float) -> MessageIdArray:
        """Remove the message ids that have been open for longer than the time-out, and return them."""
        limit = now - self._timeout
        late = 0
        for window in self._windows() if self._restarted <= limit else ():
            found = int(np.searchsorted(self._born[window], limit, "right"))  # in the order of emission
            late += found
            if found < window.stop - window.start:
                break
        return self.resolve(np.arange(self._oldest, self._oldest + late))[0]

    def numbers(self) -> I64:
        """The numbers of all open tuples."""
        every = np.arange(self._oldest, self.next)
        numbers: I64 = every[self._open[every & (len(self._open) - 1)]]
        return numbers

    def take_all(self) -> MessageIdArray:
        """Remove all open tuples, and return their message ids."""
        return self.resolve(np.arange(self._oldest, self.next))[0]

    def restart(self, now: float) -> None:
        """Restart the time-out of all open tuples."""
        self._restarted = now

    def next_expiry(self) -> float | None:
        """The earliest time at which ``expire`` can return anything. None if nothing is open."""
        if self._oldest == self.next:
            return None
        born = float(self._born[self._oldest & (len(self._open) - 1)])
        return max(born, self._restarted) + self._timeout

    def validate(self) -> None:
        """Check the invariants of the table."""
        assert self.count == int(self._open.sum())
        assert self._oldest <= self.next
        assert len(self._ids) == len(self._born) == len(self._open)
        assert sum(int(self._open[each].sum()) for each in self._windows()) == self.count, (
            "open outside the window"
        )
        born = np.concatenate([self._born[:0], *(self._born[each] for each in self._windows())])
        assert bool(np.all(born[1:] >= born[:-1])), "the order of emission"

    def _forget(self) -> None:
        """Move ``oldest`` to the first open number. The cost is proportional to how far it moves."""
        for window in self._windows():
            is_open = self._open[window]
            first = int(is_open.argmax())  # stops at the first True
            if is_open[first]:
                self._oldest += first
                return
            self._oldest += len(is_open)

    def _windows(self) -> list[slice]:
        """The places of the numbers from ``oldest`` to ``next``, in order: none, one or two slices of the
        table."""
        size, count = len(self._open), self.next - self._oldest
        begin = self._oldest & (size - 1)
        before = min(count, size - begin)
        both = (slice(begin, begin + before), slice(0, count - before))
        return [window for window in both if window.stop > window.start]

    def _grow(self) -> None:
        size = 2 * len(self._open)
        numbers = np.arange(self._oldest, self.next)
        old, new = numbers & (len(self._open) - 1), numbers & (size - 1)
        open_, born, ids = self._open, self._born, self._ids
        self._open, self._born = np.zeros(size, np.bool_), np.zeros(size)
        self._open[new], self._born[new] = open_[old], born[old]
        if isinstance(ids, np.ndarray):
            self._ids = np.zeros(size, np.int64)
            self._ids[new] = ids[old]
            return
        self._ids = [None] * size
        for before, after in zip(old.tolist(), new.tolist(), strict=True):
            self._ids[after] = ids[before]
