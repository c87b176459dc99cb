"""A transaction of a sink's own, other than exactly once: offered to the sink until every row of it is committed
or rejected.

A transaction that the sink refuses is offered again in pieces. The sink has one piece at a time. How far it has
got with that piece is one value, which is thrown away with the piece: no row is ever taken for written because
another one is.
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
    """How far the sink has got with a piece."""

    NOTHING = "it has none of its rows"
    WRITING = "it has some of its batches"
    WRITTEN = "it has all of them, in the open transaction"
    PREPARED = "there is a token for them"


@dataclass
class _Offer:
    """Of one piece."""

    state: OfferState = OfferState.NOTHING
    written: int = 0
    """How many batches the sink has, while the state is WRITING."""
    token: Any = None


class Transaction:
    """``rows``: all that the sink has in its open transaction. ``took_before``: it has committed rows since the
    process began. ``number``: gives the next transaction's number."""

    def __init__(self, sink: TransactionalSink, rows: Piece, took_before: bool, number: Callable[[], int]) -> None:
        self._sink, self._number = sink, number
        self._search = RowSearch(rows, took_before)
        self._offer = _Offer(OfferState.WRITTEN)

    @property
    def has_taken(self) -> bool:
        """The sink has committed rows, of this transaction or an earlier one."""
        return self._search.has_taken

    @property
    def wants_more(self) -> bool:
        """More rows would show whether those that fail are to blame. Only between two pieces: the sink's open
        transaction is empty then."""
        return self._search.in_doubt and self._offer.state is OfferState.NOTHING

    def add(self, rows: Piece) -> None:
        """Offer these too, first; the sink has none of them."""
        assert self.wants_more
        self._search.add(rows)

    def take_rejected(self) -> list[tuple[Piece, BaseException]]:
        """The single rows that the sink has rejected since the last call."""
        rejected, self._search.rejected = self._search.rejected, []
        return rejected

    def run(self) -> None:
        """Offer what is left until all of it is committed or rejected. Raises the sink's own error where it is
        away, seems to be, or is superseded: called again, this goes on with the call that raised."""
        while (piece := self._search.piece) is not None:
            offer = self._offer
            try:
                self._carry_on(offer, piece)
            except USER_ERRORS as error:  # the other system may answer with anything
                if fault_of(error) in (Fault.AWAY, Fault.SUPERSEDED):
                    self._search.on_unavailable()
                    raise
                if offer.state is OfferState.WRITING:
                    # What it has of the piece is still in the open transaction: end that before anything else.
                    self._search.split(offer.written)
                    self._offer = _Offer(OfferState.WRITTEN)
                    continue
                self._offer = _Offer()
                if not self._search.on_refused(error):
                    raise
            else:
                self._offer = _Offer()
                self._search.on_accepted()

    def _carry_on(self, offer: _Offer, piece: Piece) -> None:
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
