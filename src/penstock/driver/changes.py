"""Carries out the change requests of a running topology, one at a time. Requests come from users and from the
policies of scaling, refit and placement. One arbiter decides which policy may act."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from penstock.control.arbiter import Arbiter, ChangeSource
from penstock.driver.load_monitor import LoadMonitor
from penstock.driver.load_sample import MonitorSample
from penstock.driver.move import WorkerMove
from penstock.driver.placement_controller import PlacementController
from penstock.driver.placing import Placer
from penstock.driver.query_runs import QueryRuns
from penstock.driver.refit_controller import RefitController
from penstock.driver.replacement import Replacement
from penstock.driver.requests import ChangeRequest, Moved, MoveRequest, Replaced, ReplaceRequest
from penstock.driver.scaling_controller import ScalingController
from penstock.driver.steps import Settled, StepRunner
from penstock.errors import PenstockError, TopologyFailed


class Changes:
    """The changes of one topology. Methods are called on the supervisor's thread; any thread may read the lists
    and the controllers."""

    def __init__(self, runs: QueryRuns, runner: StepRunner, monitor: LoadMonitor) -> None:
        self._runs, self._runner, self._monitor = runs, runner, monitor
        self.scalings = self._make_scalings()
        """Decides about the numbers of tasks, and keeps its decisions with their reasons."""
        self.refits = self._make_refits()
        """Decides which components share workers, and keeps its decisions."""
        self.placements = PlacementController(runs.current.settings)
        """Decides on which nodes workers run, and keeps its decisions."""
        self.placer = Placer(runs, self.placements)
        self.replaced: list[Replaced] = []
        """Completed replacements, oldest first."""
        self.moved: list[Moved] = []
        """Completed moves of single workers, oldest first."""
        self._arbiter = Arbiter()
        self._scaling_at = self._refit_at = 0.0

    # ---- requests of the policies ----------------------------------------------------------------------

    def decided(self, sample: MonitorSample | None, active: bool) -> ChangeRequest | None:
        """Return the change that a policy requests now, or that has waited for nodes to join, if any. Called
        periodically while the topology runs, with a load sample if the load monitor has just taken one.
        ``active``: the spouts emit. Policies decide only while they do."""
        if not active:
            return self.placer.next(None, self._runs.current)
        now = self._runs.now()
        return self._scaling(now) or self._refit(now) or self._placement(now, sample)

    def _scaling(self, now: float) -> ReplaceRequest | None:
        """Ask the scaling policy once per ``scaling.interval``. The scaling controller takes its own load
        samples."""
        current = self._runs.current
        if self.scalings.idle or now < self._scaling_at or self._arbiter.may_change(ChangeSource.SCALING, now):
            return None
        self._scaling_at = now + current.settings.scaling.interval
        scale = self.scalings.decide(now, current.bus.tasks())
        if scale is None:
            return None
        return ReplaceRequest(None, scale.reason, source=ChangeSource.SCALING, parallelism=scale.parallelism)

    def _refit(self, now: float) -> ReplaceRequest | None:
        """Ask the refit policy once per interval. The refit controller takes its own samples."""
        current = self._runs.current
        if self.refits.idle or now < self._refit_at:
            return None
        self._refit_at = now + self.refits.interval
        choice = self.refits.decide(
            now,
            current.bus.tasks(),
            current.bus.load(),
            lambda: self._arbiter.may_change(ChangeSource.REFIT, now),
        )
        if choice is None:
            return None
        return ReplaceRequest(None, choice.reason, source=ChangeSource.REFIT, fit=choice.fit)

    def _placement(self, now: float, sample: MonitorSample | None) -> ChangeRequest | None:
        """Ask the placement policy if a load sample has just been taken. Nodes that were requested earlier are
        used in any case."""
        if sample is not None and (why_not := self._arbiter.may_change(ChangeSource.PLACEMENT, now)):
            if self.placements.on:
                self.placements.idle(now, f"no move: {why_not}")
            sample = None
        request = self.placer.next(sample, self._runs.current)
        return None if request is None else replace(request, source=ChangeSource.PLACEMENT)

    def _make_scalings(self) -> ScalingController:
        current = self._runs.current
        return ScalingController(current.plan, current.deployment.topology, current.settings, self._runs.room)

    def _make_refits(self) -> RefitController:
        current = self._runs.current
        return RefitController(current.plan, current.deployment.topology, current.settings, self._runs.room)

    # ---- carrying out requests -------------------------------------------------------------------------

    def carry_out(self, request: ChangeRequest) -> Settled:
        """Carry out a request and answer it. Returns its outcome. The outcome has a problem if the query must be
        restarted or the topology must end because of it; otherwise the topology continues, changed or not. Raises
        nothing."""
        settled = self._move(request) if isinstance(request, MoveRequest) else self._replace(request)
        if settled.error is None:
            _answer(request.answer, settled.result)
        else:
            self._not_done(request, settled.error)
        return settled

    def refuse(self, request: ChangeRequest, error: PenstockError) -> None:
        """Answer a request with an error, since it is not carried out."""
        if not request.answer.done():
            request.answer.set_exception(error)

    def _replace(self, request: ReplaceRequest) -> Settled:
        before = self._runs.current
        outdated = request.attempt is not None and request.attempt != before.number
        if request.placement is not None and (outdated or request.topology is not before.deployment.topology):
            return Settled(error=self._outdated())
        change = Replacement(len(self.replaced) + 1, request, self._runs)
        settled = change.settle(self._runner.run(change))
        if settled.result is not None:
            self.replaced.append(settled.result)
            self._arbiter.changed(request.source, self._runs.now())
            self._adopt(before.settings, request.source)
        return settled

    def _adopt(self, before: Any, source: ChangeSource) -> None:
        """Tell the policies about the new form of the topology. If its settings differ from ``before``, the
        policies start anew with the new settings."""
        now = self._runs.current
        if now.settings == before:
            topology, time = now.deployment.topology, self._runs.now()
            self.scalings.replaced(now.plan, topology, time)
            self.refits.replaced(now.plan, topology, time, source is ChangeSource.REFIT)
        else:
            self.scalings, self.refits = self._make_scalings(), self._make_refits()
            self.placements.apply_settings(now.settings)
            self._monitor.apply_settings(now.settings)

    def _move(self, request: MoveRequest) -> Settled:
        run, done = self._runs.current, []
        if request.attempt != run.number:
            return Settled(error=self._outdated())
        settled = Settled()
        for worker, node in sorted(request.nodes.items()):
            try:
                change = WorkerMove(len(self.moved) + 1, worker, node, self._runs)
            except PenstockError as error:
                settled = Settled(error=error)
                break
            settled = change.settle(self._runner.run(change))
            if settled.error is not None:
                break
            done.append(settled.result)
            self.moved.append(settled.result)
            run.bus.note("move", "", f"{request.reason}: {settled.result}")
        if done:
            self._arbiter.changed(request.source, self._runs.now())
            self._monitor.apply_settings(run.settings)  # a load sample with a worker on two nodes is useless
        return settled if settled.error is not None else Settled(done)

    def _not_done(self, request: ChangeRequest, error: PenstockError) -> None:
        self._runs.current.bus.note(request.kind, "", f"not done: {error}")
        self.placer.failed(request, error)
        if request.source is ChangeSource.REFIT:
            run = self._runs.current
            self.refits.replaced(run.plan, run.deployment.topology, self._runs.now(), by_refit=True)
        self.refuse(request, error)

    def _outdated(self) -> TopologyFailed:
        text = "it has been started again or replaced since the change was requested"
        return TopologyFailed(self._runs.current.where, text, "Request it again.")


def _answer(answer: Future[Any], result: Any) -> None:
    if not answer.done():
        answer.set_result(result)
