"""What travels on a control connection: small typed messages, as JSON. Never pickles: bytes from a socket
must not be able to run code."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import ControlRefused

# ---- slot to coordinator


@dataclass(frozen=True)
class Hello:
    """The first message after the handshake: who this is."""

    stage: int
    slot: int
    attempt: int
    """Which start of the query the slot belongs to; stragglers of an earlier one are turned away."""
    pid: int
    node: str


@dataclass(frozen=True)
class Ready:
    """All tasks are open and every channel into this slot has been used."""


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
    probe: int = 0


@dataclass(frozen=True)
class Failed:
    """The slot cannot go on. Carries the four parts of the error."""

    where: str
    rule: str
    got: str
    way_out: str


@dataclass(frozen=True)
class Closed:
    """All tasks have been closed."""


# ---- coordinator to slot


@dataclass(frozen=True)
class Open:
    """Every slot is connected: open the tasks. ``nodes`` says where each slot ("stage.slot") stands."""

    nodes: dict[str, str]


@dataclass(frozen=True)
class Activate:
    """Let the spouts emit."""


@dataclass(frozen=True)
class Deactivate:
    """Let the spouts pause."""


@dataclass(frozen=True)
class Probe:
    """Report now, with this number."""

    number: int


@dataclass(frozen=True)
class Close:
    """Close the tasks."""


Message = Hello | Ready | Report | Failed | Closed | Open | Activate | Deactivate | Probe | Close

_KINDS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (Hello, Ready, Report, Failed, Closed, Open, Activate, Deactivate, Probe, Close)
}


def dumps(message: Message) -> bytes:
    content = {spec.name: getattr(message, spec.name) for spec in dataclasses.fields(message)}
    return json.dumps([type(message).__name__, content], default=str).encode()


def loads(data: bytes) -> Message:
    """Read a message. Raises ``ControlRefused`` for anything that is not one."""
    try:
        name, content = json.loads(data)
        message: Message = _KINDS[name](**content)
    except (ValueError, KeyError, TypeError) as error:
        raise ControlRefused("control connection", "expects messages of the protocol", repr(error)) from error
    return message
