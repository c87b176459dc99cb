"""What all writers into tables share: which field goes to which column, and one row of each key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa

from penstock.errors import TopologyError

Columns = Sequence[str] | Mapping[str, str] | None
"""The fields to write, or fields mapped to columns; None for each field to the column of its name."""


def checked_columns(where: str, columns: Columns, key: Sequence[str]) -> dict[str, str] | None:
    """Fields mapped to columns; the key's columns are among them."""
    if isinstance(columns, str):
        raise TopologyError(where, "columns is a sequence or a mapping", repr(columns))
    if columns is None:
        return None
    mapped = dict(columns) if isinstance(columns, Mapping) else {name: name for name in columns}
    if not set(key) <= set(mapped.values()):
        raise TopologyError(
            where, "the key's columns are among the columns", f"key={tuple(key)!r}, columns={mapped!r}"
        )
    return mapped


def last_of_each(rows: pa.Table, key: Sequence[str]) -> pa.Table:
    """The last row of each key: one statement cannot update a row twice, and less travels."""
    if rows.num_rows < 2:
        return rows
    numbered = rows.select(key).append_column("", pa.array(range(rows.num_rows), pa.int64()))
    last = numbered.group_by(list(key)).aggregate([("", "max")])["_max"]
    return rows if len(last) == rows.num_rows else rows.take(last)
