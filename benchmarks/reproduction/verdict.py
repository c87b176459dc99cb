"""Compares our values with those of a paper. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.reproduction.model import EQUAL_WITHIN, Value

BETTER, EQUAL, WORSE = "better", "equal", "worse"
NOT_RUN, NOT_APPLICABLE, NO_FIGURE = "not run", "not applicable", "no value in the paper"
VERDICTS = (BETTER, EQUAL, WORSE, NOT_APPLICABLE, NO_FIGURE, NOT_RUN)


@dataclass(frozen=True)
class Compared:
    """One value beside the paper's."""

    value: Value
    ours: float | None
    """The median of the repeats."""
    low: float | None
    high: float | None
    repeats: int
    ratio: float | None
    """Ours divided by the paper's; None where a ratio says nothing: other sign, 0, or a range."""
    verdict: str
    met: bool | None
    """Whether the bar of the project is met; None: there is no bar, or nothing was measured."""


def compare(value: Value, measured: Sequence[float]) -> Compared:
    """Judge the repeats of one value."""
    if not measured:
        return Compared(value, None, None, None, 0, None, NOT_RUN, None)
    ours = float(statistics.median(measured))
    return Compared(
        value,
        ours,
        min(measured),
        max(measured),
        len(measured),
        _ratio(value, ours),
        _verdict(value, ours),
        _met(value, ours),
    )


def _verdict(value: Value, ours: float) -> str:
    if value.paper is None:
        return NO_FIGURE
    if value.differs:
        return NOT_APPLICABLE
    low, high = value.paper if isinstance(value.paper, tuple) else (value.paper, value.paper)
    slack = max(value.slack, 1e-9)
    if low - max(slack, value.equal * abs(low)) <= ours <= high + max(slack, value.equal * abs(high)):
        return EQUAL
    if value.better == "same":
        return WORSE
    above = ours > high
    return BETTER if above == (value.better == "higher") else WORSE


def tolerance(value: Value) -> str:
    """How far from the paper's value a value counts as equal: ``± 10 %``, ``± 2 s``; "" if it is the usual share,
    or a share of 0."""
    if value.paper is None:
        return ""
    most = max(map(abs, value.paper)) if isinstance(value.paper, tuple) else abs(value.paper)
    if value.slack > value.equal * most:
        unit = value.unit if value.unit != "%" else "point" if value.slack == 1 else "points"
        return f"± {value.slack:g} {unit}".rstrip()
    return "" if value.equal == EQUAL_WITHIN or not most else f"± {100 * value.equal:g} %"


def _ratio(value: Value, ours: float) -> float | None:
    if value.paper is None or isinstance(value.paper, tuple) or value.paper * ours <= 0:
        return None
    return ours / value.paper


def _met(value: Value, ours: float) -> bool | None:
    if value.bar is None:
        return None
    return ours <= value.bar if value.better == "lower" else ours >= value.bar


def summary(compared: Sequence[Compared]) -> str:
    """The verdicts of an exhibit in few words: ``2 better, 1 worse``; ``not run``."""
    counts = {verdict: sum(each.verdict == verdict for each in compared) for verdict in VERDICTS}
    measured = sum(each.verdict != NOT_RUN for each in compared)
    if not measured:
        return NOT_RUN
    return ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
