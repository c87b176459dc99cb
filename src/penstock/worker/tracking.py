"""What a task remembers for acks: the origins of rows that wait to be sent, the tally for the acker, and, for a
spout, its pending messages. Only at least once; otherwise none of it exists."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.acking.ids import U64, UNTRACKED, edges_of_roots, new_seed, roots
from penstock.acking.ledger import Tally, pack
from penstock.acking.lineage import I64, Anchors, Entries, Lineage, joined, of_roots, union, untracked
from penstock.acking.pending import Pending
from penstock.clock import Clock
from penstock.protocol.events import AckTally, RootsFailed
from penstock.texts import shortened

if TYPE_CHECKING:
    from penstock.worker.tasks import Tasks

_ACK_PAUSE = 0.004  # seconds between two tallies of a worker that never pauses: each is a message to the acker


@dataclass(frozen=True)
class FailedRoots:
    """These roots have failed, and why."""

    first: U64
    length: I64
    component: str
    error: str


class Tracker:
    """One task's account."""

    def __init__(self, key: int, component: str) -> None:
        self.key = key
        self.tally = Tally()
        self.failed: list[FailedRoots] = []
        self._component = component

    def fail(self, first: U64, length: I64, error: str) -> None:
        """All that stems from these roots is to be done again."""
        if len(first):
            self.failed.append(FailedRoots(*union(first, length), self._component, shortened(error)))

    def fail_rows(self, anchors: Anchors, error: str) -> None:
        """Fail what these rows stem from."""
        entries = anchors.lineage(0).entries()
        self.fail(entries.first, entries.length, error)


class Origins:
    """What the waiting rows of one stream of a bolt stem from."""

    def __init__(self, tracker: Tracker) -> None:
        self.tracker = tracker
        self._parts: list[Anchors] = []
        self._rows = 0

    def add(self, anchors: Anchors, end: int) -> None:
        """The rows before ``end`` have these anchors; rows between them and the last known are untracked."""
        gap = end - len(anchors.sets) - self._rows
        if gap > 0:
            self._parts.append(untracked(gap))
        self._parts.append(anchors)
        self._rows = end

    def take(self, rows: int) -> Anchors:
        """The anchors of all waiting rows, which are forgotten."""
        if self._rows < rows:
            self._parts.append(untracked(rows - self._rows))
        taken = joined(self._parts)
        self._parts, self._rows = [], 0
        return taken

    def routed(self, anchors: Anchors, once: bool) -> None:
        """The rows have their targets now; ``once``: exactly one each. Called before ``lineage``."""

    def lineage(self, anchors: Anchors) -> Lineage:
        """The lineage of a frame of these rows, entered in the tally."""
        lineage = anchors.lineage(new_seed())
        self.tracker.tally.add(lineage.entries())
        return lineage


class MessageIds(Origins):
    """The message ids of the waiting rows of one stream of a spout; None: not tracked."""

    def __init__(self, tracker: Tracker, task: int, pending: Pending, now: Callable[[], float]) -> None:
        super().__init__(tracker)
        self.ids: list[Any] = []
        self._task, self._pending, self._now = task, pending, now
        self._by_root = False

    def take(self, rows: int) -> Anchors:
        """Give every message a root."""
        tracked = [id for id in self.ids if id is not None]
        numbered = roots(self._task, self._pending.add(tracked, self._now()), len(tracked))
        if len(tracked) < rows:
            every = np.full(rows, UNTRACKED)
            every[[row for row, id in enumerate(self.ids) if id is not None]] = numbered
            numbered = every
        self.ids.clear()
        return of_roots(numbered)

    def routed(self, anchors: Anchors, once: bool) -> None:
        """A tuple sent once has its root's own edge id, and the acker need not be told of it. Otherwise the copies
        have edge ids of their own, and the root's is taken out of the ledger."""
        self._by_root = once and bool(np.all(anchors.sets >= 0))
        if not self._by_root:
            used = np.unique(anchors.sets[anchors.sets >= 0])
            first = anchors.first[used]
            edges = edges_of_roots(self.tracker.key, first)
            self.tracker.tally.add(Entries(first, np.ones(len(first), np.int64), edges))

    def lineage(self, anchors: Anchors) -> Lineage:
        if not self._by_root:
            return super().lineage(anchors)
        first = anchors.first[anchors.sets]
        rows = len(first)
        own = np.arange(rows)
        edges = edges_of_roots(self.tracker.key, first)
        return Lineage(own + 1, edges, first, np.ones(rows, np.int64), own)


class AckCollector:
    """Gathers what the tasks of a worker have to tell the acker. Used by the worker's loop only."""

    def __init__(self, clock: Clock) -> None:
        self._now = clock.monotonic
        self._tallies: list[Entries] = []
        self._sent = 0.0

    def collect(self, tasks: Tasks, everything: bool = False) -> list[RootsFailed | AckTally]:
        """What is to be told to the acker now, in this order. A task's tally leaves when nothing that the task
        emitted waits: so what it emitted is in the tally together with the acks of what that stems from. While
        bolts have more to do, tallies wait for each other a moment; not where ``everything`` is to leave."""
        events: list[RootsFailed | AckTally] = []
        for executor in tasks.all:
            tracker = executor.tracker
            if tracker is None:
                continue
            if tracker.failed:
                events += [
                    RootsFailed(each.first.tolist(), each.length.tolist(), each.component, each.error)
                    for each in tracker.failed
                ]
                tracker.failed = []
            if tracker.tally and not executor.waiting():
                self._tallies += tracker.tally.take()
        if self._tallies:
            now = self._now()
            if everything or now - self._sent >= _ACK_PAUSE or not tasks.busy:
                self._sent = now
                tallies, self._tallies = self._tallies, []
                events.append(AckTally(pack(tallies)))
        return events
