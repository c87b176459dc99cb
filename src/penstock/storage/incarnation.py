"""Identifies the process of a sink's task that staged or published something.

A task may have several live processes: one that stalls, or that opens late, does not know that a newer query run
has taken over. Therefore the names of staged files contain the generation of the query run and a name of the
process. A process removes only files of its own or an older generation. An outside system records the identity
together with each commit number, so that numbers of different processes are never compared.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from penstock.errors import SinkRefused
from penstock.state.store import StateStore
from penstock.topology.components import Context

_IDENTITY = "identity"
_OPENED = "opened"


@dataclass(frozen=True)
class Incarnation:
    """One process of a sink's task. Immutable; ``begin`` creates it once per process."""

    task: str
    """The task's name since it first ran, stored in its folder. For a task without a folder, a name of the
    process."""
    generation: int
    """The generation of the query run that the process belongs to."""
    process: str
    """Distinguishes this process from all others of the task."""
    epochs: bool
    """True if commits are numbered by the topology's epochs; otherwise the process numbers them itself."""

    @property
    def identity(self) -> str:
        """The text that an outside system records together with a commit number. Two numbers can be compared only
        under one identity: epoch numbers belong to the task, other numbers to the process that assigned them."""
        return self.task if self.epochs else f"{self.task}.{self.generation}.{self.process}"

    @property
    def prefix(self) -> str:
        """The beginning of the name of each file that this process stages."""
        return f"{self.generation:08d}-{self.process}"

    def may_remove(self, name: str) -> bool:
        """True if the staged file is not from a newer query run. (In one query run a task has one live
        process.)"""
        generation = name.rpartition("/")[2].partition("-")[0]
        return not generation.isdecimal() or int(generation) <= self.generation

    def is_older_than(self, identity: str) -> bool:
        """True if ``identity`` belongs to the same task in a newer query run."""
        task, _, rest = identity.partition(".")
        generation = rest.partition(".")[0]
        return task == self.task and generation.isdecimal() and int(generation) > self.generation

    def is_same_task(self, identity: str) -> bool:
        return identity.partition(".")[0] == self.task


def begin(context: Context, store: StateStore | None, where: str) -> Incarnation:
    """Register this process and return its incarnation. Called once, when the sink opens.

    ``store`` is the task's folder; it holds the task's identity and a marker for each generation that has opened
    it. Raises ``SinkRefused`` if a newer query run has already opened the task; nothing is removed then.
    """
    epochs = context.delivery == "exactly_once"
    process = secrets.token_hex(4)
    if store is None:
        return Incarnation(secrets.token_hex(8), context.generation, process, epochs)
    store.create(_IDENTITY, secrets.token_hex(8).encode())
    store.create(f"{_OPENED}/{context.generation:08d}", b"")
    for name in store.list(f"{_OPENED}/"):
        generation = int(name.rpartition("/")[2])
        if generation > context.generation:
            raise superseded(where, context.generation, generation)
        if generation < context.generation:
            store.remove(name)
    return Incarnation(store.read(_IDENTITY).decode(), context.generation, process, epochs)


def superseded(where: str, mine: int, newer: int) -> SinkRefused:
    """The error for a process whose query run is not the newest one."""
    return SinkRefused(
        where,
        f"query run {mine} is outdated: run {newer} has opened this task",
        "Nothing was removed. Stop the older run, or give one of them another name or delivery.state_dir.",
    )
