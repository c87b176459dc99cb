"""Hands the unfinished messages of a worker's spouts to the query run that takes over (at-least-once delivery)."""

from __future__ import annotations

from penstock.protocol.events import Event, UnfinishedHandedOn
from penstock.worker.tasks import Tasks


class UnfinishedMessages:
    """Carries out ``HandOnUnfinished``. Used by the worker's loop only."""

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self._left: int | None = None

    def hand_on(self) -> None:
        """Fail what the spouts have not finished (see ``SpoutExecutor.hand_on``)."""
        self._tasks.flush()  # what spouts have emitted and not sent is not in their pending tables yet
        self._left = sum(spout.hand_on() for spout in self._tasks.spouts)

    def take_answer(self) -> list[Event]:
        """Return the answer to the driver, as soon as the next process of each spout task would find all messages
        that were failed. Empty before that, and after the answer."""
        if self._left is None or not all(spout.settled for spout in self._tasks.spouts):
            return []
        left, self._left = self._left, None
        return [UnfinishedHandedOn(left)]
