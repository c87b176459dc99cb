"""Turns decisions about the placement of workers into change requests.

Workers move one by one to free slots. If no worker can move, all are placed at once by a replacement. Nodes
without workers are released. Released nodes that are needed again are requested from the master, and used once
they have joined.
"""

from __future__ import annotations

from penstock.control.arbiter import ChangeSource
from penstock.driver.engine import executor_of
from penstock.driver.load_sample import MonitorSample
from penstock.driver.move import movable
from penstock.driver.nodes import JOIN_TIMEOUT, AwaitedNodes
from penstock.driver.placement_controller import PlacementController, Rearrangement
from penstock.driver.query_run import QueryRun
from penstock.driver.query_runs import QueryRuns
from penstock.driver.requests import ChangeRequest, MoveRequest, ReplaceRequest
from penstock.errors import PenstockError, TopologyFailed
from penstock.plan.slot_placement import SlotPlacement, slots_for


class Placer:
    """Makes the change requests of placement. Called on the supervisor's thread."""

    def __init__(self, runs: QueryRuns, placements: PlacementController) -> None:
        self._runs, self._engine, self._placements = runs, runs.engine, placements
        self._take_back = False
        """Set after nodes could not be released: all nodes that there were before are to be used again."""
        self._awaited: AwaitedNodes | None = None
        """Nodes that were requested again and are used when they have joined. No other change is proposed
        meanwhile."""
        self._nodes_before = 0
        """Number of nodes when ``request`` was called last."""

    def next(self, sample: MonitorSample | None, current: QueryRun) -> ChangeRequest | None:
        """Return the change to request now, or None. Called repeatedly, with a load sample if one has just been
        taken. A ``PenstockError`` is recorded as a refusal; exceptions of an engine that has died are raised."""
        try:
            if self._take_back:
                self._take_back = False
                self._await_nodes(self._nodes_before, "a move failed")
            if self._awaited is not None:
                return self._use_joined()
            return self._erdm(sample, current) if sample is not None and self._placements.on else None
        except PenstockError as error:
            self._placements.note_refusal(self._runs.now(), str(error))
            return None

    def by_hand(self, sample: MonitorSample, current: QueryRun) -> ChangeRequest | None:
        """Return the change that ERDM proposes for this load sample, even during a pause. None if no change is
        worthwhile. Raises ``TopologyFailed`` if the change is not possible."""
        found = self._placements.by_hand(sample)
        return self._release_empty(current) if found is None else self._request_for(found, current)

    def request(
        self, placement: SlotPlacement, leaves: frozenset[str], reason: str, current: QueryRun
    ) -> ReplaceRequest:
        """Return the request for a replacement with this placement that releases the nodes in ``leaves``. Raises
        ``TopologyFailed`` if it is not possible."""
        engine = self._engine
        active = set(engine.nodes())
        leaving = {executor_of(node) for node in leaves} & active
        stays = {executor_of(node) for node in placement.nodes.values()}
        kept, total = len(active - leaving), engine.total()
        needed = sum(slots_for(current.plan, placement, kept, current.settings.placement.spares or 0))
        why_not = hint = ""
        if leaves and not engine.can_release_nodes():
            why_not = "the session has no spark.decommission.enabled, so no node can be released"
            hint = "Set spark.decommission.enabled=true when you open the session."
        elif leaves and not self._runs.alone():
            why_not = "another topology of this session uses the nodes, too"
            hint = "End the other topology first."
        elif leaves and not stays <= active - leaving:
            why_not = "a worker is requested on a node that is released or accepts no new tasks"
            hint = "Choose another node for the worker."
        elif total * kept // max(1, len(active)) - current.slots_on(active - leaving) < needed:
            why_not = (
                f"the old and the new form run side by side for a moment, and of the {total} task slots on "
                f"{len(active)} nodes too few are free on the {kept} that stay: {needed} more are needed"
            )
            hint = "Give the nodes more task slots, or release fewer of them."
        if why_not:
            where = f"placement of topology '{current.deployment.topology.name}'"
            text = f"it cannot be carried out: {why_not}"
            raise TopologyFailed(where, text, hint)
        self._nodes_before = len(active)
        self._awaited = None  # this placement is newer than the request to use all nodes
        return ReplaceRequest(
            current.deployment.topology, reason, placement=placement, attempt=current.number, leaves=leaves
        )

    def take_back(self, reason: str, current: QueryRun) -> int:
        """Suspend moves and request released nodes again. When they have joined, ``next`` returns a request that
        uses all nodes. Returns how many more nodes will be used; 0 if no node is unused."""
        more = self.unused(current)
        if more:
            self._placements.pause()
            self._placements.note(self._runs.now(), reason)
            self._await_nodes(len(self._engine.nodes()) + self._engine.nodes_away + self._coming, reason)
        return more

    def _await_nodes(self, wanted: int, reason: str) -> None:
        self._engine.take_nodes_back()
        self._awaited = AwaitedNodes(wanted, self._runs.now() + JOIN_TIMEOUT, reason)

    def _use_joined(self) -> ReplaceRequest | None:
        """Return the request that uses all nodes, if those that are awaited have joined or it takes too long."""
        awaited = self._awaited
        assert awaited is not None
        if len(self._engine.nodes()) < awaited.wanted and self._runs.now() < awaited.deadline:
            return None
        self._awaited = None
        return ReplaceRequest(None, awaited.reason)

    @property
    def _coming(self) -> int:
        """Number of nodes that were requested again and have not joined yet."""
        return 0 if self._awaited is None else max(0, self._awaited.wanted - len(self._engine.nodes()))

    def failed(self, request: ChangeRequest, error: PenstockError) -> None:
        """Called when a request was not carried out, with the reason. If it was to release nodes, those were
        requested again, and ``next`` returns a request that uses all nodes."""
        if request.source is ChangeSource.PLACEMENT:
            self._placements.note_refusal(self._runs.now(), f"{request.reason}: {error}")
        if isinstance(request, MoveRequest):
            if request.source is ChangeSource.PLACEMENT:
                self._placements.pause()
        elif request.placement is not None:
            self._placements.pause()
            if request.leaves:
                self._take_back = True

    def unused(self, current: QueryRun) -> int:
        """Return how many more nodes the topology could use: released nodes, nodes that are about to join, and
        nodes without one of its workers although it has enough workers."""
        engine = self._engine
        without_worker = max(0, min(len(engine.nodes()), current.plan.workers) - len(current.nodes))
        return engine.nodes_away + self._coming + without_worker

    def _erdm(self, sample: MonitorSample, current: QueryRun) -> ChangeRequest | None:
        if not {executor_of(node) for node in current.nodes} <= set(self._engine.nodes()):
            return ReplaceRequest(None, "a node it is on takes nothing new")
        found = self._placements.decide(self._runs.now(), sample, self.unused(current))
        if found is None and self._placements.paused:
            return None
        if found is None:
            self._release_unused(current)
            return self._release_empty(current)
        if found.placement is None:
            self.take_back(found.reason, current)
            return None
        return self._request_for(found, current)

    def _request_for(self, found: Rearrangement, current: QueryRun) -> ChangeRequest:
        """Return a request that moves the workers for which a slot is free. A worker without a free slot can move
        after a later load sample, when others have left theirs. If no worker can move, return a replacement."""
        assert found.placement is not None
        moves = movable(current, found.placement.nodes)
        request: ChangeRequest
        if moves:
            request = MoveRequest(moves, found.reason, current.number, ChangeSource.PLACEMENT)
        else:
            leaves, reason = found.leaves, found.reason
            if leaves and (empty := self._empty(current) - leaves):
                leaves, reason = leaves | empty, f"{reason}; {', '.join(sorted(empty))} has no executor any more"
            request = self.request(found.placement, leaves, reason, current)
        self._placements.note(self._runs.now(), request.reason)
        return request

    def _release_empty(self, current: QueryRun) -> ReplaceRequest | None:
        """Return a replacement that releases the nodes whose slots are all free, because their workers have moved
        away one by one. None if there is no such node or it cannot be released."""
        empty = self._empty(current)
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

    def _release_unused(self, current: QueryRun) -> None:
        """Release nodes on which the topology holds no slot, such as one that joined too late to be used. Nothing
        has to be replaced for it."""
        held = {executor_of(connection.hello.node) for connection in current.registry.slots.values()}
        unused = set(self._engine.nodes()) - held
        if held and unused and self._engine.can_release_nodes() and self._runs.alone():
            self._engine.release_nodes(unused)
            names = ", ".join(sorted(unused))
            self._placements.note(
                self._runs.now(), f"ERDM: the topology does not use Spark executor {names}, released"
            )

    def _empty(self, current: QueryRun) -> frozenset[str]:
        """Return the nodes whose slots are all free."""
        slots = {connection.hello.node for connection in current.registry.slots.values()} - current.nodes
        active = set(self._engine.nodes())
        return frozenset(node for node in slots if executor_of(node) in active)
