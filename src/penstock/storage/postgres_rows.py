"""Rows and tables of PostgreSQL: connections, COPY, types, names. psycopg 3 is imported only when it is needed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from penstock.credentials import Placeholders, has_references, resolved
from penstock.errors import EnvironmentFault
from penstock.redaction import hide

if TYPE_CHECKING:
    import psycopg

_COPY_ROWS = 65_536  # rows converted to text at a time: a few MB, below Arrow's limit of 2 GB per string column
# Used unless the dsn sets them: a host that stops responding is detected within 15 s. In seconds; tcp_user_timeout
# in milliseconds.
_DEFAULTS = {
    "connect_timeout": 5,
    "keepalives_idle": 5,
    "keepalives_interval": 5,
    "keepalives_count": 2,
    "tcp_user_timeout": 15_000,
}
_LOCK = 0x70656E73746F636B  # "penstock" in ASCII; serialises table creation, which IF NOT EXISTS does not

ROWS_FAULT = (  # SQLSTATE classes that mean the row itself is at fault; after any other error a retry may succeed
    "21",  # a row occurs twice in one upsert because the column type treats two keys as equal: halving resolves it
    "22",  # data exception
    "23",  # constraint violation
    "44",  # check option of a view
    "54",  # a limit of PostgreSQL, such as the length of a key
    "P0",  # RAISE in a trigger
)

Execute = Callable[..., Any]
"""``psycopg.Connection.execute``, or a function with the same behaviour."""


def connect(dsn: str) -> psycopg.Connection:
    """Open a connection in autocommit mode. Raises ``EnvironmentFault`` if the dsn does not parse or contains a
    reference that cannot be resolved."""
    import psycopg

    options: dict[str, Any] = {**_DEFAULTS, **connection_options(dsn)}
    options["client_encoding"] = "utf8"  # the encoding of Arrow strings, whatever the database uses
    return psycopg.connect(**options, autocommit=True)


def lock_creation(execute: Execute) -> None:
    """Prevent other processes from creating tables until the open transaction ends."""
    execute("SELECT pg_advisory_xact_lock(%s)", (_LOCK,))


def create_table(execute: Execute, table: str, schema: pa.Schema, key: Sequence[str]) -> None:
    """Create the table in the open transaction unless it exists. Column types follow the Arrow types; ``key``
    becomes the primary key."""
    from psycopg import sql

    name = identifier(table)
    if execute("SELECT to_regclass(%s)", (name.as_string(None),)).fetchone() != (None,):
        return
    lock_creation(execute)
    columns = [
        sql.SQL("{} {}").format(sql.Identifier(field.name), sql.SQL(postgres_type(field.type))) for field in schema
    ]
    if key:
        columns.append(sql.SQL("PRIMARY KEY ({})").format(identifiers(key)))
    execute(sql.SQL("CREATE TABLE IF NOT EXISTS {} ({})").format(name, sql.SQL(", ").join(columns)))


def staged() -> Any:
    """The name of the table that ``create_staged`` creates."""
    from psycopg import sql

    return sql.Identifier("pg_temp", "penstock_rows")


def create_staged(table: str, columns: Sequence[str]) -> Any:
    """The statement that creates an empty temporary table with these columns. The table ends with the
    transaction."""
    from psycopg import sql

    return sql.SQL(
        "CREATE TEMP TABLE penstock_rows ON COMMIT DROP AS SELECT {} FROM {} WITH NO DATA;"
        " ALTER TABLE pg_temp.penstock_rows ADD COLUMN penstock_row bigint GENERATED ALWAYS AS IDENTITY"
    ).format(identifiers(columns), identifier(table))


def upsert_staged(table: str, columns: Sequence[str], key: Sequence[str]) -> Any:
    """The statement that moves the last staged row of each key into the table.

    PostgreSQL may treat keys as equal that Arrow does not (0.0 and -0.0, or under a case-insensitive collation),
    so the statement removes duplicates itself. Rows are inserted in the order of the key: two transactions that
    update the same rows then wait for each other instead of deadlocking.
    """
    from psycopg import sql

    action: sql.Composable = sql.SQL("NOTHING")
    if others := [name for name in columns if name not in key]:
        updates = [sql.SQL("{0} = EXCLUDED.{0}").format(sql.Identifier(name)) for name in others]
        action = sql.SQL("UPDATE SET {}").format(sql.SQL(", ").join(updates))
    names, keys = identifiers(columns), identifiers(key)
    return sql.SQL(
        "INSERT INTO {} ({}) SELECT DISTINCT ON ({}) {} FROM {} ORDER BY {}, penstock_row DESC"
        " ON CONFLICT ({}) DO {}"
    ).format(identifier(table), names, keys, names, staged(), keys, keys, action)


def copy_rows(connection: psycopg.Connection, table: Any, rows: pa.Table) -> None:
    """Copy the rows into a table with COPY. ``table`` is a result of ``identifier`` or ``staged``."""
    from psycopg import sql

    statement = sql.SQL("COPY {} ({}) FROM STDIN").format(table, identifiers(rows.column_names))
    with connection.cursor() as cursor, cursor.copy(statement) as copy:
        for text in copy_text(rows):
            copy.write(text)


def copy_text(rows: pa.Table) -> Iterator[memoryview]:
    """The rows in the text format of COPY."""
    for start in range(0, rows.num_rows, _COPY_ROWS):
        chunk = rows.slice(start, _COPY_ROWS).combine_chunks()
        columns = [_text(column.combine_chunks()) for column in chunk.columns]
        lines = pc.binary_join_element_wise(*columns, "\t", null_handling="replace", null_replacement="\\N")
        lines = pc.binary_join_element_wise(lines, "\n", "")
        offsets = memoryview(lines.buffers()[1]).cast("i")
        yield memoryview(lines.buffers()[2])[offsets[lines.offset] : offsets[lines.offset + len(lines)]]


def _text(column: pa.Array) -> pa.Array:
    """The column as strings that PostgreSQL can read, escaped for COPY."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        column = column.dictionary_decode()
        kind = column.type
    if pa.types.is_nested(kind):
        values = [None if value is None else json.dumps(value, default=str) for value in column.to_pylist()]
        column = pa.array(values, pa.string())
    elif _is_binary(kind):
        values = [None if value is None else "\\x" + value.hex() for value in column.to_pylist()]
        column = pa.array(values, pa.string())
    elif pa.types.is_duration(kind):
        micros = column.cast(pa.duration("us")).cast(pa.int64()).cast(pa.string())
        return pc.binary_join_element_wise(micros, "microseconds", " ")
    elif not _is_string(kind):
        return column.cast(pa.string())  # the text contains no character that needs an escape
    column = column.cast(pa.string())
    if pc.any(pc.match_substring_regex(column, r"[\\\t\n\r]")).as_py():
        for character, escape in (("\\", r"\\"), ("\t", r"\t"), ("\n", r"\n"), ("\r", r"\r")):
            column = pc.replace_substring(column, character, escape)
    return column


def postgres_type(kind: pa.DataType) -> str:
    """The PostgreSQL type that holds every value of an Arrow type. Nested types become ``jsonb``."""
    if pa.types.is_dictionary(kind):
        return postgres_type(kind.value_type)
    if pa.types.is_decimal(kind):
        return f"numeric({kind.precision}, {kind.scale})"
    if pa.types.is_timestamp(kind):
        return "timestamp with time zone" if kind.tz else "timestamp"
    for matches, name in _TYPES:
        if matches(kind):
            return name
    return "text"


def _is_string(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _is_binary(kind: pa.DataType) -> bool:
    types = pa.types
    return any(
        test(kind)
        for test in (types.is_binary, types.is_large_binary, types.is_fixed_size_binary, types.is_binary_view)
    )


_TYPES: tuple[tuple[Callable[[pa.DataType], bool], str], ...] = (
    (pa.types.is_boolean, "boolean"),
    (lambda kind: kind in (pa.int8(), pa.int16(), pa.uint8()), "smallint"),
    (lambda kind: kind in (pa.int32(), pa.uint16()), "integer"),
    (lambda kind: kind in (pa.int64(), pa.uint32()), "bigint"),
    (pa.types.is_uint64, "numeric(20)"),
    (lambda kind: kind in (pa.float16(), pa.float32()), "real"),
    (pa.types.is_float64, "double precision"),
    (pa.types.is_date, "date"),
    (pa.types.is_time, "time"),
    (pa.types.is_duration, "interval"),
    (_is_binary, "bytea"),
    (pa.types.is_nested, "jsonb"),
)


def identifier(table: str) -> Any:
    """``table`` or ``schema.table``, quoted."""
    from psycopg import sql

    return sql.Identifier(*table.split("."))


def identifiers(names: Sequence[str]) -> Any:
    from psycopg import sql

    return sql.SQL(", ").join(map(sql.Identifier, names))


def connection_options(dsn: str) -> dict[str, Any]:
    """The options of a dsn with its references resolved (see ``penstock.credentials``). The password is hidden
    from errors and logs from now on."""
    placeholders = Placeholders(_whole(dsn))
    options = {name: placeholders.resolve(value, _WHERE) for name, value in _parsed(placeholders.text).items()}
    if options.get("password"):
        hide(str(options["password"]))
    return options


def check_dsn(dsn: str) -> None:
    """Raises ``EnvironmentFault`` for a dsn that does not parse. Does not resolve references."""
    if not has_references(dsn) or "=" in dsn or "://" in dsn:
        _parsed(Placeholders(dsn).text)


_WHERE = "PostgreSQL connection string"


def _whole(dsn: str) -> str:
    """Resolve a dsn that consists of a single reference, such as ``${DATABASE_URL}``, before it is parsed."""
    return resolved(dsn, _WHERE) if has_references(dsn) and "=" not in dsn and "://" not in dsn else dsn


def _parsed(dsn: str) -> dict[str, Any]:
    """The options of a dsn. The error message does not contain that of libpq, which would quote the password."""
    import psycopg
    from psycopg.conninfo import conninfo_to_dict

    try:
        options: dict[str, Any] = conninfo_to_dict(dsn)
    except psycopg.ProgrammingError:
        raise EnvironmentFault(
            _WHERE,
            "it cannot be parsed",
            "For example 'host=db.example dbname=results user=penstock password=${PASSWORD}'.",
        ) from None
    # With an @ or / that is not encoded, libpq takes a part of the password for a host, a port or a database, and
    # would quote it in its errors.
    port = str(options.get("port", "")).replace(",", "")
    misread = any("@" in str(options.get(name, "")) for name in ("host", "port", "dbname"))
    if "://" in dsn and (misread or not (port.isdecimal() or port.startswith("penstockreference") or not port)):
        raise EnvironmentFault(
            _WHERE,
            "its password contains @, /, : or % that is not encoded (as %40, %2F, %3A, %25)",
            "Encode it, or write ${NAME} in its place: the value of an environment variable needs no encoding.",
        )
    return options


def address(dsn: str) -> str:
    """Where the server is, without the password. Does not resolve references."""
    if has_references(dsn) and "=" not in dsn and "://" not in dsn:
        return dsn
    placeholders = Placeholders(dsn)
    parts = {name: placeholders.show(value) for name, value in _parsed(placeholders.text).items()}
    return f"{parts.get('host', 'the local socket')}:{parts.get('port', 5432)}/{parts.get('dbname', '')}"
