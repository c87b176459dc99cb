"""Refits of a running topology: passes samples to the refit policy, and turns what it proposes into the ``Fit`` of
a replacement. The lifecycle carries out the replacement."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, replace
from typing import Literal, cast

from penstock.control.refit import Refit, RefitKind, RefitPolicy, RefitTuning
from penstock.driver.policy_decision import PolicyDecision
from penstock.driver.refit_sampler import MeasuredLoad, RefitSampler
from penstock.metrics.stats import TaskStats
from penstock.metrics.views import Load
from penstock.plan.fusing import find_pairs
from penstock.plan.model import Fit, Plan
from penstock.plan.planner import make_plan
from penstock.settings import Settings
from penstock.topology.builder import Topology

log = logging.getLogger("penstock.refit")

_LONGEST = 1.5
"""Maximum length of a sample, in intervals. Anything longer means that there was a pause."""


@dataclass(frozen=True)
class RefitChoice:
    """A refit that is to be carried out."""

    fit: Fit
    reason: str


class RefitController:
    """Serves one topology across replacements and restarts. One thread calls it; other threads may copy
    ``decisions``."""

    def __init__(
        self, plan: Plan, topology: Topology, settings: Settings, room: Callable[[], int] | None = None
    ) -> None:
        """``room`` returns the slots that a replacement may use now. Without it their number is not limited."""
        self.decisions: deque[PolicyDecision] = deque(maxlen=1000)
        self.interval = settings.workers.refit_after / RefitTuning().samples
        """Seconds of a sample."""
        self._room = room
        self._refused = False
        """The last proposal was refused. Repeated refusals are reported once, although their figures differ."""
        self._mode = cast(Literal["off", "once", "always"], settings.workers.refit)
        # A replacement loses what components keep outside of their state. Where a restart may come at any time,
        # that is expected; at most once nothing restarts without need, so there the user must ask for it.
        wanted = self._mode == "always" or settings.delivery.guarantee != "at_most_once"
        # Packed executors could not move one by one.
        apart = settings.placement.by_executor and not settings.workers.count and self._mode == "once"
        self._on = self._mode != "off" and wanted and not apart and topology.settings.transport.fusing
        self._tuning = RefitTuning()
        self._workers = 0
        """The most workers that the policy may use."""
        self._measured: MeasuredLoad | None = None
        """The newest sample, also of an earlier packing of the same components: what they need stays the same."""
        self._earlier: Fit | None = None
        """The fit before the last refit of the policy, in case that it is taken back."""
        self._begin(plan, topology)

    @property
    def idle(self) -> bool:
        """Whether nothing can be packed differently, so that there is nothing to decide."""
        return not self._on or len(self._plan.tasks_of) < 2

    def decide(
        self,
        now: float,
        stats: Mapping[int, TaskStats],
        load: Load,
        permit: Callable[[], str] = lambda: "",
    ) -> RefitChoice | None:
        """Return the refit to carry out, or None. Called once per ``interval`` while the spouts are active, but
        not during a replacement. ``permit`` is called if the policy proposes a refit. It returns why that must not
        be carried out now, or an empty text; the policy then repeats its proposal."""
        measured = self._sampler.take(now, stats, load)
        if measured is None:
            return None
        self._measured = measured
        refit = self._policy.decide(measured.sample)
        if refit is None:
            return None
        fit = self._fit_of(refit, measured)
        plan = make_plan(self._topology, fit)
        if plan.routes.worker_of == self._plan.routes.worker_of:
            return None  # for example because only a component that is alone is blocking
        free = None if self._room is None else self._room()
        if free is not None and plan.workers > free:
            self._refuse(now, f"{refit.reason}; not done: it needs {plan.workers} task slots, but {free} are free")
            return None
        if why_not := permit():
            self._refuse(now, f"{refit.reason}; not done yet: {why_not}")
            return None
        self._refused = False
        self._earlier = self._plan.fit
        self._note(now, refit.reason)
        return RefitChoice(fit, refit.reason)

    def by_hand(self, workers: int | None) -> RefitChoice | None:
        """Return the refit that an operator requests: by the newest measured load, if there is one, with another
        number of workers, if it is given. Components whose calls were seen to wait become blocking. None if this
        is how the topology runs already."""
        before, measured = self._plan.fit, self._measured
        fit = before if measured is None else measured.fit(before)
        if measured is not None:
            waits = self._tuning.wait_share, self._tuning.wait_per_call
            waiting = {
                measured.waiting[part]
                for part, wait in measured.sample.waits.items()
                if wait.share > waits[0] and wait.per_call > waits[1] and part in measured.waiting
            }
            fit = replace(fit, blocking=fit.blocking | waiting)
        fit = replace(fit, workers=workers or fit.workers, enough=0.0, groups=())
        plan = make_plan(self._topology, fit)
        if plan.routes.worker_of == self._plan.routes.worker_of and fit.workers == before.workers:
            return None
        known = (
            "by the measured load"
            if measured is not None
            else "every executor weighs the same, as no load is known yet"
        )
        return RefitChoice(fit, f"by hand, at most {fit.workers} workers, {known}")

    def replaced(self, plan: Plan, topology: Topology, now: float, by_refit: bool) -> None:
        """Measure anew, because a replacement of the topology runs now. ``by_refit``: ``decide`` had requested
        it."""
        self._policy.replaced(now, by_refit)
        self._begin(plan, topology)

    def _begin(self, plan: Plan, topology: Topology) -> None:
        workers = plan.fit.workers or plan.workers
        if workers != self._workers:
            self._workers, self._policy = workers, RefitPolicy(self._mode, workers, self._tuning)
        if self._measured is not None and set(self._measured.weights) != set(topology.nodes):
            self._measured = None
        self._plan, self._topology = plan, topology
        self._sampler = RefitSampler(plan, topology, _LONGEST * self.interval)

    def _fit_of(self, refit: Refit, measured: MeasuredLoad) -> Fit:
        fit = self._plan.fit
        if refit.kind is RefitKind.REVERT and self._earlier is not None:
            fit = self._earlier
        elif refit.kind is RefitKind.REPACK:
            fit = replace(measured.fit(fit), enough=self._tuning.enough)
        found = {measured.waiting[part] for part in refit.blocking - set(self._plan.blocking)}
        # The packing of the policy names parts. If one of them is divided, the planner chooses another.
        groups = refit.groups if found <= refit.blocking and self._pairs_stay(found) else ()
        return replace(fit, blocking=self._plan.fit.blocking | found, groups=groups)

    def _pairs_stay(self, blocking: Set[str]) -> bool:
        return find_pairs(self._topology, {*self._plan.blocking, *blocking}) == find_pairs(
            self._topology, self._plan.blocking
        )

    def _refuse(self, now: float, text: str) -> None:
        """Report a refusal, unless the one before was reported."""
        if not self._refused:
            self._refused = True
            self._note(now, text)

    def _note(self, now: float, text: str) -> None:
        self.decisions.append(PolicyDecision(now, "", text))
        log.info("%s", text)
