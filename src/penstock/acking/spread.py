"""How roots are spread over several ackers. Blocks of consecutive roots of a spout task go to the ackers in turn,
so even the roots of one spout task are shared by all ackers. The first block of each task belongs to another acker
than that of the task before. An acker numbers the roots of its own blocks consecutively (local numbers), so the
rings of its ledgers have no gaps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.acking.ids import NUMBER_BITS, NUMBER_MASK, U64
from penstock.acking.lineage import I64, Entries

BLOCK_BITS = 11
BLOCK = 1 << BLOCK_BITS
"""Roots of one block. A message costs an acker as much as the work on about a thousand roots, so what a worker
sends at a time should go to few ackers. But all ackers should have a part of the tuples in flight, of which there
are 50,000 by default."""


@dataclass(frozen=True)
class AckerShare:
    """The roots of one acker: the one with this index, of so many."""

    index: int = 0
    count: int = 1

    @property
    def is_all(self) -> bool:
        return self.count == 1

    def local(self, task: int, numbers: I64) -> I64:
        """The local numbers of these roots of the spout task, all of which belong to this acker."""
        return (numbers >> BLOCK_BITS) // self.count * BLOCK + (numbers & (BLOCK - 1))

    def original(self, task: int, local: I64) -> I64:
        """The inverse of ``local``."""
        first = (self.index - task) % self.count
        return ((local >> BLOCK_BITS) * self.count + first) * BLOCK + (local & (BLOCK - 1))

    def below(self, task: int, number: int) -> int:
        """How many roots of the spout task with smaller numbers belong to this acker."""
        rounds, rest = divmod(number, self.count * BLOCK)
        begin = (self.index - task) % self.count * BLOCK
        return rounds * BLOCK + min(max(rest - begin, 0), BLOCK)


def owners(task: int, numbers: I64, count: int) -> I64:
    """The acker of each of these roots of a spout task."""
    return (task + (numbers >> BLOCK_BITS)) % count


def _owners_of_roots(roots: U64, count: int) -> I64:
    tasks = (roots >> np.uint64(NUMBER_BITS)).astype(np.int64)
    blocks = ((roots & NUMBER_MASK) >> np.uint64(BLOCK_BITS)).astype(np.int64)
    return (tasks + blocks) % count


def split(entries: Entries, count: int) -> list[tuple[int, Entries]]:
    """Divide entries among the ackers of their roots, in the same order. A range of roots becomes a range for each
    of its blocks. Returns the ackers that get any, each with its entries."""
    if not len(entries.first):
        return []
    first, length, value = _cut(entries)
    owner = _owners_of_roots(first, count)
    if owner[0] == owner[-1] and np.all(owner == owner[0]):
        return [(int(owner[0]), Entries(first, length, value))]
    parts = []
    for index in range(count):
        mine = owner == index
        if mine.any():
            parts.append((index, Entries(first[mine], length[mine], value[mine])))
    return parts


def _cut(entries: Entries) -> Entries:
    """The same changes, with ranges that end with their block."""
    first, length, value = entries
    within = (first & np.uint64(BLOCK - 1)).astype(np.int64)
    if np.all(within + length <= BLOCK):
        return entries
    pieces = (within + length + BLOCK - 1) >> BLOCK_BITS
    which = np.repeat(np.arange(len(first)), pieces)
    number = np.arange(len(which)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    begin = np.maximum(number * BLOCK - within[which], 0)
    end = np.minimum((number + 1) * BLOCK - within[which], length[which])
    return Entries(first[which] + begin.astype(np.uint64), end - begin, value[which])


def split_ranges(first: U64, length: I64, count: int) -> list[tuple[int, U64, I64]]:
    """Divide ranges of roots among their ackers: each acker, with its first roots and lengths."""
    parts = split(Entries(first, length, first), count)
    return [(index, entries.first, entries.length) for index, entries in parts]
