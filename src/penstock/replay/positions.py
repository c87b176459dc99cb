"""Where the reader of a queue goes on after a restart: a part of the task's state, and so of each epoch.

A position that became durable on its own would pass tuples whose effect is in no committed state: after a crash
they would be lost (docs/decisions/0005). In the state it holds with the epoch, or not at all.
"""

from __future__ import annotations

from penstock.replay.queues import ReplayQueue
from penstock.state.values import ValueState


class KeptPosition:
    """The position of one queue in one value of the state. Made when the queue is opened, before it is read; calls
    come from the task's thread.

    Records are released one epoch late: a restart that cannot read the newest epoch takes the one before.
    """

    def __init__(self, queue: ReplayQueue, kept: ValueState) -> None:
        """``kept`` is None in a task that starts from nothing: then all that was not released is read."""
        if kept.value is not None:
            queue.seek(kept.value)
        self._queue, self._kept = queue, kept
        self._noted: int | None = None
        self._committed: int | None = None

    def note(self) -> None:
        """Bring the state up to date: before a snapshot, and before the queue is closed."""
        self._kept.value = self._noted = self._queue.position

    def on_committed(self) -> None:
        """The snapshot that the last ``note`` was for is committed. If it raises, the records stay until the next
        commit."""
        before, self._committed = self._committed, self._noted
        if before is not None:
            self._queue.release(before)
