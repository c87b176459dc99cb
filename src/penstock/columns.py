"""Python values to Arrow columns and back, without changing a value.

A field with a declared type takes what fits it. An untyped field becomes an Arrow column where all its values
are of one plain type; anything else (mixed types, dicts, objects) travels pickled, so that what a bolt
receives is what was emitted, to the type.

Unpickling runs code. The Arrow type of pickled columns is therefore not registered with pyarrow: whatever reads an
Arrow or Parquet file, a column that claims to be of this type is a column of bytes. Only ``trusted_schema`` and
``trusted_batch`` give it the type. They are for bytes that were authenticated: frames of the shuffle and signed
state.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa

PLAIN_TYPES: dict[type, pa.DataType] = {
    str: pa.string(),
    int: pa.int64(),
    float: pa.float64(),
    bool: pa.bool_(),
    bytes: pa.binary(),
}


_PICKLED_NAME = "penstock.pickled"
_EXTENSION = b"ARROW:extension:name"  # field metadata in which Arrow keeps the name of a type it does not know


class PickledType(pa.ExtensionType):  # type: ignore[misc] # pyarrow is untyped
    """Arbitrary Python objects, one pickle each. Made in this process, or from authenticated bytes."""

    def __init__(self) -> None:
        super().__init__(pa.binary(), _PICKLED_NAME)

    def __hash__(self) -> int:  # schemas are cached by value
        return hash(self.extension_name)

    def __arrow_ext_serialize__(self) -> bytes:
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage_type: pa.DataType, serialized: bytes) -> PickledType:
        return cls()


PICKLED = PickledType()


def is_pickled(column: pa.Array) -> bool:
    return isinstance(column.type, PickledType)


def plain_schema(schema: pa.Schema) -> pa.Schema:
    """The schema's names and types without the metadata of its fields. That may come from a file, and would make a
    column of bytes a pickled one where it is read."""
    return pa.schema([pa.field(field.name, field.type, field.nullable) for field in schema])


def trusted_schema(schema: pa.Schema) -> pa.Schema:
    """A schema as it was read, with pickled columns where it was written with them. Only for authenticated
    bytes."""
    fields = [pa.field(field.name, PICKLED, field.nullable) if _was_pickled(field) else field for field in schema]
    return pa.schema(fields, schema.metadata)


def trusted_batch(batch: pa.RecordBatch) -> pa.RecordBatch:
    """As ``trusted_schema``, for rows."""
    if not any(map(_was_pickled, batch.schema)):
        return batch
    columns = [
        pa.ExtensionArray.from_storage(PICKLED, column) if _was_pickled(field) else column
        for field, column in zip(batch.schema, batch.columns, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=trusted_schema(batch.schema))


def _was_pickled(field: pa.Field) -> bool:
    metadata = field.metadata
    return bool(metadata) and metadata.get(_EXTENSION) == _PICKLED_NAME.encode() and field.type == pa.binary()


def to_column(values: Sequence[Any], declared: pa.DataType | None) -> pa.Array:
    """One field's values as a column. Raises ``pa.ArrowException``, ``TypeError`` or ``OverflowError`` when a
    value does not fit the declared type; without one it always succeeds or the value cannot be pickled."""
    if declared is not None:
        column = pa.array(values, declared)
        # Looking at the types alone runs in C: this is done for every emitted integer.
        if (
            pa.types.is_integer(declared)
            and float in set(map(type, values))
            and any(type(value) is float and value % 1 for value in values)
        ):
            raise TypeError(f"a fraction does not fit {declared}")  # Arrow would cut it off in silence
        return column
    kinds = set(map(type, values))
    kinds.discard(type(None))
    if len(kinds) == 1 and (plain := PLAIN_TYPES.get(kinds.pop())) is not None:
        try:
            return pa.array(values, plain)
        except (pa.ArrowInvalid, OverflowError, UnicodeEncodeError):  # an int beyond 64 bits, a lone surrogate
            pass
    return pa.ExtensionArray.from_storage(
        PICKLED, pa.array([pickle.dumps(value, 5) for value in values], pa.binary())
    )


def to_values(column: pa.Array) -> list[Any]:
    """A column as Python values."""
    if is_pickled(column):
        return [pickle.loads(item) for item in column.storage.to_pylist()]
    values: list[Any] = column.to_pylist()
    return values


def to_keys(column: pa.Array) -> list[Any]:
    """A column as keys of a dict: as ``to_values``, with ``math.nan`` in place of every NaN, also inside tuples.
    No NaN equals another, but a dict finds the very same object."""
    values = to_values(column)
    if is_pickled(column):
        return list(map(_with_one_nan, values))
    if pa.types.is_floating(column.type) and np.isnan(column.to_numpy(zero_copy_only=False)).any():
        return [math.nan if value is not None and value != value else value for value in values]
    return values


def _with_one_nan(value: Any) -> Any:
    if isinstance(value, float | complex):
        return math.nan if value != value else value
    if isinstance(value, Decimal):
        return math.nan if value.is_nan() else value
    if isinstance(value, tuple):
        parts = list(map(_with_one_nan, value))
        if all(map(lambda new, old: new is old, parts, value)):
            return value
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value
