"""Converts Python values to Arrow columns and back, without changing any value.

A field with a declared type accepts the values that fit the type. An untyped field becomes an Arrow column if all
its values are of one plain type. Otherwise (mixed types, dicts, objects) its values are pickled, so that a bolt
receives exactly what was emitted, including the type.

Unpickling runs code. The Arrow type of pickled columns is therefore not registered with pyarrow: in an Arrow or
Parquet file, a column that claims to have this type is read as bytes. Only ``trusted_schema`` and
``trusted_batch`` restore the type. They may be used for authenticated bytes only: frames of the shuffle and signed
state.
"""

from __future__ import annotations

import datetime
import math
import pickle
from collections.abc import Sequence
from decimal import Decimal
from operator import itemgetter
from sys import getsizeof
from types import NoneType
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock import native

PLAIN_TYPES: dict[type, pa.DataType] = {
    str: pa.string(),
    int: pa.int64(),
    float: pa.float64(),
    bool: pa.bool_(),
    bytes: pa.binary(),
}


_PICKLED_NAME = "penstock.pickled"
_EXTENSION = b"ARROW:extension:name"  # the field metadata in which Arrow stores the name of an unknown type


class PickledType(pa.ExtensionType):  # type: ignore[misc] # pyarrow is untyped
    """Arbitrary Python objects, one pickle each. Created in this process, or from authenticated bytes."""

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
    """The names and types of the schema without the metadata of its fields. The metadata may come from a file and
    could turn a column of bytes into a pickled one at the reader."""
    return pa.schema([pa.field(field.name, field.type, field.nullable) for field in schema])


def trusted_schema(schema: pa.Schema) -> pa.Schema:
    """A schema that was read, with pickled columns where it was written with them. For authenticated bytes
    only."""
    fields = [pa.field(field.name, PICKLED, field.nullable) if _was_pickled(field) else field for field in schema]
    return pa.schema(fields, schema.metadata)


def trusted_batch(batch: pa.RecordBatch) -> pa.RecordBatch:
    """``trusted_schema`` for a batch."""
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
    """Convert the values of one field to a column. Raises ``pa.ArrowException``, ``TypeError`` or
    ``OverflowError`` if a value does not fit the declared type. Without a declared type it only fails if a value
    cannot be pickled."""
    if declared is not None:
        column = pa.array(values, declared)
        # This is done for every emitted integer. Without the native form, comparing only the types runs in C.
        if (
            pa.types.is_integer(declared)
            and not (native.FORM is not None and type(values) is list and native.FORM.passes(values, int))
            and float in set(map(type, values))
            and any(type(value) is float and value % 1 for value in values)
        ):
            raise TypeError(f"a fraction does not fit {declared}")  # Arrow would truncate it silently
        return column
    kinds = set(map(type, values))
    kinds.discard(type(None))
    if len(kinds) == 1 and (plain := PLAIN_TYPES.get(kinds.pop())) is not None:
        try:
            return pa.array(values, plain)
        except (pa.ArrowInvalid, OverflowError, UnicodeEncodeError):  # an int beyond 64 bits, or a lone surrogate
            pass
    return pa.ExtensionArray.from_storage(
        PICKLED, pa.array([pickle.dumps(value, 5) for value in values], pa.binary())
    )


def to_values(column: pa.Array) -> list[Any]:
    """Convert a column to Python values."""
    if is_pickled(column):
        return [pickle.loads(item) for item in column.storage.to_pylist()]
    values: list[Any] = column.to_pylist()
    return values


def to_keys(column: pa.Array) -> list[Any]:
    """Convert a column to keys of a dict: like ``to_values``, but every NaN, also inside tuples, becomes
    ``math.nan``. NaNs are never equal, but a dict finds the same object."""
    values = to_values(column)
    if is_pickled(column):
        return list(map(_with_one_nan, values))
    if pa.types.is_floating(column.type) and np.isnan(column.to_numpy(zero_copy_only=False)).any():
        return [math.nan if value is not None and value != value else value for value in values]
    return values


_IMMUTABLE = frozenset(
    {*PLAIN_TYPES, NoneType, Decimal, datetime.datetime, datetime.date, datetime.time, datetime.timedelta}
)
"""Types whose objects nobody can change, so that two components of one process may share an object."""
_PYTHON_TYPE = {arrow: python for python, arrow in PLAIN_TYPES.items()}
_SAMPLE = 16
"""Rows from which the size of a batch in memory is estimated: looking at all of them would cost more than passing
them on."""


def passes_unchanged(values: Sequence[Any], declared: pa.DataType | None) -> bool:
    """True if a receiver in the same process may get these very objects instead of copies: nobody can change them,
    and converting them to the declared type and back would not change them either."""
    if native.FORM is not None and type(values) is list:
        wanted = _IMMUTABLE if declared is None else _PYTHON_TYPE.get(declared)
        return native.FORM.passes(values, wanted) if wanted is not None else not any(map(_is_some, values))
    kinds = set(map(type, values))
    if declared is None:
        return kinds <= _IMMUTABLE
    kinds.discard(NoneType)
    if not kinds:
        return True
    kind = kinds.pop()
    if kinds or _PYTHON_TYPE.get(declared) is not kind:
        return False
    if kind is int:
        return all(map((1 << 63).__gt__, map(abs, filter(None, values))))
    return kind is not str or _is_unicode("".join(filter(None, values)))


def _is_some(value: Any) -> bool:
    return value is not None


def _is_unicode(text: str) -> bool:
    """False for a text with a lone surrogate, which Arrow does not accept."""
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


RowChoice: TypeAlias = slice | npt.NDArray[np.int64]
"""Rows of a batch: a slice, or indices in order."""


class ColumnBatch:
    """Rows that stay in one process: columns of Python values that ``passes_unchanged`` has accepted. They are
    converted to Arrow only if something asks for it. Whoever receives a batch must not change its lists."""

    __slots__ = ("_arrow", "_size", "fields", "num_rows", "values")

    def __init__(self, fields: Sequence[tuple[str, pa.DataType | None]], values: list[list[Any]]) -> None:
        """``fields``: the name and the declared type of each column."""
        self.fields, self.values = fields, values
        self.num_rows = len(values[0])
        self._arrow: dict[str, pa.Array] = {}
        self._size: int | None = None

    @property
    def nbytes(self) -> int:
        """The size in memory, estimated from some of the rows."""
        if self._size is None:
            step = max(1, self.num_rows // _SAMPLE)
            sample = [column[::step] for column in self.values]
            size = sum(sum(map(getsizeof, column)) for column in sample)
            self._size = size * self.num_rows // max(1, len(sample[0]))
        return self._size

    def named(self, field: str) -> list[Any]:
        """The values of a field."""
        return next(column for (name, _), column in zip(self.fields, self.values, strict=True) if name == field)

    def column(self, field: str) -> pa.Array:
        """A field as an Arrow column."""
        found = self._arrow.get(field)
        if found is None:
            declared = dict(self.fields)[field]
            found = self._arrow[field] = to_column(self.named(field), declared)
        return found

    @property
    def columns(self) -> list[pa.Array]:
        return [self.column(name) for name, _ in self.fields]

    def arrow(self) -> pa.RecordBatch:
        return pa.RecordBatch.from_arrays(self.columns, names=[name for name, _ in self.fields])

    def slice(self, begin: int, length: int) -> ColumnBatch:
        return ColumnBatch(self.fields, [column[begin : begin + length] for column in self.values])

    def select(self, rows: RowChoice) -> ColumnBatch:
        """These rows; this batch itself if they are all of its rows."""
        if isinstance(rows, slice):
            begin, end, _ = rows.indices(self.num_rows)
            return self if end - begin == self.num_rows else self.slice(begin, end - begin)
        return self.take(rows.tolist())

    def take(self, rows: Sequence[int]) -> ColumnBatch:
        """These rows, in this order."""
        if not len(rows):
            return ColumnBatch(self.fields, [[] for _ in self.values])
        if len(rows) == 1:
            return ColumnBatch(self.fields, [[column[rows[0]]] for column in self.values])
        choose = itemgetter(*rows)
        return ColumnBatch(self.fields, [list(choose(column)) for column in self.values])


def values_of(batch: pa.RecordBatch | ColumnBatch) -> list[list[Any]]:
    """The columns of a batch as Python values. The caller must not change the lists."""
    return batch.values if isinstance(batch, ColumnBatch) else [to_values(column) for column in batch.columns]


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
