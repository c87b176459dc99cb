"""Which process was lost, and how, in a sentence. Pure."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class LostWorker:
    """One whose connection ended without a word."""

    id: str
    tasks: tuple[str, ...]
    pid: int
    node: str

    def __str__(self) -> str:
        return f"worker {self.id} ({', '.join(self.tasks) or 'no tasks'}; process {self.pid} on {self.node})"


def explain(lost: Sequence[LostWorker], status: int | None, executor_lost: bool, cause: str) -> str:
    """``lost``: in the order in which they were. ``status``: of the first one's process, as ``subprocess`` has it;
    None where nobody could tell. ``cause``: what Spark said."""
    if not lost:
        return f"Spark ended the query: {cause}"
    first = lost[0]
    if executor_lost:
        gone = [worker for worker in lost if worker.node == first.node]
        return f"the Spark executor {first.node} was lost, and with it {', '.join(map(str, gone))}"
    if status is None:
        return f"{first} was lost; Spark says: {cause}"
    return f"{first} {_how(status)}"


def _how(status: int) -> str:
    if status >= 0:
        return f"ended with exit code {status}"
    try:
        name = f" ({signal.Signals(-status).name})"
    except ValueError:
        name = ""
    memory = "; if nobody did that, the machine had no memory left" if -status == signal.SIGKILL else ""
    return f"was killed by signal {-status}{name}{memory}"
