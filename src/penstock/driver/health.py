"""Checks the health of a query run, and describes in one sentence which process was lost and how."""

from __future__ import annotations

from penstock.driver.engine import Engine
from penstock.driver.losses import LostWorker, explain
from penstock.driver.query_run import QueryRun
from penstock.driver.registry import WorkerConnection
from penstock.driver.steps import Cause, Problem
from penstock.errors import PenstockError, SnapshotCorrupt, TopologyFailed

_EXIT_STATUS_TIMEOUT = 0.5
"""Seconds to wait for the exit status of a lost process. The engine reports it at about the same time as the
loss."""
_GRACE = 2.0
"""Seconds after the end of a worker's connection from which on the worker counts as lost. Until then
the engine may end the query, and its explanation is better."""


class RunWatch:
    """Watches one query run: for steps that wait (as a ``Watch``), and for the supervisor."""

    def __init__(self, run: QueryRun, engine: Engine, strict: bool = False) -> None:
        """``strict``: a worker whose connection has ended is a problem at once. Otherwise the engine has
        ``_GRACE`` seconds to explain the loss."""
        self._run, self._engine, self._strict = run, engine, strict

    def alarm(self) -> bool:
        registry = self._run.registry
        if registry.failure is not None or bool(registry.corrupt):
            return True
        return self._strict and registry.broken

    def check(self) -> Problem | None:
        return self._dead() or self._silent() or self._gone()

    def _dead(self) -> Problem | None:
        run, registry = self._run, self._run.registry
        if run.epochs.error is not None:
            return Problem(Cause.FAILED, run.epochs.error)
        if registry.corrupt and not run.opened:
            return Problem(
                Cause.FAILED, SnapshotCorrupt(run.where, f"its state cannot be read: {registry.corrupt}")
            )
        if registry.corrupt:
            text = f"its state of epoch {run.epochs.epoch} cannot be read: {registry.corrupt}"
            return Problem(Cause.UNREADABLE, SnapshotCorrupt(run.where, text))
        failure = registry.failure
        if failure is not None:
            error = TopologyFailed(failure.where, failure.problem, failure.hint)
            return Problem(Cause.LOST if failure.passing else Cause.FAILED, error)
        query = run.query
        if query is not None and not query.is_active():
            return self._lost(self._explain(query.why_ended()))
        return None

    def _explain(self, cause: str) -> str:
        """Return a sentence that names the worker whose connection ended first, and how its process ended."""
        registry = self._run.registry
        with registry.changed:
            gone = [each for each in registry.workers.values() if not each.connected and not each.closed]
        gone.sort(key=lambda each: each.gone_at)
        lost = [self._worker(each) for each in gone]
        executor_lost = "ExecutorLost" in cause
        asked = bool(lost) and not executor_lost
        status = self._engine.exit_status(lost[0].pid, _EXIT_STATUS_TIMEOUT) if asked else None
        return explain(lost, status, executor_lost, cause)

    def _silent(self) -> Problem | None:
        run, timeout = self._run, self._run.settings.lifecycle.heartbeat_timeout
        for worker, (connected, seconds) in run.registry.silent_for().items():
            if seconds <= (timeout if connected else _GRACE):
                continue
            lost = self._worker(run.registry.workers[worker])
            if connected:
                return self._lost(
                    f"{lost} has said nothing for {seconds:.0f} s (setting lifecycle.heartbeat_timeout)"
                )
            status = self._engine.exit_status(lost.pid, 0.0)
            return self._lost(explain([lost], status, False, "no reason, and the query still runs"))
        return None

    def _gone(self) -> Problem | None:
        if self._strict and self._run.registry.broken:
            return self._lost("one of its workers has disconnected")
        return None

    def _lost(self, text: str) -> Problem:
        return Problem(Cause.LOST, TopologyFailed(self._run.where, text))

    def _worker(self, connection: WorkerConnection) -> LostWorker:
        plan = self._run.plan
        tasks = tuple(plan.task[task].key for task in plan.routes.tasks_of(connection.id))
        return LostWorker(str(connection.id), tasks, connection.hello.pid, connection.hello.node)


class RewordedWatch:
    """Wraps a watch and adds context to the messages of its problems."""

    def __init__(self, watch: RunWatch, problem: str, cause: Cause | None = None) -> None:
        """``problem``: a clause that is put before the message. ``cause``: replaces the cause of the problems."""
        self._watch, self._problem, self._cause = watch, problem, cause

    def alarm(self) -> bool:
        return self._watch.alarm()

    def check(self) -> Problem | None:
        found = self._watch.check()
        if found is None:
            return None
        error: PenstockError = TopologyFailed(
            found.error.where, f"{self._problem}: {found.error.problem}", found.error.hint
        )
        return Problem(self._cause or found.cause, error)
