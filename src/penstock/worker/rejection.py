"""Finds the rows that a sink rejects, without knowledge of the sink.

A batch or transaction that a sink refuses is offered again in halves, down to single rows. A row is rejected if
the sink says so by raising a ``PenstockError``, or if the row alone fails while the sink accepts others: the row
failed, another row was accepted, the row failed again. In every other case the sink counts as unavailable, and
the task waits for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import pyarrow as pa

from penstock.errors import PenstockError, SinkBusy, SinkRefused, StateError, StateUnavailable, SystemAway
from penstock.topology.components import Source

TRIES = 30
"""Attempts before up to ``_LEAVES`` remaining rows are rejected, if the sink accepted other rows before and
there are no other rows to offer. With the pauses in between this takes half a minute, within which most servers
restart. The more rows fail, the more likely is an outage: the number is multiplied by the number of remaining
rows divided by ``_LEAVES``, rounded up."""
_LEAVES = 3
"""Single rows that must fail in succession before the sink seems to be unavailable: more rows in a row are
rarely all bad."""
_MOST_SUSPECTS = 64
"""Suspect rows in one search. Each is offered alone after an outage, so the number bounds the extra calls."""

Piece = list[tuple[pa.RecordBatch, Source]]
"""Rows in order, as ⟨batch, source⟩."""


class Fault(Enum):
    """The meaning of an exception that a sink raised."""

    SUPERSEDED = "another process has replaced this task, or a restart may help"
    AWAY = "the external system is unavailable; the same call has to be repeated"
    REJECTED = "the sink will never accept these rows"
    UNKNOWN = "the system is unavailable, or it rejects the rows"


def fault_of(error: BaseException) -> Fault:
    """Classify an exception by its type. A file system or connection that fails raises an ``OSError``. Sinks
    raise any other ``PenstockError`` deliberately, to reject rows."""
    if isinstance(error, SinkRefused):
        return Fault.SUPERSEDED
    if isinstance(error, SinkBusy | SystemAway | StateUnavailable | OSError):
        return Fault.AWAY
    if isinstance(error, StateError) and isinstance(error.__cause__, OSError):
        return Fault.AWAY
    return Fault.REJECTED if isinstance(error, PenstockError) else Fault.UNKNOWN


@dataclass
class _Part:
    """Rows that the sink has not accepted."""

    rows: Piece
    failed_at: int = 0
    """Number of the offer at which these rows, or a part that contains them, failed last; 0 if none did."""
    suspect: bool = False
    """True for a single row that failed for an unknown reason."""
    since: int = 0
    """For a suspect: the number of attempts when it became one, or when the sink last accepted rows if that was
    later."""


class RowSearch:
    """The search in one batch or transaction. The caller offers ``piece`` to the sink and calls ``on_accepted``,
    ``on_refused``, ``on_unavailable`` or ``split``, until ``piece`` is None."""

    def __init__(self, whole: Piece, took_before: bool = False) -> None:
        """``took_before``: the sink has accepted other rows since the process started."""
        self._todo = [_Part(whole)] if whole else []
        """The remaining parts; the next one is the last of the list."""
        self._is_empty = not whole
        self._offers = self._took_at = 0
        """The number of offers so far, and the number of the last one that was accepted."""
        self._took_before = took_before
        self._in_a_row = self._tries = 0
        self._doubts = False
        """The sink seemed to be unavailable and has accepted nothing since."""
        self.rejected: list[tuple[Piece, BaseException]] = []
        """Single rows that the sink rejects, with its errors."""

    @property
    def piece(self) -> Piece | None:
        """The rows to offer next; None at the end. An empty transaction is offered once."""
        if self._is_empty:
            return []
        return self._todo[-1].rows if self._todo else None

    @property
    def has_taken(self) -> bool:
        """True if the sink has accepted rows, in this search or before."""
        return self._took_before or self._took_at > 0

    @property
    def in_doubt(self) -> bool:
        """True if only suspects are left. Whether the sink accepts further rows would show if it is available,
        so the caller should ``add`` some."""
        return bool(self._todo) and all(part.suspect for part in self._todo)

    def add(self, rows: Piece) -> None:
        """Add rows, which are offered next."""
        self._todo.append(_Part(rows))

    def on_accepted(self) -> None:
        """Called when the sink has accepted the piece."""
        self._offers += 1
        if self._is_empty:
            self._is_empty = False
            return
        self._todo.pop()
        self._took_at, self._in_a_row, self._doubts = self._offers, 0, False
        for part in self._todo:
            part.since = self._tries

    def on_unavailable(self) -> None:
        """Called when the sink says that it is unavailable. A part that failed together with other rows may have
        failed because of those, and may fail again because of the outage; two such failures do not prove that it
        is bad."""
        for part in self._todo:
            if not part.suspect:
                part.failed_at = 0

    def split(self, batches: int) -> None:
        """Called when the sink has accepted the first ``batches`` batches of the piece and refused the next one.
        The accepted batches become the next piece, the others the one after it."""
        self._offers += 1
        part = self._todo.pop()
        self._todo.append(_Part(part.rows[batches:], self._offers))
        self._todo.append(_Part(part.rows[:batches], part.failed_at))

    def take_rest(self) -> Piece:
        """End the search and return all rows that the sink has not accepted, in no particular order."""
        rest = [each for part in reversed(self._todo) for each in part.rows]
        self._todo = []
        return rest

    def on_refused(self, error: BaseException) -> bool:
        """Called when the sink has refused the whole piece. Returns False if the sink seems to be unavailable;
        the caller then pauses before it offers the remaining rows again."""
        self._offers += 1
        if self._is_empty:
            return False  # nothing was written, so no row can be the cause
        part = self._todo.pop()
        fault = fault_of(error)
        if rows_of(part.rows) > 1:
            if fault is Fault.UNKNOWN and self._doubts and self._suspects >= _MOST_SUSPECTS:
                self._todo.insert(0, _Part(part.rows, self._offers))
                return False
            self._todo += [_Part(half, self._offers) for half in reversed(_halves(part.rows))]
            return True
        accepted_others_since = 0 < part.failed_at < self._took_at
        if fault is not Fault.UNKNOWN or accepted_others_since:
            self.rejected.append((part.rows, error))
            return True
        self._in_a_row += 1
        since = part.since if part.suspect else self._tries
        self._todo.insert(0, _Part(part.rows, self._offers, suspect=True, since=since))
        if not self._doubts and self._in_a_row < min(_LEAVES, len(self._todo)):
            return True
        self._in_a_row, self._doubts = 0, True
        return self._reject_suspects(error)

    @property
    def _suspects(self) -> int:
        return sum(part.suspect for part in self._todo)

    def _reject_suspects(self, error: BaseException) -> bool:
        """Reject the remaining suspects that still fail after many attempts, if the sink has accepted other
        rows. Returns True if any was rejected."""
        if not self.in_doubt:
            return False
        self._tries += 1
        before = self._tries - TRIES * math.ceil(len(self._todo) / _LEAVES)
        exhausted = [part for part in self._todo if part.since <= before] if self.has_taken else []
        self.rejected += [(part.rows, error) for part in reversed(exhausted)]
        self._todo = [part for part in self._todo if part not in exhausted]
        return bool(exhausted)


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
