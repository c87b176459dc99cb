"""What was seen lately: two generations of Bloom filters, of which the older is forgotten as a whole.

A key is added to today's generation and looked for in both. When a period is over, today's becomes yesterday's,
and yesterday's is forgotten: so a key is known for one to two periods. When today's is full the same is done at
once, for a filter that holds more than it was made for says yes to what it never saw, and that is worse than a
duplicate.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from penstock.bolts.bloom import BloomFilter, BloomShape, Bools, Frozen
from penstock.topology.hashing import U64

Generation = tuple[Frozen, ...]
"""Mostly one filter. Several where tasks became one, or the shape was changed: they are looked into, and forgotten
with the rest."""


class Memory:
    """Each generation is made for ``capacity`` keys at half the error rate, since a key is looked for in two."""

    def __init__(self, capacity: int, error_rate: float) -> None:
        self.capacity = capacity
        self.shape = BloomShape.fit(capacity, error_rate / 2)
        self.early = 0
        """How often a generation was full before its period was over."""
        self.now_changed = self.before_changed = False
        """Since they were frozen."""
        self._now = BloomFilter(self.shape)
        self._beside: list[BloomFilter] = []  # of the same generation
        self._before: list[BloomFilter] = []

    def new(self, hashes: U64) -> Bools:
        """Which rows have a key that was not seen before, in this column or ever; they are seen from now on."""
        keys, rows = np.unique(hashes, return_index=True)  # the first row of each key
        for each in self._filters():
            known = each.holds(keys)
            keys, rows = keys[~known], rows[~known]
        result = np.zeros(len(hashes), np.bool_)
        result[rows] = True
        self._add(hashes[result])  # in the order they came: those behind are remembered longer
        return result

    def rotate(self) -> None:
        """A period is over."""
        if self._now.added or self._beside or self._before:
            self._before = [self._now, *self._beside]
            self._now, self._beside = BloomFilter(self.shape), []
            self.now_changed = self.before_changed = True

    @property
    def error_rate(self) -> float:
        """The chance that a key which was never seen is taken for one that was."""
        right = 1.0
        for each in self._filters():
            right *= 1.0 - each.error_rate
        return 1.0 - right

    @property
    def keys(self) -> int:
        return sum(each.added for each in self._filters())

    @property
    def bytes(self) -> int:
        return sum(each.shape.bytes for each in self._filters())

    def freeze_now(self) -> Generation:
        self.now_changed = False
        return tuple(each.freeze() for each in (self._now, *self._beside))

    def freeze_before(self) -> Generation:
        self.before_changed = False
        return tuple(each.freeze() for each in self._before)

    def thaw(self, now: Generation, before: Generation) -> None:
        """Go on with what was frozen, by this memory or by one for another capacity or error rate."""
        self._before = list(map(BloomFilter.thaw, before))
        self._beside = list(map(BloomFilter.thaw, now))
        for place, each in enumerate(self._beside):
            if each.shape == self.shape and each.added < self.capacity:
                self._now = self._beside.pop(place)
                break

    def _add(self, hashes: U64) -> None:
        while len(hashes):
            room = self.capacity - self._now.added
            self._now.add(hashes[:room])
            self.now_changed = True
            hashes = hashes[room:]
            if self._now.added >= self.capacity:
                self.early += 1
                self.rotate()

    def _filters(self) -> Iterable[BloomFilter]:
        return (self._now, *self._beside, *self._before)


def join(capacity: int, one: Generation, other: Generation) -> Generation:
    """The generations of two tasks that become one. Two filters become one (OR) if that holds no more keys than it
    is made for. Two full ones stay side by side and are wrong twice as often; in one, for an error rate of 0.001,
    it would be 86 times."""
    joined = list(map(BloomFilter.thaw, one))
    for added in map(BloomFilter.thaw, other):
        place, both = _fit(capacity, joined, added)
        if both is None:
            joined.append(added)
        else:
            joined[place] = both
    return tuple(each.freeze() for each in joined)


def _fit(capacity: int, filters: Sequence[BloomFilter], added: BloomFilter) -> tuple[int, BloomFilter | None]:
    for place, each in enumerate(filters):
        if each.shape == added.shape:
            both = each.joined(added)
            if both.added <= capacity:
                return place, both
    return 0, None
