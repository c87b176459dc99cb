"""The position at which the reader of a queue resumes after a restart: a part of the task's state and of each
epoch.

A position that became durable separately would pass tuples whose effects are in no committed state; a crash would
lose them (docs/decisions/0005). As part of the state it is valid with its epoch, or not at all.
"""

from __future__ import annotations

from penstock.replay.queues import ReplayQueue
from penstock.state.values import ValueState


class KeptPosition:
    """The position of one queue, stored in one value of the state. Created when the queue is opened, before it is
    read; called by the task's thread.

    Records are released one epoch late, because a restart that cannot read the newest epoch uses the one before.
    """

    def __init__(self, queue: ReplayQueue, kept: ValueState) -> None:
        """``kept.value`` is None in a task without state: then everything that was not released is read."""
        if kept.value is not None:
            queue.seek(kept.value)
        self._queue, self._kept = queue, kept
        self._saved: int | None = None
        self._committed: int | None = None

    def save(self) -> None:
        """Write the position to the state. Called before a snapshot and before the queue is closed."""
        self._kept.value = self._saved = self._queue.position

    def on_committed(self) -> None:
        """The snapshot after the last ``save`` is committed. If this raises, the records stay until the next
        commit."""
        before, self._committed = self._committed, self._saved
        if before is not None:
            self._queue.release(before)
