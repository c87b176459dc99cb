"""ERDM's decisions carried out on Spark: slots go by a replacement to the nodes that stay, the others are left;
nodes that are needed again are asked for, and used once they have joined."""

from __future__ import annotations

import time
from collections.abc import Iterable

from penstock.coordinator.load_window import Window
from penstock.coordinator.placements import Placements, Rearrangement
from penstock.errors import PenstockError, TopologyFailed
from penstock.plan.seating import seats_for
from penstock.spark.nodes import executor_of
from penstock.spark.replacement import Wish
from penstock.spark.session import total_slots
from penstock.spark.start import Start, Starter

_JOINING = 60.0  # seconds for nodes that were asked for again; a busy machine starts an executor in ten


class Placer:
    """By one thread at a time."""

    def __init__(self, starter: Starter, placements: Placements) -> None:
        self._starter, self._placements = starter, placements
        self._coming: tuple[int, float, str] | None = None
        """Nodes there are to be, until when they are waited for, and why."""

    def next(self, window: Window | None, current: Start) -> Wish | None:
        """What ERDM wishes for; called again and again, with a window when one has just ended."""
        if self._coming is not None:
            return self._come(current)
        if window is None or not self._placements.on:
            return None
        if not self._takes_tasks(current.nodes):  # of a move that failed, or it is being drained
            return Wish(current.design.topology, "a node it is on takes nothing new", pause=False)
        now = time.monotonic()
        found = self._placements.look(now, window, self._starter.nodes.away)
        if found is None:
            return None
        if found.takes_back:
            self.ask_back(found.reason)
            return None
        try:
            return self.wish(found, current)
        except PenstockError as error:
            self._placements.refused(now, found, str(error))
            return None

    def by_hand(self, window: Window, current: Start) -> Wish | None:
        """By this window, now; None: everything is where it should be. Raises what Spark does not allow."""
        found = self._placements.by_hand(time.monotonic(), window)
        return None if found is None else self.wish(found, current)

    def wish(self, found: Rearrangement, current: Start) -> Wish:
        """Raises ``TopologyFailed`` where a node cannot be left."""
        if found.leaves and found.placement is not None:
            nodes, spark = self._starter.nodes, self._starter.spark
            present = nodes.present()
            kept = present - len(found.leaves)
            room = total_slots(spark) * kept // present - current.seats_on(current.nodes - found.leaves)
            needed = sum(seats_for(current.plan, found.placement, kept))
            got = ""
            if not self._starter.alone():
                got = "another topology of this session uses them too"
            elif not self._takes_tasks(found.placement.nodes.values()):
                got = "a node that is to stay takes nothing new"
            elif needed > room:
                got = f"{room} task slots free on the {kept} nodes that stay, {needed} are needed"
            if got:
                raise TopologyFailed(
                    f"nodes {', '.join(sorted(found.leaves))}",
                    "must not be needed, to be left",
                    got,
                    "Give the nodes more task slots: old and new topology stand side by side for some seconds.",
                )
        topology = current.design.topology
        return Wish(topology, found.reason, pause=False, placement=found.placement, leaves=found.leaves)

    def ask_back(self, reason: str) -> None:
        """Have nodes that were left come again; ``next`` uses them."""
        nodes = self._starter.nodes
        if nodes.away:
            self._placements.rest()
            self._coming = nodes.present() + nodes.away, time.monotonic() + _JOINING, reason
            nodes.ask_back()

    def _come(self, current: Start) -> Wish | None:
        assert self._coming is not None
        wanted, until, reason = self._coming
        if self._starter.nodes.present() < wanted and time.monotonic() < until:
            return None
        self._coming = None
        return Wish(current.design.topology, reason, pause=False)

    def _takes_tasks(self, nodes: Iterable[str]) -> bool:
        """All of them do."""
        return {executor_of(node) for node in nodes} <= set(self._starter.nodes.names())
