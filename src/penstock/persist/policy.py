"""When the processor writes: algorithm 3, and how it tries again. Pure."""

from __future__ import annotations

from dataclasses import dataclass

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 10.0  # s


@dataclass
class Flushing:
    """Write when the period has passed since the last write, or when enough rows wait. A row that comes after a
    quiet time is written at once: the period spaces writes, it does not hold back the first."""

    period: float
    """Seconds between two writes."""
    rows: int
    """Enough, whatever the time."""
    last: float = float("-inf")
    """When the last write ended."""

    def due(self, now: float, rows: int) -> bool:
        return rows >= self.rows or (rows > 0 and now - self.last >= self.period)

    def wrote(self, now: float) -> None:
        self.last = now


@dataclass
class Patience:
    """Pauses between attempts, each twice as long as the one before, up to a limit."""

    attempts: int = 0
    until: float = float("-inf")
    """No attempt before that."""

    def failed(self, now: float) -> None:
        self.until = now + min(_FIRST_PAUSE * 2.0**self.attempts, _LONGEST_PAUSE)
        self.attempts += 1

    def succeeded(self) -> None:
        self.attempts, self.until = 0, float("-inf")

    def wait(self, now: float) -> float:
        return max(0.0, self.until - now)
