"""The place of a tuple: where it was read, as one number. It is all that is kept of a tuple in flight.

A place is also the message id of its tuple, so it is kept in the pending table of the task and nowhere else. It
consists of the origin (one bit) and the position that the origin gave the tuple.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum

import numpy as np

from penstock.acking.lineage import I64
from penstock.errors import ComponentError

_EDEN_BIT = 1 << 62  # set in places of Eden, so sorted places begin with those of To: they were emitted first
MAX_POSITION = _EDEN_BIT - 1


class Origin(Enum):
    """The source that a tuple was read from."""

    EDEN = "eden"
    TO = "to"


def places_of(origin: Origin, positions: Sequence[int]) -> list[int]:
    """Raises ``ComponentError`` if a position cannot be part of a place."""
    try:
        found = np.array(positions, np.int64)
    except OverflowError:
        found = np.array([-1])
    if len(found) and not 0 <= found.min() <= found.max() <= MAX_POSITION:
        wrong = next(each for each in positions if not 0 <= each <= MAX_POSITION)
        raise ComponentError(
            f"{origin.name.capitalize()} of a ReplaySpout",
            f"it gave a tuple the position {wrong}",
            "Positions are integers from 0 to 2**62 - 1.",
        )
    if origin is Origin.EDEN:
        found |= _EDEN_BIT
    places: list[int] = found.tolist()
    return places


def by_origin(places: I64) -> Iterator[tuple[Origin, I64]]:
    """The positions of places, for each origin that has some, in the same order."""
    of_eden = places >= _EDEN_BIT
    if not of_eden.all():
        yield Origin.TO, places[~of_eden]
    if of_eden.any():
        yield Origin.EDEN, places[of_eden] & MAX_POSITION


def first_origin(places: I64) -> tuple[Origin, I64]:
    """The origin of the first of some sorted places, and the positions of all places with this origin."""
    return next(by_origin(places))


def as_places(message_ids: Sequence[int] | I64) -> I64:
    return np.asarray(message_ids, np.int64)
