"""A map that knows what changed in it since it was last asked, at close to a plain dict's speed."""

from __future__ import annotations

import operator
from abc import ABCMeta
from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, MutableMapping, Sequence, ValuesView
from dataclasses import replace
from functools import partial
from itertools import repeat
from typing import Any, Final, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from penstock.columns import to_column, to_values
from penstock.errors import StateError
from penstock.state.decoded import DecodedChain
from penstock.state.encoding import DELETED, StateChange, all_plain, apply_map, encode_map, frozen
from penstock.state.shares import Share

MAX_DELTAS = 50
"""Changes written after a full copy before the next one, however small they are: a restore reads them all, each
with a request of its own."""

_NONE: Final = object()

Merge: TypeAlias = Callable[[Any, Any], Any]
"""Two values of one key, or of one name, as one."""
Owner: TypeAlias = Callable[[Any], Any]
"""Of a map's key what the bolt's input is grouped by: the value of one field, or a tuple of several."""


def whole_key(key: Any) -> Any:
    """The ``Owner`` of a map whose keys are the values of the one field that the bolt's input is grouped by."""
    return key


class MapState(MutableMapping[Any, Any]):
    """A dict that survives. Use it as one; made by ``TaskState.map``.

    It sees what is assigned, not what happens inside a value: after changing a list, dict or other mutable value
    in place, assign it back (``state[key] = value``), or the change may be lost with the process.

    ``map(name, default=0)`` gives it a value for missing keys, so that ``counts[word] += 1`` works for a new word;
    reading a missing key then gives the default and keeps nothing. Keys and values must be picklable. All calls
    come from the task's own thread.

    How it is quick: assignments go to ``_fresh``, a dict on top of ``_settled``; a read that misses the first
    goes on to the second. Both steps are the dict's own C code, so ``counts[word] += 1`` runs no Python of ours:
    93 ns against 57 for a dict, where a ``__setitem__`` in Python that notes the key takes 250. Everything
    that needs the whole map settles first: moves ``_fresh`` down and notes its items as changed.
    """

    __slots__ = (
        "_base_rows",
        "_changed",
        "_default",
        "_delta_rows",
        "_deltas",
        "_fresh",
        "_plain",
        "_settled",
        "merge",
        "name",
        "owner",
        "taken_over",
    )

    _fresh: dict[Any, Any]
    _settled: dict[Any, Any]

    def __new__(
        cls, name: str = "", default: Any = _NONE, merge: Merge | None = None, owner: Owner | None = None
    ) -> MapState:
        settled = _layer(None if default is _NONE else lambda key: default)
        fresh = _layer(settled.__getitem__)
        # Special methods are looked up on the class: a class for each map binds them to its own dict, in C.
        bound = {
            "__slots__": (),
            "__doc__": cls.__doc__,
            "__getitem__": staticmethod(fresh.__getitem__),
            "__setitem__": staticmethod(partial(operator.setitem, fresh)),
        }
        kind: Any = ABCMeta(cls.__name__, (cls,), bound)
        self: MapState = object.__new__(kind)
        self._fresh, self._settled = fresh, settled
        return self

    def __init__(
        self, name: str = "", default: Any = _NONE, merge: Merge | None = None, owner: Owner | None = None
    ) -> None:
        self.name, self.merge, self.owner = name, merge, owner
        self._default = None if default is _NONE else default
        self._changed: dict[Any, Any] = {}  # since the last snapshot; followed once there is a full copy to change
        self._base_rows: int | None = None  # of the full copy the changes build on; None: there is none
        self._delta_rows = self._deltas = 0  # written since then
        self._plain = True  # nothing in here can be changed from outside
        self.taken_over: list[tuple[int, int]] = []
        """Where the number of tasks has changed: the tasks before, and how many keys each one gave. Until the map
        is changed its keys are in this order."""

    def __getitem__(self, key: Any) -> Any:
        return self._fresh[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._fresh[key] = value

    def __delitem__(self, key: Any) -> None:
        self._settle()
        del self._settled[key]
        self._note_deleted((key,))

    def __contains__(self, key: object) -> bool:
        return key in self._fresh or key in self._settled

    def __iter__(self) -> Iterator[Any]:
        self._settle()
        return iter(self._settled)

    def __reversed__(self) -> Iterator[Any]:
        self._settle()
        yield from reversed(self._settled)

    def __len__(self) -> int:
        self._settle()
        return len(self._settled)

    def __eq__(self, other: object) -> bool:
        self._settle()
        if isinstance(other, MapState):
            other._settle()
            other = other._settled
        return self._settled.__eq__(other)

    __hash__ = None  # type: ignore[assignment] # as of any dict

    def __repr__(self) -> str:
        return f"MapState({self.copy()!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (self.copy(),)

    def __or__(self, other: Mapping[Any, Any]) -> dict[Any, Any]:
        return self.copy() | dict(other)

    def __ior__(self, other: Any) -> MapState:  # type: ignore[misc] # as in a dict, it takes pairs too
        self._fresh.update(other)
        return self

    def get(self, key: Any, default: Any = None) -> Any:
        """The key's value, or ``default``: also in a map that has a default of its own, as in a defaultdict."""
        return self._fresh[key] if key in self._fresh else self._settled.get(key, default)

    def items(self) -> ItemsView[Any, Any]:
        return _Items(self)

    def values(self) -> ValuesView[Any]:
        return _Values(self)

    def copy(self) -> dict[Any, Any]:
        """A plain dict of what is in it now."""
        self._settle()
        return self._settled.copy()

    def update(self, *args: Any, **kwargs: Any) -> None:
        self._fresh.update(*args, **kwargs)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def pop(self, key: Any, default: Any = _NONE) -> Any:
        self._settle()
        if key not in self._settled:
            if default is _NONE:
                raise KeyError(key)
            return default
        self._note_deleted((key,))
        return self._settled.pop(key)

    def popitem(self) -> tuple[Any, Any]:
        self._settle()
        key, value = self._settled.popitem()
        self._note_deleted((key,))
        return key, value

    def clear(self) -> None:
        self._settle()
        self._note_deleted(self._settled)
        self._settled.clear()

    def update_columns(self, keys: Any, values: Any) -> None:
        """``update`` from two columns of one length: Arrow arrays, numpy arrays or sequences."""
        keys, values = self._columns("update_columns", keys, values)
        self._fresh.update(zip(keys, values, strict=True))

    def get_columns(self, keys: Any, default: Any = None) -> list[Any]:
        """The value of each key; for missing ones ``default``, or the map's own where that is None."""
        keys = _values(keys)
        if default is None:
            default = self._default
        return list(map(self._fresh.get, keys, map(self._settled.get, keys, repeat(default))))

    def add_columns(self, keys: Any, amounts: Any = 1) -> None:
        """``self[key] += amount`` for each pair of two columns, or one amount for all; a missing key counts as the
        map's default, else 0. Keys in an Arrow array with integer amounts are summed up in Arrow first; anything
        else is added one by one, in order, so that floats come out as ``+=`` would have them."""
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
        """Called by ``TaskState``, on an empty map: a full part and the changes after it, oldest first."""
        if isinstance(parts, DecodedChain) and parts.items is not None:
            self._settled.update(parts.items)
            rows = parts.rows
        else:
            rows = [apply_map(part, self._settled) for part in parts]
        self._base_rows, self._delta_rows, self._deltas = rows[0], sum(rows[1:]), len(rows) - 1
        self._plain = all_plain(self._settled.values())

    def adopt(self, chains: Mapping[int, Sequence[bytes]], share: Share) -> None:
        """Called by ``TaskState``, on an empty map: the chains of the tasks before, by their number. The next
        snapshot is full."""
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
            both = self._settled.keys() & items.keys() if hash is None else ()  # else each key has one owner
            if both and self.merge is None:
                raise StateError(
                    f"state {self.name!r}",
                    f"{next(iter(both))!r} is a key of several of the tasks "
                    f"{', '.join(map(str, chains))}, which become one, and the map does not say how "
                    "to merge its values",
                    "Give the map a merge: state.map(..., merge=operator.add).",
                )
            for key in both:
                assert self.merge is not None
                items[key] = self.merge(self._settled[key], items[key])
            self._settled.update(items)
        self._plain = all_plain(self._settled.values())

    def take(self, full: bool, compact: bool = True) -> StateChange | None:
        """Called by ``TaskState``: what changed since the last call, or all of it; None where nothing did.

        All of it where there is no full copy yet, or, with ``compact``, where the changes since one outgrow half
        of it (reading both would cost more than the copy), or there are ``MAX_DELTAS`` of them.
        """
        self._settle()
        first, changed, self._changed = self._base_rows is None, self._changed, {}
        if not self._settled if first else not (full or changed):
            return None
        rows = self._delta_rows + len(changed)
        outgrown = rows > (self._base_rows or 0) / 2 or self._deltas >= MAX_DELTAS
        full = full or first or (compact and outgrown)
        newly_plain = all_plain((self._settled if first else changed).values())
        self._plain = self._plain and newly_plain
        if full:
            items = self._settled.copy() if self._plain else frozen(self._settled, self.name)
            self._base_rows, self._delta_rows, self._deltas = len(items), 0, 0
        else:
            items = changed if newly_plain else frozen(changed, self.name)
            self._delta_rows, self._deltas = rows, self._deltas + 1
        return StateChange("full" if full else "delta", len(items), partial(encode_map, self.name, items))

    def _settle(self) -> None:
        if self._fresh:
            self._settled.update(self._fresh)
            if self._base_rows is not None:
                self._changed.update(self._fresh)
            self._fresh.clear()

    def _note_deleted(self, keys: Iterable[Any]) -> None:
        if self._base_rows is not None:
            self._changed.update(zip(keys, repeat(DELETED)))

    def _columns(self, call: str, keys: Any, values: Any) -> tuple[Sequence[Any], Sequence[Any]]:
        keys, values = _values(keys), _values(values)
        if len(keys) != len(values):
            raise StateError(
                f"state {self.name!r}, {call}",
                f"the columns have different lengths, {len(keys):,} keys and {len(values):,} values",
                "Pass one value for each key.",
            )
        return keys, values


class _Items(ItemsView[Any, Any]):
    """A live view that goes over the dict below, and looks above it only where something was assigned since."""

    _mapping: MapState

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        mapping = self._mapping
        mapping._settle()
        fresh = mapping._fresh
        for item in mapping._settled.items():
            yield (item[0], mapping[item[0]]) if fresh else item


class _Values(ValuesView[Any]):
    _mapping: MapState

    def __iter__(self) -> Iterator[Any]:
        return (value for _, value in _Items(self._mapping))


def _owners(owner: Owner, keys: pa.Array) -> pa.Array:
    return to_column([owner(key) for key in to_values(keys)], None)


def _layer(missing: Any) -> dict[Any, Any]:
    """A dict that calls ``missing`` for the keys it has not, in C where that is C."""
    methods = {"__slots__": ()} if missing is None else {"__slots__": (), "__missing__": staticmethod(missing)}
    layer: dict[Any, Any] = type("Layer", (dict,), methods)()
    return layer


def _values(column: Any) -> Sequence[Any]:
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if isinstance(column, pa.Array):
        return to_values(column)
    if hasattr(column, "tolist"):  # numpy: Python's own numbers are quicker and pickle smaller
        values: list[Any] = column.tolist()
        return values
    return column if isinstance(column, Sequence) else list(column)


def _totals(keys: pa.Array | pa.ChunkedArray, amounts: Any) -> tuple[list[Any], list[int]] | None:
    """Distinct keys and their sums; None where Arrow cannot do it exactly."""
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
    if max(abs(least), abs(most)) * len(keys) >= 2**63:  # a sum might not fit
        return None
    table = pa.table({"key": keys, "amount": amounts.cast(pa.int64())})
    sums = table.group_by("key", use_threads=False).aggregate([("amount", "sum")])
    return sums.column("key").to_pylist(), sums.column("amount_sum").to_pylist()
