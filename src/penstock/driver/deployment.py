"""A deployment: what a query run is made from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from penstock.driver.engine import Engine
from penstock.driver.recovery import StateDirectory
from penstock.plan.model import Plan
from penstock.plan.planner import make_plan
from penstock.plan.slot_placement import SlotPlacement, slots_for
from penstock.protocol.job import Job, make_job
from penstock.state.generations import Ownership
from penstock.topology.builder import Topology


@dataclass(frozen=True)
class Deployment:
    """What a query run is made from: a topology, its plan and placement, what its workers are told, where its
    state is, and the user's modules in a zip, if there are any. Outlives the query runs made of it."""

    topology: Topology
    plan: Plan
    job: Job
    state: StateDirectory
    modules: Path | None
    placement: SlotPlacement | None = None
    """Where its workers are to run; None: where the engine puts them."""
    spares: tuple[int, ...] = ()
    """With a placement: slots of each stage, spare ones included."""

    @property
    def slots(self) -> tuple[int, ...]:
        """Tasks of the engine in each stage."""
        return self.spares or tuple(stage.workers for stage in self.plan.stages)


def make_deployment(
    topology: Topology,
    engine: Engine,
    placement: SlotPlacement | None = None,
    nodes: int = 0,
    owner: Ownership | None = None,
) -> Deployment:
    """How a topology is to run on an engine: placed on some of so many nodes. At most once its state is written
    only to hand it over to a replacement, which has the same ``owner``. Raises ``TopologyError`` where a component
    cannot be pickled."""
    plan = make_plan(topology)
    state = StateDirectory(plan, topology, owner=owner)
    lasting = topology.settings.delivery.guarantee != "at_most_once"
    if not lasting:
        state.store = state.store.child("handover")
    job = make_job(topology, plan, state.store.url if lasting else "", engine.pickle, state.store.url)
    spare = topology.settings.placement.spare_slots
    if spare and placement is None:
        placement = SlotPlacement({}, exact=False)
    spares = () if placement is None else slots_for(plan, placement, nodes, spare)
    return Deployment(topology, plan, job, state, engine.user_modules(), placement, spares)
