"""Columns as values that every store understands."""

from __future__ import annotations

import json

import pyarrow as pa


def plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """The column without dictionaries, durations (microseconds) and nested values (JSON); times of day with a time
    zone in UTC. All other columns unchanged."""
    types, kind = pa.types, column.type
    if types.is_dictionary(kind):
        return plain(column.cast(kind.value_type))
    if types.is_nested(kind):
        values = [None if value is None else json.dumps(value, default=str) for value in column.to_pylist()]
        return pa.chunked_array([pa.array(values, pa.string())])
    if types.is_duration(kind):
        return column.cast(pa.duration("us"), safe=False).cast(pa.int64())
    if types.is_timestamp(kind) and kind.tz:
        return column.cast(pa.timestamp(kind.unit, "UTC"))
    return column
