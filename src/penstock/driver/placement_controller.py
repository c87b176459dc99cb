"""Placement of a running topology by ERDM: what the load monitor saw goes to the policy, what it wants becomes a
``Rearrangement`` of workers. Somebody else carries it out."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from penstock.control.erdm import ErdmPolicy, PlacementPlan
from penstock.control.limits import Loads, amount
from penstock.driver.load_sample import MonitorSample
from penstock.driver.migration_controller import Decision
from penstock.plan.slot_placement import SlotPlacement
from penstock.settings import Settings

log = logging.getLogger("penstock.placement")

_LEAST_SAVED = 0.05  # of what goes between nodes, for which it is worth moving where no node can be left
_FILL = 0.95  # of the critical nodes, when more than those of one path are needed: executors come in whole pieces
_PAUSE_SAMPLES = (
    10  # load samples after nodes were taken back or a move failed in which none is left: it may well come again
)


@dataclass(frozen=True)
class Rearrangement:
    """What is to be done."""

    placement: SlotPlacement | None
    """Of all workers; None: nodes that are not used are asked for, and the workers spread over all there are."""
    leaves: frozenset[str]
    """Nodes that have no worker then."""
    reason: str


class PlacementController:
    """One for a topology, its restarts and its replacements. By one thread."""

    def __init__(self, settings: Settings) -> None:
        self.decisions: deque[Decision] = deque(maxlen=1000)
        self._paused_samples = 0
        self._refused = ""
        """What was not done at last: it is said once."""
        self.apply_settings(settings)

    def apply_settings(self, settings: Settings) -> None:
        """From now on."""
        self.on = settings.placement.policy == "erdm"
        self._settings = settings

    def decide(self, sample: MonitorSample, unused: int) -> Rearrangement | None:
        """What to do by a load sample that has just ended; ``unused``: nodes that could be had. None: stay so."""
        limits = Loads(sample.snapshot()).limit_nodes() if unused else ()
        if limits:
            full = limits[0]
            what = f"{amount(full.resource, full.used)} of {amount(full.resource, full.limit)}"
            reason = f"{full.node} is at its limit of {full.resource}, {what}: {_nodes(unused)} more asked for"
            return Rearrangement(None, frozenset(), reason)
        if self._paused_samples:
            self._paused_samples -= 1
            return None
        return self.by_hand(sample)

    def by_hand(self, sample: MonitorSample) -> Rearrangement | None:
        """The same without a look at what was before."""
        return rearrangement(sample, plan_for(sample, self._settings))

    @property
    def paused(self) -> bool:
        return self._paused_samples > 0

    def pause(self) -> None:
        """Nodes were asked for again, or a move failed: leave none for a while."""
        self._paused_samples = _PAUSE_SAMPLES

    def note(self, now: float, text: str) -> None:
        """What was decided, and is being done."""
        self._refused = ""
        self._note_decision(now, text)

    def note_refusal(self, now: float, why: str) -> None:
        """It cannot be done. Said once."""
        if self._refused != why:
            self._refused = why
            self._note_decision(now, f"not done: {why}")

    def _note_decision(self, now: float, text: str) -> None:
        self.decisions.append(Decision(now, "", text))
        log.info("%s", text)


def plan_for(sample: MonitorSample, settings: Settings) -> PlacementPlan:
    """ERDM's, with room left on the nodes that stay: what is moved works on, and its load varies."""
    return ErdmPolicy(fill=_FILL).plan(sample.snapshot(settings.placement.fill))


def rearrangement(sample: MonitorSample, plan: PlacementPlan) -> Rearrangement | None:
    """What the plan comes to for the load sample's workers; None: it is not worthwhile."""
    if not plan.moves or not (plan.emptied or plan.cost.saved >= _LEAST_SAVED):
        return None
    workers = sample.units
    places = {workers[each.id]: each.node for each in sample.snapshot().executors}
    places.update({workers[move.executor]: move.target for move in plan.moves})
    leaves = frozenset(release.node for release in plan.releases)
    kept = len(plan.critical.nodes)
    reason = f"ERDM: {len(plan.moves)} of {len(places)} executors to {_nodes(kept)} ({_list(plan.critical.nodes)})"
    if leaves:
        reason += f", {_list(sorted(leaves))} left"
    reason += f"; {-plan.cost.saved:+.0%} between nodes"
    # A node that is left gives its slots to the others evenly, which is what ERDM's turns come to; without one,
    # slots must be there to choose from.
    return Rearrangement(SlotPlacement(places, exact=not leaves), leaves, reason)


def _nodes(count: int) -> str:
    return f"{count} node" + ("" if count == 1 else "s")


def _list(names: Iterable[str]) -> str:
    return ", ".join(names)
