"""The two ends of XOR acking: the tally that a worker collects, and the ledgers of the acker.

The ledger of a root starts with a keyed function of the root. Each sent frame and each acked group XORs an edge id
into it. A spout that did not send exactly one copy also XORs in the difference. XOR is commutative, so an ack may
arrive before the entry of its spout. Every edge id occurs twice, so the ledger is 0 when everything that stems
from the root is acked, and otherwise only with a probability of 2^-64.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from penstock.acking.ids import NUMBER_BITS, NUMBER_MASK, U64, edges_of_roots
from penstock.acking.lineage import I64, Entries
from penstock.acking.spread import AckerShare

MAX_OPEN = 1 << 22
"""Roots: the maximum distance between the newest root of a spout task and its oldest open one. The ledgers of the
task then take about 70 MB."""
_FIRST_OPEN = 1 << 14
"""Roots for which a new ring has room: about 280 KB, enough for a spout with a small backlog."""
_HEAD = struct.Struct("<IIII")

_Change = tuple[I64, U64 | np.uint64]
"""The numbers of roots, ascending, and one value per number or one value for all."""


class Tally:
    """Collects entries until they are sent. All entries between two calls of ``take`` reach the acker together, so
    the edges of emitted tuples never arrive after the ack of their input."""

    def __init__(self) -> None:
        self._entries: list[Entries] = []

    def add(self, entries: Entries) -> None:
        if len(entries.first):
            self._entries.append(entries)

    def __bool__(self) -> bool:
        return bool(self._entries)

    def take(self) -> list[Entries]:
        taken, self._entries = self._entries, []
        return taken


def pack(parts: Sequence[Entries]) -> bytes:
    """Encode entries for the wire. Entries for the same roots are XORed together; single roots come first, then
    ranges."""
    first, length, value = merge(parts)
    single = length == 1
    count = int(single.sum())
    if 0 < count < len(first):
        order = np.argsort(~single, kind="stable")
        first, length, value = first[order], length[order], value[order]
    roots, ranges = first[:count], first[count:]
    run = count > 1 and int(roots[-1] - roots[0]) == count - 1
    columns = [roots[:1] if run else roots, ranges, length[count:].astype(np.uint64), value]
    return b"".join((_HEAD.pack(count, len(ranges), run, 0), *(column.tobytes() for column in columns)))


def unpack(data: bytes) -> tuple[Entries, Entries]:
    """Decode the entries for single roots, each of which occurs once, and those for ranges."""
    count, ranges, run, _ = _HEAD.unpack_from(data)
    words = np.frombuffer(data, np.uint64, offset=_HEAD.size)
    listed = 1 if run else count
    roots = words[0] + np.arange(count, dtype=np.uint64) if run else words[:count]
    first = words[listed : listed + ranges]
    length = words[listed + ranges : listed + 2 * ranges].view(np.int64)
    value = words[listed + 2 * ranges :]
    return Entries(roots, np.ones(count, np.int64), value[:count]), Entries(first, length, value[count:])


def merge(parts: Sequence[Entries]) -> Entries:
    """One entry per range of roots, in order. Entries that cancel out are dropped."""
    if len(parts) == 1:
        first, length, value = parts[0]
    else:
        first, length, value = (np.concatenate([part[i] for part in parts]) for i in range(3))
    mixed = bool(np.any(length != 1))
    if len(first) > 1 and (mixed or not np.all(first[1:] >= first[:-1])):
        # Makes equal ranges adjacent, even if other ranges that begin with the same root lie between them.
        order = np.lexsort((length, first)) if mixed else np.argsort(first, kind="stable")
        first, length, value = first[order], length[order], value[order]
    same = (first[1:] == first[:-1]) & (length[1:] == length[:-1])
    if same.any():
        begins = np.flatnonzero(np.concatenate([[True], ~same]))
        first, length, value = first[begins], length[begins], np.bitwise_xor.reduceat(value, begins)
    left = value != 0
    if left.all():
        return Entries(first, length, value)
    return Entries(first[left], length[left], value[left])


class Acker:
    """The ledgers of all spout tasks, or of the roots that belong to this acker. Entries may be applied in any
    order. Not thread-safe, but any thread may read the properties."""

    def __init__(self, key: int, share: AckerShare | None = None) -> None:
        """``share``: None for all roots."""
        self._key = key
        self._share = None if share is None or share.is_all else share
        self._ledgers: dict[int, _Ledgers] = {}
        self.entries = 0
        """Number of changes of ledgers so far: one for each root of each entry."""

    def apply(self, single: Entries, ranges: Entries) -> dict[int, I64]:
        """Apply the entries that one worker sent (see ``unpack``). Returns the numbers of the roots that became
        complete, by spout task and in order."""
        parts: dict[int, list[_Change]] = {}
        for task, numbers, value in _by_task(single):
            parts.setdefault(task, []).append((numbers, value))
        for first, length, value in zip(*(column.tolist() for column in ranges), strict=True):
            task, number = first >> NUMBER_BITS, first & int(NUMBER_MASK)
            parts.setdefault(task, []).append((np.arange(number, number + length), np.uint64(value)))
            self.entries += length
        self.entries += len(single.first)
        share = self._share
        if share is not None:
            local = share.local
            parts = {task: [(local(task, ns), v) for ns, v in changes] for task, changes in parts.items()}
        complete = {task: self._of(task).enter(changes) for task, changes in parts.items()}
        if share is not None:
            complete = {task: share.original(task, numbers) for task, numbers in complete.items()}
        return {task: numbers for task, numbers in complete.items() if len(numbers)}

    def close(self, first: U64, length: I64) -> dict[int, I64]:
        """Close roots that have failed. Returns their numbers by spout task. Their places in the ring become free,
        and later entries for them are ignored."""
        roots = np.unique(_spread(first, length))
        entries = Entries(roots, np.ones(len(roots), np.int64), np.zeros(len(roots), np.uint64))
        failed = {task: numbers for task, numbers, _ in _by_task(entries)}
        for task, numbers in failed.items():
            self._of(task).close(numbers if self._share is None else self._share.local(task, numbers))
        return failed

    def settled_below(self, task: int, number: int) -> None:
        """Record that the spout task has settled all roots with smaller numbers, including those that timed out.
        Their ledgers are dropped, and later entries for them are ignored."""
        ledgers = self._of(task)
        ledgers.floor = max(ledgers.floor, number if self._share is None else self._share.below(task, number))

    def size(self, task: int) -> int:
        """The capacity of the ring of this spout task, in roots."""
        return self._of(task).size

    @property
    def open_roots(self) -> int:
        """Number of roots that have a ledger and are neither complete nor failed."""
        return sum(ledgers.open_roots for ledgers in list(self._ledgers.values()))

    @property
    def ledger_bytes(self) -> int:
        """The memory of all ledgers."""
        return sum(ledgers.bytes for ledgers in list(self._ledgers.values()))

    def _of(self, task: int) -> _Ledgers:
        ledgers = self._ledgers.get(task)
        if ledgers is None:
            ledgers = self._ledgers[task] = _Ledgers(task, self._key, self._share)
        return ledgers


class _Ledgers:
    """The ledgers of one spout task, in a ring indexed by the number of the root, or with a share by its local
    number. The number is stored with the value, so that a late ack cannot change the ledger of the next root in
    the same place."""

    def __init__(self, task: int, key: int, share: AckerShare | None) -> None:
        self._base, self._key = np.uint64(task << NUMBER_BITS), key
        self._task, self._share = task, share
        self._number = np.full(_FIRST_OPEN, -1, np.int64)
        self._value = np.zeros(_FIRST_OPEN, np.uint64)
        """0 if the root is complete, has failed or is not started."""
        self._failed = np.zeros(_FIRST_OPEN, np.bool_)
        self._any_failed = False
        self.floor = 0
        """Roots with smaller numbers are settled."""

    @property
    def size(self) -> int:
        return len(self._number)

    @property
    def open_roots(self) -> int:
        number, value = self._number, self._value
        if len(number) != len(value):
            return 0  # the ring is growing at this moment, on another thread
        return int(np.count_nonzero((value != 0) & (number >= self.floor)))

    @property
    def bytes(self) -> int:
        return self._number.nbytes + self._value.nbytes + self._failed.nbytes

    def close(self, numbers: I64) -> None:
        """Mark these roots as failed."""
        numbers = numbers[numbers >= self.floor]
        self._open(numbers)
        places = self._place(numbers)
        places = places[self._number[places] == numbers]
        self._value[places] = 0
        self._failed[places] = True
        self._any_failed = self._any_failed or len(places) > 0

    def enter(self, changes: Sequence[_Change]) -> I64:
        """XOR values into ledgers; a number occurs once per change. Returns the numbers that became complete."""
        changes = [self._unsettled(change) for change in changes]
        for numbers, _ in changes:  # all, before any ledger becomes 0 and its place can be reused
            self._open(numbers)
        owned = [self._change(numbers, value) for numbers, value in changes]
        zero = [numbers[self._value[self._place(numbers)] == 0] for numbers in owned]
        done: I64 = zero[0] if len(zero) == 1 else np.unique(np.concatenate(zero))
        return done

    def _unsettled(self, change: _Change) -> _Change:
        """The change without roots that the spout has settled. Usually there are none."""
        numbers, value = change
        if not len(numbers) or numbers[0] >= self.floor:
            return change
        begin = int(np.searchsorted(numbers, self.floor))
        return numbers[begin:], value[begin:] if isinstance(value, np.ndarray) else value

    def _change(self, numbers: I64, value: U64 | np.uint64) -> I64:
        """XOR the values into the ledgers of these numbers. Returns the numbers that have a ledger."""
        places = self._place(numbers)
        live = self._number[places] == numbers
        if self._any_failed:
            live &= ~self._failed[places]
        # late entries: the root has failed, or it was settled long ago and its place belongs to another root
        if not live.all():
            numbers, places = numbers[live], places[live]
            value = value[live] if isinstance(value, np.ndarray) else value
        self._value[places] ^= value
        return numbers

    def _place(self, numbers: I64) -> I64:
        return numbers & (len(self._number) - 1)

    def _open(self, numbers: I64) -> None:
        """Start the ledger of each root that occurs for the first time. The ring grows if two open roots would
        share a place, also if the earlier root arrives after the later one because it waited in a long queue."""
        if not len(numbers):
            return
        while True:
            places = self._place(numbers)
            owner = self._number[places]
            if np.array_equal(owner, numbers):
                return
            new = owner < numbers
            crowded = (
                np.any(new & (self._value[places] != 0) & (owner >= self.floor))
                or np.any(owner > numbers)
                or int(numbers[-1] - numbers[0]) >= len(self._number)
            )
            if not crowded or len(self._number) >= MAX_OPEN:
                break
            self._grow()
        if new.any():
            fresh, begun = places[new], numbers[new]
            self._number[fresh] = begun
            self._failed[fresh] = False
            if self._share is not None:
                begun = self._share.original(self._task, begun)
            self._value[fresh] = edges_of_roots(self._key, begun.astype(np.uint64) | self._base)

    def _grow(self) -> None:
        kept = np.flatnonzero(((self._value != 0) | self._failed) & (self._number >= self.floor))
        numbers, values, failed = self._number[kept], self._value[kept], self._failed[kept]
        size = 2 * len(self._number)
        self._number = np.full(size, -1, np.int64)
        self._value = np.zeros(size, np.uint64)
        self._failed = np.zeros(size, np.bool_)
        places = numbers & (size - 1)
        self._number[places] = numbers
        self._value[places] = values
        self._failed[places] = failed
        self._any_failed = bool(failed.any())


def _by_task(entries: Entries) -> list[tuple[int, I64, U64]]:
    """Entries for single roots, in the order of the roots, as triples of spout task, numbers and values."""
    roots, _, value = entries
    parts, begin, end = [], 0, len(roots)
    last = int(roots[-1]) >> NUMBER_BITS if end else 0
    while begin < end:
        task = int(roots[begin]) >> NUMBER_BITS
        stop = end if task == last else int(np.searchsorted(roots, np.uint64((task + 1) << NUMBER_BITS)))
        numbers = roots[begin:stop].view(np.int64) - (task << NUMBER_BITS)
        parts.append((task, numbers, value[begin:stop]))
        begin = stop
    return parts


def _spread(first: U64, length: I64) -> U64:
    """Expand ranges into single roots."""
    if not len(first):
        return first
    offsets = np.arange(int(length.sum())) - np.repeat(np.cumsum(length) - length, length)
    spread: U64 = np.repeat(first, length) + offsets.astype(np.uint64)
    return spread


def ranges(numbers: npt.NDArray[np.int64]) -> tuple[I64, I64]:
    """Convert ascending numbers to ranges (first, length). What an acker sends to a spout is usually a few long
    ranges."""
    begins = np.flatnonzero(np.concatenate([[True], np.diff(numbers) != 1]))
    return numbers[begins], np.diff(np.append(begins, len(numbers)))


def numbers(first: I64, length: I64) -> I64:
    """Expand ranges into numbers."""
    if len(first) == 1:
        return np.arange(first[0], first[0] + length[0])
    return _spread(first.astype(np.uint64), length).astype(np.int64)
