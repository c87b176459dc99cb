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
from penstock.driver.registry import WorkerRegistry
from penstock.driver.steps import CHECK_INTERVAL, Waiter
from penstock.errors import PenstockError

_LOSS_CHECK_INTERVAL = 0.02
"""Seconds between two looks at a query that has lost a worker. Spark ends it after 0.04 to 0.17 s."""


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

    def arrive(self, waiter: Waiter, registry: WorkerRegistry) -> bool:
        """Wait up to ``CHECK_INTERVAL`` for a request, and return whether there is one. The end of a worker's
        connection ends the wait, too: the engine usually ends the query a moment later, so the caller should look
        at it often."""
        if registry.broken:
            return waiter.wait_for(self.waiting, _LOSS_CHECK_INTERVAL)
        waiter.wait_for(lambda: self.waiting() or registry.broken, CHECK_INTERVAL)
        return self.waiting()

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
