"""What travels on a control connection: small typed messages, as JSON; acks as columns behind it. Never pickles:
bytes from a socket must not be able to run code."""

from __future__ import annotations

import dataclasses
import json
import struct
from dataclasses import dataclass, field
from typing import Any, get_args

from penstock.control.signals import TaskMessage, TaskState
from penstock.errors import ControlRefused
from penstock.texts import parse_json

# ---- slot to coordinator


@dataclass(frozen=True)
class Hello:
    """The first message after the handshake: who this is."""

    stage: int
    slot: int
    """Its number in the stage; where slots are placed, that of its seat."""
    attempt: int
    """Which start of the query the slot belongs to; stragglers of an earlier one are turned away."""
    pid: int
    node: str


@dataclass(frozen=True)
class AskTime:
    """What is the driver's time? ``sent`` is the worker's own, and comes back in ``TellTime``. May come before
    ``Hello``."""

    sent: float


@dataclass(frozen=True)
class Ready:
    """All tasks are open and every channel into this slot has been used."""

    stateful: bool = False
    """A task keeps state or is a transactional sink: there is something to commit."""


@dataclass(frozen=True)
class Warm:
    """Every channel into this slot has been used, whether its tasks are open or not."""


@dataclass(frozen=True)
class Ahead:
    """The slot has read ahead what its tasks had after ``epoch``."""

    epoch: int


@dataclass(frozen=True)
class Report:
    """The state of a slot: sent a few times a second, and at once in answer to a ``Probe``."""

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
    """``metrics.machine.Machine.read``, as often; empty: not told this time."""
    clock_skew: float = 0.0
    """Seconds by which the wall clock of the worker's machine is ahead of the driver's."""
    settled_below: dict[str, int] = field(default_factory=dict)
    """Of each spout task: all its messages with a smaller number are acked, failed or timed out."""


@dataclass(frozen=True)
class Failed:
    """The slot cannot go on. Carries the four parts of the error."""

    where: str
    rule: str
    got: str
    way_out: str
    passing: bool = False
    """Starting again may help."""


@dataclass(frozen=True)
class Corrupt:
    """The slot's tasks cannot be restored from the manifest it was given."""

    error: str


@dataclass(frozen=True)
class Tally:
    """What the slot sent and acked, for the acker: entries as ``acking.ledger`` packs them."""

    data: bytes


@dataclass(frozen=True)
class Fails:
    """Roots that failed, as ranges, and why."""

    first: list[int]
    length: list[int]
    component: str
    error: str


@dataclass(frozen=True)
class SpoutsCut:
    """At least once: the state of the slot's spouts is cut."""

    epoch: int


@dataclass(frozen=True)
class Snapped:
    """The slot's snapshot of an epoch is written: its tasks' parts and tokens, by task key."""

    epoch: int
    tasks: dict[str, Any]


@dataclass(frozen=True)
class NotSnapped:
    """It could not be written."""

    epoch: int
    error: str


@dataclass(frozen=True)
class Published:
    """The slot's sinks have made the epoch visible."""

    epoch: int


@dataclass(frozen=True)
class Sending:
    """Rows for that slot of the next stage go to these seats now: the answer to ``SendTo``."""

    slot: int
    seats: list[int]


@dataclass(frozen=True)
class Leaving:
    """The slot knows that it leaves with that commit."""

    commit: int


@dataclass(frozen=True)
class Left:
    """The slot has cut its state at the end of an epoch, and does nothing more. ``memo``: what who takes over
    needs besides (``runtime.memo``)."""

    epoch: int
    memo: dict[str, Any]


@dataclass(frozen=True)
class Freed:
    """Nothing more comes for the slot that left: its seat may have another."""


@dataclass(frozen=True)
class JoinBoards:
    """The slot takes messages and states from the boards from now on, and what waits for it."""


@dataclass(frozen=True)
class Closed:
    """All tasks have been closed."""


# ---- operator to coordinator and back


@dataclass(frozen=True)
class Command:
    """The only message of a connection that is no slot's: something a person wants."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """What became of it; ``error`` has the four parts of the error where it was refused, ``kind`` its class."""

    text: str
    error: list[str] = field(default_factory=list)
    kind: str = "SettingError"


# ---- coordinator to slot


@dataclass(frozen=True)
class TellTime:
    """The driver's time, in answer to ``AskTime``."""

    sent: float
    time: float


@dataclass(frozen=True)
class TakeSeat:
    """Where slots are placed: the number of the slot that runs in this Spark task, in its stage, and the seats of
    the next stage that rows for each of its slots go to."""

    slot: int
    next: list[list[int]] = field(default_factory=list)
    takes_over: bool = False
    """From another seat, which still has it."""


@dataclass(frozen=True)
class SendTo:
    """Send rows for that slot of the next stage to these seats from now on, to each of them."""

    slot: int
    seats: list[int]


@dataclass(frozen=True)
class Leave:
    """When this epoch of frames ends, cut the state for this commit, and do nothing more: another seat gets the
    slot."""

    commit: int
    epoch: int


@dataclass(frozen=True)
class Stay:
    """After all."""


@dataclass(frozen=True)
class ReadAhead:
    """To a start that is to take over from another: what the slot's tasks are likely to begin with, so that little
    is left to read when they do."""

    epoch: int
    tasks: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Open:
    """Every slot is connected: open the tasks. ``nodes`` says where each slot ("stage.slot") stands; ``tasks``
    what the slot's tasks begin with, after ``epoch``."""

    nodes: dict[str, str]
    generation: int = 0
    epoch: int = 0
    tasks: dict[str, Any] = field(default_factory=dict)
    memo: dict[str, Any] = field(default_factory=dict)
    """Where it takes over from another seat: that of ``Left``, after whose epoch it begins."""


@dataclass(frozen=True)
class Settled:
    """Roots of a spout task are complete, or failed where ``error`` says why. ``data`` has ranges of their
    numbers: all the firsts, then all the lengths."""

    task: int
    component: str
    error: str
    data: bytes


@dataclass(frozen=True)
class Announce:
    """To the first stage: end the epoch of frames; exactly once with each commit, otherwise when a slot moves."""

    epoch: int
    last: bool = False
    """Of this start: another waits to take over."""


@dataclass(frozen=True)
class CutState:
    """At least once: cut the state of the spouts or of the bolts."""

    epoch: int
    what: str
    last: bool = False
    """As of ``Announce``."""


@dataclass(frozen=True)
class Committed:
    """The epoch is committed."""

    epoch: int


@dataclass(frozen=True)
class Reroute:
    """Tuples bound for a task on the left of ``routes`` go to the one on the right; replaces what was said before
    of this component."""

    component: str
    routes: dict[str, int]
    version: int


@dataclass(frozen=True)
class SetRate:
    """Let the tasks of a spout emit so many tuples a second, all together."""

    component: str
    rate: float


@dataclass(frozen=True)
class HoldTimeouts:
    """A sink is away: let no tuple time out, until told otherwise. It is not the tuples' fault."""

    held: bool


@dataclass(frozen=True)
class Activate:
    """Let the spouts emit."""


@dataclass(frozen=True)
class Deactivate:
    """Let the spouts pause."""


@dataclass(frozen=True)
class Rest:
    """Another start is about to take over, and all is drained: no more ticks, so that nothing moves. ``Activate``
    takes it back."""


@dataclass(frozen=True)
class Probe:
    """Report now, with this number."""

    number: int


@dataclass(frozen=True)
class Close:
    """Close the tasks."""


# ``TaskMessage`` and ``TaskState`` go both ways: onto the coordinator's boards and from them.

Message = (
    Hello
    | AskTime
    | TellTime
    | Ready
    | Warm
    | Ahead
    | Report
    | Failed
    | Corrupt
    | Tally
    | Fails
    | SpoutsCut
    | Snapped
    | NotSnapped
    | Published
    | Sending
    | Leaving
    | Left
    | Freed
    | Closed
    | JoinBoards
    | Command
    | Answer
    | TaskMessage
    | TaskState
    | TakeSeat
    | SendTo
    | Leave
    | Stay
    | ReadAhead
    | Open
    | Activate
    | Deactivate
    | Rest
    | Settled
    | Reroute
    | SetRate
    | HoldTimeouts
    | Announce
    | CutState
    | Committed
    | Probe
    | Close
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
        raise ControlRefused("control connection", "expects messages of the protocol", repr(error)) from error
    return message
