"""What one task says to another about load (A figures 6 and 7, table 2). Inert; message boards carry it."""

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
    """From the task whose queue it is about to one that sends to it."""

    source: int
    target: int
    kind: str
    """``slow`` and ``cancel`` (step), ``hold`` and ``resume`` (spout), ``grant`` (credit); in any of them ``wait``
    and ``proceed``, to a sender that is epochs ahead."""
    value: float = 0.0
    """Of ``slow`` and ``cancel``: the steps the source has asked for and not taken back. Of a grant: how many
    tuples the target may have sent altogether."""

    @property
    def subject(self) -> str:
        """Messages of one subject replace each other; those of another say nothing about it. A ``proceed`` must
        not be dropped because a ``slow`` or a ``grant`` comes after it: the sender would wait for ever."""
        return _SUBJECTS.get(self.kind, self.kind)


class TaskFlowState(Struct, frozen=True, tag=True, array_like=True):
    """What a task did about the messages it got: the last word on its rate towards one component."""

    task: int
    towards: str
    """The component it sends to."""
    rate: float
    """Tuples a second it may send there; ``inf``: as fast as it can."""
