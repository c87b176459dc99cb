"""The life of a running topology as a state machine: events in, decisions out.

No IO, no clock, no thread. ``driver.supervisor`` feeds it with events, on one thread, and carries out what it
decides; what comes of a decision is the next event.
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
    """Where in its life a topology is."""

    STARTING = "starting"
    ACTIVE = "active"
    INACTIVE = "inactive"
    """It runs, and its spouts pause."""
    CHANGING = "changing"
    """It is being replaced, or a worker moves."""
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
"""The phases in which requests are taken."""
OVER = frozenset({TopologyPhase.ENDED, TopologyPhase.FAILED})


# ---- events --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StartEnded:
    """The first start came to an end; without a problem the spouts emit."""

    problem: Problem | None


@dataclass(frozen=True)
class SpoutsRequested:
    """Somebody wants the spouts to emit, or to pause."""

    active: bool


@dataclass(frozen=True)
class ChangeRequested:
    """Somebody, or a policy, wants a change."""

    request: ChangeRequest


@dataclass(frozen=True)
class ChangeEnded:
    """A change came to an end, done or not. ``problem``: only where the query has to be started again."""

    problem: Problem | None
    ran: float = 0.0
    """Seconds for which the query run that has the problem ran."""


@dataclass(frozen=True)
class RunFailed:
    """The current query run, or what it needs, has a problem."""

    problem: Problem
    ran: float
    """Seconds for which it ran; less than 0: it never did."""


@dataclass(frozen=True)
class RestartEnded:
    """An attempt to start the query again came to an end; without a problem it runs."""

    problem: Problem | None


@dataclass(frozen=True)
class KillRequested:
    """Somebody wants the topology to end."""

    drain: bool


@dataclass(frozen=True)
class ShutDownEnded:
    """Nothing of the topology is left."""

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
    """Start from an earlier epoch: the snapshot of the newest one cannot be read."""


@dataclass(frozen=True)
class SetSpouts:
    active: bool


@dataclass(frozen=True)
class CarryOut:
    """Carry out a change; ``ChangeEnded`` follows."""

    request: ChangeRequest


@dataclass(frozen=True)
class Refuse:
    """The event asked for something that cannot be done in this phase."""

    error: PenstockError


@dataclass(frozen=True)
class RestartQuery:
    """Start the query again after a pause; ``RestartEnded`` follows."""

    problem: Problem
    pause: float
    """Seconds."""


@dataclass(frozen=True)
class ShutDown:
    """End everything; ``ShutDownEnded`` follows."""

    drain: bool
    """Let tuples in flight finish, and commit a last epoch."""
    running: bool
    """Its tasks are open; otherwise it is just being started or restarted, or has failed."""
    error: PenstockError | None


Decision = StartAgain | SetSpouts | CarryOut | Refuse | RestartQuery | ShutDown


class TopologyLifecycle:
    """The machine of one topology. ``handle`` is called by one thread at a time; ``phase``, ``state`` and
    ``error`` may be read by any."""

    def __init__(self, topology: str, max_restarts: int) -> None:
        self.phase = TopologyPhase.STARTING
        self.error: PenstockError | None = None
        """Why the topology failed, if it did."""
        self.restarts = RestartPolicy()
        self.spouts_active = True
        """Whether the spouts are to emit whenever the topology runs."""
        self._where, self._max_restarts = f"topology '{topology}'", max_restarts

    @property
    def state(self) -> str:
        """As people see it: a topology that is being changed is still active, or inactive."""
        return (self._running if self.phase is TopologyPhase.CHANGING else self.phase).value

    def use(self, max_restarts: int) -> None:
        """The topology was replaced by one with this setting."""
        self._max_restarts = max_restarts

    def handle(self, event: Event) -> Decision | None:
        """What to do about an event; None: nothing."""
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
        """Raises ``AssertionError`` where the machine is in a state it must never be in."""
        assert (self.phase is TopologyPhase.FAILED) <= (self.error is not None), "a failed topology has an error"
        assert (self.phase is TopologyPhase.ENDED) <= (self.error is None), "one that ended has none"

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
            return None  # the request to end is on its way
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
        """The topology cannot go on."""
        self.error = error
        self._enter(TopologyPhase.ENDING)
        return ShutDown(drain=False, running=False, error=error)

    def _refuse(self) -> Refuse:
        return Refuse(not_running(self._where, self.state))


def not_running(where: str, state: str) -> TopologyFailed:
    return TopologyFailed(where, f"it is {state}, not running")


def _passing(problem: Problem) -> bool:
    """Starting the query again may help."""
    return problem.cause in (Cause.LOST, Cause.UNREADABLE, Cause.TIMED_OUT) or isinstance(
        problem.error, StateUnavailable
    )


def _may_pass(problem: Problem) -> bool:
    """What ``prepare`` or ``open`` need may be down together with what was lost: worth another attempt."""
    return problem.cause is Cause.FAILED and isinstance(problem.error, TopologyFailed)
