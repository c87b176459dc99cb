"""Measures how long a sender had something to send but was not permitted to. The caller passes the time."""

from __future__ import annotations

_LONG_HOLD = 0.5
"""Seconds. A hold that lasts longer counts before it is known whether anything was waiting: a source is rarely
idle for longer exactly while its spout is held, and load samples of a few seconds must include a hold that has not
ended."""


class HoldTimer:
    """Sums up the holds of one task. The worker's loop updates it often. A hold lasts from the first update
    without permission to send to the next update with it. Whether anything was waiting is only known from what the
    task sends first after the hold. Until then the hold is not counted, unless it is longer than
    ``_LONG_HOLD``."""

    __slots__ = ("_since", "_unconfirmed", "seconds")

    def __init__(self) -> None:
        self.seconds = 0.0
        """Total seconds in which the task had something to send and was not permitted to."""
        self._unconfirmed = 0.0
        self._since: float | None = None

    def update(self, now: float, held: bool) -> None:
        if self._since is not None:
            self._unconfirmed += now - self._since
            if self._unconfirmed >= _LONG_HOLD:
                self.on_sent()
        self._since = now if held else None

    def on_sent(self) -> None:
        """Record that the task sent something, so something was waiting during the hold."""
        if self._unconfirmed:
            self.seconds += self._unconfirmed
            self._unconfirmed = 0.0

    def on_idle(self) -> None:
        """Record that the task was permitted to send and had nothing to send."""
        self._unconfirmed = 0.0
