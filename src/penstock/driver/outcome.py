"""Summarizes how a topology ended, as an exit code and sentences. Does no IO."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from penstock.metrics.stats import TaskStats

INCOMPLETE = 5
"""Exit code of a topology that ended with tuples in flight or without committing its last epoch."""
FRUITLESS = 6
"""Exit code of a topology that ended, but has a component that only failed."""


@dataclass(frozen=True)
class Outcome:
    """``code`` is the exit code: 0 if the topology ended without problems. There are no sentences then."""

    code: int
    sentences: tuple[str, ...]


def judge(spouts: Collection[str], totals: Mapping[str, TaskStats], left_behind: str) -> Outcome:
    """Return the outcome of a topology. ``totals``: counters of each component since the topology was submitted.
    ``left_behind``: what was not finished at the end, or an empty text."""
    fruitless = [
        sentence
        for component, total in totals.items()
        if (sentence := _spout(component, total) if component in spouts else _bolt(component, total))
    ]
    sentences = (*fruitless, *([f"Not everything was finished: {left_behind}."] if left_behind else []))
    return Outcome(FRUITLESS if fruitless else INCOMPLETE if left_behind else 0, sentences)


def _spout(component: str, total: TaskStats) -> str:
    if total.errors and not total.emitted:
        return f"Spout '{component}' emitted nothing and raised {total.errors:,} errors{_last(total)}."
    if total.failed and not total.acked:
        return (
            f"Every tuple of spout '{component}' failed: {total.failed:,} failures, none succeeded{_last(total)}."
        )
    return ""


def _bolt(component: str, total: TaskStats) -> str:
    if total.executed and total.errors >= total.executed and not total.written:
        return f"Bolt '{component}' failed on every one of {total.executed:,} tuples{_last(total)}."
    return ""


def _last(total: TaskStats) -> str:
    return f"; the last error: {total.last_error.rstrip('.')}" if total.last_error else ""
