"""Commands: messages from the driver to a worker. ``Command`` is the union of all of them."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from penstock.control.signals import TaskFlowState, TaskMessage
from penstock.protocol.handover import HandoverState
from penstock.protocol.task_states import TaskStates, WaitingTuples


class _Command(Struct, frozen=True, tag=True, array_like=True):
    """Base class of commands. A command is encoded as an array that begins with its class name."""


class DriverTime(_Command, frozen=True):
    """The driver's time, in answer to ``AskDriverTime``."""

    sent: float
    """The value of ``AskDriverTime.sent``."""
    time: float
    """Wall time of the driver, in seconds."""


class AssignWorker(_Command, frozen=True):
    """Sent to an empty slot: run this worker of the slot's stage."""

    worker: int
    """Its index in the stage."""
    next: list[list[int]] = []
    """For each worker of the next stage, the slots to which its rows are sent. If it is empty, each worker has
    the slot with its own index."""
    takes_over: bool = False
    """The worker still runs in another slot. Until this slot opens the tasks, it receives copies of that slot's
    input."""


class RouteWorker(_Command, frozen=True):
    """Send rows for that worker of the next stage to each of these slots from now on. Answered by
    ``WorkerRouted``."""

    worker: int
    slots: list[int]


class PrepareToLeave(_Command, frozen=True):
    """When this epoch of frames ends, take the snapshot of this commit and stop, because the worker moves to
    another slot. Answered by ``LeavePrepared`` at once and by ``WorkerLeft`` when the worker has stopped."""

    commit: int
    epoch: int


class CancelLeave(_Command, frozen=True):
    """Cancels ``PrepareToLeave``: the worker continues, even if it has stopped already."""


class PrefetchState(_Command, frozen=True):
    """Sent to a worker that will take over from another query run or process: the state with which its tasks
    will probably begin. The worker reads it now, so that it has little to read when it opens the tasks. Answered
    by ``StatePrefetched``."""

    epoch: int
    tasks: TaskStates = {}


class OpenTasks(_Command, frozen=True):
    """Open the tasks. Sent when every worker is connected. Answered by ``TasksOpened``."""

    nodes: dict[str, str]
    """Worker ("stage.index") → its node."""
    generation: int = 0
    """The generation of the state directory that this query run has claimed; part of the names of the files it
    writes."""
    epoch: int = 0
    """The tasks begin after this epoch."""
    tasks: TaskStates = {}
    """The state with which the worker's tasks begin."""
    handover: HandoverState | None = None
    """The handover state of the worker in the other slot, if this one takes over from it."""
    waiting: WaitingTuples | None = None
    """The tuples that the worker's tasks process before all others; None if there are none."""
    behind: dict[str, int] = {}
    """How many such tuples wait for each component, in all workers; only components whose data may be migrated."""


class RootsSettled(_Command, frozen=True):
    """Roots of a spout task are complete, or have failed if ``error`` is not empty."""

    task: int
    component: str
    """The component that failed them."""
    error: str
    data: bytes
    """Ranges of root numbers as 64-bit integers: all first numbers, then all lengths."""


class StartAcker(_Command, frozen=True):
    """Sent to a slot: start the process of an acker. It connects to the driver itself (``AckerStarted``)."""

    acker: int
    """Its index among the ackers."""
    incarnation: int
    """The number of the process among those that this acker has had."""
    count: int
    """Number of ackers."""


class StopAcker(_Command, frozen=True):
    """Sent to the slot that has started the process of an acker: kill it if it still runs."""

    acker: int
    incarnation: int


class UseAcker(_Command, frozen=True):
    """Sent to all slots: connect to this process of an acker, and send it what belongs to the acker from now on.
    Answered by ``AckerLinked``."""

    acker: int
    incarnation: int
    host: str
    """Empty: the driver is the acker."""
    port: int


class FailRoots(_Command, frozen=True):
    """Fail all open roots of this acker, because its ledgers are lost. Sent when all slots use the next
    process."""

    acker: int


class EndEpoch(_Command, frozen=True):
    """Sent to the first stage: end the epoch of frames. With exactly-once delivery this happens with each
    commit, otherwise when a worker moves."""

    epoch: int
    last: bool = False
    """This is the last epoch of the query run: another run waits to take over."""
    overtakes: bool = False
    """Sent to all workers: end this epoch and all earlier ones at once. The tuples that wait are stored with the
    snapshot."""


class TakeSnapshot(_Command, frozen=True):
    """At-least-once delivery: take the snapshots of the spouts (answered by ``SpoutsSnapshotted``) or of the
    bolts. Then answered by ``SnapshotWritten`` or ``SnapshotFailed``."""

    epoch: int
    what: Literal["spouts", "bolts"]
    last: bool = False
    """As in ``EndEpoch``."""


class EpochCommitted(_Command, frozen=True):
    """The epoch and all earlier ones are committed: the sinks publish what they have prepared. Answered by
    ``EpochPublished``."""

    epoch: int


class SetMigrationRoutes(_Command, frozen=True):
    """Send tuples for each key of ``routes`` to the task that is its value. Replaces the previous routes of the
    component."""

    component: str
    routes: dict[int, int]
    version: int
    """A command whose version is older than the newest one received is ignored."""


class ProbeLinks(_Command, frozen=True):
    """Send a few large frames to every worker of the next stage, which measures the bandwidth of the link by them
    and reports it (``WorkerReport.links``)."""


class SetSpoutRate(_Command, frozen=True):
    """Limit the rate of a spout."""

    component: str
    rate: float
    """Tuples a second, for all tasks of the spout together."""


class HoldTimeouts(_Command, frozen=True):
    """While ``held``, no tuple times out. The driver sends this when the system behind a sink is unavailable."""

    held: bool


class ActivateSpouts(_Command, frozen=True):
    """Let the spouts emit tuples and start the ticks of bolts."""


class DeactivateSpouts(_Command, frozen=True):
    """Stop the spouts from emitting tuples."""


class HandOnUnfinished(_Command, frozen=True):
    """At-least-once delivery: fail all tuples of the spouts that are not acked, because another query run takes
    over and will read them again. Sent when the spouts are deactivated. Answered by ``UnfinishedHandedOn``."""


class StopTicks(_Command, frozen=True):
    """Stop the ticks of bolts until ``ActivateSpouts``. Sent when the query run is drained and another one is
    about to take over."""


class RequestReport(_Command, frozen=True):
    """Send a report now, with this number in ``WorkerReport.probe``."""

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
    | StartAcker
    | StopAcker
    | UseAcker
    | FailRoots
    | EndEpoch
    | TakeSnapshot
    | EpochCommitted
    | SetMigrationRoutes
    | ProbeLinks
    | SetSpoutRate
    | HoldTimeouts
    | ActivateSpouts
    | DeactivateSpouts
    | HandOnUnfinished
    | StopTicks
    | RequestReport
    | CloseTasks
    | TaskMessage
    | TaskFlowState
)
"""``TaskMessage`` and ``TaskFlowState`` come from the driver's message board; workers send them there as
events."""
