"""Jobs of a worker that may block on storage or on another system. The host runs them one after the other, in the
order in which turns gave them: on Spark in a thread of its own, in the local runner at once. The result goes back
to the worker (``Worker.finish``). A job reads nothing of the worker but what it carries."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.errors import PenstockError, StateError
from penstock.protocol.task_states import SavedTask
from penstock.worker.snapshots import WorkerSnapshot


@dataclass(frozen=True)
class SnapshotResult:
    """Of ``WriteSnapshot``."""

    snapshot: WorkerSnapshot
    tasks: dict[str, SavedTask]
    error: str = ""
    """Why it could not be written; then ``tasks`` is empty."""


@dataclass(frozen=True)
class PublishResult:
    """Of ``PublishEpoch``."""

    epoch: int
    committed: Mapping[int, int]
    """By the sink's task: how many of its tokens are committed."""
    errors: Mapping[int, PenstockError]
    """By the sink's task: why the next one is not."""


JobResult = SnapshotResult | PublishResult


class BackgroundJob(Protocol):
    """``run`` may block and is called once. Only what it does not expect is raised: then the worker fails."""

    def run(self) -> JobResult: ...


@dataclass(frozen=True)
class WriteSnapshot:
    """Step 3 of a commit."""

    write: Callable[[WorkerSnapshot], dict[str, SavedTask]]
    """Of the worker's archive."""
    snapshot: WorkerSnapshot

    def run(self) -> SnapshotResult:
        try:
            return SnapshotResult(self.snapshot, self.write(self.snapshot))
        except StateError as error:
            return SnapshotResult(self.snapshot, {}, str(error))


@dataclass(frozen=True)
class TokensToCommit:
    """What one sink has prepared."""

    task: int
    commit: Callable[[Any], None]
    """The sink's own, made safe: raises nothing but ``PenstockError``."""
    tokens: Sequence[Any]


@dataclass(frozen=True)
class PublishEpoch:
    """Step 5 of a commit: make visible what the sinks prepared up to the epoch. A sink that fails does not hold up
    the others."""

    epoch: int
    sinks: Sequence[TokensToCommit]

    def run(self) -> PublishResult:
        committed: dict[int, int] = {}
        errors: dict[int, PenstockError] = {}
        for sink in self.sinks:
            committed[sink.task] = 0
            try:
                for token in sink.tokens:
                    sink.commit(token)
                    committed[sink.task] += 1
            except PenstockError as error:
                errors[sink.task] = error
        return PublishResult(self.epoch, committed, errors)
