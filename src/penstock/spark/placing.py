"""ERDM's decisions carried out on Spark: slots move one by one where seats are free, else all together, by a
replacement to the nodes that stay. Nodes without slots are left; those that are needed again are asked for, and
used once they have joined."""

from __future__ import annotations

import time

from penstock.coordinator.load_window import Window
from penstock.coordinator.placements import Placements, Rearrangement
from penstock.errors import PenstockError, TopologyFailed
from penstock.plan.seating import Placement, seats_for
from penstock.spark.moving import MoveWish, movable
from penstock.spark.nodes import executor_of
from penstock.spark.replacement import ReplaceWish
from penstock.spark.session import total_slots
from penstock.spark.start import Start, Starter

Wish = ReplaceWish | MoveWish
"""For a change of a running topology."""

_UNKNOWN = 2**31  # nodes: more than there are, so that the time decides
_JOINING = 60.0  # seconds for nodes that were asked for again; a busy machine starts an executor in ten


class Placer:
    """By one thread at a time."""

    def __init__(self, starter: Starter, placements: Placements) -> None:
        self._starter, self._placements = starter, placements
        self._coming: tuple[int, float, str] | None = None
        """Nodes there are to be, until when they are waited for, and why."""

    def next(self, window: Window | None, current: Start) -> Wish | None:
        """What is to be done now; called again and again, with a window when one has just ended. Raises only what
        a dead JVM does."""
        try:
            if self._coming is not None:
                return self._come(current)
            return self._erdm(window, current) if window is not None and self._placements.on else None
        except PenstockError as error:
            self._placements.refused(time.monotonic(), str(error))
            return None

    def by_hand(self, window: Window, current: Start) -> Wish | None:
        """By this window, now; None: nothing that is worth it. Raises what Spark does not allow."""
        found = self._placements.by_hand(window)
        return self._leave_empty(current) if found is None else self._decided(found, current)

    def wish(self, placement: Placement, leaves: frozenset[str], reason: str, current: Start) -> ReplaceWish:
        """Raises ``TopologyFailed`` where it cannot be."""
        nodes = self._starter.nodes
        active = set(nodes.names())
        leaving = {executor_of(node) for node in leaves} & active
        stays = {executor_of(node) for node in placement.nodes.values()}
        kept = len(active - leaving)
        got, slots = "", total_slots(self._starter.spark)
        needed = sum(seats_for(current.plan, placement, kept, current.settings.spare_seats))
        if leaves and not nodes.leavable():
            got = "a session without spark.decommission.enabled"
        elif leaves and not self._starter.alone():
            got = "another topology of this session, which uses them too"
        elif leaves and not stays <= active - leaving:
            got = "slots for a node that is left, or takes nothing new"
        elif slots * kept // max(1, len(active)) - current.seats_on(active - leaving) < needed:
            got = f"{slots} task slots on {len(active)} nodes, too few on {kept} for {needed} more"
        if got:
            raise TopologyFailed(
                f"placement of topology '{current.design.topology.name}'",
                "must leave room for old and new side by side, and leave nodes that are not needed",
                got,
                "Give the nodes more task slots, or leave fewer of them.",
            )
        return ReplaceWish(current.design.topology, reason, placement=placement, leaves=leaves)

    def ask_back(self, reason: str, current: Start) -> int:
        """Have nodes that were left come again, and use all there are as soon as they do; how many more."""
        nodes, more = self._starter.nodes, self.unused(current)
        if more:
            self._placements.rest()
            self._placements.note(time.monotonic(), reason)
            self._coming = nodes.present() + nodes.away, time.monotonic() + _JOINING, reason
            nodes.ask_back()
        return more

    def failed(self, wish: Wish) -> None:
        """It was not carried out: nodes that it was to leave are asked for again, and all of them used."""
        if isinstance(wish, MoveWish):
            if wish.by_policy:
                self._placements.rest()
        elif wish.placement is not None:
            self._placements.rest()
            if wish.leaves:
                self._coming = _UNKNOWN, time.monotonic() + _JOINING, "a move failed"

    def unused(self, current: Start) -> int:
        """Nodes that were left, or have no slot of ours though there are slots enough."""
        nodes = self._starter.nodes
        return nodes.away + max(0, min(nodes.present(), current.plan.slots) - len(current.nodes))

    def _erdm(self, window: Window, current: Start) -> Wish | None:
        if not {executor_of(node) for node in current.nodes} <= set(self._starter.nodes.names()):
            return ReplaceWish(current.design.topology, "a node it is on takes nothing new")
        found = self._placements.look(window, self.unused(current))
        if found is None:
            return None if self._placements.resting else self._leave_empty(current)
        if found.placement is None:
            self.ask_back(found.reason, current)
            return None
        return self._decided(found, current)

    def _decided(self, found: Rearrangement, current: Start) -> Wish:
        """One by one where seats are free. Who finds none does in the next window, when others have left theirs;
        where nobody does, all go by a replacement."""
        assert found.placement is not None
        moves = movable(current, found.placement.nodes)
        wish: Wish
        if moves:
            wish = MoveWish(moves, found.reason, current.number, by_policy=True)
        else:
            wish = self.wish(found.placement, found.leaves, found.reason, current)
        self._placements.note(time.monotonic(), found.reason)
        return wish

    def _leave_empty(self, current: Start) -> ReplaceWish | None:
        """Nodes that slots have left one by one have free seats only: a replacement onto the others releases
        them."""
        nodes = self._starter.nodes
        seats = {connection.hello.node for connection in current.crew.seats.values()} - current.nodes
        active = set(nodes.names())
        empty = frozenset(node for node in seats if executor_of(node) in active)
        if not empty or not nodes.leavable() or not self._starter.alone():
            return None
        reason = f"ERDM: no executor is on {', '.join(sorted(empty))} any more, left"
        try:
            wish = self.wish(Placement(current.places(), exact=False), empty, reason, current)
        except TopologyFailed as error:
            self._placements.refused(time.monotonic(), str(error))
            return None
        self._placements.note(time.monotonic(), reason)
        return wish

    def _come(self, current: Start) -> ReplaceWish | None:
        assert self._coming is not None
        wanted, until, reason = self._coming
        if self._starter.nodes.present() < wanted and time.monotonic() < until:
            return None
        self._coming = None
        return ReplaceWish(current.design.topology, reason)
