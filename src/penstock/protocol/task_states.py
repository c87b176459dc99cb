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


class OvertakenTuples(Struct, frozen=True, array_like=True):
    """Tuples that wait for one task and that the marker of an epoch has overtaken (``worker.overtaking``)."""

    parts: list[SnapshotPart]
    """Where they are stored, in the order in which the task has to process them."""
    streams: list[int]
    """The numbers of their streams in the plan of the query run that stored them."""


class WaitingTuples(Struct, frozen=True, array_like=True):
    """The overtaken tuples with which the tasks of a worker begin, and what the numbers in their frames mean: they
    are those of the query run that stored them."""

    parts: list[tuple[str, SnapshotPart]]
    """⟨Key of the task for which they waited, where they are⟩, in the order in which they have to be processed."""
    before: dict[str, int]
    """The previous number of tasks of each component in ``parts``."""
    streams: list[int]
    """The number of each previous stream now; -1 if there is no such stream."""
    tasks: dict[int, str]
    """The key of each previous task, by its number."""


TaskStates = dict[str, SavedTask | InheritedTask]
"""By task key ("component/index")."""
