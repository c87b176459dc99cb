"""Commands: what the driver says to a worker. ``Command`` is the union of all of them."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from penstock.control.signals import TaskFlowState, TaskMessage
from penstock.protocol.handover import HandoverState
from penstock.protocol.task_states import TaskStates


class _Command(Struct, frozen=True, tag=True, array_like=True):
    """Written as an array that begins with the name of its class."""


class DriverTime(_Command, frozen=True):
    """The driver's time, in answer to ``AskDriverTime``."""

    sent: float
    """From the question."""
    time: float


class AssignWorker(_Command, frozen=True):
    """To an empty slot: run this worker of the slot's stage."""

    worker: int
    """Its index in the stage."""
    next: list[list[int]] = []
    """The slots of the next stage that rows for each of its workers go to; empty: each worker has the slot with
    its own index."""
    takes_over: bool = False
    """The worker still runs in another slot. Until this one opens its tasks it receives copies of that one's
    input."""


class RouteWorker(_Command, frozen=True):
    """Send rows for that worker of the next stage to each of these slots from now on. Answered by
    ``WorkerRouted``."""

    worker: int
    slots: list[int]


class PrepareToLeave(_Command, frozen=True):
    """When this epoch of frames ends, take the snapshot of this commit and stop: another slot gets the worker.
    Answered by ``LeavePrepared``, and by ``WorkerLeft`` when it has left."""

    commit: int
    epoch: int


class CancelLeave(_Command, frozen=True):
    """The worker stays: go on, whether it has left already or not."""


class PrefetchState(_Command, frozen=True):
    """To a query run that is to take over from another: the state that the worker's tasks will probably begin
    with. The worker reads it now, so that little is left to read when it opens. Answered by
    ``StatePrefetched``."""

    epoch: int
    tasks: TaskStates = {}


class OpenTasks(_Command, frozen=True):
    """Every worker is connected: open the tasks. Answered by ``TasksOpened``."""

    nodes: dict[str, str]
    """The node of each worker ("stage.index")."""
    generation: int = 0
    """Of the state directory: marks the files that this query run writes."""
    epoch: int = 0
    """The tasks begin after this epoch."""
    tasks: TaskStates = {}
    """What the worker's tasks begin with."""
    handover: HandoverState | None = None
    """Of the worker in the other slot, where this one takes over from it."""


class RootsSettled(_Command, frozen=True):
    """Roots of a spout task are complete, or have failed where ``error`` is not empty."""

    task: int
    component: str
    """Which component failed them."""
    error: str
    data: bytes
    """Ranges of their numbers, 64-bit integers: all firsts, then all lengths."""


class EndEpoch(_Command, frozen=True):
    """To the first stage: end the epoch of frames. Exactly once with each commit, otherwise when a worker
    moves."""

    epoch: int
    last: bool = False
    """Of this query run: another one waits to take over."""


class TakeSnapshot(_Command, frozen=True):
    """At least once: take the snapshots of the spouts (answered by ``SpoutsSnapshotted``) or of the bolts."""

    epoch: int
    what: Literal["spouts", "bolts"]
    last: bool = False
    """As in ``EndEpoch``."""


class EpochCommitted(_Command, frozen=True):
    """The epoch and all before it are committed: sinks publish what they prepared. Answered by
    ``EpochPublished``."""

    epoch: int


class SetMigrationRoutes(_Command, frozen=True):
    """Tuples for a task on the left go to the task on the right. Replaces the routes of this component so far."""

    component: str
    routes: dict[int, int]
    version: int
    """A command with an older version than the newest one is ignored."""


class SetSpoutRate(_Command, frozen=True):
    """The tasks of a spout may emit so many tuples a second, all together."""

    component: str
    rate: float


class HoldTimeouts(_Command, frozen=True):
    """``held``: a sink's system is away, so no tuple times out until further notice."""

    held: bool


class ActivateSpouts(_Command, frozen=True):
    """Let the spouts emit, and bolts have their ticks."""


class DeactivateSpouts(_Command, frozen=True):
    """Let the spouts pause."""


class StopTicks(_Command, frozen=True):
    """Another query run is about to take over and everything is drained: no ticks until ``ActivateSpouts``."""


class RequestReport(_Command, frozen=True):
    """Report now; the report carries this number."""

    number: int


class CloseTasks(_Command, frozen=True):
    """Close the tasks. Answered by ``TasksClosed``."""


Command = (
    DriverTime
    | AssignWorker
    | RouteWorker
    | PrepareToLeave
    | CancelLeave
    | PrefetchState
    | OpenTasks
    | RootsSettled
    | EndEpoch
    | TakeSnapshot
    | EpochCommitted
    | SetMigrationRoutes
    | SetSpoutRate
    | HoldTimeouts
    | ActivateSpouts
    | DeactivateSpouts
    | StopTicks
    | RequestReport
    | CloseTasks
    | TaskMessage
    | TaskFlowState
)
"""``TaskMessage`` and ``TaskFlowState`` come from the message board in the coordinator, and go there as events."""
