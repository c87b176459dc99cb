"""The map of a task's state: a dict whose changes are included in snapshots."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import repeat
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from penstock.columns import to_column, to_values
from penstock.errors import StateError
from penstock.state.decoded import DecodedChain
from penstock.state.encoding import DELETED, StateChange, all_plain, apply_map, encode_map, frozen
from penstock.state.shares import Share
from penstock.state.tracked_map import NO_DEFAULT, TrackedMap

MAX_DELTAS = 50
"""Deltas written after a full copy before the next full copy, however small they are. A restore reads them all,
with one request each."""

Merge: TypeAlias = Callable[[Any, Any], Any]
"""Merges two values of one key, or of one value state."""
Owner: TypeAlias = Callable[[Any], Any]
"""Extracts from a map's key what the bolt's input is grouped by: the value of one field, or a tuple of several."""


def whole_key(key: Any) -> Any:
    """The ``Owner`` of a map whose keys are the values of the single field that the bolt's input is grouped by."""
    return key


class MapState(TrackedMap):
    """A dict that survives the process. Created by ``TaskState.map``. All calls come from the thread of the task.

    Only assignments are recorded. After changing a list, dict or other mutable value in place, assign it again
    (``state[key] = value``); otherwise the change may be lost with the process.

    ``map(name, default=0)`` sets a value for missing keys, so that ``counts[word] += 1`` works for a new word.
    Reading a missing key then returns the default and stores nothing. Keys and values must be picklable.
    """

    __slots__ = (
        "_base_rows",
        "_default",
        "_delta_rows",
        "_deltas",
        "_plain",
        "merge",
        "name",
        "owner",
        "taken_over",
    )

    def __init__(
        self, name: str = "", default: Any = NO_DEFAULT, merge: Merge | None = None, owner: Owner | None = None
    ) -> None:
        self.name, self.merge, self.owner = name, merge, owner
        self._default = None if default is NO_DEFAULT else default
        self._base_rows = 0  # rows of the last full copy
        self._delta_rows = self._deltas = 0  # rows and number of the deltas written since then
        self._plain = True  # all values are immutable
        self.taken_over: list[tuple[int, int]] = []
        """After a change of the number of tasks: each previous task and the number of keys taken over from it. The
        keys of the map are in this order until it is changed."""

    def update_columns(self, keys: Any, values: Any) -> None:
        """``update`` from two columns of equal length: Arrow arrays, numpy arrays or sequences."""
        keys, values = self._columns("update_columns", keys, values)
        self._fresh.update(zip(keys, values, strict=True))

    def get_columns(self, keys: Any, default: Any = None) -> list[Any]:
        """The value of each key. For a missing key ``default``, or the default of the map if that is None."""
        keys = _values(keys)
        if default is None:
            default = self._default
        return list(map(self._fresh.get, keys, map(self._settled.get, keys, repeat(default))))

    def add_columns(self, keys: Any, amounts: Any = 1) -> None:
        """``self[key] += amount`` for each pair of two columns, or with one amount for all keys. A missing key
        counts as the default of the map, or 0. Integer amounts for keys in an Arrow array are summed up by Arrow
        first. Everything else is added one by one, in order, so that floats give the same result as ``+=``."""
        if isinstance(keys, pa.Array | pa.ChunkedArray) and not keys.null_count:
            totals = _totals(keys, amounts)
            if totals is not None:
                before = self.get_columns(totals[0], self._default or 0)
                self._fresh.update(zip(totals[0], map(operator.add, before, totals[1]), strict=True))
                return
        if not isinstance(amounts, pa.Array | pa.ChunkedArray | Iterable):
            keys = _values(keys)
            amounts = [amounts] * len(keys)
        keys, amounts = self._columns("add_columns", keys, amounts)
        fresh, settled, nothing = self._fresh, self._settled, self._default or 0
        for key, amount in zip(keys, amounts, strict=True):
            fresh[key] = (fresh[key] if key in fresh else settled.get(key, nothing)) + amount

    def load(self, parts: Sequence[bytes]) -> None:
        """Called by ``TaskState`` on an empty map, with a full part and the deltas after it, oldest first."""
        if isinstance(parts, DecodedChain) and parts.items is not None:
            self._settled.update(parts.items)
            rows = parts.rows
        else:
            rows = [apply_map(part, self._settled) for part in parts]
        self._base_rows, self._delta_rows, self._deltas = rows[0], sum(rows[1:]), len(rows) - 1
        self._tracking = True
        self._plain = all_plain(self._settled.values())

    def adopt(self, chains: Mapping[int, Sequence[bytes]], share: Share) -> None:
        """Called by ``TaskState`` on an empty map, with the chains of the previous tasks by their index. The next
        snapshot is full. Raises ``StateError`` if tasks with the same key are merged and the map has no
        ``merge``."""
        owner, hash = self.owner, share.hash
        if owner is not None and hash is not None:
            of_owner = hash if owner is whole_key else lambda keys: hash(_owners(owner, keys))
            share = replace(share, hash=of_owner, one_field=False)
        for source, parts in chains.items():
            if (
                isinstance(parts, DecodedChain)
                and parts.items is not None
                and (owner in (None, whole_key) or hash is None)
            ):
                items = parts.items
            else:
                items = {}
                for part in parts:
                    apply_map(part, items, partial(share.of, source=source, state=self.name))
            self.taken_over.append((source, len(items)))
            both = self._settled.keys() & items.keys() if hash is None else ()  # otherwise each key has one owner
            if both and self.merge is None:
                raise StateError(
                    f"state {self.name!r}",
                    f"tasks {', '.join(map(str, chains))} become one, several of them have the key "
                    f"{next(iter(both))!r}, and the map does not say how to merge its values",
                    "Give the map a merge: state.map(..., merge=operator.add).",
                )
            for key in both:
                assert self.merge is not None
                items[key] = self.merge(self._settled[key], items[key])
            self._settled.update(items)
        self._plain = all_plain(self._settled.values())

    def take(self, full: bool, compact: bool = True) -> StateChange | None:
        """Called by ``TaskState``. Returns the changes since the last call, or a full copy; None if nothing
        changed.

        A full copy is returned if there was none before. With ``compact``, it is also returned if the deltas
        exceed half of the last full copy, because reading both would then cost more, or if there are
        ``MAX_DELTAS``.
        """
        self._settle()
        first, changed, deleted = not self._tracking, self._changed, self._deleted
        self._changed, self._deleted = {}, {}
        if not self._settled if first else not (full or changed or deleted):
            return None
        rows = self._delta_rows + len(changed) + len(deleted)
        outgrown = rows > self._base_rows / 2 or self._deltas >= MAX_DELTAS
        full = full or first or (compact and outgrown)
        newly_plain = all_plain((self._settled if first else changed).values())
        self._plain = self._plain and newly_plain
        if full:
            items = self._settled.copy() if self._plain else frozen(self._settled, self.name)
            self._base_rows, self._delta_rows, self._deltas = len(items), 0, 0
            self._tracking = True
            return StateChange("full", len(items), partial(encode_map, self.name, items))
        items = changed if newly_plain else frozen(changed, self.name)
        self._delta_rows, self._deltas = rows, self._deltas + 1
        return StateChange("delta", len(items) + len(deleted), partial(_encode_delta, self.name, deleted, items))

    def _columns(self, call: str, keys: Any, values: Any) -> tuple[Sequence[Any], Sequence[Any]]:
        keys, values = _values(keys), _values(values)
        if len(keys) != len(values):
            raise StateError(
                f"state {self.name!r}, {call}",
                f"the columns have different lengths, {len(keys):,} keys and {len(values):,} values",
                "Pass one value for each key.",
            )
        return keys, values


def _encode_delta(name: str, deleted: Iterable[Any], items: Mapping[Any, Any]) -> bytes:
    """The deletions come first, because a key that was deleted and assigned again is in both."""
    gone = dict.fromkeys(deleted, DELETED)
    return b"".join(encode_map(name, rows) for rows in (gone, items) if rows)


def _owners(owner: Owner, keys: pa.Array) -> pa.Array:
    return to_column([owner(key) for key in to_values(keys)], None)


def _values(column: Any) -> Sequence[Any]:
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if isinstance(column, pa.Array):
        return to_values(column)
    if hasattr(column, "tolist"):  # numpy: Python numbers are faster and pickle smaller
        values: list[Any] = column.tolist()
        return values
    return column if isinstance(column, Sequence) else list(column)


def _totals(keys: pa.Array | pa.ChunkedArray, amounts: Any) -> tuple[list[Any], list[int]] | None:
    """Distinct keys and their sums. None if Arrow cannot compute them exactly."""
    if not (pa.types.is_string(keys.type) or pa.types.is_integer(keys.type)):
        return None
    if type(amounts) is int:
        counts = pc.value_counts(keys)
        return counts.field(0).to_pylist(), [count * amounts for count in counts.field(1).to_pylist()]
    if not isinstance(amounts, pa.Array | pa.ChunkedArray) or not pa.types.is_integer(amounts.type):
        return None
    if amounts.null_count or len(amounts) != len(keys) or not len(keys):
        return None
    least, most = pc.min_max(amounts).as_py().values()
    if max(abs(least), abs(most)) * len(keys) >= 2**63:  # a sum might overflow
        return None
    table = pa.table({"key": keys, "amount": amounts.cast(pa.int64())})
    sums = table.group_by("key", use_threads=False).aggregate([("amount", "sum")])
    return sums.column("key").to_pylist(), sums.column("amount_sum").to_pylist()
