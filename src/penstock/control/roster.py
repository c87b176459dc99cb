"""Finds the first node, by a rule, that has room for an executor, without asking all of them each time.

Asked for thousands of executors about thousands of nodes, a scan would make a plan quadratic. Here a node that had
no room steps aside until somebody comes with a need it could meet, so executors of the same size pass it once.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable

from penstock.control.limits import Loads, Need
from penstock.control.placement import RESOURCES

Key = tuple[float, ...]


class Roster:
    """Nodes by ``key``, least first, then by position. ``moved`` is to be told of every node whose load
    changed."""

    def __init__(self, loads: Loads, nodes: Iterable[int], key: Callable[[int], Key]) -> None:
        self._loads, self._key = loads, key
        self._ready: list[tuple[Key, int]] = []
        self._aside: list[list[tuple[float, int]]] = [[] for _ in RESOURCES]
        """By what they lacked: ⟨− what is free of it, node⟩."""
        self._entry: dict[int, tuple[Key, int] | tuple[float, int]] = {}
        """The one entry of each node that counts; older ones are passed over. None of a node at a limit."""
        self._where: dict[int, int] = {}
        """What each node that stepped aside lacked."""
        for node in nodes:
            entry = self._key(node), node
            self._entry[node] = entry
            self._ready.append(entry)
        heapq.heapify(self._ready)

    def moved(self, node: int) -> None:
        if node in self._entry:
            self._wake(node)

    def first(self, need: Need) -> int | None:
        """The first node this executor may move to; None: no node has room."""
        for resource, heap in enumerate(self._aside):
            most = need.of(resource, -1)  # where none of its neighbours is
            while heap and -heap[0][0] >= most:
                aside = heapq.heappop(heap)
                if self._entry.get(aside[1]) is aside:
                    self._wake(aside[1])
        for node in need.shared:  # there it needs less
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
            del self._entry[node]  # nothing moves in any more, so it stays at its limit
            return
        entry = self._loads.used[lacks][node] - self._loads.limits[lacks][node], node
        self._entry[node] = entry
        self._where[node] = lacks
        heapq.heappush(self._aside[lacks], entry)
