"""Messages about load from one task to another (Lu 2020, figures 6 and 7, table 2). Inert; the message board
carries them."""

from __future__ import annotations

from msgspec import Struct

_SUBJECTS = {
    "slow": "rate",
    "cancel": "rate",
    "hold": "hold",
    "resume": "hold",
    "grant": "grant",
    "wait": "epoch",
    "proceed": "epoch",
}


class TaskMessage(Struct, frozen=True, tag=True, array_like=True):
    """A message from a task about its queue to a task that sends to it."""

    source: int
    target: int
    kind: str
    """``slow`` and ``cancel`` (mode step), ``hold`` and ``resume`` (mode spout), ``grant`` (mode credit). In every
    mode ``wait`` and ``proceed``, to a sender that is epochs ahead."""
    value: float = 0.0
    """For ``slow`` and ``cancel``: the steps that the source has requested and not cancelled. For ``grant``: the
    tuples that the target may have sent in total."""

    @property
    def subject(self) -> str:
        """A message replaces earlier messages of the same subject only. A ``proceed`` must not be dropped because
        a later ``slow`` or ``grant`` replaces it: the sender would wait forever."""
        return _SUBJECTS.get(self.kind, self.kind)


class TaskFlowState(Struct, frozen=True, tag=True, array_like=True):
    """How a task has applied the messages it received: its current rate towards one component."""

    task: int
    towards: str
    """The component it sends to."""
    rate: float
    """Permitted tuples per second; ``inf``: no limit."""
