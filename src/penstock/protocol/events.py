"""Events: what a worker says to the driver. ``Event`` is the union of all of them."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from penstock.control.signals import TaskFlowState, TaskMessage
from penstock.metrics.stats import TaskStats
from penstock.protocol.handover import HandoverState
from penstock.protocol.task_states import SavedTask


class _Event(Struct, frozen=True, tag=True, array_like=True):
    """Written as an array that begins with the name of its class."""


class Hello(_Event, frozen=True):
    """The first event after the handshake: which slot this is. It runs the worker with the same index, unless the
    driver assigns workers to slots."""

    stage: int
    slot: int
    attempt: int
    """Which query run the slot belongs to; slots of an earlier one are turned away."""
    pid: int
    node: str


class AskDriverTime(_Event, frozen=True):
    """Answered by ``DriverTime``. May come before ``Hello``."""

    sent: float
    """The worker's own monotonic time; comes back in the answer."""


class TasksOpened(_Event, frozen=True):
    """All tasks are open and every channel into this worker has been used."""

    stateful: bool = False
    """A task keeps state or is a transactional sink: there is something to commit."""


class ChannelsWarm(_Event, frozen=True):
    """Every channel into this worker has been used, whether its tasks are open or not."""


class StatePrefetched(_Event, frozen=True):
    """The worker has read the state of ``PrefetchState``."""

    epoch: int


class WorkerReport(_Event, frozen=True):
    """The state of a worker: sent a few times a second by its loop, and at once in answer to ``RequestReport``.
    Counters are cumulative, so a lost report costs nothing."""

    frames_sent: int
    frames_done: int
    pending: int
    """Tuples that the worker holds, anywhere."""
    cpu: float
    """CPU seconds of the process so far."""
    rss: int
    """Resident memory in bytes."""
    tasks: dict[int, TaskStats]
    published: dict[int, list[list[Any]]] = {}
    """Rows that tasks show; values of the user's."""
    errors: list[str] = []
    segments: list[tuple[int, str, str, int, int]] = []
    """Migrated segments that have ended: sender, branch, where it went, offset, length."""
    probe: int = 0
    """The number of the request that this answers; 0: none."""
    streams: list[tuple[int, int, int, int]] | None = None
    """Sender, receiver (tasks), tuples and bytes so far; None: not in this report. With the load monitor on they
    are in a few reports of each window, because there may be many."""
    machine: dict[str, str | int | float | list[int | float]] = {}
    """``metrics.machine.MachineProbe.read``, as often as ``streams``; empty: not in this report."""
    clock_skew: float = 0.0
    """Seconds by which the wall clock of the worker's machine is ahead of the driver's."""
    settled_below: dict[int, int] = {}
    """Of each spout task: all its messages with a smaller number are acked, failed or timed out."""


class Heartbeat(_Event, frozen=True):
    """The worker lives, and its loop has not reported for a while: a component's code has not returned, or Spark
    does not take rows. Sent by a thread of its own."""

    task: int = -1
    """The task whose code runs; -1: none."""
    in_call: float = 0.0
    """Seconds for which it has not returned."""


class WorkerFailed(_Event, frozen=True):
    """The worker cannot go on. Carries the parts of the error."""

    where: str
    problem: str
    hint: str = ""
    passing: bool = False
    """Starting the query again may help."""


class StateUnreadable(_Event, frozen=True):
    """The worker's tasks cannot be restored from the state that it was given."""

    error: str


class AckTally(_Event, frozen=True):
    """What the worker sent and acked, for the acker: entries as ``acking.ledger`` packs them."""

    data: bytes


class RootsFailed(_Event, frozen=True):
    """Roots that have failed, as ranges, and why."""

    first: list[int]
    length: list[int]
    component: str
    error: str


class SpoutsSnapshotted(_Event, frozen=True):
    """At least once: the snapshots of the worker's spouts are taken."""

    epoch: int


class SnapshotWritten(_Event, frozen=True):
    """The worker's snapshot of an epoch is in the state directory."""

    epoch: int
    tasks: dict[str, SavedTask]


class SnapshotFailed(_Event, frozen=True):
    """It could not be written."""

    epoch: int
    error: str


class EpochPublished(_Event, frozen=True):
    """The worker's sinks have published the epoch."""

    epoch: int


class WorkerRouted(_Event, frozen=True):
    """Rows for that worker of the next stage go to these slots now: the answer to ``RouteWorker``."""

    worker: int
    slots: list[int]


class LeavePrepared(_Event, frozen=True):
    """The worker will leave with that commit."""

    commit: int


class WorkerLeft(_Event, frozen=True):
    """The worker has taken its snapshot at the end of an epoch, and does nothing more."""

    handover: HandoverState

    @property
    def epoch(self) -> int:
        """The last one that it worked on."""
        return self.handover.epoch


class SlotFreed(_Event, frozen=True):
    """Nothing more comes for the worker that left: its slot is empty and may have another."""


class JoinMessageBoard(_Event, frozen=True):
    """Send this worker the messages and states of the message board from now on, and what waits for it."""


class TasksClosed(_Event, frozen=True):
    """All tasks have been closed."""


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
"""``TaskMessage`` and ``TaskFlowState`` go to the message board in the coordinator, and come from there as
commands."""
