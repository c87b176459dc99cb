"""Ack tracking in a worker that its spouts' tuples cannot leave: the same parts as in ``worker.tracking``, with
flights (``acking.flights``) instead of ledgers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.acking import flights
from penstock.acking.flights import MOST_MESSAGES, EmittedRows, Flight, FlightLog, Trace
from penstock.acking.pending import Pending
from penstock.plan.model import Plan, WorkerId
from penstock.texts import shortened
from penstock.topology.components import Component, RichBolt
from penstock.worker.tracking import Ancestry, Anchoring, MessageIds, Origins, Tracker


def keeps_flights(plan: Plan, worker: WorkerId, instances: Sequence[Component]) -> bool:
    """True if the worker has spout tasks, no tuple that stems from one of them can leave it, and none of its bolts
    acks tuples itself."""
    mine = {plan.task[task].component for task in plan.routes.tasks_of(worker)}
    stays = bool(mine & set(plan.spouts)) and not any(plan.downstream_of[component] for component in mine)
    if any(plan.upstream_of[component] for component in mine):
        return False  # tuples from other workers have ledgers
    return stays and not any(isinstance(instance, RichBolt) for instance in instances)


class FlightTracker(Tracker):
    """Tells flights what a task has done with their tuples."""

    def ack(self, ancestry: Ancestry) -> None:
        assert isinstance(ancestry, Trace)
        ancestry.release()

    def fail_all(self, ancestry: Ancestry, rows: int, error: str) -> None:
        assert isinstance(ancestry, Trace)
        for flight, number in ancestry.messages():
            flight.fail(number, self.component, shortened(error))

    def drop(self, ancestry: Ancestry) -> None:
        self.ack(ancestry)

    def fail_row(self, ancestry: Anchoring, row: int, error: str) -> None:
        assert isinstance(ancestry, Trace)
        ancestry.fail_row(row, self.component, shortened(error))


class FlightOrigins(Origins):
    """The traces of the waiting rows in one stream of a bolt. Waiting rows hold their flights."""

    def __init__(self, tracker: Tracker) -> None:
        super().__init__(tracker)
        self._traces: list[tuple[Trace | None, int]] = []

    def add_trace(self, trace: Trace, rows: int, end: int) -> None:
        """Record the trace of the last ``rows`` rows before row ``end``. Rows between them and the rows recorded
        before are untracked."""
        gap = end - rows - self._rows
        if gap > 0:
            self._traces.append((None, gap))
        trace.hold()
        self._traces.append((trace, rows))
        self._rows = end

    def take(self, rows: int) -> Anchoring | None:
        if self._rows < rows:
            self._traces.append((None, rows - self._rows))
        taken, self._traces, self._rows = self._traces, [], 0
        return join(taken)

    def join(self, parts: Sequence[tuple[Anchoring | None, int]]) -> Anchoring | None:
        return join([(part if isinstance(part, Trace) else None, rows) for part, rows in parts])

    def lineage(self, anchors: Anchoring) -> Ancestry:
        assert isinstance(anchors, Trace)
        anchors.hold()
        return anchors

    def sent(self, anchors: Anchoring) -> None:
        assert isinstance(anchors, Trace)
        anchors.release()


def join(parts: Sequence[tuple[Trace | None, int]]) -> Trace | None:
    """Join the traces of waiting rows, each of which holds its flights. The result holds each flight once."""
    whole = flights.joined(parts)
    if whole is not None and len(parts) > 1:
        whole.hold()
        for part, _ in parts:
            if part is not None:
                part.release()
    return whole


class MessageFlights(MessageIds):
    """The message ids of the waiting rows in one stream of a spout. Messages that are passed on together form
    flights."""

    def __init__(
        self, tracker: Tracker, task: int, pending: Pending, now: Callable[[], float], log: FlightLog
    ) -> None:
        super().__init__(tracker, task, pending, now)
        self._log = log

    def take(self, rows: int) -> Anchoring | None:
        first, tracked, which = self._assign(rows)
        if not tracked:
            return None
        numbers: Sequence[int | None] = range(first, first + tracked)
        if which is not None:
            every: list[int | None] = [None] * rows
            for row, number in zip(which, numbers, strict=True):
                every[row] = number
            numbers = every
        made = []
        for begin in range(first, first + tracked, MOST_MESSAGES):
            end = min(begin + MOST_MESSAGES, first + tracked)
            made.append((Flight(self._log, self._task, begin, end - begin), end))
        emitted = EmittedRows(numbers, made)
        emitted.hold()
        return emitted

    def routed(self, anchors: Anchoring, once: bool) -> None:
        """A flight counts parcels, so it does not matter how often a tuple is sent."""

    def lineage(self, anchors: Anchoring) -> Ancestry:
        assert isinstance(anchors, Trace)
        anchors.hold()
        return anchors

    def sent(self, anchors: Anchoring) -> None:
        assert isinstance(anchors, Trace)
        anchors.release()
