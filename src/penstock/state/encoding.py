"""The encoding of state: Arrow IPC streams of rows (key, value, deleted), which are applied in order.

A part (what one snapshot writes of one state) is one or more concatenated streams, so concatenated parts are again
a part. Reading a part unpickles values; only parts whose signature was verified may be decoded here.
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
"""Rows that are converted at a time. Arrow holds the GIL while it reads Python values; with this size a background
snapshot blocks the main loop of a worker for about 5 ms at a time."""

_FORM = b"penstock.state"
"""The key of the schema metadata that says ``map`` or ``value``."""


class _Deleted:
    """Marks a key that was removed."""


DELETED: Final = _Deleted()


class Pickled(bytes):
    """The pickle of a mutable value at the time of the snapshot."""


@dataclass(frozen=True)
class StateChange:
    """What one snapshot contains of one state. It refers to nothing that can change, so ``encode`` may run later
    and on another thread."""

    kind: str
    """``full``: the part is complete; ``delta``: it is applied to the parts before it."""
    rows: int
    encode: Callable[[], bytes]


_IMMUTABLE = frozenset({int, float, str, bytes, bool, type(None), _Deleted})


def is_plain(value: Any) -> bool:
    """Whether the value is immutable, so that a reference to it is as good as a copy."""
    return type(value) in _IMMUTABLE or (type(value) is tuple and all(map(is_plain, value)))


def all_plain(values: Iterable[Any]) -> bool:
    kinds = set(map(type, values))  # runs in C, which matters for millions of values
    if kinds <= _IMMUTABLE:
        return True
    return kinds <= _IMMUTABLE | {tuple} and all(map(is_plain, values))


def frozen(items: Mapping[Any, Any], state: str) -> dict[Any, Any]:
    """The same items, with pickles instead of mutable values. Keys are hashable and are assumed not to change."""
    return {key: value if is_plain(value) else Pickled(dumps(value, state)) for key, value in items.items()}


def dumps(value: Any, state: str) -> bytes:
    try:
        return pickle.dumps(value, 5)
    except Exception as error:  # the user's __reduce__ may raise anything
        raise StateError(
            f"state {state!r}",
            f"a {type(value).__qualname__} in it cannot be pickled ({type(error).__name__}: {error})",
            "Keep only data in the state, and create files, connections and locks in open or prepare.",
        ) from error


def encode_map(state: str, items: Mapping[Any, Any]) -> bytes:
    """Encode the items of a map; ``DELETED`` marks a removed key. ``state`` is the name of the map, for errors."""
    sink = pa.BufferOutputStream()
    keys, values = iter(items), iter(items.values())
    for _ in range(0, max(1, len(items)), CHUNK_ROWS):
        _write(sink, b"map", _columns(state, list(islice(keys, CHUNK_ROWS)), list(islice(values, CHUNK_ROWS))))
    encoded: bytes = sink.getvalue().to_pybytes()
    return encoded


def encode_value(pickled: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    # large_binary also holds more than 2 GB
    columns = [pa.nulls(1), pa.array([pickled], pa.large_binary()), pa.array([False])]
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
    """Apply a part of a map to ``items``, for all keys or for those that ``mine`` selects. Returns the number of
    applied rows."""
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
    """The pickle in a part of a value. If several parts are concatenated, the last one."""
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
            dumps(value, state)  # raises an error with the offending value, if this is the reason
        raise StateError(
            f"state {state!r}",
            f"a block of {CHUNK_ROWS:,} of its keys or values exceeds 2 GB ({type(error).__name__}: {error})",
            "Keep large values in files of context.folder and their names in the state.",
        ) from error
    return column


def _batches(part: bytes) -> Iterator[pa.RecordBatch]:
    with pa.BufferReader(part) as source:
        while source.tell() < source.size():
            with pa.ipc.open_stream(source) as stream:
                yield from map(trusted_batch, stream)
