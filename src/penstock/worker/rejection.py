"""Which rows a sink does not take: decided by halving, without knowing the sink.

A batch or transaction that a sink refuses is offered in halves until single rows are left. A row is rejected where
the sink says so (an error of Penstock's own), or where the row alone fails while the sink takes others: it failed,
another row was taken, it failed again. Everything else looks like a sink that is away, and is waited for.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import pyarrow as pa

from penstock.errors import PenstockError, SinkBusy, SinkRefused, StateError, StateUnavailable, SystemAway
from penstock.topology.components import Source

TRIES = 30
"""How often up to ``_LEAVES`` rows are tried before they are blamed, where the sink took others before and none is
left to offer after them: with the pauses in between half a minute, within which most servers have restarted. The
more rows, the more it looks like an outage: six are tried twice as often, and so on."""
_LEAVES = 3
"""Single rows in succession that fail before it looks as if the sink took nothing: more are rarely all bad."""
_MOST_SUSPECTS = 64  # single rows set apart in an outage: each is offered alone when it is over

Piece = list[tuple[pa.RecordBatch, Source]]
"""Rows in order, with where they come from."""


class Fault(Enum):
    """What an exception of a sink means."""

    SUPERSEDED = "another process has this task's place, or starting again may help"
    AWAY = "the other system takes nothing now; the same call again is right"
    REJECTED = "these rows will never be taken"
    UNKNOWN = "either of the last two"


def fault_of(error: BaseException) -> Fault:
    """By its type. A file system or a connection that fails is an ``OSError``; an error of Penstock's own is
    raised on purpose, on behalf of rows."""
    if isinstance(error, SinkRefused):
        return Fault.SUPERSEDED
    if isinstance(error, SinkBusy | SystemAway | StateUnavailable | OSError):
        return Fault.AWAY
    if isinstance(error, StateError) and isinstance(error.__cause__, OSError):
        return Fault.AWAY
    return Fault.REJECTED if isinstance(error, PenstockError) else Fault.UNKNOWN


@dataclass
class _Part:
    """Rows that the sink has not taken."""

    rows: Piece
    failed_at: int = 0
    """Which offer it, or what it is a half of, failed at; 0 for none."""
    suspect: bool = False
    """A single row that failed for an unknown reason."""
    since: int = 0
    """Of a suspect: how many tries had been made when it became one, or when the sink last took something."""


class RowSearch:
    """Of one batch or transaction. Offer ``piece`` to the sink, say what came of it, until there is none left."""

    def __init__(self, whole: Piece, took_before: bool = False) -> None:
        """``took_before``: the sink has taken other rows since the process began."""
        self._todo = [_Part(whole)] if whole else []
        """The next one last."""
        self._is_empty = not whole
        self._offers = self._took_at = 0
        """How many offers there were; which of them was taken last."""
        self._took_before = took_before
        self._in_a_row = self._tries = 0
        self._doubts = False
        """The sink has taken nothing since it seemed to take nothing at all."""
        self.rejected: list[tuple[Piece, BaseException]] = []
        """Single rows that the sink does not take."""

    @property
    def piece(self) -> Piece | None:
        """The rows to offer next. Of an empty transaction no rows, once."""
        if self._is_empty:
            return []
        return self._todo[-1].rows if self._todo else None

    @property
    def has_taken(self) -> bool:
        """The sink has taken rows, of this search or before it."""
        return self._took_before or self._took_at > 0

    @property
    def in_doubt(self) -> bool:
        """Rows fail, and no others are left that could show that it is their fault: any more would help."""
        return bool(self._todo) and all(part.suspect for part in self._todo)

    def add(self, rows: Piece) -> None:
        """Offer these too, first."""
        self._todo.append(_Part(rows))

    def on_accepted(self) -> None:
        """The sink has the piece."""
        self._offers += 1
        if self._is_empty:
            self._is_empty = False
            return
        self._todo.pop()
        self._took_at, self._in_a_row, self._doubts = self._offers, 0, False
        for part in self._todo:
            part.since = self._tries

    def on_unavailable(self) -> None:
        """The sink said so. What failed as a part of more rows may have failed because of them, and may now fail
        because of an outage: that alone does not blame it."""
        for part in self._todo:
            if not part.suspect:
                part.failed_at = 0

    def split(self, batches: int) -> None:
        """The sink has these batches of the piece and refused the next one: the first of two pieces from now
        on."""
        self._offers += 1
        part = self._todo.pop()
        self._todo.append(_Part(part.rows[batches:], self._offers))
        self._todo.append(_Part(part.rows[:batches], part.failed_at))

    def take_rest(self) -> Piece:
        """Give up the search: all rows that the sink has not taken, in no order."""
        rest = [each for part in reversed(self._todo) for each in part.rows]
        self._todo = []
        return rest

    def on_refused(self, error: BaseException) -> bool:
        """The sink has nothing of the piece. False: it seems to take nothing at all. Then pause; what is left is
        offered once more."""
        self._offers += 1
        if self._is_empty:
            return False  # nothing was written, so it is not about rows
        part = self._todo.pop()
        fault = fault_of(error)
        if rows_of(part.rows) > 1:
            if fault is Fault.UNKNOWN and self._doubts and self._suspects >= _MOST_SUSPECTS:
                self._todo.insert(0, _Part(part.rows, self._offers))
                return False
            self._todo += [_Part(half, self._offers) for half in reversed(_halves(part.rows))]
            return True
        if fault is not Fault.UNKNOWN or 0 < part.failed_at < self._took_at:
            self.rejected.append((part.rows, error))
            return True
        self._in_a_row += 1
        since = part.since if part.suspect else self._tries
        self._todo.insert(0, _Part(part.rows, self._offers, suspect=True, since=since))
        if not self._doubts and self._in_a_row < min(_LEAVES, len(self._todo)):
            return True
        self._in_a_row, self._doubts = 0, True
        return self._blame_the_last(error)

    @property
    def _suspects(self) -> int:
        return sum(part.suspect for part in self._todo)

    def _blame_the_last(self, error: BaseException) -> bool:
        """Where the sink took others, those that are left and still fail after many tries are blamed."""
        if not self.in_doubt:
            return False
        self._tries += 1
        before = self._tries - TRIES * -(-len(self._todo) // _LEAVES)
        blamed = [part for part in self._todo if part.since <= before] if self.has_taken else []
        self.rejected += [(part.rows, error) for part in reversed(blamed)]
        self._todo = [part for part in self._todo if part not in blamed]
        return bool(blamed)


def rows_of(piece: Piece) -> int:
    return sum(batch.num_rows for batch, _ in piece)


def _halves(piece: Piece) -> tuple[Piece, Piece]:
    half = rows_of(piece) // 2
    first: Piece = []
    for place, (batch, source) in enumerate(piece):
        if batch.num_rows >= half:
            rest = [(batch.slice(half), source)] if batch.num_rows > half else []
            return [*first, (batch.slice(0, half), source)], [*rest, *piece[place + 1 :]]
        first.append((batch, source))
        half -= batch.num_rows
    raise AssertionError("a piece has more rows than half of it")
