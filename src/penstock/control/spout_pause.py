"""How long a spout that had nothing to emit rests before it is asked again. Pure."""

from __future__ import annotations

_PATIENCE = 50
"""Pauses of the first length. A source that rests for a moment is asked as often as before, so a stream of a few
hundred tuples per second is not delayed."""
_LONGEST = 10.0
"""The longest pause, in pauses of the first length: 10 ms by default. A tuple that follows a long silence waits at
most that long, and an idle spout costs a tenth."""
_GROWTH = 1.1
"""Factor from one pause to the next. The longest is reached after about a tenth of a second."""


class SpoutPause:
    """The pauses of the spouts of one worker. ``first``: seconds of the first pauses."""

    def __init__(self, first: float) -> None:
        self._first, self._empty = first, 0
        self.seconds = first
        """The pause after a turn in which nothing was emitted."""

    def note(self, emitted: bool) -> None:
        """Record whether a spout emitted anything in a turn in which it was called."""
        if emitted:
            self._empty, self.seconds = 0, self._first
            return
        self._empty += 1
        if self._empty > _PATIENCE:
            self.seconds = min(self.seconds * _GROWTH, self._first * _LONGEST)
