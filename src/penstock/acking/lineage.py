"""The lineage of a frame: the spout tuples (roots) that its tuples stem from.

The rows of a frame are divided into groups of adjacent rows that stem from the same roots. A group has one edge id
and is acked when all its rows are acked: one edge id per pair of inputs and target task instead of one per anchor
(the improved scheme of the Storm overview). Roots are stored as ranges, because a batch stems from hundreds of
consecutive roots.

``Entries`` are changes of the ledgers of roots. Sending a frame and acking it change the same ledgers by the same
values, so both use the entries of its lineage.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.acking.ids import U64, UNTRACKED, edges_of_roots, seeded_edges

I64 = npt.NDArray[np.int64]
_HEAD = struct.Struct("<IIIIQ")
_OWN_ROWS, _CONSECUTIVE, _ONE_ROOT_EACH, _SINGLE, _KEYED = 1, 2, 4, 8, 16
_NO_U64 = np.zeros(0, np.uint64)
_NO_I64 = np.zeros(0, np.int64)


class Entries(NamedTuple):
    """XOR ``value`` into the ledgers of the roots ``first`` to ``first + length - 1``."""

    first: U64
    length: I64
    value: U64


class Lineage:
    """The groups of a frame. ``first``, ``length`` and ``group`` have one element per pair of group and range of
    roots, in the order of groups. An untracked group has none."""

    __slots__ = ("edges", "ends", "first", "group", "length", "seed")

    def __init__(
        self, ends: I64, edges: U64, first: U64, length: I64, group: I64, seed: int | None = None
    ) -> None:
        self.ends, self.edges = ends, edges
        """The end of each group's rows, and its edge id."""
        self.seed = seed
        """The seed of the edge ids. None if they are those of the roots."""
        self.first, self.length, self.group = first, length, group

    @property
    def rows(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def entries(self, begin: int = 0, end: int | None = None) -> Entries:
        """The entries of groups ``begin`` to ``end``: the changes made when these groups are acked."""
        if begin == 0 and end is None:
            low, high = 0, len(self.group)
        else:
            low, high = np.searchsorted(self.group, [begin, len(self.ends) if end is None else end])
        return Entries(self.first[low:high], self.length[low:high], self.edges[self.group[low:high]])

    def group_of_rows(self) -> I64:
        """The group of each row."""
        return np.repeat(np.arange(len(self.ends)), np.diff(self.ends, prepend=0))

    def pack(self) -> bytes:
        """Encode for the wire. Values that can be derived are omitted: a frame of a spout takes 32 bytes."""
        count, entries = len(self.ends), len(self.first)
        flags, parts = 0, []
        if count == self.rows:
            flags |= _OWN_ROWS
        else:
            parts.append(self.ends.astype(np.uint64).tobytes())
        if entries and np.array_equal(self.first, np.arange(self.first[0], self.first[0] + np.uint64(entries))):
            flags |= _CONSECUTIVE
            parts.append(self.first[:1].tobytes())
        else:
            parts.append(self.first.tobytes())
        if np.all(self.length == 1):
            flags |= _SINGLE
        else:
            parts.append(self.length.astype(np.uint64).tobytes())
        if entries == count and np.array_equal(self.group, np.arange(count)):
            flags |= _ONE_ROOT_EACH
        else:
            parts.append(self.group.astype(np.uint64).tobytes())
        if self.seed is None:
            flags |= _KEYED
        return b"".join((_HEAD.pack(flags, self.rows, count, entries, self.seed or 0), *parts))


def unpack(data: memoryview, key: int) -> Lineage:
    """Decode the lineage in a frame. ``key`` is ``Job.key``."""
    flags, rows, count, entries, seed = _HEAD.unpack_from(data)
    at = _HEAD.size

    def column(length: int) -> U64:
        nonlocal at
        found = np.frombuffer(data, np.uint64, length, at)
        at += 8 * length
        return found

    ends = np.arange(1, rows + 1) if flags & _OWN_ROWS else column(count).astype(np.int64)
    consecutive = flags & _CONSECUTIVE
    first = column(1)[0] + np.arange(entries, dtype=np.uint64) if consecutive else column(entries).copy()
    length = np.ones(entries, np.int64) if flags & _SINGLE else column(entries).astype(np.int64)
    group = np.arange(count) if flags & _ONE_ROOT_EACH else column(entries).astype(np.int64)
    edges = edges_of_roots(key, first) if flags & _KEYED else seeded_edges(seed, count)
    return Lineage(ends, edges, first, length, group, None if flags & _KEYED else seed)


class Anchors(NamedTuple):
    """The origin of emitted rows: the number of a set of roots for each row (-1: untracked), and the sets, with
    one element per pair of set and range of roots."""

    sets: I64
    first: U64
    length: I64
    starts: I64
    """The ranges of set i are ``starts[i]`` to ``starts[i + 1]``."""

    def take(self, rows: slice | I64) -> Anchors:
        return self._replace(sets=self.sets[rows])

    def lineage(self, seed: int) -> Lineage:
        """The groups of a frame with these rows: adjacent rows with the same set."""
        sets = self.sets
        if not len(sets):
            return Lineage(_NO_I64, _NO_U64, _NO_U64, _NO_I64, _NO_I64, seed)
        ends = np.append(np.flatnonzero(sets[1:] != sets[:-1]) + 1, len(sets))
        chosen = sets[ends - 1]
        counts = np.where(chosen < 0, 0, self.starts[chosen + 1] - self.starts[chosen])
        group = np.repeat(np.arange(len(ends)), counts)
        if len(group) == len(ends) and np.all(counts == 1):
            at = self.starts[chosen]
        else:
            within = np.arange(len(group)) - np.repeat(np.cumsum(counts) - counts, counts)
            at = np.repeat(self.starts[chosen], counts) + within
        return Lineage(ends, seeded_edges(seed, len(ends)), self.first[at], self.length[at], group, seed)


def joined(parts: Sequence[Anchors]) -> Anchors:
    """The anchors of concatenated rows."""
    if len(parts) == 1:
        return parts[0]
    sets, starts, count, ranges = [], [], 0, 0
    for part in parts:
        sets.append(np.where(part.sets < 0, -1, part.sets + count))
        starts.append(part.starts[:-1] + ranges)
        count += len(part.starts) - 1
        ranges += len(part.first)
    return Anchors(
        np.concatenate(sets),
        np.concatenate([part.first for part in parts]),
        np.concatenate([part.length for part in parts]),
        np.concatenate([*starts, [ranges]]),
    )


def untracked(rows: int) -> Anchors:
    return Anchors(np.full(rows, -1), _NO_U64, _NO_I64, np.zeros(1, np.int64))


def of_roots(roots: U64) -> Anchors:
    """The anchors of rows of a spout: each row is its own root, or ``UNTRACKED``."""
    tracked = roots != UNTRACKED
    if tracked.all():
        sets = np.arange(len(roots))
    else:
        sets = np.where(tracked, np.cumsum(tracked) - 1, -1)
        roots = roots[tracked]
    count = len(roots)
    return Anchors(sets, roots, np.ones(count, np.int64), np.arange(count + 1))


def of_groups(lineage: Lineage, groups: I64) -> Anchors:
    """The anchors of rows that each stem from one group of an input frame."""
    starts = np.searchsorted(lineage.group, np.arange(len(lineage.ends) + 1))
    return Anchors(groups, lineage.first, lineage.length, starts)


def of_all(lineages: Sequence[Lineage], rows: int) -> Anchors:
    """The anchors of rows that all stem from all rows of the given frames. Each root is included once, because its
    ledger must get a new edge exactly once, even if several anchors stem from it."""
    first, length = union(
        np.concatenate([lineage.first for lineage in lineages]),
        np.concatenate([lineage.length for lineage in lineages]),
    )
    return Anchors(np.zeros(rows, np.int64), first, length, np.array([0, len(first)]))


def part_of(lineage: Lineage, group: int) -> Lineage:
    """The lineage of a single group."""
    low, high = np.searchsorted(lineage.group, [group, group + 1])
    return Lineage(
        np.array([1]),
        lineage.edges[group : group + 1],
        lineage.first[low:high],
        lineage.length[low:high],
        np.zeros(high - low, np.int64),
    )


def union(first: U64, length: I64) -> tuple[U64, I64]:
    """Ranges that cover the same roots without overlaps."""
    if len(first) < 2:
        return first, length
    if not np.all(first[1:] >= first[:-1]):
        order = np.argsort(first, kind="stable")
        first, length = first[order], length[order]
    reach = np.maximum.accumulate(first + length.astype(np.uint64))
    begins = np.flatnonzero(np.concatenate([[True], first[1:] > reach[:-1]]))
    ends = np.append(begins[1:], len(first)) - 1
    return first[begins], (reach[ends] - first[begins]).astype(np.int64)
