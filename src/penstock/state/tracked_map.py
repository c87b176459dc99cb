"""A dict that records its changes, at nearly the speed of a plain dict. The base of ``MapState``."""

from __future__ import annotations

import operator
from abc import ABCMeta
from collections.abc import ItemsView, Iterable, Iterator, Mapping, MutableMapping, ValuesView
from functools import partial
from typing import Any, Final, Self

NO_DEFAULT: Final = object()


class TrackedMap(MutableMapping[Any, Any]):
    """A dict of two layers. Assignments go to ``_fresh``; a read that finds nothing there continues in
    ``_settled``. Both steps run in the C code of dict, so ``counts[word] += 1`` takes 93 ns, compared with 57 ns
    for a dict and 250 ns for a ``__setitem__`` in Python that records the key. Every method that needs the whole
    map first moves the content of ``_fresh`` to ``_settled`` and records it as changed."""

    __slots__ = ("_changed", "_deleted", "_fresh", "_settled", "_tracking")

    _fresh: dict[Any, Any]
    _settled: dict[Any, Any]
    _tracking: bool
    """Whether changes are recorded. They are not needed before the first full copy."""
    _changed: dict[Any, Any]
    """The items assigned since the last snapshot, without those that were deleted again."""
    _deleted: dict[Any, None]
    """The keys deleted since the last snapshot. A key that was deleted and then assigned is in both: a restore
    must delete it first, so that it comes last in the order of the map."""

    def __new__(cls, name: str = "", default: Any = NO_DEFAULT, *args: Any, **kwargs: Any) -> Self:
        settled = _layer(None if default is NO_DEFAULT else lambda key: default)
        fresh = _layer(settled.__getitem__)
        # Python looks up special methods on the class. A class per map binds them to the methods of its own dict.
        bound = {
            "__slots__": (),
            "__doc__": cls.__doc__,
            "__getitem__": staticmethod(fresh.__getitem__),
            "__setitem__": staticmethod(partial(operator.setitem, fresh)),
        }
        kind: Any = ABCMeta(cls.__name__, (cls,), bound)
        self: Self = object.__new__(kind)
        self._fresh, self._settled, self._tracking = fresh, settled, False
        self._changed, self._deleted = {}, {}
        return self

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
        if isinstance(other, TrackedMap):
            other._settle()
            other = other._settled
        return self._settled.__eq__(other)

    __hash__ = None  # type: ignore[assignment] # like a dict

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.copy()!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (self.copy(),)

    def __or__(self, other: Mapping[Any, Any]) -> dict[Any, Any]:
        return self.copy() | dict(other)

    def __ior__(self, other: Any) -> Self:  # type: ignore[misc] # like a dict, it also takes pairs
        self._fresh.update(other)
        return self

    def get(self, key: Any, default: Any = None) -> Any:
        """The value of the key, or ``default``, even if the map has a default of its own (as in a defaultdict)."""
        return self._fresh[key] if key in self._fresh else self._settled.get(key, default)

    def items(self) -> ItemsView[Any, Any]:
        return _Items(self)

    def values(self) -> ValuesView[Any]:
        return _Values(self)

    def copy(self) -> dict[Any, Any]:
        """A plain dict with the current content."""
        self._settle()
        return self._settled.copy()

    def update(self, *args: Any, **kwargs: Any) -> None:
        self._fresh.update(*args, **kwargs)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def pop(self, key: Any, default: Any = NO_DEFAULT) -> Any:
        self._settle()
        if key not in self._settled:
            if default is NO_DEFAULT:
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

    def _settle(self) -> None:
        if self._fresh:
            self._settled.update(self._fresh)
            if self._tracking:
                self._changed.update(self._fresh)
            self._fresh.clear()

    def _note_deleted(self, keys: Iterable[Any]) -> None:
        if self._tracking:
            for key in keys if self._changed else ():
                self._changed.pop(key, None)
            self._deleted.update(dict.fromkeys(keys))


class _Items(ItemsView[Any, Any]):
    """A live view. It iterates over the lower layer, and reads the upper layer only if something was assigned
    since."""

    _mapping: TrackedMap

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        mapping = self._mapping
        mapping._settle()
        fresh = mapping._fresh
        for item in mapping._settled.items():
            yield (item[0], mapping[item[0]]) if fresh else item


class _Values(ValuesView[Any]):
    _mapping: TrackedMap

    def __iter__(self) -> Iterator[Any]:
        return (value for _, value in _Items(self._mapping))


def _layer(missing: Any) -> dict[Any, Any]:
    """A dict that calls ``missing`` for missing keys. No Python code runs if ``missing`` is a C function."""
    methods = {"__slots__": ()} if missing is None else {"__slots__": (), "__missing__": staticmethod(missing)}
    layer: dict[Any, Any] = type("Layer", (dict,), methods)()
    return layer
