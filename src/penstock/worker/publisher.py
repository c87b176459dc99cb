"""When a worker's sinks publish what they prepared: after each commit, again and again while a sink is away."""

from __future__ import annotations

import math

from penstock.clock import Clock
from penstock.errors import PenstockError, SinkRefused
from penstock.worker.background import PublishEpoch, PublishResult
from penstock.worker.tasks import Tasks

_RETRY = 1.0  # seconds until a system that did not take an epoch is asked again


class Publisher:
    """Used by the worker's loop only. At most one job of it is under way."""

    def __init__(self, clock: Clock, tasks: Tasks) -> None:
        self._now, self._tasks = clock.monotonic, tasks
        self._committed = self._published = 0
        self._under_way = self._refused = False
        self._retry_at = -math.inf

    def on_committed(self, epoch: int) -> None:
        """This epoch and all before it are committed: tell the components, and have the sinks publish."""
        for executor in self._tasks.all:
            executor.on_committed(epoch)
        self._committed = max(self._committed, epoch)

    def next_job(self) -> PublishEpoch | None:
        """What the host is to publish now, if anything."""
        if self._refused or self._under_way or self._published >= self._committed:
            return None
        if self._now() < self._retry_at:
            return None
        self._under_way = True
        return PublishEpoch(self._committed, [sink.to_publish(self._committed) for sink in self._tasks.sinks])

    def finish(self, result: PublishResult) -> bool:
        """True: all sinks have published the epoch. Raises ``SinkRefused`` where trying again will not help, but
        starting again may."""
        self._under_way = False
        failed: PenstockError | None = None
        for sink in self._tasks.sinks:
            task = sink.context.task
            error = sink.on_published(result.epoch, result.committed[task], result.errors.get(task))
            failed = failed or error
        refused = [error for error in result.errors.values() if isinstance(error, SinkRefused)]
        if refused:
            self._refused = True  # publishes nothing more: the query is started again
            raise refused[0]
        if failed is not None:
            self._retry_at = self._now() + _RETRY
            return False
        self._published = result.epoch
        return True

    def wait(self) -> float:
        """Seconds until the next try is due; inf: none is."""
        waits = not self._refused and not self._under_way and self._published < self._committed
        return max(0.0, self._retry_at - self._now()) if waits else math.inf
