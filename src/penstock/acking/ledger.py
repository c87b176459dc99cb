"""The two ends of XOR acking: the tally a worker collects, and the ledgers of an acker.

A root's ledger begins with a keyed function of the root. Each frame sent and each group acked XORs an edge id
into it; a spout XORs in what its own edges differ by, if it sent other than one copy. XOR does not care for
order, so an ack may well come before what its spout has to say. All edges come twice, so the ledger is 0 when,
and (but for a chance of 2^-64) only when, everything that stems from the root is acked.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from penstock.acking.ids import NUMBER_BITS, NUMBER_MASK, U64, edges_of_roots
from penstock.acking.lineage import I64, Entries

MOST_OPEN = 1 << 22
"""How far a spout's newest root may be ahead of its oldest open one: 64 MB of ledgers."""
_FIRST_OPEN = 1 << 14
_HEAD = struct.Struct("<IIII")

_Change = tuple[I64, U64 | np.uint64]
"""The numbers of roots, ascending, and their values or the one for all of them."""


class Tally:
    """Collects entries until they are sent. What is collected between two ``take`` reaches the acker as one, so
    that the edges of emitted tuples never come after the ack of what they stem from."""

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
    """Entries for the wire: XORed together where they are for the same roots, single roots first, then ranges."""
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
    """The entries for single roots, each once, and those for ranges."""
    count, ranges, run, _ = _HEAD.unpack_from(data)
    words = np.frombuffer(data, np.uint64, offset=_HEAD.size)
    listed = 1 if run else count
    roots = words[0] + np.arange(count, dtype=np.uint64) if run else words[:count]
    first = words[listed : listed + ranges]
    length = words[listed + ranges : listed + 2 * ranges].view(np.int64)
    value = words[listed + 2 * ranges :]
    return Entries(roots, np.ones(count, np.int64), value[:count]), Entries(first, length, value[count:])


def merge(parts: Sequence[Entries]) -> Entries:
    """One entry per range of roots, in order; those that cancel out are dropped."""
    if len(parts) == 1:
        first, length, value = parts[0]
    else:
        first, length, value = (np.concatenate([part[i] for part in parts]) for i in range(3))
    mixed = bool(np.any(length != 1))
    if len(first) > 1 and (mixed or not np.all(first[1:] >= first[:-1])):
        # Equal ranges side by side, also where others that begin with the same root lie between them.
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
    """The ledgers of all spout tasks. Fed with entries in any order."""

    def __init__(self, key: int) -> None:
        self._key = key
        self._ledgers: dict[int, _Ledgers] = {}

    def apply(self, single: Entries, ranges: Entries) -> dict[int, I64]:
        """Enter what one worker sent (see ``unpack``); returns the numbers of the roots that are complete now, by
        spout task, in order."""
        parts: dict[int, list[_Change]] = {}
        for task, numbers, value in _by_task(single):
            parts.setdefault(task, []).append((numbers, value))
        for first, length, value in zip(*(column.tolist() for column in ranges), strict=True):
            task, number = first >> NUMBER_BITS, first & int(NUMBER_MASK)
            parts.setdefault(task, []).append((np.arange(number, number + length), np.uint64(value)))
        complete = {task: self._of(task).enter(changes) for task, changes in parts.items()}
        return {task: numbers for task, numbers in complete.items() if len(numbers)}

    def close(self, first: U64, length: I64) -> dict[int, I64]:
        """These roots have failed: their numbers, by spout task. Their places in the ring are free for others, and
        what still comes for them changes nothing."""
        roots = np.unique(_spread(first, length))
        entries = Entries(roots, np.ones(len(roots), np.int64), np.zeros(len(roots), np.uint64))
        failed = {task: numbers for task, numbers, _ in _by_task(entries)}
        for task, numbers in failed.items():
            self._of(task).close(numbers)
        return failed

    def settled_below(self, task: int, number: int) -> None:
        """The spout task has settled all roots with smaller numbers, those that timed out included: nothing is
        kept of them, and what still comes for them is ignored."""
        ledgers = self._of(task)
        ledgers.floor = max(ledgers.floor, number)

    def size(self, task: int) -> int:
        """How many roots the ring of that spout task has places for."""
        return self._of(task).size

    def _of(self, task: int) -> _Ledgers:
        ledgers = self._ledgers.get(task)
        if ledgers is None:
            ledgers = self._ledgers[task] = _Ledgers(task, self._key)
        return ledgers


class _Ledgers:
    """One spout task's, in a ring indexed by the root's number. The number stands beside the value, so that a
    late ack cannot hit the next owner of its place."""

    def __init__(self, task: int, key: int) -> None:
        self._base, self._key = np.uint64(task << NUMBER_BITS), key
        self._number = np.full(_FIRST_OPEN, -1, np.int64)
        self._value = np.zeros(_FIRST_OPEN, np.uint64)
        """0: complete, failed, or not begun."""
        self._failed = np.zeros(_FIRST_OPEN, np.bool_)
        self._any_failed = False
        self.floor = 0
        """Roots with smaller numbers are settled."""

    @property
    def size(self) -> int:
        return len(self._number)

    def close(self, numbers: I64) -> None:
        """They have failed."""
        numbers = numbers[numbers >= self.floor]
        self._open(numbers)
        places = self._place(numbers)
        places = places[self._number[places] == numbers]
        self._value[places] = 0
        self._failed[places] = True
        self._any_failed = self._any_failed or len(places) > 0

    def enter(self, changes: Sequence[_Change]) -> I64:
        """XOR values into ledgers, in each change a number once; returns the numbers that are complete now."""
        changes = [self._unsettled(change) for change in changes]
        for numbers, _ in changes:  # all before any is 0, and its place free for another
            self._open(numbers)
        owned = [self._change(numbers, value) for numbers, value in changes]
        zero = [numbers[self._value[self._place(numbers)] == 0] for numbers in owned]
        done: I64 = zero[0] if len(zero) == 1 else np.unique(np.concatenate(zero))
        return done

    def _unsettled(self, change: _Change) -> _Change:
        """Without the roots that the spout has settled; as a rule there are none."""
        numbers, value = change
        if not len(numbers) or numbers[0] >= self.floor:
            return change
        begin = int(np.searchsorted(numbers, self.floor))
        return numbers[begin:], value[begin:] if isinstance(value, np.ndarray) else value

    def _change(self, numbers: I64, value: U64 | np.uint64) -> I64:
        """XOR the values into the ledgers of these numbers; returns those that have one."""
        places = self._place(numbers)
        live = self._number[places] == numbers
        if self._any_failed:
            live &= ~self._failed[places]
        if not live.all():  # late: the root has failed, or the place has a new owner, as it was settled long ago
            numbers, places = numbers[live], places[live]
            value = value[live] if isinstance(value, np.ndarray) else value
        self._value[places] ^= value
        return numbers

    def _place(self, numbers: I64) -> I64:
        return numbers & (len(self._number) - 1)

    def _open(self, numbers: I64) -> None:
        """Begin the ledger of each root of which this is the first that is heard. Grows where two open roots
        would share a place; also for one that comes when a later root has its place: it may have waited in a
        long queue."""
        if not len(numbers):
            return
        while True:
            places = self._place(numbers)
            owner = self._number[places]
            new = owner < numbers
            crowded = (
                np.any(new & (self._value[places] != 0) & (owner >= self.floor))
                or np.any(owner > numbers)
                or int(numbers[-1] - numbers[0]) >= len(self._number)
            )
            if not crowded or len(self._number) >= MOST_OPEN:
                break
            self._grow()
        if new.any():
            fresh, begun = places[new], numbers[new]
            self._number[fresh] = begun
            self._failed[fresh] = False
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
    """Entries for single roots, as ⟨spout task, numbers, values⟩."""
    roots, _, value = entries
    if not len(roots):
        return []
    numbers = (roots & NUMBER_MASK).astype(np.int64)
    tasks = (roots >> np.uint64(NUMBER_BITS)).astype(np.int64)
    if tasks[0] == tasks[-1]:  # they come in order
        return [(int(tasks[0]), numbers, value)]
    return [(task, numbers[tasks == task], value[tasks == task]) for task in np.unique(tasks).tolist()]


def _spread(first: U64, length: I64) -> U64:
    """Ranges as single roots."""
    if not len(first):
        return first
    offsets = np.arange(int(length.sum())) - np.repeat(np.cumsum(length) - length, length)
    spread: U64 = np.repeat(first, length) + offsets.astype(np.uint64)
    return spread


def ranges(numbers: npt.NDArray[np.int64]) -> tuple[I64, I64]:
    """Ascending numbers as ⟨first, length⟩: what an acker tells a spout is mostly a few long runs."""
    begins = np.flatnonzero(np.concatenate([[True], np.diff(numbers) != 1]))
    return numbers[begins], np.diff(np.append(begins, len(numbers)))


def numbers(first: I64, length: I64) -> I64:
    """The numbers in ranges."""
    if len(first) == 1:
        return np.arange(first[0], first[0] + length[0])
    return _spread(first.astype(np.uint64), length).astype(np.int64)
