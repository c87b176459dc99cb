"""Data migration at the branching point: tuples bound for an overloaded task go to another of the same
component, and it is written down which."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from penstock.control.migration import Segment, SegmentLedger
from penstock.topology.groupings import Rows

Share = tuple[int, Rows]
"""A task, and which rows of a batch it gets."""


class MigrationRoutes:
    """Of one subscription, in one sender."""

    def __init__(self, keys: Mapping[int, str]) -> None:
        self.ledger = SegmentLedger()
        self._keys = keys
        """Names of the receiving tasks, for the ledger."""
        self._routes: dict[int, int] = {}
        self._bound = dict.fromkeys(keys, 0)
        """Tuples ever bound for each task, wherever they went."""

    def set(self, routes: Mapping[int, int]) -> list[Segment]:
        """From now on tuples bound for a task on the left go to the one on the right. Returns the segments that
        ended by that."""
        ended = []
        for task in self._routes:
            if routes.get(task) != self._routes[task] and (segment := self.ledger.close(self._keys[task])):
                ended.append(segment)
        for task, target in routes.items():
            if self._routes.get(task) != target:
                self.ledger.open(self._keys[task], self._keys[target], self._bound[task])
        self._routes = dict(routes)
        return ended

    def apply(self, shares: list[Share], rows: int) -> list[Share]:
        """Who gets which rows, of a batch that the grouping has spread."""
        for task, chosen in shares:
            self._bound[task] += _count(chosen, rows)
        if not self._routes:
            return shares
        gathered: dict[int, list[Rows]] = {}
        for task, chosen in shares:
            target = self._routes.get(task, task)
            if target != task:
                self.ledger.extend(self._keys[task], _count(chosen, rows))
            gathered.setdefault(target, []).append(chosen)
        return [(task, parts[0] if len(parts) == 1 else _join(parts, rows)) for task, parts in gathered.items()]


def _count(chosen: Rows, rows: int) -> int:
    return len(range(*chosen.indices(rows))) if isinstance(chosen, slice) else len(chosen)


def _join(parts: list[Rows], rows: int) -> Rows:
    """All of them, in the order of the batch."""
    indices = [np.arange(*part.indices(rows)) if isinstance(part, slice) else part for part in parts]
    return np.sort(np.concatenate(indices))
