"""Decides when the sinks of a worker publish their prepared transactions: after each commit, and again after a
pause if a sink failed."""

from __future__ import annotations

import math

from penstock.clock import Clock
from penstock.errors import PenstockError, SinkRefused
from penstock.worker.background import PublishEpoch, PublishResult
from penstock.worker.tasks import Tasks

_RETRY = 1.0
"""Seconds until the next attempt to publish an epoch that a sink did not publish: as long as the longest pause of
a sink that is unavailable."""


class Publisher:
    """Starts the publishing jobs of a worker, one at a time. Used by the worker's loop only."""

    def __init__(self, clock: Clock, tasks: Tasks) -> None:
        self._now, self._tasks = clock.monotonic, tasks
        self._committed = self._published = 0
        self._under_way = self._refused = False
        self._retry_at = -math.inf

    def on_committed(self, epoch: int) -> None:
        """Called when this epoch and all earlier ones are committed: notifies the executors, and makes the next
        publishing job due."""
        for executor in self._tasks.all:
            executor.on_committed(epoch)
        self._committed = max(self._committed, epoch)

    def next_job(self) -> PublishEpoch | None:
        """The job that the host has to run now; None if there is none."""
        if self._refused or self._under_way or self._published >= self._committed:
            return None
        if self._now() < self._retry_at:
            return None
        self._under_way = True
        return PublishEpoch(self._committed, [sink.to_publish(self._committed) for sink in self._tasks.sinks])

    def finish(self, result: PublishResult) -> bool:
        """Handle the result of a job. Returns True if all sinks have published the epoch. Raises ``SinkRefused``
        if a retry will not help but a restart may."""
        self._under_way = False
        failed: PenstockError | None = None
        for sink in self._tasks.sinks:
            task = sink.context.task
            error = sink.on_published(result.epoch, result.committed[task], result.errors.get(task))
            failed = failed or error
        refused = [error for error in result.errors.values() if isinstance(error, SinkRefused)]
        if refused:
            self._refused = True  # nothing more is published: the query is restarted
            raise refused[0]
        if failed is not None:
            self._retry_at = self._now() + _RETRY
            return False
        self._published = result.epoch
        return True

    def wait(self) -> float:
        """Seconds until the next job is due; infinity if none is."""
        waits = not self._refused and not self._under_way and self._published < self._committed
        return max(0.0, self._retry_at - self._now()) if waits else math.inf
