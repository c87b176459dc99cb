"""Placement of a running topology by ERDM (Pu 2021): passes load samples to the policy, and turns its plan into a
``Rearrangement`` of workers. The lifecycle carries it out."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from penstock.control.erdm import ErdmPolicy, PlacementPlan
from penstock.control.inaction import why_no_move
from penstock.control.limits import Loads, amount
from penstock.driver.load_sample import MonitorSample
from penstock.driver.policy_decision import PolicyDecision
from penstock.plan.slot_placement import SlotPlacement
from penstock.settings import Settings

log = logging.getLogger("penstock.placement")

_LEAST_SAVED = 0.05
"""Fraction of the traffic between nodes that moves must save if they empty no node. Less is not worth the
moves."""
_FILL = 0.95
"""Fraction of the critical nodes that ERDM fills if the nodes of one path are not enough. Below 1 because
executors cannot be divided."""
_PAUSE_SAMPLES = 10
"""Load samples without further moves after nodes were requested again or a move failed: 5 minutes with the default
interval of 30 s. The same may well happen again soon."""
_WINDOWS = 16
"""Load samples of which the outcome is kept for the status."""


@dataclass(frozen=True)
class Rearrangement:
    """A change of the placement of workers."""

    placement: SlotPlacement | None
    """The new placement of all workers. None: request the unused nodes, and spread the workers over all nodes."""
    leaves: frozenset[str]
    """Nodes that have no worker afterwards."""
    reason: str


class PlacementController:
    """Serves one topology across restarts and replacements. One thread calls it; other threads may copy
    ``decisions`` and ``outcomes``."""

    def __init__(self, settings: Settings) -> None:
        self.decisions: deque[PolicyDecision] = deque(maxlen=1000)
        self.outcomes: deque[PolicyDecision] = deque(maxlen=_WINDOWS)
        """What followed from each of the last load samples: the action, or why there is none."""
        self._paused_samples = 0
        self._refused = ""
        """The reason of the last refusal. A repeated refusal is reported only once."""
        self.apply_settings(settings)

    def apply_settings(self, settings: Settings) -> None:
        """Use other settings from now on."""
        self.on = settings.placement.policy == "erdm"
        self._settings = settings

    def decide(self, now: float, sample: MonitorSample, unused: int) -> Rearrangement | None:
        """Return the change to make after a load sample, or None. ``unused``: number of nodes that could be
        requested. Called when a load sample has ended. ``outcomes`` then ends with the reason."""
        limits = Loads(sample.snapshot(self._settings)).limit_nodes()
        full = ""
        if limits:
            at, (node,) = limits[0], [each for each in sample.nodes if each.node == limits[0].node]
            full = f"{at.node} is at its limit of {at.resource}, {amount(at.resource, at.used)} of "
            full += amount(at.resource, at.limit)
            if at.resource == "cpu":
                full += f" (Spark's processes {amount(0, node.other.cpu)}, executors {amount(0, node.used.cpu)})"
        if full and unused:
            return self._found(now, Rearrangement(None, frozenset(), f"{full}: {_nodes(unused)} more requested"))
        if self._paused_samples:
            self._paused_samples -= 1
            left = self._paused_samples + 1
            self.idle(
                now, f"no move for {left} more load samples, because nodes were requested again or a move failed"
            )
            return None
        plan = plan_for(sample, self._settings)
        found = rearrangement(sample, plan)
        if found is None:
            why = why_no_move(sample.snapshot(self._settings, filled=True), plan, _LEAST_SAVED)
            self.idle(now, f"{why}. {full}, and no node is unused" if full else why)
            return None
        return self._found(now, found)

    def _found(self, now: float, found: Rearrangement) -> Rearrangement:
        self.outcomes.append(PolicyDecision(now, "", found.reason))
        return found

    def idle(self, now: float, why: str) -> None:
        """Record why nothing follows from a load sample."""
        self.outcomes.append(PolicyDecision(now, "", why))
        log.debug("%s", why)

    def by_hand(self, sample: MonitorSample) -> Rearrangement | None:
        """Return the change that ERDM proposes, even during a pause. Called when a user requests a placement."""
        return rearrangement(sample, plan_for(sample, self._settings))

    @property
    def paused(self) -> bool:
        """Whether moves are suspended at the moment."""
        return self._paused_samples > 0

    def pause(self) -> None:
        """Suspend moves for some load samples. Called after nodes were requested again or a move failed."""
        self._paused_samples = _PAUSE_SAMPLES

    def note(self, now: float, text: str) -> None:
        """Record a decision that is being carried out."""
        self._refused = ""
        self._note_decision(now, text)

    def note_refusal(self, now: float, why: str) -> None:
        """Record why a decision is not carried out, once per reason."""
        self.outcomes.append(PolicyDecision(now, "", f"not done: {why}"))
        if self._refused != why:
            self._refused = why
            self._note_decision(now, f"not done: {why}")

    def _note_decision(self, now: float, text: str) -> None:
        self.decisions.append(PolicyDecision(now, "", text))
        log.info("%s", text)


def plan_for(sample: MonitorSample, settings: Settings) -> PlacementPlan:
    """Return ERDM's plan for a load sample. It fills nodes only up to ``placement.fill``, because the load
    varies."""
    fill = _FILL if settings.placement.critical == "widened" else None
    return ErdmPolicy(fill=fill).plan(sample.snapshot(settings, filled=True))


def rearrangement(sample: MonitorSample, plan: PlacementPlan) -> Rearrangement | None:
    """Convert a plan into a placement of the load sample's workers. None if the plan is not worthwhile."""
    if not plan.moves or not (plan.emptied or plan.cost.saved >= _LEAST_SAVED):
        return None
    workers = sample.units
    places = {worker: sample.node_of[worker] for worker in workers.values()}
    places.update({workers[move.executor]: move.target for move in plan.moves})
    leaves = frozenset(release.node for release in plan.releases)
    count = len(plan.critical.nodes)
    reason = f"ERDM moves {len(plan.moves)} of {len(places)} executors to {_nodes(count)}"
    reason += f" ({_list(plan.critical.nodes)})"
    if leaves:
        reason += f" and releases {_list(sorted(leaves))}"
    reason += f"; cost between nodes {-plan.cost.saved:+.0%}"
    # If nodes are emptied, the slots are spread evenly over the remaining nodes, as ERDM assigns executors in
    # turn. Otherwise the workers need slots on exactly the nodes that the plan names.
    return Rearrangement(SlotPlacement(places, exact=not leaves), leaves, reason)


def _nodes(count: int) -> str:
    return f"{count} node" + ("" if count == 1 else "s")


def _list(names: Iterable[str]) -> str:
    return ", ".join(names)
