"""A wake-up signal for loops that wait for the first of several causes."""

from __future__ import annotations

import contextlib
import threading


class Wake:
    """``wait`` returns after the given time, or when ``set`` is called, or at once if ``set`` was called since
    the last ``wait``. Any thread may call ``set``. The class uses a plain lock, because a loop whose spout has
    nothing to emit waits here a thousand times a second."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        with contextlib.suppress(RuntimeError):  # it is set already
            self._lock.release()

    def wait(self, seconds: float) -> None:
        self._lock.acquire(timeout=seconds)
