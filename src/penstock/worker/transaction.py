"""A transaction that a sink task commits by itself (not with exactly-once delivery): it is offered to the sink
until every row is committed or rejected.

If the sink refuses a transaction, its rows are offered again in pieces, one at a time. The progress with a piece
is one value, which is discarded with the piece, so that no row can count as written because another one is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from penstock.topology.components import TransactionalSink
from penstock.worker.failures import USER_ERRORS
from penstock.worker.rejection import Fault, Piece, RowSearch, fault_of


class OfferState(Enum):
    """The sink's progress with a piece."""

    NOTHING = "no row of the piece is written"
    WRITING = "some batches are written"
    WRITTEN = "all batches are written, in the open transaction"
    PREPARED = "the transaction is prepared"


@dataclass
class _Offer:
    """The progress with the current piece."""

    state: OfferState = OfferState.NOTHING
    written: int = 0
    """The number of batches that are written, while the state is WRITING."""
    token: Any = None


class Transaction:
    """One transaction. ``rows`` are all rows in the sink's open transaction. ``took_before``: the sink has
    committed rows since the process started. ``number`` returns the number of the next transaction. Used by the
    worker's loop only."""

    def __init__(self, sink: TransactionalSink, rows: Piece, took_before: bool, number: Callable[[], int]) -> None:
        self._sink, self._number = sink, number
        self._search = RowSearch(rows, took_before)
        self._offer = _Offer(OfferState.WRITTEN)

    @property
    def has_taken(self) -> bool:
        """True if the sink has committed rows, of this transaction or an earlier one."""
        return self._search.has_taken

    @property
    def wants_more(self) -> bool:
        """True if further rows would show whether the failing rows are bad or the sink is unavailable. Only
        between two pieces, when the sink's open transaction is empty."""
        return self._search.in_doubt and self._offer.state is OfferState.NOTHING

    def add(self, rows: Piece) -> None:
        """Add rows that are not written yet; they are offered next."""
        assert self.wants_more
        self._search.add(rows)

    def take_rejected(self) -> list[tuple[Piece, BaseException]]:
        """Remove and return the rows that the sink has rejected since the last call, each as a piece of one
        row."""
        rejected, self._search.rejected = self._search.rejected, []
        return rejected

    def run(self) -> None:
        """Offer the remaining rows until all are committed or rejected. Raises the sink's error if the sink is
        unavailable, seems to be, or is superseded. The next call of ``run`` repeats the call that raised."""
        while (piece := self._search.piece) is not None:
            offer = self._offer
            try:
                self._continue(offer, piece)
            except USER_ERRORS as error:  # a client library may raise anything
                if fault_of(error) in (Fault.AWAY, Fault.SUPERSEDED):
                    self._search.on_unavailable()
                    raise
                if offer.state is OfferState.WRITING:
                    # The written batches are in the open transaction, which must be ended first.
                    self._search.split(offer.written)
                    self._offer = _Offer(OfferState.WRITTEN)
                    continue
                self._offer = _Offer()
                if not self._search.on_refused(error):
                    raise
            else:
                self._offer = _Offer()
                self._search.on_accepted()

    def _continue(self, offer: _Offer, piece: Piece) -> None:
        if offer.state in (OfferState.NOTHING, OfferState.WRITING):
            for batch, source in piece[offer.written :]:
                self._sink.write(batch, source)
                offer.written += 1
                offer.state = OfferState.WRITING
            offer.state = OfferState.WRITTEN
        if offer.state is OfferState.WRITTEN:
            offer.token = self._sink.prepare_commit(self._number())
            offer.state = OfferState.PREPARED
        if offer.token is not None:
            self._sink.commit(offer.token)
