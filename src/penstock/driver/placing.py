"""Decisions about where workers run, as change requests: workers move one by one where slots are free, otherwise
all together, by a replacement onto the nodes that stay. Nodes without workers are released; those that are needed
again are taken back, and used once they have joined."""

from __future__ import annotations

from penstock.driver.engine import executor_of
from penstock.driver.load_sample import MonitorSample
from penstock.driver.move import movable
from penstock.driver.placement_controller import PlacementController, Rearrangement
from penstock.driver.query_run import QueryRun
from penstock.driver.query_runs import QueryRuns
from penstock.driver.requests import ChangeRequest, MoveRequest, ReplaceRequest
from penstock.errors import PenstockError, TopologyFailed
from penstock.plan.slot_placement import SlotPlacement, slots_for


class Placer:
    """Called on the supervisor's thread."""

    def __init__(self, runs: QueryRuns, placements: PlacementController) -> None:
        self._runs, self._engine, self._placements = runs, runs.engine, placements
        self._take_back: int | None = None
        """After a failed release of nodes: how many there are to be before all of them are used again."""
        self._nodes_before = 0
        """When nodes were released at last."""

    def next(self, sample: MonitorSample | None, current: QueryRun) -> ChangeRequest | None:
        """What is to be done now; called again and again, with a load sample when one has just been taken. Raises
        only what a dead engine does."""
        try:
            if self._take_back is not None:
                wanted, self._take_back = self._take_back, None
                return ReplaceRequest(current.deployment.topology, "a move failed", takes_back=wanted)
            return self._erdm(sample, current) if sample is not None and self._placements.on else None
        except PenstockError as error:
            self._placements.note_refusal(self._runs.now(), str(error))
            return None

    def by_hand(self, sample: MonitorSample, current: QueryRun) -> ChangeRequest | None:
        """By this load sample, now; None: nothing that is worth it. Raises what the engine does not allow."""
        found = self._placements.by_hand(sample)
        return self._release_empty(current) if found is None else self._decided(found, current)

    def request(
        self, placement: SlotPlacement, leaves: frozenset[str], reason: str, current: QueryRun
    ) -> ReplaceRequest:
        """Raises ``TopologyFailed`` where workers cannot be placed so."""
        engine = self._engine
        active = set(engine.nodes())
        leaving = {executor_of(node) for node in leaves} & active
        stays = {executor_of(node) for node in placement.nodes.values()}
        kept, total = len(active - leaving), engine.total()
        needed = sum(slots_for(current.plan, placement, kept, current.settings.placement.spare_slots))
        why_not = ""
        if leaves and not engine.can_release_nodes():
            why_not = "the session has no spark.decommission.enabled, so no node can be released"
        elif leaves and not self._runs.alone():
            why_not = "another topology of this session uses the nodes, too"
        elif leaves and not stays <= active - leaving:
            why_not = "a worker is wanted on a node that is released, or takes nothing new"
        elif total * kept // max(1, len(active)) - current.slots_on(active - leaving) < needed:
            why_not = (
                f"the old and the new form must run side by side: {total} task slots on {len(active)} nodes are "
                f"too few on {kept} for {needed} more"
            )
        if why_not:
            where = f"placement of topology '{current.deployment.topology.name}'"
            text = f"it cannot be carried out: {why_not}"
            raise TopologyFailed(where, text, "Give the nodes more task slots, or release fewer of them.")
        self._nodes_before = len(active)
        return ReplaceRequest(current.deployment.topology, reason, placement=placement, leaves=leaves)

    def take_back(self, reason: str, current: QueryRun) -> tuple[int, ReplaceRequest | None]:
        """Have released nodes come back, and use all nodes as soon as they do: how many more, and the request for
        it, if any."""
        more = self.unused(current)
        if not more:
            return 0, None
        self._placements.pause()
        self._placements.note(self._runs.now(), reason)
        wanted = len(self._engine.nodes()) + self._engine.nodes_away
        return more, ReplaceRequest(current.deployment.topology, reason, takes_back=wanted)

    def failed(self, request: ChangeRequest) -> None:
        """It was not carried out. The nodes that it was to release are on their way back, and all are used
        again."""
        if isinstance(request, MoveRequest):
            if request.by_policy:
                self._placements.pause()
        elif request.placement is not None:
            self._placements.pause()
            if request.leaves:
                self._take_back = self._nodes_before

    def unused(self, current: QueryRun) -> int:
        """Nodes that were released, or have no worker of ours though there are workers enough."""
        engine = self._engine
        return engine.nodes_away + max(0, min(len(engine.nodes()), current.plan.workers) - len(current.nodes))

    def _erdm(self, sample: MonitorSample, current: QueryRun) -> ChangeRequest | None:
        if not {executor_of(node) for node in current.nodes} <= set(self._engine.nodes()):
            return ReplaceRequest(current.deployment.topology, "a node it is on takes nothing new")
        found = self._placements.decide(sample, self.unused(current))
        if found is None:
            return None if self._placements.paused else self._release_empty(current)
        if found.placement is None:
            return self.take_back(found.reason, current)[1]
        return self._decided(found, current)

    def _decided(self, found: Rearrangement, current: QueryRun) -> ChangeRequest:
        """One by one where slots are free. A worker that finds none does with the next load sample, when others
        have left theirs; where none can move, all go by a replacement."""
        assert found.placement is not None
        moves = movable(current, found.placement.nodes)
        request: ChangeRequest
        if moves:
            request = MoveRequest(moves, found.reason, current.number, by_policy=True)
        else:
            request = self.request(found.placement, found.leaves, found.reason, current)
        self._placements.note(self._runs.now(), found.reason)
        return request

    def _release_empty(self, current: QueryRun) -> ReplaceRequest | None:
        """Nodes that workers have left one by one have free slots only: a replacement onto the others releases
        them."""
        slots = {connection.hello.node for connection in current.registry.slots.values()} - current.nodes
        active = set(self._engine.nodes())
        empty = frozenset(node for node in slots if executor_of(node) in active)
        if not empty or not self._engine.can_release_nodes() or not self._runs.alone():
            return None
        reason = f"ERDM: no executor is on {', '.join(sorted(empty))} any more, released"
        try:
            request = self.request(SlotPlacement(current.places(), exact=False), empty, reason, current)
        except TopologyFailed as error:
            self._placements.note_refusal(self._runs.now(), str(error))
            return None
        self._placements.note(self._runs.now(), reason)
        return request
