"""What a worker's tasks begin with, and what they leave at the end of an epoch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.state.shares import Share
from penstock.state.values import TaskSnapshot


@dataclass(frozen=True)
class Restored:
    """What a task begins with: the parts of its state, and what it had prepared in other systems. Where the number
    of its component's tasks has changed, its ``share`` of what the tasks before had."""

    parts: Mapping[str, Sequence[bytes]] = field(default_factory=dict)
    tokens: Sequence[Any] = ()
    sources: Mapping[int, Mapping[str, Sequence[bytes]]] = field(default_factory=dict)
    """The parts of the tasks before, by their index; instead of ``parts``."""
    share: Share | None = None


@dataclass(frozen=True)
class WorkerSnapshot:
    """The state of a worker's tasks at the end of an epoch, by task key."""

    epoch: int
    snapshots: Mapping[str, TaskSnapshot]
    tokens: Mapping[str, list[Any]]
