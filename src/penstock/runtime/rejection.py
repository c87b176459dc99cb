"""Which rows a sink does not take: decided by halving, without knowing the sink.

A batch or transaction that a sink refuses is offered in halves until single rows are left. Those are the rejected
ones; all others are written.
"""

from __future__ import annotations

from enum import Enum

import pyarrow as pa

from penstock.errors import PenstockError, SinkBusy, SinkRefused, StateError, StateUnavailable, SystemAway
from penstock.topology.components import Source

TRIES = 30
"""How often a sink that took nothing at all, and did not say why, is tried before single rows are blamed: with the
pauses in between half a minute, which most restarts of a server are done within."""
_LEAVES = 3  # single rows that fail before it looks as if the sink took nothing: rarely are neighbours all bad

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


class RowSearch:
    """Of one batch or transaction. Offer ``piece`` to the sink, say what came of it, until there is none left."""

    def __init__(self, whole: Piece) -> None:
        self._whole = whole
        self._tries = 0
        self._begin()

    def _begin(self) -> None:
        self._todo = [self._whole]
        self._taken = self._unexplained = 0
        self.rejected: list[tuple[Piece, BaseException]] = []
        """Single rows that the sink does not take, in order."""

    @property
    def piece(self) -> Piece | None:
        """The rows to offer next."""
        return self._todo[-1] if self._todo else None

    def took(self) -> None:
        """The sink has the piece."""
        self._todo.pop()
        self._taken += 1

    def refused(self, error: BaseException) -> bool:
        """The sink has nothing of the piece. False: it seems to take nothing at all. Then pause; everything is
        offered once more."""
        if not self._whole:
            return False  # nothing was written, so it is not about rows
        piece = self._todo.pop()
        if rows_of(piece) > 1:
            self._todo += reversed(_halves(piece))
            return True
        self.rejected.append((piece, error))
        self._unexplained += fault_of(error) is Fault.UNKNOWN
        in_doubt = self._unexplained and not self._taken and (self._unexplained >= _LEAVES or not self._todo)
        if in_doubt and self._tries < TRIES:
            self._tries += 1
            self._begin()
            return False
        return True


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
