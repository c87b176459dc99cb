"""Chains that were decoded ahead: what a restart would otherwise do while nothing runs (SPEC 4)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.state.encoding import apply_map, form_of


class DecodedChain(list[bytes]):
    """A state's parts, oldest first, and what the parts of a map come to. It may be used wherever its parts may;
    whoever takes the items takes them over."""

    __slots__ = ("_mine", "items", "rows")

    def __init__(self, mine: Callable[[pa.Array], npt.NDArray[np.bool_]] | None = None) -> None:
        """``mine``: which keys count; None for all."""
        super().__init__()
        self._mine = mine
        self.items: dict[Any, Any] | None = {}
        """None: a value's chain, or one that only who asks for the state can decode."""
        self.rows: list[int] = []
        """Of each part, as far as they count."""

    def add(self, part: bytes) -> None:
        """The next part."""
        self.append(part)
        if self.items is None:
            return
        if form_of(part) != "map":
            self.items = None
            return
        try:
            self.rows.append(apply_map(part, self.items, self._mine))
        except Exception:  # unpickling may raise anything, and so may keys that need an owner: said when asked for
            self.items = None
