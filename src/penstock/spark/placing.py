"""ERDM's decisions carried out on Spark: workers move one by one where slots are free, else all together, by a
replacement to the nodes that stay. Nodes without workers are left; those that are needed again are asked for, and
used once they have joined."""

from __future__ import annotations

import time

from penstock.driver.load_sample import MonitorSample
from penstock.driver.placement_controller import PlacementController, Rearrangement
from penstock.errors import PenstockError, TopologyFailed
from penstock.plan.slot_placement import SlotPlacement, slots_for
from penstock.spark.move import MoveRequest, movable
from penstock.spark.nodes import executor_of
from penstock.spark.query_run import QueryLauncher, QueryRun
from penstock.spark.replacement import ReplaceRequest
from penstock.spark.session import total_slots

ChangeRequest = ReplaceRequest | MoveRequest
"""For a change of a running topology."""

_UNKNOWN = 2**31  # nodes: more than there are, so that the time decides
_JOINING = 60.0  # seconds for nodes that were asked for again; a busy machine starts an executor in ten


class Placer:
    """By one thread at a time."""

    def __init__(self, starter: QueryLauncher, placements: PlacementController) -> None:
        self._starter, self._placements = starter, placements
        self._coming: tuple[int, float, str] | None = None
        """Nodes there are to be, until when they are waited for, and why."""

    def next(self, sample: MonitorSample | None, current: QueryRun) -> ChangeRequest | None:
        """What is to be done now; called again and again, with a load sample when one has just ended. Raises only
        what a dead JVM does."""
        try:
            if self._coming is not None:
                return self._come(current)
            return self._erdm(sample, current) if sample is not None and self._placements.on else None
        except PenstockError as error:
            self._placements.note_refusal(time.monotonic(), str(error))
            return None

    def by_hand(self, sample: MonitorSample, current: QueryRun) -> ChangeRequest | None:
        """By this load sample, now; None: nothing that is worth it. Raises what Spark does not allow."""
        found = self._placements.by_hand(sample)
        return self._leave_empty(current) if found is None else self._decided(found, current)

    def request(
        self, placement: SlotPlacement, leaves: frozenset[str], reason: str, current: QueryRun
    ) -> ReplaceRequest:
        """Raises ``TopologyFailed`` where it cannot be."""
        nodes = self._starter.nodes
        active = set(nodes.names())
        leaving = {executor_of(node) for node in leaves} & active
        stays = {executor_of(node) for node in placement.nodes.values()}
        kept = len(active - leaving)
        why_not, workers = "", total_slots(self._starter.spark)
        needed = sum(slots_for(current.plan, placement, kept, current.settings.placement.spare_slots))
        if leaves and not nodes.leavable():
            why_not = "the session lacks spark.decommission.enabled"
        elif leaves and not self._starter.alone():
            why_not = "another topology of this session uses the nodes too"
        elif leaves and not stays <= active - leaving:
            why_not = "workers are wanted on a node that is to be freed, or takes nothing new"
        elif workers * kept // max(1, len(active)) - current.slots_on(active - leaving) < needed:
            why_not = (
                f"{workers} task slots on {len(active)} nodes leave too few on {kept} nodes for {needed} more"
            )
        if why_not:
            raise TopologyFailed(
                f"placement of topology '{current.deployment.topology.name}'",
                f"it cannot be carried out: {why_not}",
                "Give the nodes more task slots, or free fewer of them.",
            )
        return ReplaceRequest(current.deployment.topology, reason, placement=placement, leaves=leaves)

    def ask_back(self, reason: str, current: QueryRun) -> int:
        """Have nodes that were left come again, and use all there are as soon as they do; how many more."""
        nodes, more = self._starter.nodes, self.unused(current)
        if more:
            self._placements.pause()
            self._placements.note(time.monotonic(), reason)
            self._coming = nodes.present() + nodes.away, time.monotonic() + _JOINING, reason
            nodes.ask_back()
        return more

    def failed(self, request: ChangeRequest) -> None:
        """It was not carried out: nodes that it was to leave are asked for again, and all of them used."""
        if isinstance(request, MoveRequest):
            if request.by_policy:
                self._placements.pause()
        elif request.placement is not None:
            self._placements.pause()
            if request.leaves:
                self._coming = _UNKNOWN, time.monotonic() + _JOINING, "a move failed"

    def unused(self, current: QueryRun) -> int:
        """Nodes that were left, or have no worker of ours though there are workers enough."""
        nodes = self._starter.nodes
        return nodes.away + max(0, min(nodes.present(), current.plan.workers) - len(current.nodes))

    def _erdm(self, sample: MonitorSample, current: QueryRun) -> ChangeRequest | None:
        if not {executor_of(node) for node in current.nodes} <= set(self._starter.nodes.names()):
            return ReplaceRequest(current.deployment.topology, "a node it is on takes nothing new")
        found = self._placements.decide(sample, self.unused(current))
        if found is None:
            return None if self._placements.paused else self._leave_empty(current)
        if found.placement is None:
            self.ask_back(found.reason, current)
            return None
        return self._decided(found, current)

    def _decided(self, found: Rearrangement, current: QueryRun) -> ChangeRequest:
        """One by one where slots are free. Who finds none does in the next load sample, when others have left
        theirs; where nobody does, all go by a replacement."""
        assert found.placement is not None
        moves = movable(current, found.placement.nodes)
        request: ChangeRequest
        if moves:
            request = MoveRequest(moves, found.reason, current.number, by_policy=True)
        else:
            request = self.request(found.placement, found.leaves, found.reason, current)
        self._placements.note(time.monotonic(), found.reason)
        return request

    def _leave_empty(self, current: QueryRun) -> ReplaceRequest | None:
        """Nodes that workers have left one by one have free slots only: a replacement onto the others releases
        them."""
        nodes = self._starter.nodes
        slots = {connection.hello.node for connection in current.registry.slots.values()} - current.nodes
        active = set(nodes.names())
        empty = frozenset(node for node in slots if executor_of(node) in active)
        if not empty or not nodes.leavable() or not self._starter.alone():
            return None
        reason = f"ERDM: no executor is on {', '.join(sorted(empty))} any more, left"
        try:
            request = self.request(SlotPlacement(current.places(), exact=False), empty, reason, current)
        except TopologyFailed as error:
            self._placements.note_refusal(time.monotonic(), str(error))
            return None
        self._placements.note(time.monotonic(), reason)
        return request

    def _come(self, current: QueryRun) -> ReplaceRequest | None:
        assert self._coming is not None
        wanted, until, reason = self._coming
        if self._starter.nodes.present() < wanted and time.monotonic() < until:
            return None
        self._coming = None
        return ReplaceRequest(current.deployment.topology, reason)
