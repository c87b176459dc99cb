"""Finds the first node in an order that has room for an executor, without checking every node each time.

With thousands of executors and nodes, a scan would make a plan quadratic. Here a node without room is set aside
until an executor arrives that it could hold, so executors of the same size skip it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable

from penstock.control.limits import Loads, Need
from penstock.control.placement import RESOURCES

Key = tuple[float, ...]


class Roster:
    """Nodes ordered by ``key``, lowest first, then by position. Call ``moved`` for every node whose load
    changed."""

    def __init__(self, loads: Loads, nodes: Iterable[int], key: Callable[[int], Key]) -> None:
        self._loads, self._key = loads, key
        self._ready: list[tuple[Key, int]] = []
        self._aside: list[list[tuple[float, int]]] = [[] for _ in RESOURCES]
        """By the resource they lacked: pairs of the negated free amount and the node."""
        self._entry: dict[int, tuple[Key, int] | tuple[float, int]] = {}
        """The one valid entry of each node; older entries are skipped. A node at a limit has none."""
        self._where: dict[int, int] = {}
        """The resource that each node set aside lacked."""
        for node in nodes:
            entry = self._key(node), node
            self._entry[node] = entry
            self._ready.append(entry)
        heapq.heapify(self._ready)

    def moved(self, node: int) -> None:
        if node in self._entry:
            self._wake(node)

    def first(self, need: Need) -> int | None:
        """The first node that this executor may move to. None if no node has room."""
        for resource, heap in enumerate(self._aside):
            most = need.of(resource, -1)  # the need on nodes without its neighbours
            while heap and -heap[0][0] >= most:
                aside = heapq.heappop(heap)
                if self._entry.get(aside[1]) is aside:
                    self._wake(aside[1])
        for node in need.shared:  # it needs less there
            if node in self._where:
                self._wake(node)
        while self._ready:
            entry = self._ready[0]
            node = entry[1]
            if self._entry.get(node) is not entry:
                heapq.heappop(self._ready)
                continue
            lacks = self._loads.lacking(need, node)
            if lacks is None:
                return node
            heapq.heappop(self._ready)
            self._step_aside(node, lacks)
        return None

    def _wake(self, node: int) -> None:
        self._where.pop(node, None)
        entry = self._key(node), node
        self._entry[node] = entry
        heapq.heappush(self._ready, entry)

    def _step_aside(self, node: int, lacks: int) -> None:
        if self._loads.at_limit(node) is not None:
            del self._entry[node]  # nothing moves to this node any more, so it stays at its limit
            return
        entry = self._loads.used[lacks][node] - self._loads.limits[lacks][node], node
        self._entry[node] = entry
        self._where[node] = lacks
        heapq.heappush(self._aside[lacks], entry)
