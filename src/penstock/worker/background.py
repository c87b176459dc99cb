"""Background jobs of a worker: work that may block on storage or on another system.

A worker's turns return jobs, and the host runs them one after the other in that order: on Spark in a separate
thread, in the local runner at once. The host passes the result to ``Worker.finish``. A job uses only the objects
in its fields, no other part of the worker.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from penstock.errors import PenstockError, StateError
from penstock.protocol.task_states import OvertakenTuples, SavedTask
from penstock.worker.snapshots import WorkerSnapshot


@dataclass(frozen=True)
class SnapshotResult:
    """The result of ``WriteSnapshot``."""

    snapshot: WorkerSnapshot
    tasks: dict[str, SavedTask]
    overtaken: dict[str, OvertakenTuples] = field(default_factory=dict)
    """By key of the task for which the tuples wait."""
    error: str = ""
    """Why the snapshot could not be written; ``tasks`` is then empty. Empty if it was written."""


@dataclass(frozen=True)
class PublishResult:
    """The result of ``PublishEpoch``."""

    epoch: int
    committed: Mapping[int, int]
    """Task of the sink → number of its tokens that were committed."""
    errors: Mapping[int, PenstockError]
    """Task of the sink → the error of its next token; only sinks with an error."""


JobResult = SnapshotResult | PublishResult


class BackgroundJob(Protocol):
    """A job. ``run`` may block and is called once. It returns expected errors in its result; if it raises, the
    worker fails."""

    def run(self) -> JobResult: ...


@dataclass(frozen=True)
class WriteSnapshot:
    """Step 3 of a commit (``driver.commits``): write the worker's snapshot to the state directory."""

    write: Callable[[WorkerSnapshot], tuple[dict[str, SavedTask], dict[str, OvertakenTuples]]]
    """``WorkerArchive.write``."""
    snapshot: WorkerSnapshot

    def run(self) -> SnapshotResult:
        try:
            return SnapshotResult(self.snapshot, *self.write(self.snapshot))
        except StateError as error:
            return SnapshotResult(self.snapshot, {}, error=str(error))
        finally:
            if self.snapshot.overtaken is not None:
                self.snapshot.overtaken.close()


@dataclass(frozen=True)
class TokensToCommit:
    """The tokens that one sink has prepared and that are to be committed."""

    task: int
    commit: Callable[[Any], None]
    """Calls the sink's ``commit``. Errors of user code are raised as ``PenstockError``."""
    tokens: Sequence[Any]


@dataclass(frozen=True)
class PublishEpoch:
    """Step 5 of a commit (``driver.commits``): the sinks publish the output that they prepared up to the epoch. If
    one sink fails, the others still publish."""

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
