"""The first start of a topology, and its restart after a loss, as steps.

A restart, in order:

1. The lost query is stopped, and the engine frees its slots (``stopped``).
2. If its snapshots could not be read, the state directory falls back to an earlier epoch (``fallen_back``).
3. After a failed attempt the supervisor waits, longer each time (``waited``).
4. A new query run of the same deployment becomes the current one (``renewed``). Released nodes are requested again
   (``nodes_asked_back``), because the remaining ones may be too few. The slots are reserved (``reserved``), and
   the query is launched (``launched``).
5. While its workers start, the new run takes over the state directory (``claimed``). Workers connect
   (``connected``) and get their slots (``assigned``).
6. Its tasks open with the state of the newest committed epoch (``opened``), and its spouts emit (``activated``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from penstock.driver.query_runs import QueryRuns
from penstock.driver.steps import Cause, Problem, Step


class FirstStart:
    """The first start, which ``submit`` waits for. If it fails, the topology is shut down."""

    kind, number = "start", 1

    def __init__(self, runs: QueryRuns, listen: Callable[[], None]) -> None:
        """``listen`` starts the coordinator, so that workers can connect."""
        self._runs, self._listen = runs, listen

    def steps(self) -> Iterator[Step]:
        runs = self._runs
        yield Step("nodes_asked_back", runs.engine.take_nodes_back)  # another topology may have released nodes
        run = runs.current
        yield runs.reserve_step(run.deployment, run.settings.lifecycle.start_timeout)
        yield Step("listening", self._listen)
        yield from runs.start_steps(run)


class Restart:
    """One attempt to start a lost topology again."""

    kind = "restart"

    def __init__(self, number: int, problem: Problem, pause: float, runs: QueryRuns) -> None:
        """``pause``: seconds before the query is launched."""
        self.number = number
        self._problem, self._pause, self._runs = problem, pause, runs

    def steps(self) -> Iterator[Step]:
        runs, lost = self._runs, self._runs.current
        yield Step("stopped", lost.stop)
        if self._problem.cause is Cause.UNREADABLE:
            yield Step("fallen_back", lambda: lost.deployment.state.fall_back(lost.registry.corrupt))
        yield Step("waited", until=lambda: False, limit=self._pause, on_problem=_end_of_pause)
        yield Step("renewed", self._renew)
        yield Step("nodes_asked_back", runs.engine.take_nodes_back)  # the remaining nodes may be too few
        yield runs.reserve_step(lost.deployment, lost.settings.lifecycle.start_timeout)
        yield from runs.start_steps(runs.current)

    def _renew(self) -> None:
        runs, lost = self._runs, self._runs.current
        runs.current = runs.new(lost.deployment, lost.bus, lost)


def _end_of_pause(problem: Problem) -> Problem | None:
    return None if problem.cause is Cause.TIMED_OUT else problem
