"""Limits the size of texts. User code, data and other systems may produce texts of any size; a text that becomes
part of an error, a report or a log line is shortened first and says so."""

from __future__ import annotations

import json
import reprlib
from typing import Any

MOST_ERROR = 4_000
"""Characters of one part of an error. A stack trace fits, and a report of 32 errors stays below 1 MB."""
MOST_LINE = 16_000
"""Characters of a line that a worker or the JVM prints. Limits the memory per line."""
MOST_VALUE = 200
"""Characters of one value in an error text: about two lines of a terminal."""
MOST_CELL = 1_000
"""Characters of a cell in the rows that a component shows: more than a screen is wide."""
MOST_ROWS = 1_000
"""Rows that a component may show, and cells per row. More than any view displays."""


def shortened(text: str, most: int = MOST_ERROR) -> str:
    """Shorten ``text`` to at most ``most`` characters (at least 60): its beginning, its end, and the number of
    characters left out between them. Lone surrogates, which cannot be encoded, are escaped. Idempotent."""
    text = encodable(text)
    if len(text) <= most:
        return text
    marker = f" … [shortened, {len(text):,} characters in all] … "
    rest = most - len(marker)
    end = rest // 4
    return text[: rest - end] + marker + text[len(text) - end :]


def encodable(text: str) -> str:
    """``text`` with lone surrogates escaped. File names and ``errors="surrogateescape"`` produce them, and UTF-8
    cannot encode them."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


class _Repr(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 4
        self.maxstring = self.maxother = self.maxlong = MOST_VALUE
        self.maxtuple = self.maxlist = self.maxdict = self.maxset = self.maxfrozenset = 20

    def repr_bytes(self, value: bytes, level: int) -> str:
        return repr(value) if len(value) <= MOST_VALUE else f"{value[:MOST_VALUE]!r}… ({len(value):,} bytes)"

    repr_bytearray = repr_bytes


_repr = _Repr()


def bounded_repr(value: object) -> str:
    """``repr(value)`` in at most ``MOST_VALUE`` characters. Never raises, whatever ``value.__repr__`` does, and
    does not build the complete text of a long string, bytes or large collection."""
    try:
        return shortened(_repr.repr(value), MOST_VALUE)
    except Exception:  # the user's __repr__ may raise anything
        return f"<{type(value).__name__}>"


def bounded_cell(value: Any) -> Any:
    """A cell for display: unchanged if it is a number or a short text, otherwise its shortened text."""
    if isinstance(value, str):
        return shortened(value, MOST_CELL)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, float):
        return float(value)  # not a subclass, such as NumPy's
    if isinstance(value, int):
        return int(value) if -(1 << 63) <= value < 1 << 64 else bounded_repr(value)
    return shortened(_text(value), MOST_CELL)


def _text(value: object) -> str:
    try:
        large = isinstance(value, bytes | bytearray | list | tuple | dict | set | frozenset)
        return _repr.repr(value) if large else str(value)
    except Exception:  # the user's __str__ may raise anything
        return f"<{type(value).__name__}>"


def parse_json(text: str | bytes) -> Any:
    """``json.loads``. Raises only ``ValueError``, also for JSON that is nested too deeply, because received bytes
    must not be able to raise anything else."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None
