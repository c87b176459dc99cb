"""How state becomes bytes: Arrow IPC streams of rows ⟨key, value, deleted⟩, applied one after the other.

A part (what one snapshot of one state wrote) is one or more streams end to end, so parts laid end to end are a
part again. What is stored is unpickled when it is read: only parts whose signature was checked are decoded here.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.columns import PICKLED, to_column, to_keys, to_values, trusted_batch
from penstock.errors import StateError

CHUNK_ROWS = 16_384
"""Rows converted in one go. Arrow holds the interpreter while it reads Python values; about 5 ms of a worker's
main loop is what a background snapshot may take at a time."""

_FORM = b"penstock.state"
"""Schema metadata: ``map`` or ``value``."""


class _Deleted:
    """In place of the value of a key that was removed."""


DELETED: Final = _Deleted()


class Pickled(bytes):
    """A value as it was when it was pickled, whatever became of it since."""


@dataclass(frozen=True)
class StateChange:
    """What one snapshot has of one state. ``encode`` may run later and elsewhere: it holds all it needs."""

    kind: str
    """``full``: the part stands alone; ``delta``: it goes on top of the parts before it."""
    rows: int
    encode: Callable[[], bytes]


_IMMUTABLE = frozenset({int, float, str, bytes, bool, type(None), _Deleted})


def is_plain(value: Any) -> bool:
    """Can nobody change this value, so that a reference to it is as good as a copy?"""
    return type(value) in _IMMUTABLE or (type(value) is tuple and all(map(is_plain, value)))


def all_plain(values: Iterable[Any]) -> bool:
    kinds = set(map(type, values))  # in C: one look at millions of counts
    if kinds <= _IMMUTABLE:
        return True
    return kinds <= _IMMUTABLE | {tuple} and all(map(is_plain, values))


def frozen(items: Mapping[Any, Any], state: str) -> dict[Any, Any]:
    """The same items, with pickles in place of the values that might change. (A key is hashable, and so taken
    not to change.)"""
    return {key: value if is_plain(value) else Pickled(dumps(value, state)) for key, value in items.items()}


def dumps(value: Any, state: str) -> bytes:
    try:
        return pickle.dumps(value, 5)
    except Exception as error:  # a user's __reduce__ may raise anything
        raise StateError(
            f"state {state!r}",
            f"a {type(value).__qualname__} in it cannot be pickled ({type(error).__name__}: {error})",
            "Keep data in the state; open files, connections and locks in open or prepare.",
        ) from error


def encode_map(state: str, items: Mapping[Any, Any]) -> bytes:
    """A map's items, ``DELETED`` standing for a key that went. ``state`` is its name, for errors."""
    sink = pa.BufferOutputStream()
    keys, values = iter(items), iter(items.values())
    for _ in range(0, max(1, len(items)), CHUNK_ROWS):
        _write(sink, b"map", _columns(state, list(islice(keys, CHUNK_ROWS)), list(islice(values, CHUNK_ROWS))))
    encoded: bytes = sink.getvalue().to_pybytes()
    return encoded


def encode_value(pickled: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    columns = [pa.nulls(1), pa.array([pickled], pa.large_binary()), pa.array([False])]  # large: beyond 2 GB too
    _write(sink, b"value", columns)
    encoded: bytes = sink.getvalue().to_pybytes()
    return encoded


def form_of(part: bytes) -> str:
    """``map`` or ``value``."""
    form: bytes = pa.ipc.open_stream(part).schema.metadata[_FORM]
    return form.decode()


def count_rows(part: bytes) -> int:
    return sum(batch.num_rows for batch in _batches(part))


def apply_map(
    part: bytes, items: dict[Any, Any], mine: Callable[[pa.Array], npt.NDArray[np.bool_]] | None = None
) -> int:
    """Bring ``items`` up to date with a map's part, or with those of its keys that are ``mine``; gives the number
    of their rows."""
    rows = 0
    for batch in _batches(part):
        if mine is not None:
            batch = batch.filter(pa.array(mine(batch.column(0))))
        rows += batch.num_rows
        keys, values = to_keys(batch.column(0)), to_values(batch.column(1))
        if not batch.column(2).true_count:
            items.update(zip(keys, values, strict=True))
            continue
        for key, value, deleted in zip(keys, values, batch.column(2).to_pylist(), strict=True):
            if deleted:
                items.pop(key, None)
            else:
                items[key] = value
    return rows


def pickled_value(part: bytes) -> bytes:
    """The pickle inside a value's part; of several laid end to end, the last."""
    *_, batch = _batches(part)
    pickled: bytes = batch.column(1)[0].as_py()
    return pickled


def _columns(state: str, keys: Sequence[Any], values: Sequence[Any]) -> list[pa.Array]:
    deleted = pa.repeat(pa.scalar(False), len(values))
    if _Deleted in set(map(type, values)):
        deleted = pa.array([value is DELETED for value in values], pa.bool_())
        values = [None if value is DELETED else value for value in values]
    return [_column(keys, state), _column(values, state), deleted]


def _write(sink: Any, form: bytes, columns: Sequence[pa.Array]) -> None:
    fields = [
        pa.field(name, column.type) for name, column in zip(("key", "value", "deleted"), columns, strict=True)
    ]
    batch = pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields, {_FORM: form}))
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)


def _column(values: Sequence[Any], state: str) -> pa.Array:
    try:
        if Pickled in set(map(type, values)):
            storage = [value if type(value) is Pickled else dumps(value, state) for value in values]
            column = pa.ExtensionArray.from_storage(PICKLED, pa.array(storage, pa.binary()))
        else:
            column = to_column(values, None)
        if isinstance(column, pa.ChunkedArray):
            raise OverflowError("too long for one Arrow array")
    except StateError:
        raise
    except Exception as error:
        for value in values:
            dumps(value, state)  # says which, if that is it
        raise StateError(
            f"state {state!r}",
            f"{CHUNK_ROWS:,} of its keys or values together do not fit into 2 GB "
            f"({type(error).__name__}: {error})",
            "Keep large values in files of context.folder and their names in the state.",
        ) from error
    return column


def _batches(part: bytes) -> Iterator[pa.RecordBatch]:
    with pa.BufferReader(part) as source:
        while source.tell() < source.size():
            with pa.ipc.open_stream(source) as stream:
                yield from map(trusted_batch, stream)
