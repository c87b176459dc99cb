"""Python values to Arrow columns and back, without changing a value.

A field with a declared type takes what fits it. An untyped field becomes an Arrow column where all its values
are of one plain type; anything else (mixed types, dicts, objects) travels pickled, so that what a bolt
receives is what was emitted, to the type.
"""

from __future__ import annotations

import contextlib
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


class PickledType(pa.ExtensionType):  # type: ignore[misc] # pyarrow is untyped
    """Arbitrary Python objects, one pickle each. Only ever decoded from authenticated slots of the same run."""

    def __init__(self) -> None:
        super().__init__(pa.binary(), "penstock.pickled")

    def __hash__(self) -> int:  # schemas are cached by value
        return hash(self.extension_name)

    def __arrow_ext_serialize__(self) -> bytes:
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage_type: pa.DataType, serialized: bytes) -> PickledType:
        return cls()


PICKLED = PickledType()
with contextlib.suppress(pa.ArrowKeyError):  # known already: a second copy of the package in one process
    pa.register_extension_type(PICKLED)


def is_pickled(column: pa.Array) -> bool:
    return isinstance(column.type, pa.ExtensionType) and column.type.extension_name == "penstock.pickled"


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
