"""Data migration in the sender: tuples for an overloaded task are sent to another task of the same component, and
a ledger records which tuples were. The sender numbers its tuples, so that the output knows which are missing."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from penstock.control.segments import Segment, SegmentLedger, SourceRange, first_position
from penstock.topology.groupings import Rows

Share = tuple[int, Rows]
"""⟨Task, the rows of a batch that it gets⟩."""


class MigrationRoutes:
    """The migration routes of one subscription in one sending task. Used by the worker's loop only."""

    def __init__(self, keys: Mapping[int, str], generation: int = 0) -> None:
        self.ledger = SegmentLedger()
        self.newest = SourceRange(first_position(generation), 0)
        """The range of the source data that was routed last."""
        self._keys = keys
        """Keys of the receiving tasks; the ledger records tasks by key."""
        self._routes: dict[int, int] = {}
        self._bound = dict.fromkeys(keys, 0)
        """Number of tuples that the grouping has assigned to each task so far, migrated or not."""

    def set(self, routes: Mapping[int, int]) -> list[Segment]:
        """Replace the routes: from now on tuples for a key of ``routes`` go to the task that is its value.
        Returns the segments that this ends."""
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
        """Apply the routes to the shares that the grouping has assigned for a batch of ``rows`` rows."""
        length = 0
        for task, chosen in shares:
            count = _count(chosen, rows)
            self._bound[task] += count
            length += count
        self.newest = SourceRange(sum(self.newest), length)
        if not self._routes:
            return shares
        gathered: dict[int, list[Rows]] = {}
        for task, chosen in shares:
            target = self._routes.get(task, task)
            if target != task:
                self.ledger.extend(self._keys[task], _count(chosen, rows))
            gathered.setdefault(target, []).append(chosen)
        return [(task, parts[0] if len(parts) == 1 else _join(parts, rows)) for task, parts in gathered.items()]

    # ---- moving to another process ---------------------------------------------------------------------

    @property
    def positions(self) -> tuple[int, dict[int, int]]:
        """The position of the next tuple, and the tuples bound for each task so far."""
        return sum(self.newest), dict(self._bound)

    def restore(self, position: int, bound: Mapping[int, int]) -> None:
        """Continue from the ``positions`` of the process that ran the task before."""
        self.newest = SourceRange(position, 0)
        self._bound.update(bound)
        routes, self._routes = self._routes, {}
        self.set(routes)


def _count(chosen: Rows, rows: int) -> int:
    return len(range(*chosen.indices(rows))) if isinstance(chosen, slice) else len(chosen)


def _join(parts: list[Rows], rows: int) -> Rows:
    """The rows of all parts, in the order of the batch."""
    indices = [np.arange(*part.indices(rows)) if isinstance(part, slice) else part for part in parts]
    return np.sort(np.concatenate(indices))
