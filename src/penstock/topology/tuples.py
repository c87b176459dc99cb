"""Tuples as bolts see them: Python tuples whose fields can also be read by name.

There is one class per pair of source task and stream. It stores the attributes that all its tuples share, and a
whole frame is converted to tuples in C: by the native form, or by ``map(cls, zip(*columns))``.
"""

from __future__ import annotations

from collections import _tuplegetter  # type: ignore[attr-defined] # namedtuple uses it to read fields
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, ClassVar

from penstock import native
from penstock.topology.streams import SYSTEM_COMPONENT, TICK_STREAM


class Tuple(tuple[Any, ...]):
    """One message. ``tup[0]``, ``tup.word``, ``tup.value("word")`` and unpacking all work."""

    __slots__ = ()
    fields: ClassVar[tuple[str, ...]] = ()
    source_component: ClassVar[str] = ""
    source_stream: ClassVar[str] = ""
    source_task: ClassVar[int] = 0
    is_tick: ClassVar[bool] = False

    # Type checkers accept ``tup.word`` because of this method: field names are only known when the topology is
    # built.
    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"no field '{name}' in a tuple of {self.source_component}:{self.source_stream}; "
            f"its fields are {', '.join(self.fields) or '(none)'}"
        )

    def value(self, field: str) -> Any:
        """The value of a field by name. Needed for field names that are not Python identifiers."""
        try:
            return self[self.fields.index(field)]
        except ValueError:
            return self.__getattr__(field)

    def __repr__(self) -> str:
        inner = ", ".join(f"{name}={value!r}" for name, value in zip(self.fields, self, strict=False))
        return f"Tuple({inner})"

    def __reduce__(self) -> tuple[Any, ...]:
        head = (self.source_component, self.source_stream, self.source_task, self.fields)
        return (_rebuild, (head, tuple(self)))


@lru_cache(maxsize=4096)
def tuple_type(component: str, stream: str, task: int, fields: tuple[str, ...], held: bool = False) -> type[Tuple]:
    """The class of the tuples that ``task`` of ``component`` emits on ``stream``. If ``held``, each tuple has a
    ``__dict__`` in which the worker stores what it needs to ack the tuple."""
    attributes: dict[str, Any] = {
        **({} if held else {"__slots__": ()}),
        "fields": fields,
        "source_component": component,
        "source_stream": stream,
        "source_task": task,
        "is_tick": component == SYSTEM_COMPONENT and stream == TICK_STREAM,
    }
    for index, name in enumerate(fields):
        attributes[name] = _tuplegetter(index, f"field {index}")
    return type("Tuple", (Tuple,), attributes)


def rows_of(kind: type[Tuple], columns: Sequence[list[Any]]) -> tuple[Iterator[Tuple], Iterator[Any]]:
    """The rows of the columns as tuples of this class, and an iterator whose length hint is the number of rows
    that are not yet read. The caller must not change the columns, and must not use the second iterator otherwise.

    The native form uses a tuple again that nobody else holds when the next but one is read. So the object may be
    the same, but a tuple that is kept does not change."""
    if native.FORM is not None:
        rows = native.FORM.Rows(kind, columns)
        return rows, rows
    first = iter(columns[0])
    return map(kind, zip(first, *columns[1:], strict=True)), first


def _rebuild(head: tuple[str, str, int, tuple[str, ...]], values: Iterable[Any]) -> Tuple:
    return tuple_type(*head)(values)


TICK: Tuple = tuple_type(SYSTEM_COMPONENT, TICK_STREAM, 0, ())(())
