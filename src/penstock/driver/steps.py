"""Steps of a change of the running topology, and the one runner that carries them out.

A change (a replacement, the move of a worker, a restart, a shutdown) is a list of ``Step``. The runner carries out
one after the other: it calls ``do``, waits for ``until``, and notes when the step ended. If a step fails, takes
too long, or the change is cancelled, the runner calls ``undo`` of this step and of all steps before it, the last
one first. From a step marked ``point_of_no_return`` on nothing is undone: a later problem leaves the change
broken, and the caller has to go forward (usually by a restart).

How a change ended is a value, ``StepsEnded``. Steps may raise; nothing else has to catch it.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from penstock.clock import Clock, SystemClock
from penstock.errors import PenstockError, TopologyFailed

log = logging.getLogger("penstock.driver")

CHECK_INTERVAL = 0.2
"""Seconds between two checks of the watches while no worker reports anything. A check may ask the engine, so it is
not made more often."""


class Cause(Enum):
    """Why a change could not continue. It determines what can be done about it."""

    CANCELLED = "cancelled"
    """The topology was asked to end."""
    TIMED_OUT = "timed out"
    LOST = "lost"
    """A worker or the query is gone: starting the query again may help."""
    UNREADABLE = "unreadable"
    """A worker could not read its snapshot: starting from an earlier epoch may help."""
    FAILED = "failed"
    """An error that does not go away by itself, such as one of user code."""
    INTERNAL = "internal"
    """An exception that is not a ``PenstockError``: the engine died, or Penstock has a bug."""


@dataclass(frozen=True)
class Problem:
    """Why a change could not continue, with the error for users."""

    cause: Cause
    error: PenstockError

    def __str__(self) -> str:
        return str(self.error)


class Watch(Protocol):
    """Something that must stay well while a step waits, such as the workers of a query run."""

    def alarm(self) -> bool:
        """Whether ``check`` would find a problem at once. Called often and under the waiter's lock: it must be
        quick."""
        ...

    def check(self) -> Problem | None:
        """Return the problem, or None. Called every ``CHECK_INTERVAL`` and after an alarm; it may ask the
        engine."""
        ...


def nothing() -> None:
    """Do nothing, for a step that only waits."""


@dataclass(frozen=True)
class Step:
    """One step of a change. All functions are called on the thread of the runner, one at a time."""

    name: str
    """As reported in ``StepsEnded.times`` and to crash points."""
    do: Callable[[], None] = nothing
    """Begins the step. Without ``until`` the step ends when this returns. May raise."""
    until: Callable[[], bool] | None = None
    """Returns whether the step has ended. It is called whenever a worker reports something, under the waiter's
    lock, so it must be quick; ``poll`` is for a slow one."""
    expected: str = ""
    """What did not happen in time, as a clause for the error message of a time-out: "not all workers
    connected"."""
    progress: Callable[[], str] = str
    """Returns how far the step has come, for the same message. Empty if there is nothing to say."""
    hint: str = ""
    """What to do about a time-out, for the same message."""
    limit: float = math.inf
    """Seconds that ``until`` may take."""
    watch: Sequence[Watch] = ()
    """What must stay well while the step waits."""
    undo: Callable[[], None] | None = None
    """Reverts the step. Also called if the step itself failed half-way; must not fail for that reason."""
    on_problem: Callable[[Problem], Problem | None] | None = None
    """Called with a problem of this step. Returns the problem to report instead, or None to continue with the next
    step."""
    poll: bool = False
    """Call ``until`` every ``CHECK_INTERVAL`` without the lock, because it asks the engine or reads files."""
    cancellable: bool = True
    """Whether the change may be cancelled before this step and while it waits."""
    point_of_no_return: bool = False
    """No step is undone once this step has begun."""


class Change(Protocol):
    """What the runner carries out."""

    @property
    def kind(self) -> str:
        """For messages: "replacement", "move", "restart", …"""
        ...

    @property
    def number(self) -> int:
        """The number of the change among those of its kind, from 1. Crash points name it."""
        ...

    def steps(self) -> Iterable[Step]:
        """Called once. A generator may prepare each step when the one before has ended, and may raise."""
        ...


class Ending(Enum):
    """How a list of steps ended."""

    DONE = "done"
    UNDONE = "undone"
    """A problem occurred, and all steps were undone."""
    BROKEN = "broken"
    """A problem occurred behind the point of no return."""


@dataclass(frozen=True)
class StepsEnded:
    """How a change ended."""

    ending: Ending
    times: Mapping[str, float]
    """When each step ended, on the waiter's clock, in order."""
    step: str = ""
    """The step that had the problem."""
    problem: Problem | None = None

    @property
    def done(self) -> bool:
        return self.ending is Ending.DONE


@dataclass(frozen=True)
class Settled:
    """The outcome of a change whose steps have ended."""

    result: Any = None
    """The answer to the request, if the change was carried out."""
    error: PenstockError | None = None
    """The answer to the request, if the change was not carried out."""
    problem: Problem | None = None
    """Set if the query has to be restarted, or the topology has to end."""
    left_behind: str = ""
    """If the change was cancelled behind its point of no return: what it did not finish, as a clause."""


class Waiter(Protocol):
    """A clock, and a way to wait. Tests use a simulated clock."""

    def now(self) -> float:
        """Seconds on a clock that never goes back."""
        ...

    def wait_for(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait until the condition holds, at most this many seconds. Returns whether it holds."""
        ...


class ConditionWaiter:
    """Waits on the condition variable that is notified whenever a worker reports something."""

    def __init__(self, changed: threading.Condition, clock: Clock | None = None) -> None:
        self._changed, self._clock = changed, clock or SystemClock()

    def now(self) -> float:
        return self._clock.monotonic()

    def wait_for(self, condition: Callable[[], bool], seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(condition, max(0.0, seconds))


def _never() -> bool:
    return False


def _unexpected(error: Exception) -> PenstockError:
    return TopologyFailed("topology", f"internal error (please report it): {type(error).__name__}: {error}")


def _no_crash(change: Change, step: str) -> None:
    pass


@dataclass
class StepRunner:
    """Carries out changes, one at a time, on the thread that calls ``run``."""

    waiter: Waiter
    cancelled: Callable[[], bool] = _never
    """Returns whether the change is to be cancelled, because the topology is asked to end. Must be quick."""
    crash: Callable[[Change, str], None] = _no_crash
    """Called when a step of a change has ended. Crash tests end the process here."""
    explain: Callable[[Exception], PenstockError] = _unexpected
    """Converts an exception that is not a ``PenstockError`` into an error."""
    where: str = "topology"
    """Names the topology in error messages."""
    change: Change | None = field(default=None, init=False)
    """The change that is being carried out."""

    def run(self, change: Change, cancelled: Callable[[], bool] | None = None) -> StepsEnded:
        """Carry out a change. ``cancelled`` replaces that of the runner for this change. Does not raise, except
        for a ``BaseException`` such as ``KeyboardInterrupt``; steps are undone in this case, too."""
        self.change = change
        cancelled = cancelled or self.cancelled
        times: dict[str, float] = {}
        begun: list[Step] = []
        undoable = True
        steps = iter(change.steps())
        while True:
            try:
                step, problem = self._next(steps)
                if step is not None:
                    stop = step.cancellable and cancelled()
                    begun.append(step)
                    undoable = undoable and (stop or not step.point_of_no_return)
                    problem = self._carry_out(step, cancelled, stop)
            except BaseException:
                if undoable:
                    self._undo(begun)
                raise
            name = begun[-1].name if begun else ""
            if problem is not None:
                log.info("%s: step '%s': %s", change.kind, name, problem)
                if undoable:
                    self._undo(begun)
                return StepsEnded(Ending.UNDONE if undoable else Ending.BROKEN, times, name, problem)
            if step is None:
                return StepsEnded(Ending.DONE, times)
            times[name] = self.waiter.now()
            self.reached(change, name)

    def reached(self, change: Change, step: str) -> None:
        """Called when a step has ended. Fault tests replace this method to cause a fault at a step."""
        self.crash(change, step)

    def pause(self, seconds: float) -> bool:
        """Wait, for a step that has to retry something. Returns True if the change is cancelled."""
        return self.waiter.wait_for(self.cancelled, seconds)

    def _next(self, steps: Iterator[Step]) -> tuple[Step | None, Problem | None]:
        """Return the next step, or None after the last one. If the step could not be made, return the problem."""
        try:
            return next(steps, None), None
        except Exception as error:
            return None, self._problem(error)

    def _problem(self, error: Exception) -> Problem:
        if isinstance(error, PenstockError):
            return Problem(Cause.FAILED, error)
        log.debug("in a step", exc_info=True)
        return Problem(Cause.INTERNAL, self.explain(error))

    def _carry_out(self, step: Step, cancelled: Callable[[], bool], stop: bool) -> Problem | None:
        """``stop``: the change was cancelled before the step."""
        try:
            if stop:
                problem: Problem | None = self._cancelled()
            else:
                step.do()
                problem = self._await(step, cancelled)
        except Exception as error:
            problem = self._problem(error)
        if problem is not None and step.on_problem is not None:
            problem = step.on_problem(problem)
        return problem

    def _await(self, step: Step, cancelled: Callable[[], bool]) -> Problem | None:
        if step.until is None:
            return None
        deadline = self.waiter.now() + step.limit
        while True:
            if step.poll:
                ended = step.until()
            else:
                ended = self._look(step, cancelled, min(CHECK_INTERVAL, deadline - self.waiter.now()))
            if ended and not any(watch.alarm() for watch in step.watch):
                return None
            for watch in step.watch:
                problem = watch.check()
                if problem is not None:
                    return problem
            if ended:
                return None
            if step.cancellable and cancelled():
                return self._cancelled()
            if self.waiter.now() >= deadline:
                return self._timed_out(step)
            if step.poll:
                self.waiter.wait_for(cancelled if step.cancellable else _never, CHECK_INTERVAL)

    def _look(self, step: Step, cancelled: Callable[[], bool], seconds: float) -> bool:
        """Wait until the step has ended, a watch has an alarm, the change is cancelled or the seconds have passed.
        Returns whether the step has ended."""
        ended = False

        def over() -> bool:
            nonlocal ended
            assert step.until is not None
            ended = step.until()
            return ended or any(watch.alarm() for watch in step.watch) or (step.cancellable and cancelled())

        self.waiter.wait_for(over, seconds)
        return ended

    @staticmethod
    def _undo(begun: Sequence[Step]) -> None:
        interrupted: BaseException | None = None
        for step in reversed(begun):
            if step.undo is None:
                continue
            try:
                step.undo()
            except Exception as error:  # the other steps must still be undone
                log.warning("undoing step '%s': %s", step.name, error)
            except BaseException as error:  # Ctrl-C: raised when all steps are undone
                interrupted = error
        if interrupted is not None:
            raise interrupted

    def _cancelled(self) -> Problem:
        return Problem(
            Cause.CANCELLED,
            TopologyFailed(self.where, "the change was cancelled, because the topology was asked to end"),
        )

    def _timed_out(self, step: Step) -> Problem:
        text = f"{step.expected or step.name} within {step.limit:g} s"
        progress = step.progress()
        return Problem(
            Cause.TIMED_OUT, TopologyFailed(self.where, text + (f"; {progress}" if progress else ""), step.hint)
        )
