"""What the stores that are tables of a database share."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from penstock.persist.stores import Store, StoreUnavailable, checked_key
from penstock.storage.tables import Columns, checked_columns


class NullInKey(ValueError):
    """A row of a store with a key has none."""


class TableStore(Store):
    """Rows into one table.

    ``columns`` names the fields to write, or maps fields to columns; without it each field goes to the column of
    its name. ``key`` names columns. ``create`` makes the table when the first rows come, if it is not there, with
    types after the Arrow ones and the key as its primary key. A table of your own needs a primary key or unique
    constraint on exactly the key's columns.

    Of several rows of one key in one write only the last is written; the others are not even looked at.

    A row the table does not take (a type, a constraint, None in the key) is rejected. What is wrong for every row
    (no such table or column, no right to write) is ``StoreUnavailable``: nothing is dropped, and the rows go in
    once the table is mended.
    """

    def __init__(self, table: str, key: Sequence[str], columns: Columns, create: bool) -> None:
        where = f"{type(self).__name__} for table '{table}'"
        self.table = table
        self.key = checked_key(where, key)
        self.create = create
        self._columns = checked_columns(where, columns, self.key)

    def shaped(self, rows: pa.Table) -> pa.Table:
        """The rows with the table's columns."""
        wanted = self.key if self._columns is None else tuple(self._columns)
        if missing := [name for name in wanted if name not in rows.column_names]:
            raise StoreUnavailable(
                str(self),
                f"the rows ({', '.join(rows.column_names)}) have no field {', '.join(missing)}",
                "Set columns={field: column} to say which field goes where. The rows wait in the queue.",
            )
        if self._columns is None:
            return rows
        return rows.select(list(self._columns)).rename_columns(list(self._columns.values()))


def refuse_null_keys(rows: pa.Table, key: Sequence[str]) -> None:
    """To a database None is no key: it would be another one each time."""
    for name in key:
        if rows[name].null_count:
            raise NullInKey(f"None in the key's column '{name}'")
