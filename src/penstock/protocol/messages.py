"""What travels on a control connection: small typed messages, as JSON; acks as columns behind it. Never pickles:
bytes from a socket must not be able to run code."""

from __future__ import annotations

import dataclasses
import json
import struct
from dataclasses import dataclass, field
from typing import Any, get_args

from penstock.control.signals import TaskFlowState, TaskMessage
from penstock.errors import ControlRefused
from penstock.texts import parse_json

# ---- worker to coordinator


@dataclass(frozen=True)
class Hello:
    """The first message after the handshake: who this is."""

    stage: int
    slot: int
    """Its number in the stage; where slots are placed, that of its slot."""
    attempt: int
    """Which start of the query the worker belongs to; stragglers of an earlier one are turned away."""
    pid: int
    node: str


@dataclass(frozen=True)
class AskDriverTime:
    """What is the driver's time? ``sent`` is the worker's own, and comes back in ``DriverTime``. May come before
    ``Hello``."""

    sent: float


@dataclass(frozen=True)
class TasksOpened:
    """All tasks are open and every channel into this worker has been used."""

    stateful: bool = False
    """A task keeps state or is a transactional sink: there is something to commit."""


@dataclass(frozen=True)
class ChannelsWarm:
    """Every channel into this worker has been used, whether its tasks are open or not."""


@dataclass(frozen=True)
class StatePrefetched:
    """The worker has read ahead what its tasks had after ``epoch``."""

    epoch: int


@dataclass(frozen=True)
class WorkerReport:
    """The state of a worker: sent a few times a second, and at once in answer to a ``RequestReport``."""

    frames_sent: int
    frames_done: int
    pending: int
    cpu: float
    """CPU seconds of the process so far."""
    rss: int
    """Resident memory in bytes."""
    tasks: dict[str, dict[str, Any]]
    published: dict[str, list[list[Any]]] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    segments: list[list[Any]] = field(default_factory=list)
    """Migrated segments that have ended: sender, branch, where it went, offset, length."""
    probe: int = 0
    streams: list[list[int]] | None = None
    """Sender, receiver (tasks), tuples and bytes so far; None: not told this time. With the load monitor on a few
    times a window, for there may be many."""
    machine: dict[str, Any] = field(default_factory=dict)
    """``metrics.machine.MachineProbe.read``, as often; empty: not told this time."""
    clock_skew: float = 0.0
    """Seconds by which the wall clock of the worker's machine is ahead of the driver's."""
    settled_below: dict[str, int] = field(default_factory=dict)
    """Of each spout task: all its messages with a smaller number are acked, failed or timed out."""


@dataclass(frozen=True)
class WorkerFailed:
    """The worker cannot go on. Carries the three parts of the error."""

    where: str
    problem: str
    hint: str
    passing: bool = False
    """Starting again may help."""


@dataclass(frozen=True)
class StateUnreadable:
    """The worker's tasks cannot be restored from the manifest it was given."""

    error: str


@dataclass(frozen=True)
class AckTally:
    """What the worker sent and acked, for the acker: entries as ``acking.ledger`` packs them."""

    data: bytes


@dataclass(frozen=True)
class RootsFailed:
    """Roots that failed, as ranges, and why."""

    first: list[int]
    length: list[int]
    component: str
    error: str


@dataclass(frozen=True)
class SpoutsSnapshotted:
    """At least once: the state of the worker's spouts is snapshotted."""

    epoch: int


@dataclass(frozen=True)
class SnapshotWritten:
    """The worker's snapshot of an epoch is written: its tasks' parts and tokens, by task key."""

    epoch: int
    tasks: dict[str, Any]


@dataclass(frozen=True)
class SnapshotFailed:
    """It could not be written."""

    epoch: int
    error: str


@dataclass(frozen=True)
class EpochPublished:
    """The worker's sinks have made the epoch visible."""

    epoch: int


@dataclass(frozen=True)
class WorkerRouted:
    """Rows for that worker of the next stage go to these slots now: the answer to ``RouteWorker``."""

    worker: int
    slots: list[int]


@dataclass(frozen=True)
class LeavePrepared:
    """The worker knows that it leaves with that commit."""

    commit: int


@dataclass(frozen=True)
class WorkerLeft:
    """The worker has snapshotted its state at the end of an epoch, and does nothing more. ``handover state``: what
    who takes over needs besides (``runtime.handover state``)."""

    epoch: int
    handover: dict[str, Any]


@dataclass(frozen=True)
class SlotFreed:
    """Nothing more comes for the worker that left: its slot may have another."""


@dataclass(frozen=True)
class JoinMessageBoard:
    """The worker takes messages and states from the boards from now on, and what waits for it."""


@dataclass(frozen=True)
class TasksClosed:
    """All tasks have been closed."""


# ---- operator to coordinator and back


@dataclass(frozen=True)
class OperatorRequest:
    """The only message of a connection that is no worker's: something a person wants."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class OperatorAnswer:
    """What became of it; ``error`` has the three parts of the error where it was refused, ``kind`` its class."""

    text: str
    error: list[str] = field(default_factory=list)
    kind: str = "SettingError"


# ---- coordinator to worker


@dataclass(frozen=True)
class DriverTime:
    """The driver's time, in answer to ``AskDriverTime``."""

    sent: float
    time: float


@dataclass(frozen=True)
class AssignWorker:
    """Where workers are placed: the number of the worker that runs in this Spark task, in its stage, and the slots
    of the next stage that rows for each of its workers go to."""

    worker: int
    next: list[list[int]] = field(default_factory=list)
    takes_over: bool = False
    """From another slot, which still has it."""


@dataclass(frozen=True)
class RouteWorker:
    """Send rows for that worker of the next stage to these slots from now on, to each of them."""

    worker: int
    slots: list[int]


@dataclass(frozen=True)
class PrepareToLeave:
    """When this epoch of frames ends, snapshot the state for this commit, and do nothing more: another slot gets
    the worker."""

    commit: int
    epoch: int


@dataclass(frozen=True)
class CancelLeave:
    """After all."""


@dataclass(frozen=True)
class PrefetchState:
    """To a start that is to take over from another: what the worker's tasks are likely to begin with, so that
    little is left to read when they do."""

    epoch: int
    tasks: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class OpenTasks:
    """Every worker is connected: open the tasks. ``nodes`` says where each worker ("stage.worker") stands;
    ``tasks`` what the worker's tasks begin with, after ``epoch``."""

    nodes: dict[str, str]
    generation: int = 0
    epoch: int = 0
    tasks: dict[str, Any] = field(default_factory=dict)
    handover: dict[str, Any] = field(default_factory=dict)
    """Where it takes over from another slot: that of ``WorkerLeft``, after whose epoch it begins."""


@dataclass(frozen=True)
class RootsSettled:
    """Roots of a spout task are complete, or failed where ``error`` says why. ``data`` has ranges of their
    numbers: all the firsts, then all the lengths."""

    task: int
    component: str
    error: str
    data: bytes


@dataclass(frozen=True)
class EndEpoch:
    """To the first stage: end the epoch of frames; exactly once with each commit, otherwise when a worker
    moves."""

    epoch: int
    last: bool = False
    """Of this start: another waits to take over."""


@dataclass(frozen=True)
class TakeSnapshot:
    """At least once: snapshot the state of the spouts or of the bolts."""

    epoch: int
    what: str
    last: bool = False
    """As of ``EndEpoch``."""


@dataclass(frozen=True)
class EpochCommitted:
    """The epoch is committed."""

    epoch: int


@dataclass(frozen=True)
class SetMigrationRoutes:
    """Tuples bound for a task on the left of ``routes`` go to the one on the right; replaces what was said before
    of this component."""

    component: str
    routes: dict[str, int]
    version: int


@dataclass(frozen=True)
class SetSpoutRate:
    """Let the tasks of a spout emit so many tuples a second, all together."""

    component: str
    rate: float


@dataclass(frozen=True)
class HoldTimeouts:
    """A sink is away: let no tuple time out, until told otherwise. It is not the tuples' fault."""

    held: bool


@dataclass(frozen=True)
class ActivateSpouts:
    """Let the spouts emit."""


@dataclass(frozen=True)
class DeactivateSpouts:
    """Let the spouts pause."""


@dataclass(frozen=True)
class StopTicks:
    """Another start is about to take over, and all is drained: no more ticks, so that nothing moves.
    ``ActivateSpouts`` takes it back."""


@dataclass(frozen=True)
class RequestReport:
    """Report now, with this number."""

    number: int


@dataclass(frozen=True)
class CloseTasks:
    """Close the tasks."""


# ``TaskMessage`` and ``TaskFlowState`` go both ways: onto the coordinator's boards and from them.

Message = (
    Hello
    | AskDriverTime
    | DriverTime
    | TasksOpened
    | ChannelsWarm
    | StatePrefetched
    | WorkerReport
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
    | TasksClosed
    | JoinMessageBoard
    | OperatorRequest
    | OperatorAnswer
    | TaskMessage
    | TaskFlowState
    | AssignWorker
    | RouteWorker
    | PrepareToLeave
    | CancelLeave
    | PrefetchState
    | OpenTasks
    | ActivateSpouts
    | DeactivateSpouts
    | StopTicks
    | RootsSettled
    | SetMigrationRoutes
    | SetSpoutRate
    | HoldTimeouts
    | EndEpoch
    | TakeSnapshot
    | EpochCommitted
    | RequestReport
    | CloseTasks
)

_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in get_args(Message)}
_BINARY = 0  # first byte of a message with a column of bytes; JSON never begins with it
_HEAD = struct.Struct("<BI")


def dumps(message: Message) -> bytes:
    content = {spec.name: getattr(message, spec.name) for spec in dataclasses.fields(message)}
    data = content.pop("data", None)
    text = json.dumps([type(message).__name__, content], default=str).encode()
    return text if data is None else b"".join((_HEAD.pack(_BINARY, len(text)), text, data))


def loads(data: bytes) -> Message:
    """Read a message. Raises ``ControlRefused`` for anything that is not one."""
    try:
        if data[0] == _BINARY:
            _, length = _HEAD.unpack_from(data)
            name, content = parse_json(data[_HEAD.size : _HEAD.size + length])
            content["data"] = data[_HEAD.size + length :]
        else:
            name, content = parse_json(data)
        message: Message = _KINDS[name](**content)
    except (ValueError, KeyError, TypeError, IndexError, struct.error) as error:
        raise ControlRefused(
            "control connection", f"a message does not follow the protocol ({error!r})"
        ) from error
    return message
