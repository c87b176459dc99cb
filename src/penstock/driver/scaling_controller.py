"""Scaling of a running topology: passes load samples to the scaling policy, and reduces what the policy proposes
to what the free slots allow. The lifecycle carries out the replacement."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from penstock.control.failure_policy import FailurePolicy
from penstock.control.scaling import Bounds, LoadSample, RatePolicy, Scale, ScalingPolicy, demands, use_with, uses
from penstock.driver.load_sampler import LoadSampler, TopologyShape, shape_of
from penstock.driver.policy_decision import PolicyDecision
from penstock.metrics.stats import TaskStats
from penstock.plan.model import Plan
from penstock.plan.planner import make_plan
from penstock.settings import Settings
from penstock.topology.builder import Topology

log = logging.getLogger("penstock.scaling")

_SAMPLES_SHOWN = 120
"""Load samples that users can look back at: ten minutes with the default interval of 5 s."""
_LATE = 0.025
"""Share of the message timeout: the deviation of the completion latency that the policy ``failures`` regards as
random. Full queues make it many times as long (``flow.queue_time``), and a short pause does not reach it."""
_LONGEST = 2.0
"""Maximum length of a load sample, in intervals. A busy thread may be a little late; anything longer means that
there was a pause, and the load sample is dropped."""


@dataclass(frozen=True)
class SampleSummary:
    """One load sample as shown to users: the number of failures and the completion latency."""

    time: float
    """End of the load sample, on the clock of the caller."""
    failed: int
    """Tuples that timed out (X_i in Lu 2020). Without acks: tuples that reached the last bolts after the
    time-out."""
    latency: float | None
    """Mean seconds from emit to ack, or without acks to the end of the last bolts. None if there were no
    tuples."""


class ScalingController:
    """Scales one topology, across replacements and restarts.

    One thread calls ``decide`` once per ``scaling.interval`` with the newest counters of all tasks. It does not
    call it during a replacement or while the spouts are deactivated, because the input is not the usual load then.
    It calls ``replaced`` after every replacement. A restart of the query need not be reported: the controller
    detects it from counters that decrease.
    """

    def __init__(
        self, plan: Plan, topology: Topology, settings: Settings, room: Callable[[], int] | None = None
    ) -> None:
        """``room`` returns the slots that the replacement may use now, while the old query run still holds its
        own. Without it the number of slots is not limited."""
        self.decisions: deque[PolicyDecision] = deque(maxlen=1000)
        self.samples: deque[SampleSummary] = deque(maxlen=_SAMPLES_SHOWN)
        """Oldest first."""
        self._policy = make_policy(settings)
        self._longest = _LONGEST * settings.scaling.interval
        self._room = room
        self._refused: object = None
        """The proposal that was refused last. A repeated refusal is reported only once."""
        self._begin(plan, topology)

    @property
    def idle(self) -> bool:
        """Whether nothing can be scaled, so that there is nothing to decide."""
        return self._policy is None or all(unit.fixed for unit in self._shape.units)

    def decide(self, now: float, stats: Mapping[int, TaskStats]) -> Scale | None:
        """Return the new parallelism of bolts, including all bolts fused with them. None if the policy proposes
        nothing, or nothing that fits into the free slots."""
        if self._policy is None:
            return None
        if self._sampler.counters_went_back(stats):
            self._policy.restart_cool_down(now)  # a restart leaves a backlog, as a replacement does
        sample = self._sampler.take(now, stats)
        if sample is None:
            return None
        self.samples.append(SampleSummary(now, sample.failed, sample.latency))
        proposal = self._policy.decide(sample)
        return None if proposal is None else self._enact(sample, proposal)

    def replaced(self, plan: Plan, topology: Topology, now: float) -> None:
        """Restart the counters and the cool-down, because a replacement of the topology runs now."""
        self._begin(plan, topology)
        if self._policy is not None:
            self._policy.restart_cool_down(now)

    def _begin(self, plan: Plan, topology: Topology) -> None:
        self._topology, self._fit = topology, plan.fit
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
            needed = self._workers(proposal.parallelism)
            reason += f"; only {moves}: all of it needs {needed} task slots, but only {free:,.0f} are free"
        self._note_decision(sample.time, fitting, reason)
        return Scale(self._with_fused(fitting), reason)

    def _fitting(self, sample: LoadSample, wanted: Mapping[str, int], free: float) -> dict[str, int]:
        """Return the proposal without the least needed doublings, until it fits. Halvings stay. A doubling is
        needed least if its bolt would be the least busy without it."""
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
        """Report that nothing was done, unless it is the same refusal as before."""
        least = min(self._workers(step) for step in self._least_steps(proposal.parallelism))
        if self._refused != (refused := (dict(proposal.parallelism), least)):
            self._refused = refused
            self._note_decision(
                now,
                proposal.parallelism,
                f"{proposal.reason}; not done: it needs {least} task slots, but only {free:,.0f} are free",
            )

    def _least_steps(self, wanted: Mapping[str, int]) -> list[dict[str, int]]:
        """Return the whole proposal, and each single doubling of a bolt. One of these needs the fewest slots."""
        old = {unit.name: len(unit.executors) for unit in self._shape.units}
        return [dict(wanted), *({name: 2 * old[name]} for name, new in wanted.items() if new > old[name])]

    def _workers(self, parallelism: Mapping[str, int]) -> int:
        return make_plan(self._topology.scaled(self._with_fused(parallelism)), self._fit).workers

    def _with_fused(self, parallelism: Mapping[str, int]) -> dict[str, int]:
        return {
            component: parallelism[unit.name]
            for unit in self._shape.units
            if unit.name in parallelism
            for component in unit.components
        }

    def _note_decision(self, now: float, parallelism: Mapping[str, int], text: str) -> None:
        component = next(iter(parallelism)) if len(parallelism) == 1 else ""
        self.decisions.append(PolicyDecision(now, component, text))
        log.info("%s", text)


def make_policy(settings: Settings) -> ScalingPolicy | None:
    """Return the policy that the settings name, or None if scaling is off."""
    bounds = Bounds(settings.scaling.least, settings.scaling.most, settings.scaling.cool_down)
    if settings.scaling.policy == "failures":
        late = settings.delivery.message_timeout * _LATE
        scaling = settings.scaling
        return FailurePolicy(bounds, scaling.samples, scaling.threshold, late, scaling.target)
    return RatePolicy(bounds, settings.scaling.target) if settings.scaling.policy == "rate" else None
