"""Groups the rows of a batch by key, computes the partial of each key, and converts keys to values and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.aggregates.merges import Merge
from penstock.columns import is_pickled, to_keys, to_values
from penstock.errors import ComponentError
from penstock.state.maps import Owner, whole_key

Ints = npt.NDArray[np.int64]


def column_of(batch: pa.RecordBatch, field: str) -> pa.Array:
    """The column of a field. Raises ``ComponentError`` if the batch has no such field."""
    index = batch.schema.get_field_index(field)
    if index < 0:
        raise ComponentError(
            f"field '{field}'",
            f"a Reduce reads it, but the input has only {', '.join(batch.schema.names)}",
            "Name one of these in Reduce, or emit the field.",
        )
    return batch.column(index)


def keys_of(batch: pa.RecordBatch, fields: Sequence[str]) -> Sequence[Any]:
    """The key of each row: the value of the field, or a tuple if there are several fields or none. All NaNs are
    equal."""
    columns = [to_keys(column_of(batch, field)) for field in fields]
    if len(columns) == 1:
        return columns[0]
    return list(zip(*columns, strict=True)) if columns else [()] * batch.num_rows


def owner_of(key: Sequence[str], grouped_by: Sequence[str]) -> Owner | None:
    """A function that extracts from a key the value that the input is grouped by (a tuple if it is grouped by
    several fields). None if no function is needed because the key begins with these fields, or if they are not
    part of it."""
    if not grouped_by or not set(grouped_by) <= set(key):
        return None
    if len(key) == 1:
        return whole_key
    if len(grouped_by) > 1 and list(key[: len(grouped_by)]) == list(grouped_by):
        return None
    return itemgetter(*(key.index(field) for field in grouped_by))


def key_columns(keys: Sequence[Any], fields: Sequence[str]) -> list[Sequence[Any]]:
    """The columns of a sequence of keys."""
    if len(fields) == 1:
        return [keys]
    return list(zip(*keys, strict=True)) if keys else [() for _ in fields]


def reduce_rows(
    batch: pa.RecordBatch, keys: Sequence[pa.Array], merges: Mapping[str, Merge[Any, Any]]
) -> list[Any]:
    """One row for each key: the columns of the key, then the columns of the partials."""
    order, bounds = by_key(keys, batch.num_rows)
    firsts = pa.array(order[bounds[:-1]])
    partials = []
    for merge in merges.values():
        if merge.field is None:
            values: list[Any] = [None] * batch.num_rows
        else:
            column = column_of(batch, merge.field)
            values = to_values(column.take(pa.array(order)))
            if _lacks(column, values):
                partials.append([merge.total(list(filter(is_value, values[a:b]))) for a, b in pairwise(bounds)])
                continue
        total = merge.total
        partials.append([total(values[begin:end]) for begin, end in pairwise(bounds)])
    return [*(column.take(firsts) for column in keys), *partials]


def by_key(columns: Sequence[pa.Array], rows: int) -> tuple[Ints, list[int]]:
    """The row numbers sorted by key, and the index at which the rows of each key begin, followed by the end.
    Without rows there are no keys. Without columns all rows have the same key."""
    if not columns or not rows:
        return np.arange(rows), [0, rows] if rows else [0]
    codes = _codes(columns[0])
    for column in columns[1:]:
        more = _codes(column)
        codes = np.unique(codes * (int(more.max()) + 1) + more, return_inverse=True)[1]
    if codes.max() < 2**16:
        order = np.argsort(codes.astype(np.uint16), kind="stable")  # numpy uses a radix sort for 16-bit integers
    else:
        order = np.argsort(codes, kind="stable")
    changes = np.flatnonzero(np.diff(codes[order])) + 1
    return order, [0, *changes.tolist(), rows]


def _codes(column: pa.Array) -> Ints:
    """A number for each value; equal values have equal numbers."""
    if is_pickled(column):
        seen: dict[Any, int] = {}
        codes = [seen.setdefault(value, len(seen)) for value in to_keys(column)]
        return np.array(codes, np.int64)
    encoded = column if pa.types.is_dictionary(column.type) else column.dictionary_encode("encode")
    return np.asarray(encoded.indices.to_numpy(zero_copy_only=False), np.int64)


def _lacks(column: pa.Array, values: Sequence[Any]) -> bool:
    """True if the column contains None or NaN."""
    if is_pickled(column):
        return not all(map(is_value, values))
    return bool(column.null_count) or (
        pa.types.is_floating(column.type) and pc.any(pc.is_nan(column)).as_py() is True
    )


def is_value(value: Any) -> bool:
    return value is not None and not (isinstance(value, float) and value != value)
