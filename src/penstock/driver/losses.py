"""Describes in one sentence which worker process was lost, and how it ended. Does no IO."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class LostWorker:
    """A worker whose connection closed without a message."""

    id: str
    tasks: tuple[str, ...]
    pid: int
    node: str

    def __str__(self) -> str:
        return f"worker {self.id} ({', '.join(self.tasks) or 'no tasks'}; process {self.pid} on {self.node})"


def explain(lost: Sequence[LostWorker], status: int | None, executor_lost: bool, cause: str) -> str:
    """Return a sentence that explains why the query ended.

    ``lost``: the lost workers, in the order of their loss. ``status``: return code of the first one's process, as
    in ``subprocess``; None if unknown. ``executor_lost``: its whole Spark executor was lost. ``cause``: Spark's
    message.
    """
    if not lost:
        return f"Spark ended the query: {cause}"
    first = lost[0]
    if executor_lost:
        same_executor = [worker for worker in lost if worker.node == first.node]
        return f"the Spark executor {first.node} was lost, and with it {', '.join(map(str, same_executor))}"
    if status is None:
        return f"{first} was lost; Spark reports: {cause}"
    return f"{first} {_describe_status(status)}"


def _describe_status(status: int) -> str:
    if status >= 0:
        return f"ended with exit code {status}"
    try:
        name = f" ({signal.Signals(-status).name})"
    except ValueError:
        name = ""
    memory = "; unless someone killed it, the machine ran out of memory" if -status == signal.SIGKILL else ""
    return f"was killed by signal {-status}{name}{memory}"
