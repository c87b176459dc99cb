"""The phases of a worker, and the legal transitions between them."""

from __future__ import annotations

from enum import Enum


class WorkerPhase(Enum):
    """The phases of a worker. The values say what the worker does in each of them."""

    CREATED = "waits for OpenTasks"
    STANDING_BY = "waits for OpenTasks, and receives copies of the input of the worker that it takes over from"
    OPEN = "runs its tasks"
    LEAVING = "runs its tasks, and stops at the end of an epoch because another slot gets the worker"
    LEFT = "has stopped and given its handover state; holds all that arrives"
    CLOSED = "its tasks are closed"
    FAILED = "has reported an error; does nothing more"

    @property
    def has_tasks(self) -> bool:
        """True if the tasks are open."""
        return self in (WorkerPhase.OPEN, WorkerPhase.LEAVING, WorkerPhase.LEFT)

    @property
    def shares_input(self) -> bool:
        """True during a move, while two slots receive the worker's input. Frames for later stages are then
        buffered without a limit: the marker that ends the move arrives behind them, so the reader must not stop
        reading."""
        return self in (WorkerPhase.STANDING_BY, WorkerPhase.LEAVING, WorkerPhase.LEFT)


TRANSITIONS: dict[WorkerPhase, frozenset[WorkerPhase]] = {
    WorkerPhase.CREATED: frozenset({WorkerPhase.OPEN, WorkerPhase.CLOSED, WorkerPhase.FAILED}),
    WorkerPhase.STANDING_BY: frozenset({WorkerPhase.OPEN, WorkerPhase.CLOSED, WorkerPhase.FAILED}),
    WorkerPhase.OPEN: frozenset({WorkerPhase.LEAVING, WorkerPhase.CLOSED, WorkerPhase.FAILED}),
    WorkerPhase.LEAVING: frozenset({WorkerPhase.OPEN, WorkerPhase.LEFT, WorkerPhase.CLOSED, WorkerPhase.FAILED}),
    WorkerPhase.LEFT: frozenset({WorkerPhase.OPEN, WorkerPhase.CLOSED, WorkerPhase.FAILED}),
    WorkerPhase.CLOSED: frozenset(),
    WorkerPhase.FAILED: frozenset({WorkerPhase.CLOSED}),
}
"""The phases that may follow each phase."""


class IllegalTransition(Exception):
    """Raised for a transition that ``TRANSITIONS`` does not allow: an error in Penstock."""

    def __init__(self, now: WorkerPhase, wanted: WorkerPhase) -> None:
        super().__init__(f"a worker that is {now.name} cannot become {wanted.name}")
