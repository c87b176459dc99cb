"""The queue of requests from other threads to the supervisor. Each request has an answer that its sender may wait
for."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from penstock.driver.lifecycle import Event
from penstock.errors import PenstockError


@dataclass(frozen=True)
class Posted:
    """A request: an event for the lifecycle, or a function to call on the supervisor's thread."""

    event: Event | None
    call: Callable[[], Any] | None = None
    answer: Future[Any] = field(default_factory=Future)


class RequestQueue:
    """Any thread calls ``post``; the supervisor's thread calls the other methods."""

    def __init__(self, changed: threading.Condition) -> None:
        """``changed`` is notified of each request, because the supervisor waits on it."""
        self._changed = changed
        self._posted: queue.SimpleQueue[Posted] = queue.SimpleQueue()
        self._refusal: PenstockError | None = None

    def post(self, posted: Posted) -> None:
        self._posted.put(posted)
        with self._changed:
            self._changed.notify_all()
        if self._refusal is not None:  # the supervisor has ended and takes no more requests
            self.refuse(self._refusal)

    def waiting(self) -> bool:
        return not self._posted.empty()

    def take(self) -> Posted:
        """Return the oldest request. Blocks while there is none, so ``waiting`` is asked first."""
        return self._posted.get()

    def refuse(self, error: PenstockError) -> None:
        """Answer all waiting requests, and all later ones, with this error."""
        self._refusal = error
        while True:
            try:
                posted = self._posted.get_nowait()
            except queue.Empty:
                return
            if not posted.answer.done():
                posted.answer.set_exception(error)
