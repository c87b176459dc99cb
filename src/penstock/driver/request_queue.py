"""Requests of other threads to the supervisor, each with an answer that somebody may wait for."""

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
    """What another thread wants: an event for the lifecycle, or a call on the supervisor's thread."""

    event: Event | None
    call: Callable[[], Any] | None = None
    answer: Future[Any] = field(default_factory=Future)


class RequestQueue:
    """``post`` is called by any thread, ``take`` by the supervisor's."""

    def __init__(self, changed: threading.Condition) -> None:
        """``changed`` is notified of each request: the supervisor waits on it for everything."""
        self._changed = changed
        self._posted: queue.SimpleQueue[Posted] = queue.SimpleQueue()
        self._refusal: PenstockError | None = None

    def post(self, posted: Posted) -> None:
        self._posted.put(posted)
        with self._changed:
            self._changed.notify_all()
        if self._refusal is not None:  # nobody may look here any more
            self.refuse(self._refusal)

    def waiting(self) -> bool:
        return not self._posted.empty()

    def take(self) -> Posted:
        """Of use when one is waiting."""
        return self._posted.get()

    def refuse(self, error: PenstockError) -> None:
        """Refuse all that are waiting, and all that will come."""
        self._refusal = error
        while True:
            try:
                posted = self._posted.get_nowait()
            except queue.Empty:
                return
            if not posted.answer.done():
                posted.answer.set_exception(error)
