"""Scaling of a running topology: what the tasks report goes to the policy, what it wants and the workers allow
becomes a ``Scale``. Somebody else does the replacing."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from penstock.control.scaling import (
    Bounds,
    FailurePolicy,
    LoadSample,
    RatePolicy,
    Scale,
    ScalingPolicy,
    demands,
    use_with,
    uses,
)
from penstock.driver.load_sampler import LoadSampler, TopologyShape, shape_of
from penstock.driver.migration_controller import Decision
from penstock.metrics.stats import TaskStats
from penstock.plan.model import Plan
from penstock.plan.planner import make_plan
from penstock.settings import Settings
from penstock.topology.builder import Topology

log = logging.getLogger("penstock.scaling")

_KEPT = 120  # windows people can look back at: ten minutes of 5 s
_LONGEST = (
    2.0  # windows a load sample may last: a late thread makes one a little longer, a pause makes another thing
)


@dataclass(frozen=True)
class SampleSummary:
    """One load sample, as people read it: the completion latency beside the number of failures."""

    time: float
    """Its end, on the clock of the caller."""
    failed: int
    """X_i: time-outs; without acks tuples later than the time-out at the last bolts."""
    latency: float | None
    """Seconds, the mean: from emit to ack, without acks to the end of the last bolts; None: of nothing."""


class ScalingController:
    """The enactor of one topology and its replacements. ``decide`` is called once a ``scaling.window`` with the
    newest counters of all tasks since the last start, by one thread; not while a replacement is under way or the
    spouts are deactivated, for what arrives then is no load. After a replacement, whoever wanted it, ``replaced``
    is called. That a query was started again shows in counters that go back, and need not be told."""

    def __init__(
        self, plan: Plan, topology: Topology, settings: Settings, room: Callable[[], int] | None = None
    ) -> None:
        """``room``: how many workers a second topology, which stands by while the first runs, may use now; without
        it they are not counted."""
        self.decisions: deque[Decision] = deque(maxlen=1000)
        self.samples: deque[SampleSummary] = deque(maxlen=_KEPT)
        """Oldest first."""
        self._policy = make_policy(settings)
        self._longest = _LONGEST * settings.scaling.window
        self._room = room
        self._refused: object = None
        """What was not done at last: it is said once."""
        self._begin(plan, topology)

    @property
    def idle(self) -> bool:
        """Nothing is ever scaled: there is nothing to look at."""
        return self._policy is None or all(unit.fixed for unit in self._shape.units)

    def decide(self, now: float, stats: Mapping[int, TaskStats]) -> Scale | None:
        """What to replace the topology by, bolts that are fused with one another named together; None: nothing, or
        nothing that fits."""
        if self._policy is None:
            return None
        if self._sampler.counters_went_back(stats):
            self._policy.restart_cool_down(now)  # a restart leaves a backlog as a replacement does
        sample = self._sampler.take(now, stats)
        if sample is None:
            return None
        self.samples.append(SampleSummary(now, sample.failed, sample.latency))
        proposal = self._policy.decide(sample)
        return None if proposal is None else self._enact(sample, proposal)

    def replaced(self, plan: Plan, topology: Topology, now: float) -> None:
        """Another topology runs now; its counters begin anew, and so does the cool-down."""
        self._begin(plan, topology)
        if self._policy is not None:
            self._policy.restart_cool_down(now)

    def _begin(self, plan: Plan, topology: Topology) -> None:
        self._topology = topology
        self._shape: TopologyShape = shape_of(plan, topology)
        self._sampler = LoadSampler(self._shape, self._longest)
        self._refused = None

    # ---- what fits -------------------------------------------------------------------------------------

    def _enact(self, sample: LoadSample, proposal: Scale) -> Scale | None:
        free = math.inf if self._room is None else self._room()
        fitting = self._fitting(sample, proposal.parallelism, free)
        least = self._workers(fitting)
        if not fitting or least > free:
            self._refuse(sample.time, proposal, free)
            return None
        self._refused = None
        reason = proposal.reason
        if fitting != proposal.parallelism:
            moves = ", ".join(f"{name} to {new}" for name, new in fitting.items())
            reason += f"; only {moves}: needs {self._workers(proposal.parallelism)} slots, {free:,.0f} are free"
        self._note_decision(sample.time, fitting, reason)
        return Scale(self._with_fused(fitting), reason)

    def _fitting(self, sample: LoadSample, wanted: Mapping[str, int], free: float) -> dict[str, int]:
        """Without the doublings that are needed least, as many as it takes; halvings stay. Least needed: the bolt
        that would be least busy without it."""
        fitting = dict(wanted)
        old = {bolt.name: len(bolt.tasks) for bolt in sample.bolts}
        rates = demands(sample)
        use = {bolt.name: uses(bolt, rates[bolt.name]) or [0.0] * len(bolt.tasks) for bolt in sample.bolts}
        while self._workers(fitting) > free:
            more = [name for name, new in fitting.items() if new > old[name]]
            if not more:
                break
            name = min(more, key=lambda each: use_with(use[each], fitting[each] // 2))
            fitting[name] //= 2
            if fitting[name] == old[name]:
                del fitting[name]
        return fitting

    def _refuse(self, now: float, proposal: Scale, free: float) -> None:
        """Say it, but not in every window."""
        least = min(self._workers(step) for step in self._least_steps(proposal.parallelism))
        if self._refused != (refused := (dict(proposal.parallelism), least)):
            self._refused = refused
            self._note_decision(
                now,
                proposal.parallelism,
                f"{proposal.reason}; not done: needs {least} slots, {free:,.0f} are free",
            )

    def _least_steps(self, wanted: Mapping[str, int]) -> list[dict[str, int]]:
        """All that is wanted, or one bolt doubled once: one of them needs the fewest workers."""
        old = {unit.name: len(unit.executors) for unit in self._shape.units}
        return [dict(wanted), *({name: 2 * old[name]} for name, new in wanted.items() if new > old[name])]

    def _workers(self, parallelism: Mapping[str, int]) -> int:
        return make_plan(self._topology.scaled(self._with_fused(parallelism))).workers

    def _with_fused(self, parallelism: Mapping[str, int]) -> dict[str, int]:
        return {
            component: parallelism[unit.name]
            for unit in self._shape.units
            if unit.name in parallelism
            for component in unit.components
        }

    def _note_decision(self, now: float, parallelism: Mapping[str, int], text: str) -> None:
        component = next(iter(parallelism)) if len(parallelism) == 1 else ""
        self.decisions.append(Decision(now, component, text))
        log.info("%s", text)


def make_policy(settings: Settings) -> ScalingPolicy | None:
    """The policy the settings ask for; None: off."""
    bounds = Bounds(settings.scaling.least, settings.scaling.most, settings.scaling.cool_down)
    if settings.scaling.policy == "failures":
        return FailurePolicy(bounds, settings.scaling.windows, settings.scaling.threshold)
    return RatePolicy(bounds, settings.scaling.target) if settings.scaling.policy == "rate" else None
