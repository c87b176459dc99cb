"""Remembers recent keys in two Bloom filters.

A key is added to the current filter and looked up in both. At the end of a period the current filter
becomes the previous one, and the previous one is discarded, so a key is remembered for one to two periods. If the
current filter is full, this happens early: an overfull filter would report keys it never contained, and losing
a tuple is worse than passing a duplicate.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from penstock.bolts.bloom import BloomFilter, BloomShape, Bools, Frozen
from penstock.topology.hashing import U64

Generation = tuple[Frozen, ...]
"""Usually one filter. Several if tasks were merged or the shape was changed: all of them are looked up and
discarded together."""


class RecentKeys:
    """The keys seen in the last one to two periods. Each filter is sized for ``capacity`` keys at half the
    error rate, because a key is looked up in two filters. Used by the task's thread."""

    def __init__(self, capacity: int, error_rate: float) -> None:
        self.capacity = capacity
        self.shape = BloomShape.fit(capacity, error_rate / 2)
        self.early = 0
        """The number of filters that were full before the end of their period."""
        self.now_changed = self.before_changed = False
        """Whether a filter changed since it was frozen."""
        self._now = BloomFilter(self.shape)
        self._beside: list[BloomFilter] = []  # further filters of the current period
        self._before: list[BloomFilter] = []

    def new(self, hashes: U64) -> Bools:
        """Which rows contain a key not seen before, in this column or earlier. These keys count as seen from now
        on."""
        keys, rows = np.unique(hashes, return_index=True)  # the first row of each key
        for each in self._filters():
            known = each.holds(keys)
            keys, rows = keys[~known], rows[~known]
        result = np.zeros(len(hashes), np.bool_)
        result[rows] = True
        self._add(hashes[result])  # in the order of arrival, so that later keys are remembered longer
        return result

    def rotate(self) -> None:
        """End the period: discard the previous filter and start a new one."""
        if self._now.added or self._beside or self._before:
            self._before = [self._now, *self._beside]
            self._now, self._beside = BloomFilter(self.shape), []
            self.now_changed = self.before_changed = True

    @property
    def error_rate(self) -> float:
        """The probability that a key that was never seen is reported as seen."""
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
        """Restore frozen filters, possibly those of an object with another capacity or error rate."""
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
    """Merge the filters of two tasks that become one. Two filters are joined (OR) if the result contains no
    more keys than its capacity. Two full filters are kept side by side, which doubles the error rate; joining them
    would increase an error rate of 0.001 by a factor of 86."""
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
