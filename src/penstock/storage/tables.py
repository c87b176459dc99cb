"""What all writers into tables share: which field goes to which column, and one row of each key."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from penstock.errors import TopologyError

Columns = Sequence[str] | Mapping[str, str] | None
"""The fields to write, or fields mapped to columns; None for each field to the column of its name."""


def checked_columns(where: str, columns: Columns, key: Sequence[str]) -> dict[str, str] | None:
    """Fields mapped to columns; the key's columns are among them."""
    if isinstance(columns, str):
        raise TopologyError(where, f"columns is {columns!r}, neither a sequence nor a mapping")
    if columns is None:
        return None
    mapped = dict(columns) if isinstance(columns, Mapping) else {name: name for name in columns}
    if not set(key) <= set(mapped.values()):
        raise TopologyError(where, f"the key {tuple(key)!r} names columns that are not among {mapped!r}")
    return mapped


@dataclass(frozen=True)
class Rejected:
    """A row that a table will never take as it is."""

    row: int
    """Its place in the table that was to be written."""
    error: str
    """The other system's own words."""


def write_all_but_rejected(
    rows: pa.Table, write: Callable[[pa.Table], None], refused: type[Exception] | tuple[type[Exception], ...]
) -> list[Rejected]:
    """Write rows in as few calls as need be: what is refused is halved until single rows are left. ``write`` does
    all of its rows or raises; the parts are written in order."""
    rejected: list[Rejected] = []
    parts = [(0, rows)] if rows.num_rows else []
    while parts:
        first, part = parts.pop()
        try:
            write(part)
        except refused as error:
            if part.num_rows == 1:
                rejected.append(Rejected(first, str(error).strip()))
            else:
                half = part.num_rows // 2
                parts += [(first + half, part.slice(half)), (first, part.slice(0, half))]
    return rejected


def last_of_each(rows: pa.Table, key: Sequence[str]) -> pa.Table:
    """The last row of each key: one statement cannot update a row twice, and less travels."""
    if rows.num_rows < 2:
        return rows
    numbered = rows.select(key).append_column("", pa.array(range(rows.num_rows), pa.int64()))
    last = numbered.group_by(list(key)).aggregate([("", "max")])["_max"]
    return rows if len(last) == rows.num_rows else rows.take(last)
