"""The load that workers report: CPU and memory of their processes, and the streams between their tasks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

from penstock.metrics.stats import TaskStats
from penstock.metrics.views import Pair, StreamCount, WorkerLoad
from penstock.plan.model import WorkerId


class WorkerState(Protocol):
    """The part of a worker's report that the metrics bus reads."""

    @property
    def tasks(self) -> dict[int, TaskStats]: ...
    @property
    def published(self) -> dict[int, list[list[Any]]]: ...
    @property
    def errors(self) -> list[str]: ...
    @property
    def segments(self) -> list[tuple[int, str, str, int, int]]: ...
    @property
    def cpu(self) -> float: ...
    @property
    def loop_cpu(self) -> float: ...
    @property
    def rss(self) -> int: ...
    @property
    def pending(self) -> int: ...
    @property
    def streams(self) -> list[tuple[int, int, int, int]] | None: ...
    @property
    def links(self) -> list[tuple[int, float]]: ...
    @property
    def machine(self) -> Mapping[str, Any]: ...


class LoadTable:
    """The newest load of each worker, and the totals of earlier query runs. Not thread-safe: the metrics bus holds
    its lock during every call."""

    def __init__(self) -> None:
        self.workers: dict[WorkerId, WorkerLoad] = {}
        self.links: dict[tuple[WorkerId, WorkerId], float] = {}
        """⟨Sending worker, receiving worker⟩ → the measured bytes per second of the link."""
        self._earlier: dict[Pair, StreamCount] = {}

    def record(self, now: float, worker: WorkerId, report: WorkerState) -> None:
        for source, speed in report.links:
            self.links[WorkerId(worker.stage - 1, source), worker] = speed
        before = self.workers.get(worker)
        if report.machine:
            streams = None
            if report.streams is not None:
                streams = {(source, target): StreamCount(*count) for source, target, *count in report.streams}
            self.workers[worker] = WorkerLoad(
                now, report.cpu, report.rss, now, streams, report.machine, report.loop_cpu
            )
        elif before is None:
            self.workers[worker] = WorkerLoad(now, report.cpu, report.rss, loop_cpu=report.loop_cpu)
        else:
            self.workers[worker] = replace(
                before, time=now, cpu=report.cpu, rss=report.rss, loop_cpu=report.loop_cpu
            )

    def forget(self, worker: WorkerId) -> None:
        """Drop the load of a worker's process."""
        self.workers.pop(worker, None)

    def start_run(self) -> None:
        """Add the streams of the last query run to the totals, because the counters of the next start at 0."""
        self._earlier = self.streams()
        self.workers, self.links = {}, {}

    def add_earlier(self, pair: Pair, count: StreamCount) -> None:
        """Add the totals of a pair of tasks of the previous plan."""
        self._earlier[pair] = self._earlier.get(pair, StreamCount()) + count

    def streams(self) -> dict[Pair, StreamCount]:
        """The tuples sent between tasks since the topology was first started, as far as reported."""
        total = dict(self._earlier)
        for load in self.workers.values():
            for pair, count in (load.streams or {}).items():
                total[pair] = total.get(pair, StreamCount()) + count
        return total
