"""Chains of state parts that are decoded ahead of a restart, so that the restart takes less time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.state.encoding import apply_map, form_of


class DecodedChain(list[bytes]):
    """The parts of a state, oldest first, together with the decoded items of a map. Can be used in place of the
    list of its parts. Whoever uses ``items`` owns them afterwards."""

    __slots__ = ("_mine", "items", "rows")

    def __init__(self, mine: Callable[[pa.Array], npt.NDArray[np.bool_]] | None = None) -> None:
        """``mine``: selects the keys to decode; None for all."""
        super().__init__()
        self._mine = mine
        self.items: dict[Any, Any] | None = {}
        """None for the chain of a value, or if the chain can only be decoded once the component asks for the
        state."""
        self.rows: list[int] = []
        """The number of selected rows of each part."""

    def add(self, part: bytes) -> None:
        """Add the next part and decode it."""
        self.append(part)
        if self.items is None:
            return
        if form_of(part) != "map":
            self.items = None
            return
        try:
            self.rows.append(apply_map(part, self.items, self._mine))
        # unpickling and a key's owner function may raise anything; it is reported when the component asks for the
        # state
        except Exception:
            self.items = None
