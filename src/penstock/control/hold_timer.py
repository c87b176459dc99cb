"""How long a sender might not send though it had something to send. The caller brings the time."""

from __future__ import annotations

_LONG = 0.5
"""Seconds after which a hold counts before it is known what waited: a source is rarely silent for longer just when
its spout may not emit, and whoever looks at the load every few seconds must see a hold that has not ended."""


class HoldTimer:
    """Adds up the holds of one task. It is looked at often, may it send or not; a hold lasts from an update at
    which it may not to the next at which it may. Only what it sends first after a hold tells whether anything
    waited: until then the hold counts for nothing, unless it is a long one."""

    __slots__ = ("_since", "_unconfirmed", "seconds")

    def __init__(self) -> None:
        self.seconds = 0.0
        """In which it had something to send and might not."""
        self._unconfirmed = 0.0
        self._since: float | None = None

    def update(self, now: float, held: bool) -> None:
        if self._since is not None:
            self._unconfirmed += now - self._since
            if self._unconfirmed >= _LONG:
                self.on_sent()
        self._since = now if held else None

    def on_sent(self) -> None:
        """It has sent something, so something had waited."""
        if self._unconfirmed:
            self.seconds += self._unconfirmed
            self._unconfirmed = 0.0

    def on_idle(self) -> None:
        """It might have sent something, and had nothing."""
        self._unconfirmed = 0.0
