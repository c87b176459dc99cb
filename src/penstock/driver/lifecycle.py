"""The lifecycle of a running topology as a state machine, which takes events and returns decisions.

It has no IO, clock or thread. ``driver.supervisor`` passes events to it on one thread and carries out its
decisions. The result of a decision is the next event.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from penstock.driver.requests import ChangeRequest
from penstock.driver.restart_policy import RestartPolicy
from penstock.driver.steps import Cause, Problem
from penstock.errors import PenstockError, StateUnavailable, TopologyFailed


class TopologyPhase(Enum):
    """The phase of a topology's life."""

    STARTING = "starting"
    ACTIVE = "active"
    INACTIVE = "inactive"
    """The topology runs, but its spouts do not emit."""
    CHANGING = "changing"
    """The topology is being replaced, or a worker moves."""
    RESTARTING = "restarting"
    ENDING = "ending"
    ENDED = "ended"
    FAILED = "failed"


_FROM_RUNNING = frozenset({TopologyPhase.CHANGING, TopologyPhase.RESTARTING, TopologyPhase.ENDING})

TRANSITIONS: Mapping[TopologyPhase, frozenset[TopologyPhase]] = {
    TopologyPhase.STARTING: frozenset({TopologyPhase.ACTIVE, TopologyPhase.ENDING}),
    TopologyPhase.ACTIVE: _FROM_RUNNING | {TopologyPhase.INACTIVE},
    TopologyPhase.INACTIVE: _FROM_RUNNING | {TopologyPhase.ACTIVE},
    TopologyPhase.CHANGING: frozenset({TopologyPhase.ACTIVE, TopologyPhase.INACTIVE, TopologyPhase.ENDING}),
    TopologyPhase.RESTARTING: frozenset({TopologyPhase.ACTIVE, TopologyPhase.INACTIVE, TopologyPhase.ENDING}),
    TopologyPhase.ENDING: frozenset({TopologyPhase.ENDED, TopologyPhase.FAILED}),
    TopologyPhase.ENDED: frozenset(),
    TopologyPhase.FAILED: frozenset(),
}
"""Which phases may follow each phase."""

RUNNING = frozenset({TopologyPhase.ACTIVE, TopologyPhase.INACTIVE})
"""The phases in which requests are accepted."""
OVER = frozenset({TopologyPhase.ENDED, TopologyPhase.FAILED})


# ---- events --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StartEnded:
    """The first start has ended. If there was no problem, the spouts emit."""

    problem: Problem | None


@dataclass(frozen=True)
class SpoutsRequested:
    """An operator or the user's program has requested to activate or deactivate the spouts."""

    active: bool


@dataclass(frozen=True)
class ChangeRequested:
    """An operator, the user's program or a policy has requested a change."""

    request: ChangeRequest


@dataclass(frozen=True)
class ChangeEnded:
    """A change has ended, successfully or not. ``problem``: set only if the query must be restarted or the
    topology must end."""

    problem: Problem | None
    ran: float = 0.0
    """Seconds for which the current query run has run."""


@dataclass(frozen=True)
class RunFailed:
    """The current query run has a problem, or something that it needs: the lease or the engine."""

    problem: Problem
    ran: float
    """Seconds for which the query run has run. Less than 0 if its tasks never opened."""


@dataclass(frozen=True)
class RestartEnded:
    """An attempt to restart the query has ended. If there was no problem, the topology runs."""

    problem: Problem | None


@dataclass(frozen=True)
class KillRequested:
    """An operator or the user's program has requested the end of the topology."""

    drain: bool


@dataclass(frozen=True)
class ShutDownEnded:
    """The shutdown has ended: nothing of the topology runs any more."""

    error: PenstockError | None


Event = (
    StartEnded
    | SpoutsRequested
    | ChangeRequested
    | ChangeEnded
    | RunFailed
    | RestartEnded
    | KillRequested
    | ShutDownEnded
)


# ---- decisions -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StartAgain:
    """Start from an earlier epoch, since the snapshot of the newest epoch cannot be read."""


@dataclass(frozen=True)
class SetSpouts:
    active: bool


@dataclass(frozen=True)
class CarryOut:
    """Carry out a change; ``ChangeEnded`` follows."""

    request: ChangeRequest


@dataclass(frozen=True)
class Refuse:
    """Refuse the request, since it cannot be carried out in this phase."""

    error: PenstockError


@dataclass(frozen=True)
class RestartQuery:
    """Restart the query after a pause; ``RestartEnded`` follows."""

    problem: Problem
    pause: float
    """Seconds."""


@dataclass(frozen=True)
class ShutDown:
    """End the topology; ``ShutDownEnded`` follows."""

    drain: bool
    """Whether to process tuples in flight, and to commit a last epoch."""
    running: bool
    """Whether the tasks are open. False if the topology is being started or restarted, or has failed."""
    error: PenstockError | None


Decision = StartAgain | SetSpouts | CarryOut | Refuse | RestartQuery | ShutDown


class TopologyLifecycle:
    """The state machine of one topology. One thread at a time calls ``handle``; any thread may read ``phase``,
    ``state`` and ``error``."""

    def __init__(self, topology: str, max_restarts: int) -> None:
        self.phase = TopologyPhase.STARTING
        self.error: PenstockError | None = None
        """The error with which the topology failed, if it did."""
        self.restarts = RestartPolicy()
        self.spouts_active = True
        """Whether the spouts should emit whenever the topology runs."""
        self._where, self._max_restarts = f"topology '{topology}'", max_restarts

    @property
    def state(self) -> str:
        """The phase as shown to users: a topology that is being changed is shown as active or inactive."""
        return (self._running if self.phase is TopologyPhase.CHANGING else self.phase).value

    def use(self, max_restarts: int) -> None:
        """Use this setting from now on. Called after a change, since a replacement may have other settings."""
        self._max_restarts = max_restarts

    def handle(self, event: Event) -> Decision | None:
        """Return what to do about an event, or None."""
        match event:
            case StartEnded(problem):
                return self._on_started(problem)
            case SpoutsRequested(active):
                if self.phase not in RUNNING:
                    return self._refuse()
                self.spouts_active = active
                self._enter(self._running)
                return SetSpouts(active)
            case ChangeRequested(request):
                if self.phase not in RUNNING:
                    return self._refuse()
                self._enter(TopologyPhase.CHANGING)
                return CarryOut(request)
            case ChangeEnded(problem, ran):
                self._enter(self._running)
                return None if problem is None else self._on_failed(problem, ran)
            case RunFailed(problem, ran):
                if self.phase in RUNNING:
                    return self._on_failed(problem, ran)
                final = problem.cause in (Cause.INTERNAL, Cause.FAILED)
                broken = final and self.phase not in OVER | {TopologyPhase.ENDING}
                return self.fail(problem.error) if broken else None
            case RestartEnded(problem):
                return self._on_restarted(problem)
            case KillRequested(drain):
                return self._on_kill(drain)
            case ShutDownEnded(error):
                self.error = self.error or error
                self._enter(TopologyPhase.ENDED if self.error is None else TopologyPhase.FAILED)
        return None

    def validate(self) -> None:
        """Raise ``AssertionError`` if the state machine is in an invalid state."""
        assert self.phase is not TopologyPhase.FAILED or self.error is not None, "a failed topology has an error"
        assert self.phase is not TopologyPhase.ENDED or self.error is None, "one that ended has none"

    @property
    def _running(self) -> TopologyPhase:
        return TopologyPhase.ACTIVE if self.spouts_active else TopologyPhase.INACTIVE

    def _enter(self, phase: TopologyPhase) -> None:
        if phase is not self.phase:
            assert phase in TRANSITIONS[self.phase], f"{phase} does not follow {self.phase}"
            self.phase = phase

    def _on_started(self, problem: Problem | None) -> Decision | None:
        if problem is None:
            self._enter(TopologyPhase.ACTIVE)
            return None
        if problem.cause is Cause.UNREADABLE:
            self.restarts.count += 1
            return StartAgain()
        return self.fail(problem.error)

    def _on_failed(self, problem: Problem, ran: float) -> Decision | None:
        if problem.cause is Cause.CANCELLED:
            return None  # a ``KillRequested`` follows
        if not _passing(problem):
            return self.fail(problem.error)
        self.restarts.lost(ran)
        return self._restart(problem)

    def _on_restarted(self, problem: Problem | None) -> Decision | None:
        if problem is None:
            self._enter(self._running)
            return None
        if problem.cause is Cause.CANCELLED:
            return None
        return self._restart(problem) if _passing(problem) or _may_pass(problem) else self.fail(problem.error)

    def _restart(self, problem: Problem) -> Decision:
        restarts = self.restarts
        if restarts.tries >= self._max_restarts:
            text = f"it failed again after {restarts.tries} restarts (setting lifecycle.max_restarts): {problem}"
            return self.fail(TopologyFailed(self._where, text.rstrip(".")))
        self._enter(TopologyPhase.RESTARTING)
        pause = restarts.pause
        restarts.begin()
        return RestartQuery(problem, pause)

    def _on_kill(self, drain: bool) -> Decision | None:
        if self.phase in OVER or self.phase is TopologyPhase.ENDING:
            return None
        running = self.phase in RUNNING
        self._enter(TopologyPhase.ENDING)
        return ShutDown(drain and running, running, None)

    def fail(self, error: PenstockError) -> Decision:
        """Return the decision to end the topology, since it cannot continue because of an error."""
        self.error = error
        self._enter(TopologyPhase.ENDING)
        return ShutDown(drain=False, running=False, error=error)

    def _refuse(self) -> Refuse:
        return Refuse(not_running(self._where, self.state))


def not_running(where: str, state: str) -> TopologyFailed:
    return TopologyFailed(where, f"it is {state}, not running")


def _passing(problem: Problem) -> bool:
    """Whether a restart of the query may help."""
    return problem.cause in (Cause.LOST, Cause.UNREADABLE, Cause.TIMED_OUT) or isinstance(
        problem.error, StateUnavailable
    )


def _may_pass(problem: Problem) -> bool:
    """Whether another attempt to restart may help although the last one failed with an error of the user's code. A
    service that ``prepare`` or ``open`` need may be down for the same reason as the lost worker."""
    return problem.cause is Cause.FAILED and isinstance(problem.error, TopologyFailed)
