"""The state of a worker's tasks: as it is restored when they open, and as it is snapshotted at the end of an
epoch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.state.shares import Share
from penstock.state.values import TaskSnapshot
from penstock.worker.overtaking import Recording


@dataclass(frozen=True)
class Restored:
    """The state with which a task begins: the parts of its state and the tokens of prepared transactions. If the
    number of tasks of its component has changed, the task takes its ``share`` of the states in ``sources``."""

    parts: Mapping[str, Sequence[bytes]] = field(default_factory=dict)
    tokens: Sequence[Any] = ()
    sources: Mapping[int, Mapping[str, Sequence[bytes]]] = field(default_factory=dict)
    """The parts of the previous tasks by task index; used instead of ``parts``."""
    share: Share | None = None


@dataclass(frozen=True)
class WorkerSnapshot:
    """The state of a worker's tasks at the end of an epoch, by task key."""

    epoch: int
    snapshots: Mapping[str, TaskSnapshot]
    tokens: Mapping[str, list[Any]]
    overtaken: Recording | None = None
    """What the marker of the epoch overtook; None if the worker had processed all tuples of the epoch."""
