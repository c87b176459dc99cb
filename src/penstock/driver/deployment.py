"""A deployment: everything that a query run is started from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from penstock.driver.engine import Engine
from penstock.driver.recovery import StateDirectory
from penstock.plan.model import Fit, Plan
from penstock.plan.planner import make_plan
from penstock.plan.slot_placement import SlotPlacement, fitted, slots_for
from penstock.protocol.job import Job, make_job
from penstock.state.generations import Ownership
from penstock.topology.builder import Topology


@dataclass(frozen=True)
class Deployment:
    """A topology, its plan and placement, the job for its workers, its state directory, and the user's modules in
    a zip file, if there are any. A restart starts another query run from the same deployment."""

    topology: Topology
    plan: Plan
    job: Job
    state: StateDirectory
    modules: Path | None
    placement: SlotPlacement | None = None
    """The nodes on which workers should run. None if the engine chooses them."""
    placed_slots: tuple[int, ...] = ()
    """Number of slots of each stage, including spare slots. Empty without a placement."""

    @property
    def slots(self) -> tuple[int, ...]:
        """Number of the engine's tasks in each stage."""
        return self.placed_slots or tuple(stage.workers for stage in self.plan.stages)


def first_fit(topology: Topology, engine: Engine) -> Fit:
    """Return what is known before the topology runs: the number of workers. With placement by ERDM each executor
    has its own, unless the user sets a number, because the workers are what can move."""
    settings = topology.settings
    if settings.placement.by_executor and not settings.workers.count:
        return Fit()
    return Fit(settings.workers.count or engine.cores())


def make_deployment(
    topology: Topology,
    engine: Engine,
    placement: SlotPlacement | None = None,
    nodes: int = 0,
    owner: Ownership | None = None,
    fit: Fit | None = None,
    room: int | None = None,
) -> Deployment:
    """Return a deployment of a topology on an engine.

    ``placement``: the nodes of the workers, out of ``nodes`` nodes. ``owner``: the owner of the state directory; a
    replacement has the same owner as the old form. ``fit``: what the components are packed into workers by;
    without it, nothing was measured yet. ``room``: the slots that it may have if the number of spare slots is not
    set; without it, as many as leave room for a replacement on half of the nodes. With at-most-once delivery,
    state is written only to hand it over to a replacement or to a worker that moves. Raises ``TopologyError`` if a
    component cannot be pickled.
    """
    plan = make_plan(topology, fit or first_fit(topology, engine))
    state = StateDirectory(plan, topology, owner=owner)
    lasting = topology.settings.delivery.guarantee != "at_most_once"
    if not lasting:
        state.store = state.store.child("handover")
    job = make_job(topology, plan, state.store.url if lasting else "", engine.pickle, state.store.url)
    spare = topology.settings.placement.spares
    if spare != 0 and placement is None:
        placement = SlotPlacement({}, exact=False)
    placed_slots = () if placement is None else slots_for(plan, placement, nodes, spare)
    if placement is not None and spare is None:
        room = engine.total() - 2 * plan.workers if room is None else room
        placed_slots = fitted(plan, placed_slots, max(room, sum(slots_for(plan, placement, nodes))))
    return Deployment(topology, plan, job, state, engine.user_modules(), placement, placed_slots)
