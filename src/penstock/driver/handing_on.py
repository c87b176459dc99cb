"""How a query run that is replaced leaves its tuples in flight to the next one, with at-least-once delivery.

The tuples finish if that takes no longer than a moment. Otherwise the spouts fail them at once (*Lu 2020*, section
5): replay stores them in From, other spouts have them in their snapshot, and the next run reads them again. So the
time without output does not depend on how much waits in the queues. Only a spout without state would forget its
tuples; they get ``lifecycle.drain_timeout`` to finish.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from penstock.driver.drain import Drain
from penstock.driver.query_run import QueryRun
from penstock.driver.steps import Problem, Step, Watch, nothing
from penstock.metrics.stats import TaskStats
from penstock.protocol.commands import HandOnUnfinished

PATIENCE = 0.2
"""Seconds that tuples in flight get to finish before they are handed on. Tuples that are handed on are processed
twice in part, so it is several times what they take when queues are short; and it is less than half of the time
without output that is acceptable."""
_LAST_TICKS = 1.0
"""Seconds to finish what the last ticks emitted. Short, because no spout emits meanwhile."""


def backlog_seconds(tasks: Iterable[TaskStats]) -> float:
    """Return how long the task with the longest queue will take for it, at the speed it had so far."""
    return max((task.queued * task.busy / task.executed for task in tasks if task.executed), default=0.0)


class HandingOn:
    """The steps between the pause of the spouts and the last epoch. Used on the supervisor's thread."""

    def __init__(self, run: QueryRun, watch: Sequence[Watch]) -> None:
        """``watch``: what must stay well while a step waits. If the run is lost, nothing is waited for."""
        self.unfinished = False
        """Whether tuples in flight were handed on, or did not finish."""
        self.waited = PATIENCE
        """Seconds that they had to finish."""
        self._run, self._watch = run, watch

    def steps(self) -> Iterator[Step]:
        run = self._run
        if backlog_seconds(run.bus.tasks().values()) > PATIENCE:
            self.unfinished = True
        else:
            yield self._finish("finished", PATIENCE)
        if self.unfinished:
            yield self._hand_on()
            if self._left():
                self.unfinished = False
                yield self._finish("rest_finished", run.settings.lifecycle.drain_timeout)
        # Ticks stop after the tuples, because sinks and other bolts may need ticks to finish.
        if self.unfinished:
            yield Step("ticks_stopped", run.stop_ticks, cancellable=False)
        else:
            yield self._finish("ticks_stopped", _LAST_TICKS, run.stop_ticks)

    def _finish(self, name: str, limit: float, do: Callable[[], None] = nothing) -> Step:
        """Return a step that waits until the tuples in flight have finished."""
        self.waited = max(self.waited, limit)
        return self._step(name, do, Drain(self._run.registry).done, limit)

    def _hand_on(self) -> Step:
        registry = self._run.registry
        return self._step(
            "handed_on",
            lambda: registry.send(HandOnUnfinished()),
            lambda: all(worker.left_unfinished is not None for worker in registry.workers.values()),
            self._run.settings.lifecycle.drain_timeout,
        )

    def _left(self) -> int:
        return sum(worker.left_unfinished or 0 for worker in self._run.registry.workers.values())

    def _step(self, name: str, do: Callable[[], None], until: Callable[[], bool], limit: float) -> Step:
        return Step(
            name, do, until, limit=limit, watch=self._watch, on_problem=self._not_finished, cancellable=False
        )

    def _not_finished(self, problem: Problem) -> None:
        self.unfinished = True
