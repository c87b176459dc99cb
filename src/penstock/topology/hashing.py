"""A hash of Arrow columns that is the same in every process, on every machine, in every run.

Equal Python values hash equal whatever column type carries them (1, 1.0 and True are one key, as in a dict),
because an untyped field may be inferred as int in one frame and as float in the next.
"""

from __future__ import annotations

import math
import numbers
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.columns import is_pickled, to_column, to_values

U64 = npt.NDArray[np.uint64]

_PRIME = np.uint64(0x100000001B3)  # FNV's 64-bit prime, here the base of a polynomial over the bytes
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # splitmix64's constants
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)
_NULL = np.uint64(0x6E756C6C)
_MASK = 0xFFFFFFFFFFFFFFFF
_INT64 = 2.0**63  # beyond it a float has no equal among 64-bit integers

_powers: U64 = np.ones(1, np.uint64)


def hash_rows(columns: Sequence[pa.Array]) -> U64:
    """One 64-bit hash per row over all the columns, the order of the columns included."""
    total = hash_column(columns[0])
    for column in columns[1:]:
        total = _mix(total * _GOLDEN + hash_column(column))
    return total


def hash_keys(keys: pa.Array, fields: int) -> U64:
    """The hash that ``hash_rows`` gives the fields a key of a map stands for: the key is the one field, or a tuple
    that begins with them."""
    if not is_pickled(keys):
        return hash_column(keys)
    values = [key if isinstance(key, tuple) else (key,) for key in to_values(keys)]
    if not values:
        return np.zeros(0, np.uint64)
    return hash_rows([to_column([value[place] for value in values], None) for place in range(fields)])


def rehash(hashes: U64, number: int) -> U64:
    """Another hash of the same rows for each number, as good as independent of the first: for those that share out
    what a grouping has shared out by the first already."""
    return _mix(hashes ^ _mix(np.array([number], np.uint64) * _GOLDEN))


def hash_column(column: pa.Array) -> U64:
    """One 64-bit hash per value."""
    kind = column.type
    if is_pickled(column):
        return _hash_values(to_values(column))
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        hashes = _hash_bytes(column)
    elif pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        try:
            wide = column.cast(pa.int64())
        except pa.ArrowInvalid:  # unsigned, and beyond 63 bits
            return _hash_values(column.to_pylist())
        hashes = _mix(_numbers(wide, 0).view(np.uint64) + _GOLDEN)
    elif pa.types.is_floating(kind):
        hashes = _hash_floats(_numbers(column.cast(pa.float64()), 0.0))
    elif pa.types.is_dictionary(kind):
        return hash_column(column.dictionary_decode())
    else:
        return _hash_values(column.to_pylist())
    if column.null_count:
        hashes[np.asarray(column.is_null())] = _mix(np.array([_NULL]))[0]
    return hashes


def _numbers(column: pa.Array, fill: float) -> Any:
    filled = pc.fill_null(column, fill) if column.null_count else column
    return filled.to_numpy(zero_copy_only=False)


def _hash_floats(values: npt.NDArray[np.float64]) -> U64:
    whole = (values == np.floor(values)) & (np.abs(values) < _INT64)
    bits = values.view(np.uint64).copy()
    bits[whole] = values[whole].astype(np.int64).view(np.uint64)
    return _mix(bits + _GOLDEN)


def _hash_bytes(column: pa.Array) -> U64:
    count = len(column)
    if count == 0:
        return np.zeros(0, np.uint64)
    _, offset_buffer, data_buffer = column.buffers()
    offsets = np.frombuffer(offset_buffer, np.int32, count + 1, column.offset * 4).astype(np.int64)
    lengths = np.diff(offsets)
    sums = np.zeros(count, np.uint64)
    first, last = int(offsets[0]), int(offsets[-1])
    if last > first:
        data = np.frombuffer(data_buffer, np.uint8, last - first, first)
        position = np.arange(last - first) - np.repeat(offsets[:-1] - first, lengths)
        terms = (data + np.uint64(1)) * _powers_up_to(int(lengths.max()))[position]
        filled = lengths > 0
        sums[filled] = np.add.reduceat(terms, (offsets[:-1] - first)[filled])
    return _mix(sums + lengths.astype(np.uint64) * _GOLDEN)


def _powers_up_to(length: int) -> U64:
    global _powers
    if len(_powers) < length:
        steps = np.full(2 * length, _PRIME, np.uint64)
        steps[0] = 1
        _powers = np.multiply.accumulate(steps)
    return _powers


def _hash_values(values: Sequence[Any]) -> U64:
    """Values of mixed or rich types, one by one."""
    return np.fromiter((_hash_value(value) for value in values), np.uint64, len(values))


def _hash_value(value: Any) -> int:
    """The hash that a column of the value's plain type would give, where there is one; tuples by their parts;
    other numbers by Python's own rule that equal numbers hash equal; the rest by their pickle, on its own."""
    if value is None:
        return int(_mix(np.array([_NULL]))[0])
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, str):
        return _hash_one_bytes(str.encode(value, "utf-8", "surrogatepass"))
    if isinstance(value, bytes):
        return _hash_one_bytes(value)
    if isinstance(value, numbers.Number):
        return _hash_number(value)
    if isinstance(value, tuple):
        total = np.array([len(value)], np.uint64)
        for part in value:
            total = _mix(total * _GOLDEN + np.array([_hash_value(part)], np.uint64))
        return int(total[0])
    return _hash_one_bytes(pickle.dumps(value, 5))


def _hash_number(value: Any) -> int:
    try:
        as_float: float | None = float(value)
        if abs(value) < _INT64 and value == int(value):
            return int(_mix(np.array([int(value) & _MASK], np.uint64) + _GOLDEN)[0])
    except (OverflowError, TypeError, ValueError):  # too large, complex, not a number
        as_float = math.nan if value != value else None
    if as_float is not None and (as_float == value or value != value):
        return int(_hash_floats(np.array([as_float]))[0])
    return int(_mix(np.array([hash(value) & _MASK], np.uint64))[0])  # Python's own: equal numbers hash equal


def _hash_one_bytes(value: bytes) -> int:
    return int(_hash_bytes(pa.array([value], pa.binary()))[0])


def _mix(value: U64) -> U64:
    value = value ^ (value >> np.uint64(30))
    value = value * _MIX1
    value = value ^ (value >> np.uint64(27))
    value = value * _MIX2
    return value ^ (value >> np.uint64(31))
