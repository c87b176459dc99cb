"""Sliding windows over a time field: the pane of a tuple, and when a window is complete.

Time is divided into panes of one slide each; pane 0 begins at time 0. A window is a sequence of adjacent panes and
is numbered by the pane after its last one. A tuple is in one pane, and a pane is in several windows. Partials are
kept by pane, so each value is aggregated once, however many windows contain it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.columns import to_values
from penstock.errors import ComponentError, TopologyError


@dataclass(frozen=True)
class Window:
    """The definition of a sliding window. All times have the unit of the time field."""

    time: str
    """The field that contains the time of the event."""
    length: float
    slide: float
    """Time from the start of one window to the start of the next; ``length`` is a multiple of it."""
    lateness: float
    """How far a tuple may be behind the newest one and still be counted."""

    def __post_init__(self) -> None:
        where = f"window of field '{self.time}'"
        for name, value, zero in (
            ("length", self.length, False),
            ("slide", self.slide, False),
            ("lateness", self.lateness, True),
        ):
            if not isinstance(value, int | float) or not (0 < value < math.inf or (zero and value == 0)):
                raise TopologyError(
                    where,
                    f"{name} must be a number {'of at least' if zero else 'greater than'} 0, not {value!r}",
                    "Use the field's unit.",
                )
        if not math.isclose(self.panes * self.slide, self.length):
            raise TopologyError(
                where,
                f"its length, {self.length}, is not a multiple of its slide, {self.slide}",
                f"A length of {max(self.panes, 1) * self.slide} fits that slide.",
            )

    @property
    def panes(self) -> int:
        """The number of panes of a window."""
        return round(self.length / self.slide)

    def complete(self, newest: float) -> int:
        """The last window that is complete when ``newest`` is the newest time seen: all its missing tuples would
        be more than ``lateness`` behind. Computed with exact fractions, as panes are."""
        return (Fraction(newest) - Fraction(self.lateness)) // Fraction(self.slide)

    def panes_in(self, window: int) -> range:
        return range(window - self.panes, window)

    def windows_of(self, pane: int) -> range:
        return range(pane + 1, pane + self.panes + 1)

    def end(self, window: int) -> float:
        """The end of a window, exclusive."""
        return window * self.slide

    def panes_of(self, times: pa.Array) -> tuple[pa.Array, npt.NDArray[Any]]:
        """The pane of each time, and the times as numbers. Raises ``ComponentError`` if one is not a finite
        number."""
        numbers = times
        if times.null_count or not (pa.types.is_integer(times.type) or pa.types.is_floating(times.type)):
            try:
                numbers = pa.array(to_values(times), pa.float64())
            except (pa.ArrowException, TypeError) as error:
                raise self._no_time(str(error)) from None
        numbers = numbers.to_numpy(zero_copy_only=False)
        if not np.isfinite(numbers).all():
            raise self._no_time(repr(to_values(times)[int(np.argmin(np.isfinite(numbers)))]))
        return pa.array(np.floor_divide(numbers, self.slide).astype(np.int64)), numbers

    def _no_time(self, got: str) -> ComponentError:
        return ComponentError(
            f"field '{self.time}'",
            f"the time of a window is not a number: {got}",
            "Emit seconds, or any unit that length and slide are in too.",
        )
