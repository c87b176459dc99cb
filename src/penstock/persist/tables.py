"""The common base of stores that write to a table of a database."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from penstock.persist.stores import Store, StoreUnavailable, checked_key
from penstock.storage.tables import Columns, checked_columns


class NullInKey(ValueError):
    """A row has None in a field of the key."""


class TableStore(Store):
    """Writes rows to one table.

    ``columns`` names the fields to write, or maps fields to columns; without it each field is written to the
    column of the same name. ``key`` names columns. With ``create`` the table is created when the first rows
    arrive, unless it exists, with types that correspond to the Arrow types and with the key as its primary key. A
    table of your own needs a primary key or unique constraint on exactly the columns of the key.

    If a write contains several rows with the same key, only the last one is written; the others are not checked.

    A row that the table does not accept (because of a type, a constraint, or None in the key) is rejected. A
    problem that concerns every row (a missing table or column, or missing permission) is reported as
    ``StoreUnavailable``: no row is dropped, and the rows are written once the problem is resolved.
    """

    def __init__(self, table: str, key: Sequence[str], columns: Columns, create: bool) -> None:
        where = f"{type(self).__name__} for table '{table}'"
        self.table = table
        self.key = checked_key(where, key)
        self.create = create
        self._columns = checked_columns(where, columns, self.key)

    def shaped(self, rows: pa.Table) -> pa.Table:
        """The rows with the columns of the table. Raises ``StoreUnavailable`` if a field is missing."""
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
    """Raise ``NullInKey`` if a key contains None: a database treats each NULL as a different key."""
    for name in key:
        if rows[name].null_count:
            raise NullInKey(f"None in the key's column '{name}'")
