"""A hash of Arrow columns that is the same in every process, on every machine and in every run.

Equal Python values have equal hashes, regardless of the column type (1, 1.0 and True are one key, as in a dict),
because an untyped field may be inferred as int in one frame and as float in the next. All NaNs are one key.
``penstock.topology.key_types`` defines which types can be a key; other types raise ``KeyTypeError``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock import native
from penstock.columns import is_pickled, to_values
from penstock.errors import KeyTypeError
from penstock.topology.key_types import ATTOSECONDS, DURATION, INSTANT, NAIVE, TIME, form_of

U64 = npt.NDArray[np.uint64]

_PRIME = np.uint64(0x100000001B3)  # FNV's 64-bit prime, here the base of a polynomial over the bytes
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # splitmix64's constants
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)
_NULL = np.uint64(0x6E756C6C)
_SEQUENCE = 0x736571  # so that an empty sequence and an empty text have different hashes
_UNORDERED = np.uint64(0x736574)
_NAN_BITS = np.uint64(0x7FF8000000000000)
_MASK = 0xFFFFFFFFFFFFFFFF
_INT64 = 2.0**63  # apart from -2**63, no float of this magnitude or larger equals a 64-bit integer
_DAY = 86_400_000_000  # microseconds
_PER_SECOND = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}

_powers: U64 = np.ones(1, np.uint64)


def hash_rows(columns: Sequence[pa.Array]) -> U64:
    """One 64-bit hash per row over all columns. The order of the columns matters."""
    return _combined([hash_column(column) for column in columns])


def hash_fields(batch: pa.RecordBatch, fields: Sequence[str]) -> U64:
    """``hash_rows`` of these fields. Raises ``KeyTypeError`` with the name of the field if a value cannot be a
    key."""
    return _combined([_hash_field(batch.column(field), field) for field in fields])


def check_keys(batch: pa.RecordBatch, fields: Sequence[str]) -> None:
    """Raise the same errors as ``hash_fields``. Faster, because it only inspects columns that can hold such
    values."""
    for field in fields:
        if is_pickled(batch.column(field)):
            _hash_field(batch.column(field), field)


def hash_keys(keys: pa.Array, fields: int) -> U64:
    """The hash that ``hash_rows`` gives to the fields in a key. With one field, the key is the value of the field.
    With several, the key is a tuple that starts with their values. Raises ``LookupError`` for a shorter tuple."""
    if fields == 1:
        return hash_column(keys)
    values = to_values(keys)
    if any(not isinstance(value, tuple) or len(value) < fields for value in values):
        raise LookupError("a key with fewer parts than there are fields")
    return _combined([hash_values([value[place] for value in values]) for place in range(fields)])


def rehash(hashes: U64, number: int) -> U64:
    """A second hash of the same rows, different for each ``number`` and practically independent of the first. For
    dividing rows again that a grouping has already divided by the first hash."""
    return _mix(hashes ^ _mix(np.array([number], np.uint64) * _GOLDEN))


def hash_column(column: pa.Array) -> U64:
    """One 64-bit hash per value."""
    kind = column.type
    if is_pickled(column):
        return hash_values(to_values(column))
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        hashes = _hash_bytes(column)
    elif pa.types.is_boolean(kind) or (pa.types.is_integer(kind) and not pa.types.is_uint64(kind)):
        hashes = _hash_ints(_filled(column.cast(pa.int64())))
    elif pa.types.is_uint64(kind):
        hashes = _hash_unsigned(_filled(column))
    elif pa.types.is_floating(kind):
        hashes = _hash_floats(_filled(column.cast(pa.float64())))
    elif pa.types.is_dictionary(kind):
        return hash_column(column.dictionary_decode())
    elif pa.types.is_large_string(kind) or pa.types.is_large_binary(kind):
        hashes = _hash_bytes(column, np.int64)
    elif pa.types.is_fixed_size_binary(kind) and not isinstance(kind, pa.BaseExtensionType):
        hashes = _hash_bytes(column.cast(pa.binary()))
    elif pa.types.is_temporal(kind) and not pa.types.is_interval(kind) and not _in_a_zone(kind):
        hashes = _hash_moments(column)
    else:
        return hash_values(column.to_pylist())
    if column.null_count:
        hashes[np.asarray(column.is_null())] = _hash_none(1)[0]
    return hashes


def hash_values(values: Sequence[Any]) -> U64:
    """One 64-bit hash per value. Values of the same type are hashed together."""
    kinds = list(map(type, values))
    distinct = set(kinds)
    if len(distinct) == 1:
        return _hash_kind(distinct.pop(), values)
    rows: dict[type, list[int]] = {}
    for row, kind in enumerate(kinds):
        rows.setdefault(kind, []).append(row)
    hashes = np.zeros(len(values), np.uint64)
    for kind, chosen in rows.items():
        hashes[chosen] = _hash_kind(kind, [values[row] for row in chosen])
    return hashes


def _hash_kind(kind: type, values: Sequence[Any]) -> U64:
    form = form_of(kind)
    if form.reduce is not None:
        values = list(map(form.reduce, values))
    return _HASHES[form.kind](values)


def _hash_field(column: pa.Array, field: str) -> U64:
    try:
        return hash_column(column)
    except KeyTypeError as error:
        raise KeyTypeError(f"field '{field}'", error.problem, error.hint) from None


def _combined(hashes: Sequence[U64]) -> U64:
    total = hashes[0]
    for more in hashes[1:]:
        total = _mix(total * _GOLDEN + more)
    return total


# ---- columns of one plain type ---------------------------------------------------------------------------------


def _filled(column: pa.Array) -> Any:
    filled = pc.fill_null(column, 0) if column.null_count else column
    return filled.to_numpy(zero_copy_only=False)


def _hash_ints(values: npt.NDArray[np.int64]) -> U64:
    return _mix(values.view(np.uint64) + _GOLDEN)


def _hash_unsigned(values: U64) -> U64:
    hashes = _mix(values + _GOLDEN)
    large = np.flatnonzero(values >> np.uint64(63))
    if len(large):
        hashes[large] = _hash_numbers(values[large].tolist())
    return hashes


def _hash_floats(values: npt.NDArray[np.float64]) -> U64:
    with np.errstate(invalid="ignore"):  # a signalling NaN
        whole = (values == np.floor(values)) & (values >= -_INT64) & (values < _INT64)
    bits = values.view(np.uint64).copy()
    bits[whole] = values[whole].astype(np.int64).view(np.uint64)
    nans = np.isnan(values)
    if nans.any():
        bits[nans] = _NAN_BITS
    return _mix(bits + _GOLDEN)


def _hash_bytes(column: pa.Array, offset_type: type[np.signedinteger[Any]] = np.int32) -> U64:
    count = len(column)
    if count == 0:
        return np.zeros(0, np.uint64)
    _, offset_buffer, data_buffer = column.buffers()
    begin = column.offset * np.dtype(offset_type).itemsize
    offsets = np.frombuffer(offset_buffer, offset_type, count + 1, begin).astype(np.int64)
    lengths = np.diff(offsets)
    sums = np.zeros(count, np.uint64)
    first, last = int(offsets[0]), int(offsets[-1])
    if last > first and native.FORM is not None:
        return np.frombuffer(bytearray(native.FORM.hash_bytes(offsets, data_buffer)), np.uint64)
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


def _in_a_zone(kind: pa.DataType) -> bool:
    """Whether a timestamp has a named time zone. Such values are hashed as Python values, because in a repeated
    hour the instant alone does not determine equality."""
    return pa.types.is_timestamp(kind) and kind.tz not in (None, "UTC") and kind.tz[:1] not in "+-"


def _hash_moments(column: pa.Array) -> U64:
    """Hash dates and times as the sequences to which ``key_types`` reduces Python's date and time values."""
    kind = column.type
    if pa.types.is_date(kind):
        numbers = _filled(column.cast(pa.date32()).cast(pa.int32())).astype(np.int64)
        return _hash_tagged(NAIVE, numbers * _DAY)
    per_second = _PER_SECOND[kind.unit]
    narrow = pa.types.is_time32(kind)
    numbers = _filled(column.cast(pa.int32() if narrow else pa.int64())).astype(np.int64)
    if pa.types.is_timestamp(kind):
        tag = NAIVE if kind.tz is None else INSTANT
    else:
        tag = DURATION if pa.types.is_duration(kind) else TIME
    if per_second <= 1_000_000:
        return _hash_tagged(tag, numbers * (1_000_000 // per_second))
    microseconds, rest = np.divmod(numbers, 1_000)
    hashes = _hash_tagged(tag, microseconds)
    finer = rest != 0
    if finer.any():
        hashes[finer] = _hash_tagged(tag, microseconds[finer], rest[finer] * (ATTOSECONDS // 1_000))
    return hashes


def _hash_tagged(tag: str, *numbers: npt.NDArray[np.int64]) -> U64:
    """Hash sequences of one text and some integers."""
    total = np.full(len(numbers[0]), _SEQUENCE + len(numbers) + 1, np.uint64)
    for part in (np.repeat(_hash_texts([tag]), len(total)), *map(_hash_ints, numbers)):
        total = _mix(total * _GOLDEN + part)
    return total


# ---- Python values of one kind ---------------------------------------------------------------------------------


def _hash_none(count: int) -> U64:
    return np.repeat(_mix(np.array([_NULL])), count)


def _hash_texts(values: Sequence[str]) -> U64:
    try:
        return _hash_bytes(pa.array(values, pa.string()))
    except (UnicodeEncodeError, pa.ArrowException):  # a lone surrogate
        return _hash_bytes(pa.array([str.encode(v, "utf-8", "surrogatepass") for v in values], pa.binary()))


def _hash_python_ints(values: Sequence[int]) -> U64:
    try:
        return _hash_ints(np.array(values, np.int64))
    except OverflowError:
        return _hash_numbers(values)


def _hash_numbers(values: Sequence[Any]) -> U64:
    return np.fromiter(map(_hash_number, values), np.uint64, len(values))


def _hash_number(value: Any) -> int:
    """Hash a number of any type like the integer or float that equals it. If there is none, use Python's own hash,
    which is equal for equal numbers of all types and the same in every process."""
    if isinstance(value, complex) and not value.imag:
        value = value.real
    try:
        if value != value:
            return int(_hash_floats(np.array([math.nan]))[0])
        if -(2**63) <= value < 2**63 and value == int(value):
            return int(_mix(np.array([int(value) & _MASK], np.uint64) + _GOLDEN)[0])
        as_float = float(value)
        if as_float == value:
            return int(_hash_floats(np.array([as_float]))[0])
    except ArithmeticError:  # too large for a float, or a signalling NaN
        if not isinstance(value, int) and getattr(value, "is_nan", bool)():
            return int(_hash_floats(np.array([math.nan]))[0])
    except TypeError:  # complex
        pass
    return int(_mix(np.array([hash(value) & _MASK], np.uint64))[0])


def _hash_sequences(values: Sequence[Sequence[Any]]) -> U64:
    lengths = np.fromiter(map(len, values), np.int64, len(values))
    hashes = np.zeros(len(values), np.uint64)
    for length in np.unique(lengths).tolist():
        rows = np.flatnonzero(lengths == length)
        chosen = values if len(rows) == len(values) else [values[row] for row in rows.tolist()]
        total = np.full(len(rows), _SEQUENCE + length, np.uint64)
        for part in zip(*chosen, strict=True):
            total = _mix(total * _GOLDEN + hash_values(part))
        hashes[rows] = total
    return hashes


def _hash_unordered(values: Sequence[Sequence[Any]]) -> U64:
    """Hash collections without order, by the sum of the hashes of their elements."""
    lengths = np.fromiter(map(len, values), np.int64, len(values))
    sums = np.zeros(len(values), np.uint64)
    filled = lengths > 0
    if filled.any():
        elements = _mix(hash_values(list(chain.from_iterable(values))) + _GOLDEN)
        sums[filled] = np.add.reduceat(elements, (np.cumsum(lengths) - lengths)[filled])
    return _mix(sums * _GOLDEN + lengths.astype(np.uint64) + _UNORDERED)


_HASHES: Mapping[str, Callable[[Sequence[Any]], U64]] = {
    "none": lambda values: _hash_none(len(values)),
    "int": _hash_python_ints,
    "float": lambda values: _hash_floats(np.array(values, np.float64)),
    "number": _hash_numbers,
    "text": _hash_texts,
    "bytes": lambda values: _hash_bytes(pa.array(values, pa.binary())),
    "sequence": _hash_sequences,
    "unordered": _hash_unordered,
    "any": hash_values,
}


def _mix(value: U64) -> U64:
    value = value ^ (value >> np.uint64(30))
    value = value * _MIX1
    value = value ^ (value >> np.uint64(27))
    value = value * _MIX2
    return value ^ (value >> np.uint64(31))
