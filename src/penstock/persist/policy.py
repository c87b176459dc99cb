"""Decides when the processor writes (*Lu 2020*, algorithm 3) and when it tries again. Pure functions of time."""

from __future__ import annotations

from dataclasses import dataclass

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 10.0  # seconds
_DOUBLINGS = 20  # more than any limit needs; after a thousand a float would overflow


@dataclass
class Flushing:
    """A write is due when the period has passed since the last write, or when enough rows are waiting. A row that
    arrives after a quiet time is written at once: the period limits how often writes occur, not when they
    begin."""

    period: float
    """Seconds between two writes."""
    rows: int
    """The number of rows at which a write is due in any case."""
    last: float = float("-inf")
    """The time at which the last write ended."""

    def due(self, now: float, rows: int) -> bool:
        return rows >= self.rows or (rows > 0 and now - self.last >= self.period)

    def on_written(self, now: float) -> None:
        self.last = now


@dataclass
class Patience:
    """Pauses between attempts; each is twice as long as the one before, up to a limit."""

    attempts: int = 0
    until: float = float("-inf")
    """The time before which no attempt is made."""
    first: float = _FIRST_PAUSE
    longest: float = _LONGEST_PAUSE

    def failed(self, now: float) -> None:
        self.until = now + min(self.first * 2.0 ** min(self.attempts, _DOUBLINGS), self.longest)
        self.attempts += 1

    def succeeded(self) -> None:
        self.attempts, self.until = 0, float("-inf")

    def wait(self, now: float) -> float:
        return max(0.0, self.until - now)
