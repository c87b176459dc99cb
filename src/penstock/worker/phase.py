"""The phases of a worker, and which may follow which."""

from __future__ import annotations

from enum import Enum


class Phase(Enum):
    """Where a worker is in its life."""

    CREATED = "waits for OpenTasks"
    STANDING_BY = "waits for OpenTasks, and receives copies of the input of the worker that it takes over from"
    OPEN = "runs its tasks"
    LEAVING = "runs its tasks, and stops at the end of an epoch because another slot gets the worker"
    LEFT = "has stopped and given its handover state; holds all that arrives"
    CLOSED = "its tasks are closed"
    FAILED = "has reported an error; does nothing more"

    @property
    def has_tasks(self) -> bool:
        """The tasks were opened, and turns run them."""
        return self in (Phase.OPEN, Phase.LEAVING, Phase.LEFT)

    @property
    def shares_input(self) -> bool:
        """Two workers receive this worker's input. What belongs to the one that continues is buffered here without
        a limit: the marker that ends this phase comes behind it, so the sender must not be held up."""
        return self in (Phase.STANDING_BY, Phase.LEAVING, Phase.LEFT)


TRANSITIONS: dict[Phase, frozenset[Phase]] = {
    Phase.CREATED: frozenset({Phase.OPEN, Phase.CLOSED, Phase.FAILED}),
    Phase.STANDING_BY: frozenset({Phase.OPEN, Phase.CLOSED, Phase.FAILED}),
    Phase.OPEN: frozenset({Phase.LEAVING, Phase.CLOSED, Phase.FAILED}),
    Phase.LEAVING: frozenset({Phase.OPEN, Phase.LEFT, Phase.CLOSED, Phase.FAILED}),
    Phase.LEFT: frozenset({Phase.OPEN, Phase.CLOSED, Phase.FAILED}),
    Phase.CLOSED: frozenset(),
    Phase.FAILED: frozenset({Phase.CLOSED}),
}
"""The phases that may follow each phase."""


class IllegalTransition(Exception):
    """A phase that may not follow the present one: an error in Penstock."""

    def __init__(self, now: Phase, wanted: Phase) -> None:
        super().__init__(f"a worker that is {now.name} cannot become {wanted.name}")
