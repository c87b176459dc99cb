"""The end of a topology, as steps. No step is undone, and a problem in one step does not prevent the later ones.

With draining: the spouts pause (``paused``), tuples in flight finish (``drained``), and a last epoch is committed
(``last_committed``). Then, in any case: the tasks are closed (``closed``), the queries are stopped (``stopped``),
and the task slots are released (``released``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

from penstock.driver.drain import Drain
from penstock.driver.query_runs import QueryRuns
from penstock.driver.steps import Cause, Problem, Step
from penstock.errors import PenstockError, TopologyFailed

log = logging.getLogger("penstock.driver")

_LONG_CALL = 2.0
"""Seconds in one call of user code from which on the call is reported as the reason for a drain that takes too
long. Usual calls take microseconds to milliseconds."""


class ShuttingDown:
    """The shutdown of a topology."""

    kind, number = "shutdown", 1

    def __init__(
        self,
        runs: QueryRuns,
        drain: bool,
        running: bool,
        on_closed: Callable[[ShuttingDown], None],
        give_back: Sequence[Callable[[], None]],
    ) -> None:
        """``drain``: let tuples in flight finish. ``running``: the tasks are open and have to be closed.
        ``on_closed`` is called when they are; the functions in ``give_back`` after the queries are stopped, in
        order, even if one raises."""
        self.error: PenstockError | None = None
        """An error of user code that occurred during the shutdown."""
        self._runs, self._run, self._drain, self._running = runs, runs.current, drain, running
        self._on_closed, self._give_back = on_closed, give_back
        self._not_drained = self._not_committed = ""

    @property
    def left_behind(self) -> str:
        """What was not finished, as a clause. Empty if everything was."""
        again = "the next run repeats it" if self._not_committed else ""
        return "; ".join(filter(None, (self._not_drained, self._not_committed, again)))

    def steps(self) -> Iterator[Step]:
        run, runs = self._run, self._runs
        limit = run.settings.lifecycle.drain_timeout
        gone = (runs.watch(run, strict=True),)
        if self._drain:
            yield Step("paused", run.deactivate, on_problem=_log_and_continue, cancellable=False)
            drained = Drain(run.registry).done
            yield Step("drained", until=drained, limit=limit, watch=gone, on_problem=self._on_not_drained)
            if run.epochs.running:
                yield run.epochs.commit_step("last_committed", gone, self._on_not_committed, last=True)
        if self._running:
            yield run.close_step()
        yield self._finally("ended", self._note_failure)
        yield self._finally("on_closed", lambda: self._on_closed(self))
        yield self._finally("retired_stopped", lambda: runs.stop_retired(at_once=True))
        yield self._finally("stopped", run.stop)
        for number, give_back in enumerate(self._give_back):
            yield self._finally(f"given_back_{number}", give_back)
        yield self._finally("released", lambda: runs.release(run.deployment))

    @staticmethod
    def _finally(name: str, do: Callable[[], None]) -> Step:
        return Step(name, do, on_problem=_log_and_continue, cancellable=False)

    def _note_failure(self) -> None:
        failure = self._run.registry.failure
        if failure is not None and self._running:
            self.error = TopologyFailed(failure.where, failure.problem, failure.hint)

    def _on_not_drained(self, problem: Problem) -> None:
        if problem.cause in (Cause.TIMED_OUT, Cause.CANCELLED):
            run = self._run
            limit = run.settings.lifecycle.drain_timeout
            what = "the next run processes them" if run.keeps_state else "they are lost"
            in_time = f"within {limit:g} s" if problem.cause is Cause.TIMED_OUT else "because it was ended at once"
            self._not_drained = f"{self._blocked()}tuples in flight were not processed {in_time}; {what}"
            log.warning("%s: %s", run.where, self._not_drained)

    def _blocked(self) -> str:
        """Return a clause about the longest call of user code that has not returned. Empty if none takes long."""
        seconds, task = max(
            ((stats.in_call, task) for task, stats in self._run.bus.tasks().items()), default=(0, 0)
        )
        if seconds < _LONG_CALL:
            return ""
        key = self._run.plan.task[task].key
        return f"{key} has been in one call of its component's code for {seconds:.0f} s, so "

    def _on_not_committed(self, problem: Problem) -> None:
        if problem.cause is Cause.LOST:
            self._not_committed = "a worker was lost before the last epoch was committed"
            return
        log.warning("%s: its last epoch is not committed (%s); the next run repeats it", self._run.where, problem)
        self._not_committed = f"the last epoch is not committed ({str(problem).rstrip('.')})"


def _log_and_continue(problem: Problem) -> None:
    log.debug("while shutting down: %s", problem)
