"""Systems take turns within each repeat, so that a disturbance of the machine affects all of them. Ratios are
computed within a repeat; their median is reported."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import psutil

from benchmarks.harness import median, say

T = TypeVar("T")
_LOOK = 0.5  # seconds for which the machine is observed before a system is measured
_BUSY = 15.0  # percent of all cores


def take_turns(
    what: str, systems: Sequence[str], repeats: int, measure: Callable[[str, int], T], describe: Callable[[T], str]
) -> dict[str, list[T]]:
    """Measure each system once per repeat. ``measure`` gets the system and the number of the repeat. Says if the
    machine is not idle before, because figures are then worth little."""
    found: dict[str, list[T]] = {system: [] for system in systems}
    for number in range(repeats):
        for system in systems:
            busy = psutil.cpu_percent(_LOOK)
            if busy > _BUSY:
                say(f"  the machine is not idle: others use {busy:.0f} % of all cores")
            found[system].append(measure(system, number))
            say(f"  {what}, repeat {number + 1}: {system} {describe(found[system][-1])}")
    return found


def median_ratio(ours: Sequence[T], theirs: Sequence[T], value: Callable[[T], float] = float) -> float:  # type: ignore[assignment]
    """The median of the ratios of ours to theirs within each repeat."""
    return median([value(our) / value(their) for our, their in zip(ours, theirs, strict=True)])


def spread(values: Sequence[float], form: Callable[[float], Any] = "{:.3g}".format) -> str:
    """All repeats, for a column of a table."""
    return " ".join(str(form(value)) for value in values)
