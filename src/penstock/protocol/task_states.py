"""The committed state of tasks, as it is stored in manifests and sent in commands and events."""

from __future__ import annotations

from msgspec import Struct

from penstock.plan.owners import OwnerRule
from penstock.state.snapshots import SnapshotPart

Chains = dict[str, list[SnapshotPart]]
"""State name → the parts of its snapshots, oldest first."""


class SavedTask(Struct, frozen=True, tag=True, array_like=True):
    """The state of a task after an epoch, for a component whose number of tasks has not changed."""

    parts: Chains
    tokens: str = "[]"
    """The tokens that its sink prepared for the epoch, as a JSON list: they are users' values and must arrive
    unchanged."""


class InheritedTask(Struct, frozen=True, tag=True, array_like=True):
    """The state of a task of a component whose number of tasks has changed: its share of the states of the
    previous tasks."""

    before: int
    """The previous number of tasks."""
    now: int
    """The number of tasks now."""
    owners: OwnerRule
    sources: dict[int, Chains]
    """By the index of the previous task; only tasks from which this task gets a share."""
    tokens: str = "[]"


TaskStates = dict[str, SavedTask | InheritedTask]
"""By task key ("component/index")."""
