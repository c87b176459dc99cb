"""Records which call of user code is running: one cell, which the worker's loop writes and the heartbeat thread
reads."""

from __future__ import annotations


class CurrentCall:
    """The running call. ``running`` is replaced as a whole, so the other thread never reads a partial change."""

    __slots__ = ("running",)

    def __init__(self) -> None:
        self.running: tuple[int, float] | None = None
        """⟨Task, monotonic time at which its code was called⟩; None if no call is running. Set once for a chunk of
        calls."""
