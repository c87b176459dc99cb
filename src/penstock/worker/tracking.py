"""Ack tracking in a worker, for at-least-once delivery only: the roots of rows that wait to be sent, the tally
for the acker and the message ids of spouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.acking.flights import Trace
from penstock.acking.ids import U64, UNTRACKED, edges_of_roots, new_seed, roots
from penstock.acking.ledger import Tally, merge, pack
from penstock.acking.lineage import I64, Anchors, Entries, Lineage, joined, of_roots, union, untracked
from penstock.acking.pending import Pending
from penstock.acking.spread import split, split_ranges
from penstock.clock import Clock
from penstock.protocol.events import AckTally, RootsFailed
from penstock.texts import shortened

if TYPE_CHECKING:
    from penstock.worker.tasks import Tasks

Ancestry = Lineage | Trace
"""What the tuples of a parcel stem from."""
Anchoring = Anchors | Trace
"""What rows that wait to be sent stem from."""

_ACK_PAUSE = 0.004
"""Least seconds between two tallies of a busy worker. Each tally is a message to the acker, and 250 a second
delay acks little."""
_ENOUGH = 16_384
"""Entries from which on a message to one of several ackers does not wait for more: they cost the acker more than
the message itself."""


@dataclass(frozen=True)
class FailedRoots:
    """Roots that have failed, as ranges, and the reason."""

    first: U64
    length: I64
    component: str
    error: str


class Tracker:
    """The acks and failures of one task that the acker does not know yet. Used by the worker's loop only."""

    def __init__(self, key: int, component: str) -> None:
        self.key = key
        self.tally = Tally()
        self.failed: list[FailedRoots] = []
        self.component = component

    def ack(self, ancestry: Ancestry) -> None:
        """Ack all tuples of a parcel."""
        assert isinstance(ancestry, Lineage)
        self.tally.add(ancestry.entries())

    def fail_all(self, ancestry: Ancestry, rows: int, error: str) -> None:
        """Fail all tuples of a parcel with so many rows."""
        assert isinstance(ancestry, Lineage)
        self.fail(ancestry.first, ancestry.length, error)

    def drop(self, ancestry: Ancestry) -> None:
        """Called for a parcel whose tuples have all failed, instead of ``ack``."""

    def fail_row(self, ancestry: Anchoring, row: int, error: str) -> None:
        """Fail the roots of one row that waits to be sent."""
        assert isinstance(ancestry, Anchors)
        entries = ancestry.take(np.array([row])).lineage(0).entries()
        self.fail(entries.first, entries.length, error)

    def fail(self, first: U64, length: I64, error: str) -> None:
        """Fail these roots: their spouts have to emit them again."""
        if len(first):
            self.failed.append(FailedRoots(*union(first, length), self.component, shortened(error)))


class Origins:
    """The roots of the waiting rows in one stream of a bolt."""

    def __init__(self, tracker: Tracker) -> None:
        self.tracker = tracker
        self._parts: list[Anchors] = []
        self._rows = 0

    def add(self, anchors: Anchors, end: int) -> None:
        """Record the anchors of the rows that end before row ``end``. Rows between them and the rows recorded
        before are untracked."""
        gap = end - len(anchors.sets) - self._rows
        if gap > 0:
            self._parts.append(untracked(gap))
        self._parts.append(anchors)
        self._rows = end

    def take(self, rows: int) -> Anchoring | None:
        """Remove and return the anchors of all waiting rows, which are ``rows`` in number. None: no row is
        tracked."""
        if self._rows < rows:
            self._parts.append(untracked(rows - self._rows))
        taken = joined(self._parts)
        self._parts, self._rows = [], 0
        return taken

    def join(self, parts: Sequence[tuple[Anchoring | None, int]]) -> Anchoring | None:
        """Put together what ``take`` returned for several outputs, each with its number of rows."""
        return joined([part if isinstance(part, Anchors) else untracked(rows) for part, rows in parts])

    def sent(self, anchors: Anchoring) -> None:
        """Called when the parcels of all rows are on their way."""

    def routed(self, anchors: Anchoring, once: bool) -> None:
        """Called when the receivers of the rows are known, before ``lineage``. ``once``: each row has exactly
        one."""

    def lineage(self, anchors: Anchoring) -> Ancestry:
        """Make the lineage of a frame with these rows, and add it to the tally."""
        assert isinstance(anchors, Anchors)
        lineage = anchors.lineage(new_seed())
        self.tracker.tally.add(lineage.entries())
        return lineage


class MessageIds(Origins):
    """The message ids of the waiting rows in one stream of a spout. A row whose id is None is not tracked."""

    def __init__(self, tracker: Tracker, task: int, pending: Pending, now: Callable[[], float]) -> None:
        super().__init__(tracker)
        self.ids: list[Any] = []
        self._arrays: list[I64] = []
        """All ids, if all were given as arrays; ``ids`` is empty then."""
        self._task, self._pending, self._now = task, pending, now
        self._by_root = False

    def add_many(self, ids: Sequence[Any]) -> None:
        """Add the ids of many rows: a sequence, or an array of integers."""
        if isinstance(ids, np.ndarray) and ids.dtype == np.int64 and not self.ids:
            self._arrays.append(ids.copy())  # the spout may change its array
            return
        for array in self._arrays:
            self.ids += array.tolist()
        self._arrays = []
        self.ids += ids.tolist() if isinstance(ids, np.ndarray) else ids

    def take(self, rows: int) -> Anchoring | None:
        """Assign a root to every message, and return the anchors of all waiting rows."""
        first, tracked, which = self._assign(rows)
        numbered = roots(self._task, first, tracked)
        if which is not None:
            every = np.full(rows, UNTRACKED)
            every[which] = numbered
            numbered = every
        return of_roots(numbered)

    def _assign(self, rows: int) -> tuple[int, int, list[int] | None]:
        """Put the messages of all waiting rows into the pending table. Returns the number of the first one, how
        many there are, and their rows; None instead of the rows if all are messages."""
        if self._arrays:
            arrays, self._arrays = self._arrays, []
            ids = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
            which = None if len(ids) == rows else list(range(len(ids)))
            return self._pending.add(ids, self._now()), len(ids), which
        tracked = [id for id in self.ids if id is not None]
        which = None if len(tracked) == rows else [row for row, id in enumerate(self.ids) if id is not None]
        self.ids.clear()
        return self._pending.add(tracked, self._now()), len(tracked), which

    def routed(self, anchors: Anchoring, once: bool) -> None:
        """A tuple that is sent once uses the edge id of its root, which the acker derives itself. Otherwise each
        copy gets an edge id of its own, and the tally cancels the edge id of the root in the ledger."""
        assert isinstance(anchors, Anchors)
        self._by_root = once and bool(np.all(anchors.sets >= 0))
        if not self._by_root:
            used = np.unique(anchors.sets[anchors.sets >= 0])
            first = anchors.first[used]
            edges = edges_of_roots(self.tracker.key, first)
            self.tracker.tally.add(Entries(first, np.ones(len(first), np.int64), edges))

    def lineage(self, anchors: Anchoring) -> Ancestry:
        assert isinstance(anchors, Anchors)
        if not self._by_root:
            return super().lineage(anchors)
        first = anchors.first[anchors.sets]
        rows = len(first)
        own = np.arange(rows)
        edges = edges_of_roots(self.tracker.key, first)
        return Lineage(own + 1, edges, first, np.ones(rows, np.int64), own)


class AckCollector:
    """Collects the tallies and failures of all tasks of a worker for the ackers. Used by the worker's loop."""

    def __init__(self, clock: Clock, ackers: int = 1) -> None:
        self._now, self._ackers = clock.monotonic, ackers
        self._tallies: list[Entries] = []
        self._sent = 0.0
        self._shares = [AckerTally() for _ in range(ackers)] if ackers > 1 else []

    def collect(self, tasks: Tasks, everything: bool = False) -> list[RootsFailed | AckTally]:
        """The events to send to the ackers now, in this order. The tally of a task is included only when none of
        its rows wait, so that it contains the emitted tuples together with the acks of their inputs. Tuples that
        were passed on inside the worker come first, so that they never arrive after the ack of their input. While
        bolts are busy, tallies are collected for ``_ACK_PAUSE`` seconds, unless ``everything`` is to be sent.

        There are no events if the worker keeps flights: its own spouts are told at once."""
        if tasks.flights is not None:
            tasks.settle_flights(tasks.flights)
            return []
        inside = tasks.inside_tracker
        failed: list[FailedRoots] = []
        if inside is not None:
            self._tallies += inside.tally.take()
        for executor in tasks.all:
            tracker = executor.tracker
            if tracker is None:
                continue
            if tracker.failed:
                failed += tracker.failed
                tracker.failed = []
            if tracker.tally and not executor.waiting():
                self._tallies += tracker.tally.take()
        events: list[RootsFailed | AckTally] = []
        for each in failed:
            events += self._failed(each)
        everything = everything or not tasks.busy
        if self._tallies:
            now = self._now()
            if everything or now - self._sent >= _ACK_PAUSE:
                self._sent = now
                tallies, self._tallies = self._tallies, []
                if not self._shares:
                    return [*events, AckTally(pack(tallies))]
                for acker, part in split(merge(tallies), self._ackers):
                    self._shares[acker].add(part)
        for acker, share in enumerate(self._shares):
            if share.entries and (everything or share.is_due(self._now(), self._ackers)):
                events.append(AckTally(share.take(self._now()), acker))
        return events

    def _failed(self, roots: FailedRoots) -> list[RootsFailed]:
        parts = [(0, roots.first, roots.length)]
        if self._ackers > 1:
            parts = split_ranges(roots.first, roots.length, self._ackers)
        return [
            RootsFailed(first.tolist(), length.tolist(), roots.component, roots.error, acker)
            for acker, first, length in parts
        ]


class AckerTally:
    """The entries that one of several ackers gets next. A message costs an acker as much as a thousand entries, so
    while bolts are busy each acker gets messages as large as a single acker would, but less often."""

    def __init__(self) -> None:
        self.entries = 0
        """Number of entries that wait."""
        self._parts: list[Entries] = []
        self._sent = 0.0

    def add(self, part: Entries) -> None:
        """Add entries that must arrive together."""
        self._parts.append(part)
        self.entries += len(part.first)

    def is_due(self, now: float, ackers: int) -> bool:
        return self.entries >= _ENOUGH or now - self._sent >= ackers * _ACK_PAUSE

    def take(self, now: float) -> bytes:
        """Remove all entries and pack them."""
        parts, self._parts = self._parts, []
        self.entries, self._sent = 0, now
        return pack(parts)
