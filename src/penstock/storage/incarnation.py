"""Which process of a sink's task staged or published something.

A task may have several processes at a time: one that stalls, or that opens late, does not know that a newer start
of the topology has taken over. So everything a process stages carries the start's generation and a name of the
process itself, a process removes only what its own or an earlier start staged, and what an outside system records
says whose numbers it means.
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
    """One process of a sink's task."""

    task: str
    """Names the task from its first start on: kept in its folder. Without a folder, the process."""
    generation: int
    """Of the start that the process belongs to."""
    process: str
    """Tells it from all others of this task."""
    epochs: bool
    """Commits are numbered by the topology's epochs. Otherwise the process numbers them itself."""

    @property
    def identity(self) -> str:
        """What an outside system records beside a commit's number. Two numbers can be compared only under one
        identity: epochs belong to the task, other numbers to the process that gave them."""
        return self.task if self.epochs else f"{self.task}.{self.generation}.{self.process}"

    @property
    def prefix(self) -> str:
        """How the names of what it stages begin."""
        return f"{self.generation:08d}-{self.process}"

    def may_remove(self, name: str) -> bool:
        """A staged file of this name is of no newer start. (Within one start a task has one process at a time.)"""
        generation = name.rpartition("/")[2].partition("-")[0]
        return not generation.isdecimal() or int(generation) <= self.generation

    def is_older_than(self, identity: str) -> bool:
        """The identity is one of the same task in a newer start."""
        task, _, rest = identity.partition(".")
        generation = rest.partition(".")[0]
        return task == self.task and generation.isdecimal() and int(generation) > self.generation

    def is_same_task(self, identity: str) -> bool:
        return identity.partition(".")[0] == self.task


def begin(context: Context, store: StateStore | None, where: str) -> Incarnation:
    """The incarnation of this process. ``store`` is the task's folder, where its identity is kept and where starts
    leave their generation. Raises ``SinkRefused`` where a newer start has opened the task already: this process
    must not take anything from it."""
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
    """For a process whose start is not the newest."""
    return SinkRefused(
        where,
        f"query run {mine} is outdated: run {newer} has opened this task",
        "Nothing was removed. Stop the older run, or give one of them another name or delivery.state_dir.",
    )
