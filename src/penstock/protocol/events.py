"""Events: messages from a worker to the driver. ``Event`` is the union of all of them."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from penstock.control.signals import TaskFlowState, TaskMessage
from penstock.metrics.stats import TaskStats
from penstock.protocol.handover import HandoverState
from penstock.protocol.task_states import OvertakenTuples, SavedTask


class _Event(Struct, frozen=True, tag=True, array_like=True):
    """Base class of events. An event is encoded as an array that begins with its class name."""


class Hello(_Event, frozen=True):
    """Identifies the slot; sent after the handshake. The slot runs the worker with the same index, unless the
    driver assigns workers to slots (``AssignWorker``)."""

    stage: int
    slot: int
    attempt: int
    """The number of the query run to which the slot belongs. The driver rejects slots of an earlier run."""
    pid: int
    node: str


class AskDriverTime(_Event, frozen=True):
    """Asks for the driver's time. Answered by ``DriverTime``. May be sent before ``Hello``."""

    sent: float
    """The worker's monotonic time, which the answer repeats."""


class TasksOpened(_Event, frozen=True):
    """All tasks are open, and a frame has arrived over every channel into this worker."""

    stateful: bool = False
    """A task keeps state or is a transactional sink, so epochs have to be committed."""


class ChannelsWarm(_Event, frozen=True):
    """A frame has arrived over every channel into this worker, whether its tasks are open or not."""


class StatePrefetched(_Event, frozen=True):
    """The worker has read the state that ``PrefetchState`` named."""

    epoch: int


class WorkerReport(_Event, frozen=True):
    """The state of a worker. Its loop sends it a few times a second, and at once in answer to ``RequestReport``.
    Counters are cumulative, so a lost report does no harm."""

    frames_sent: int
    frames_done: int
    pending: int
    """Number of tuples in the worker: in inboxes, buffers and outputs."""
    cpu: float
    """CPU seconds of the process so far."""
    rss: int
    """Resident memory in bytes."""
    tasks: dict[int, TaskStats]
    published: dict[int, list[list[Any]]] = {}
    """Rows that tasks publish for display, by task. They contain users' values."""
    errors: list[str] = []
    segments: list[tuple[int, str, str, int, int]] = []
    """Migrated segments that have ended: sending task, original receiver, actual receiver, offset, length."""
    probe: int = 0
    """The number of the ``RequestReport`` that this answers; 0 if it answers none."""
    streams: list[tuple[int, int, int, int]] | None = None
    """Sending task, receiving task, tuples and bytes so far; None: not in this report. With the load monitor
    they are in a few reports of each load sample only, because there may be many."""
    machine: dict[str, str | int | float | list[int | float]] = {}
    """The result of ``metrics.machine.MachineProbe.read``, as often as ``streams``; empty: not in this report."""
    clock_skew: float = 0.0
    """Seconds by which the wall clock of the worker's machine is ahead of the driver's."""
    settled_below: dict[int, int] = {}
    """Spout task → number: all its messages with a smaller number are acked, failed or timed out."""
    loop_cpu: float = 0.0
    """The part of ``cpu`` that the loop used, which runs the tasks. At one core the worker is at its limit."""
    links: list[tuple[int, float]] = []
    """Worker of the previous stage, and the bytes per second that the link from it carries. Empty before
    ``ProbeLinks``."""


class Heartbeat(_Event, frozen=True):
    """The worker is alive although its loop has not reported for a while, because user code has not returned or
    Spark does not take rows. Sent by a separate thread."""

    task: int = -1
    """The task whose code is running; -1 if none is."""
    in_call: float = 0.0
    """Seconds since that call began."""


class WorkerFailed(_Event, frozen=True):
    """The worker cannot continue. Contains the parts of the error."""

    where: str
    problem: str
    hint: str = ""
    passing: bool = False
    """The error may be temporary: a restart of the query may help."""


class StateUnreadable(_Event, frozen=True):
    """The worker cannot restore its tasks from the state in ``OpenTasks``."""

    error: str


class AckTally(_Event, frozen=True):
    """The tuples that the worker has emitted and acked, for an acker: entries packed by ``acking.ledger``."""

    data: bytes
    acker: int = 0
    """The acker to which the roots belong."""


class RootsFailed(_Event, frozen=True):
    """Roots that have failed, as ranges, and the reason, for an acker."""

    first: list[int]
    length: list[int]
    component: str
    error: str
    acker: int = 0
    """The acker to which the roots belong."""


class SpoutProgress(_Event, frozen=True):
    """For all acker processes: the spout tasks that run here, to which ``RootsSettled`` is sent, each with the
    number below which all its messages are acked, failed or timed out."""

    settled_below: dict[int, int]


class JoinAcker(_Event, frozen=True):
    """The first message to an acker process: which acker this slot wants to use. The process closes the connection
    if it is not this acker."""

    attempt: int
    acker: int
    incarnation: int


class AckerLinked(_Event, frozen=True):
    """The answer to ``UseAcker``: from now on the slot sends to this acker, and no longer to the one before. With
    an error, the slot cannot reach it, or its connection has ended."""

    acker: int
    incarnation: int
    error: str = ""


class AckerStarted(_Event, frozen=True):
    """The first message of an acker process to the driver: it accepts connections of workers at this address."""

    attempt: int
    """The number of the query run to which it belongs."""
    acker: int
    incarnation: int
    pid: int
    node: str
    host: str
    port: int


class AckerReport(_Event, frozen=True):
    """The state of an acker process, sent a few times a second. It also shows that the process lives."""

    open_roots: int
    entries: int
    """Changes of ledgers so far."""
    cpu: float
    """CPU seconds of the process so far."""
    rss: int
    """Resident memory in bytes."""


class UnfinishedHandedOn(_Event, frozen=True):
    """The answer to ``HandOnUnfinished``: what the worker's spouts have not finished will be read again."""

    left: int
    """Tuples that are still in flight, because their spout keeps no state and would forget them."""


class SpoutsSnapshotted(_Event, frozen=True):
    """At-least-once delivery: the snapshots of the worker's spouts are taken."""

    epoch: int


class SnapshotWritten(_Event, frozen=True):
    """The worker's snapshot of an epoch is in the state directory."""

    epoch: int
    tasks: dict[str, SavedTask]
    overtaken: dict[str, OvertakenTuples] = {}
    """The tuples that the marker of the epoch overtook in this worker, by the key of the task for which they
    wait. That task may be in another worker."""


class SnapshotFailed(_Event, frozen=True):
    """The worker's snapshot of an epoch could not be written."""

    epoch: int
    error: str


class EpochPublished(_Event, frozen=True):
    """The worker's sinks have published the epoch."""

    epoch: int


class WorkerRouted(_Event, frozen=True):
    """The answer to ``RouteWorker``: rows for that worker of the next stage now go to these slots."""

    worker: int
    slots: list[int]


class LeavePrepared(_Event, frozen=True):
    """The answer to ``PrepareToLeave``: the worker will stop with that commit."""

    commit: int


class WorkerLeft(_Event, frozen=True):
    """The worker has taken its snapshot at the end of an epoch and has stopped."""

    handover: HandoverState

    @property
    def epoch(self) -> int:
        """The last epoch that the worker processed."""
        return self.handover.epoch


class SlotFreed(_Event, frozen=True):
    """The slot of a worker that has left receives no more rows for it and can run another worker."""


class JoinMessageBoard(_Event, frozen=True):
    """Asks the driver to send this worker the messages and states of the message board from now on, including
    those that wait already."""


class TasksClosed(_Event, frozen=True):
    """The answer to ``CloseTasks``: all tasks are closed."""


Event = (
    Hello
    | AskDriverTime
    | TasksOpened
    | ChannelsWarm
    | StatePrefetched
    | WorkerReport
    | Heartbeat
    | WorkerFailed
    | StateUnreadable
    | AckTally
    | RootsFailed
    | SpoutProgress
    | JoinAcker
    | AckerLinked
    | AckerStarted
    | AckerReport
    | UnfinishedHandedOn
    | SpoutsSnapshotted
    | SnapshotWritten
    | SnapshotFailed
    | EpochPublished
    | WorkerRouted
    | LeavePrepared
    | WorkerLeft
    | SlotFreed
    | JoinMessageBoard
    | TasksClosed
    | TaskMessage
    | TaskFlowState
)
"""``TaskMessage`` and ``TaskFlowState`` go to the driver's message board, which sends them to workers as
commands."""
