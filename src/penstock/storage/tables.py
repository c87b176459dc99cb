"""Functions for all writers into tables: mapping fields to columns, last row per key, isolating rejected rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from penstock.errors import TopologyError

Columns = Sequence[str] | Mapping[str, str] | None
"""The fields to write, or a mapping of fields to columns. None writes each field to the column of the same
name."""


def checked_columns(where: str, columns: Columns, key: Sequence[str]) -> dict[str, str] | None:
    """Return ``columns`` as a mapping of fields to columns. Raises ``TopologyError`` if a column of the key is
    missing from it."""
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
    """A row that a table will never accept as it is."""

    row: int
    """Index of the row in the table that was to be written."""
    error: str
    """The error message of the outside system."""


def write_all_but_rejected(
    rows: pa.Table, write: Callable[[pa.Table], None], refused: type[Exception] | tuple[type[Exception], ...]
) -> list[Rejected]:
    """Write rows with few calls of ``write`` and return those that were rejected.

    ``write`` writes all of its rows or raises. When it raises one of ``refused``, the rows are halved and both
    halves are written in order, until single rows remain.
    """
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
    """The last row of each key. One SQL statement cannot update a row twice, and fewer rows are sent."""
    if rows.num_rows < 2:
        return rows
    numbered = rows.select(key).append_column("", pa.array(range(rows.num_rows), pa.int64()))
    last = numbered.group_by(list(key)).aggregate([("", "max")])["_max"]
    return rows if len(last) == rows.num_rows else rows.take(last)
