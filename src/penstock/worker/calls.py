"""Which call of user code has not returned yet: one cell, written by the loop, read by the heartbeat thread."""

from __future__ import annotations


class CurrentCall:
    """``running`` is replaced whole, so a reader never sees half of a change."""

    __slots__ = ("running",)

    def __init__(self) -> None:
        self.running: tuple[int, float] | None = None
        """The task, and when its code was called, on the monotonic clock; None: no call is under way. Set once for
        a chunk of calls."""
