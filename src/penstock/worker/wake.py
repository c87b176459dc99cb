"""An alarm clock for loops that wait for whatever comes first."""

from __future__ import annotations

import contextlib
import threading


class Wake:
    """An alarm clock: ``wait`` returns after the time or at the next ``set``, one that came before included.
    A bare lock, because a spout with nothing to emit waits here a thousand times a second."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        with contextlib.suppress(RuntimeError):  # set already
            self._lock.release()

    def wait(self, seconds: float) -> None:
        self._lock.acquire(timeout=seconds)
