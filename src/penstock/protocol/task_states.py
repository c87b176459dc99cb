"""The committed state of tasks, as manifests, commands and events carry it."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from penstock.plan.owners import Owners
from penstock.state.snapshots import SnapshotPart

Chains = dict[str, list[SnapshotPart]]
"""State name → the parts of its snapshots, oldest first."""


class SavedTask(Struct, frozen=True, tag=True, array_like=True):
    """A task's state after an epoch, in the same number of tasks as now."""

    parts: Chains
    tokens: list[Any]
    """What its sink prepared for the epoch; a value of the user's."""


class InheritedTask(Struct, frozen=True, tag=True, array_like=True):
    """A task of a component whose number of tasks has changed: it takes its share of what the tasks before had."""

    before: int
    """How many tasks there were."""
    now: int
    owners: Owners
    sources: dict[int, Chains]
    """By the index of the task before; only those that this task needs something of."""
    tokens: list[Any]


TaskStates = dict[str, SavedTask | InheritedTask]
"""By task key ("component/index")."""
