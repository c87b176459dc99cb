"""Passes tuples between tasks of one worker: no frame, no linger, and no conversion to Arrow between two tuple
components.

The tasks of a component that share a worker share one pass: their rows are put together and routed once, and each
receiving task gets one parcel. A parcel remembers which rows came from which task.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from penstock.columns import ColumnBatch, passes_unchanged
from penstock.frames.header import Header, Kind
from penstock.plan.model import WorkerId
from penstock.topology.groupings import ALL_ROWS, Part, Router, Rows
from penstock.topology.streams import Stream
from penstock.worker.failures import USER_ERRORS
from penstock.worker.flight_tracking import FlightOrigins, FlightTracker
from penstock.worker.inbox import Inbox
from penstock.worker.outputs import StreamOutput, sent_once
from penstock.worker.parcel import Parcel
from penstock.worker.tracking import Anchoring, MessageIds, Origins, Tracker

Count = Callable[[int, int, int, int], None]
"""count(sending task, receiving task, tuples, bytes)"""


class Receiver(NamedTuple):
    """A task of this worker that receives the stream."""

    task: int
    inbox: Inbox
    takes_columns: bool
    """False: it works on Arrow batches, which have a single sender."""


class InsideEdge(NamedTuple):
    """One subscriber of the stream, all of whose receivers are in this worker."""

    router: Router
    receivers: Sequence[Receiver]


class _Shipment(NamedTuple):
    """Rows of one or several tasks on their way to their receivers."""

    batch: ColumnBatch
    senders: list[tuple[int, StreamOutput]]
    ends: list[int]
    """Where the rows of each sender end."""
    parts: list[list[Part]]
    """For each edge, the rows of each receiver."""
    arrow: pa.RecordBatch | None
    """The batch for receivers that do not take columns. None if there are none."""


class InsideStream:
    """One stream of a tuple component, all of whose receivers are in the same worker. Used by the worker's loop
    only."""

    def __init__(
        self,
        worker: WorkerId,
        number: int,
        stream: Stream,
        outputs: Mapping[int, StreamOutput],
        edges: Sequence[InsideEdge],
        tracker: Tracker | None,
        count: Count,
        now: Callable[[], float],
    ) -> None:
        """``outputs``: the stream's output in each task of the component. ``tracker`` collects the edge ids of
        the tuples that bolts pass on, for all inside streams of the worker; None if acks are not tracked."""
        self._worker, self._number, self._outputs, self._edges = worker, number, outputs, edges
        self._fields = [(field.name, field.type) for field in stream.fields]
        self._origins = None if tracker is None else _origins(tracker)
        self._count, self._now = count, now
        self._all_take_columns = all(each.takes_columns for edge in edges for each in edge.receivers)
        self._merges = not any(isinstance(output.origins, MessageIds) for output in outputs.values())
        """False for spouts: their roots are numbered task by task."""

    def flush(self) -> None:
        """Pass on all waiting rows."""
        waiting = [(task, output) for task, output in self._outputs.items() if output.waiting()]
        if not waiting:
            return
        groups = [waiting] if self._merges else [[each] for each in waiting]
        for senders in groups:
            shipment = self._prepare(senders)
            if shipment is None:
                for _, output in senders:
                    output.flush()  # by way of Arrow, which copies values and reports those that do not fit
            else:
                self._pass_on(shipment)

    def _prepare(self, senders: list[tuple[int, StreamOutput]]) -> _Shipment | None:
        """Put the rows together and route them; nothing is taken yet. None if they have to be sent as Arrow."""
        if any(output.has_batches for _, output in senders):
            return None
        values = [column[:] for column in senders[0][1].columns]
        ends = [len(values[0])]
        for _, output in senders[1:]:
            for column, more in zip(values, output.columns, strict=True):
                column += more
            ends.append(len(values[0]))
        if not all(map(passes_unchanged, values, (declared for _, declared in self._fields))):
            return None
        batch = ColumnBatch(self._fields, values)
        try:
            parts = [edge.router.divide(batch) for edge in self._edges]
            arrow = None if self._all_take_columns else batch.arrow()
        except USER_ERRORS:  # a key of another type, or a user's grouping: the output's own flush reports it
            return None
        return _Shipment(batch, senders, ends, parts, arrow)

    def _pass_on(self, shipment: _Shipment) -> None:
        batch, senders, ends, parts, arrow = shipment
        taken = [output.take_all() for _, output in senders]
        born = min((each.born for each in taken if each.born is not None), default=None)
        if born is None:
            born = self._now()
        origins = self._origins if self._merges else senders[0][1].origins
        every = None
        if origins is not None:
            every = taken[0].anchors
            if len(taken) > 1:
                every = origins.join([(each.anchors, each.rows) for each in taken])
        if every is not None and isinstance(origins, MessageIds):
            shares = [(position, rows) for edge in parts for position, rows, _ in edge]
            origins.routed(every, sent_once(shares, batch.num_rows))
        for edge, divided in zip(self._edges, parts, strict=True):
            for position, rows, part in divided:
                receiver = edge.receivers[position]
                if receiver.takes_columns:
                    self._put(receiver, part, part, rows, senders, ends, every, origins, born)
                    continue
                assert arrow is not None
                several = _by_sender(rows, ends) if len(ends) > 1 else [(0, rows)]
                for sender, own in several:
                    content = _arrow_rows(arrow, own)
                    self._put(receiver, part, content, own, [senders[sender]], [], every, origins, born)
        if every is not None and origins is not None:
            origins.sent(every)

    def _put(
        self,
        receiver: Receiver,
        part: ColumnBatch,
        content: ColumnBatch | pa.RecordBatch,
        rows: Rows,
        senders: list[tuple[int, StreamOutput]],
        ends: list[int],
        anchors: Anchoring | None,
        origins: Origins | None,
        born: float,
    ) -> None:
        count = content.num_rows
        if not count:
            return
        lineage = None
        if anchors is not None and origins is not None:
            lineage = origins.lineage(anchors if rows is ALL_ROWS else anchors.take(rows))
        sources = []
        before = 0
        per_row = part.nbytes / part.num_rows
        for (task, output), end in zip(senders, _ends_within(rows, ends) or [count], strict=True):
            if end > before:
                size = int(per_row * (end - before))
                sources.append((task, end - before))
                output.count_sent(end - before, size)
                self._count(task, receiver.task, end - before, size)
                before = end
        here = self._worker
        header = Header(
            Kind.DATA, here.stage, here.index, here.stage, here.index, receiver.task, sources[0][0], self._number
        )
        header = header._replace(rows=count, born=born)
        receiver.inbox.put(Parcel(header, content, lineage, tuple(sources) if len(sources) > 1 else ()))


def _origins(tracker: Tracker) -> Origins:
    return FlightOrigins(tracker) if isinstance(tracker, FlightTracker) else Origins(tracker)


def _arrow_rows(batch: pa.RecordBatch, rows: Rows) -> pa.RecordBatch:
    if isinstance(rows, slice):
        begin, end, _ = rows.indices(batch.num_rows)
        return batch.slice(begin, end - begin)
    return batch.take(pa.array(rows))


def _ends_within(rows: Rows, ends: list[int]) -> list[int]:
    """Where the rows of each sender end among the chosen rows. Empty if there is one sender."""
    if len(ends) < 2:
        return []
    if isinstance(rows, slice):
        begin, stop = (0, ends[-1]) if rows is ALL_ROWS else (rows.start, rows.stop)
        return [min(max(end, begin), stop) - begin for end in ends]
    return [int(each) for each in np.searchsorted(rows, ends)]


def _by_sender(rows: Rows, ends: list[int]) -> list[tuple[int, Rows]]:
    """The chosen rows of each sender that has any."""
    parts: list[tuple[int, Rows]] = []
    before = 0
    for sender, end in enumerate(_ends_within(rows, ends)):
        if end > before:
            if isinstance(rows, slice):
                begin = 0 if rows is ALL_ROWS else rows.start
                parts.append((sender, slice(begin + before, begin + end)))
            else:
                parts.append((sender, rows[before:end]))
            before = end
    return parts
