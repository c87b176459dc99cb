"""The output of a task: collects emitted tuples, applies the groupings and sends the tuples in frames."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from penstock.columns import to_column, to_values
from penstock.control.segments import Segment, SourceRange
from penstock.errors import FieldTypeError
from penstock.metrics.stats import TaskStats
from penstock.topology.groupings import ALL_ROWS, Router, Rows, Split
from penstock.topology.streams import Stream
from penstock.worker.failures import USER_ERRORS, blame
from penstock.worker.flow_control import LEAST_ROWS, SendQueue
from penstock.worker.migration_routes import MigrationRoutes
from penstock.worker.tracking import Ancestry, Anchoring, Origins

_FIRST_GUESS_ROWS = 512
"""Rows of a frame until the size of a row is known: a full frame of rows of about 256 bytes."""
_MOST_ROWS = 65_536
"""Rows of a frame, however small they are: bounds the work between two readings of the clock."""

_MISFIT = (pa.ArrowException, TypeError, ValueError, OverflowError, AttributeError, pickle.PicklingError)
"""Exceptions raised when a value does not fit the type of its column (Arrow) or cannot be pickled."""


class TakenRows(NamedTuple):
    """What ``StreamOutput.take_all`` returns besides the rows."""

    rows: int
    anchors: Anchoring | None
    born: float | None


class OutputEdge(NamedTuple):
    """One subscriber of a stream: its tasks, and the router that distributes tuples among them. A direct stream
    has no router."""

    router: Router | None
    tasks: tuple[int, ...]
    grouping: str
    send_queue: SendQueue | None = None
    """The send queue of the subscriber; None if its tasks run in the same worker."""
    migration_routes: MigrationRoutes | None = None
    """None if data migration is not allowed for the subscriber."""


Send = Callable[[int, int, pa.RecordBatch, float, Ancestry | None, SourceRange | None], int]
"""send(stream number, target task, tuples, born, lineage, range) -> bytes: sends the tuples of one frame.
``range``: the range of the source data to which they belong; None if the receiver's data is never migrated.
Returns the size of the frame, or of the batch if the target is in the same worker."""

AddDeadLetter = Callable[[Sequence[Any], str], None]
"""add_dead_letter(values, error): turns one row into a dead letter."""


class StreamOutput:
    """One stream of one task. Rows wait in columns (tuple components) or batches (batch components) until the
    worker calls ``flush``. Used by the worker's loop only."""

    def __init__(
        self,
        number: int,
        stream: Stream,
        edges: Sequence[OutputEdge],
        frame_bytes: int,
        send: Send,
        stats: TaskStats,
        report: Callable[[Exception], None],
        now: Callable[[], float],
        origins: Origins | None = None,
    ) -> None:
        self.stream = stream
        self.origins = origins
        """The roots of the waiting rows; None if acks are not tracked."""
        self.add_dead_letter: AddDeadLetter | None = None
        """Called for rows that cannot be sent and that no spout emits again (exactly-once delivery); otherwise
        None."""
        self.columns: list[list[Any]] = [[] for _ in stream.fields]
        self.tasks: list[int] = []
        """Target tasks of the rows in ``columns``, on a direct stream only."""
        self.born: float | None = None
        """Wall time at which the oldest tuple from which a waiting row descends left its spout. None if there is
        none, for example for rows that ``activate`` emitted."""
        self.number, self._edges, self._send, self._stats = number, edges, send, stats
        self._report, self._now = report, now
        self._batches: list[pa.RecordBatch] = []
        self._batch_tasks: list[int] = []
        self._batch_rows = 0
        self.emitted = 0
        """Rows that have left the stream since the task was opened here."""
        self._frame_bytes = frame_bytes
        self._frame_rows = _FIRST_GUESS_ROWS
        self._fan_out = max([1, *(len(edge.tasks) for edge in edges)])
        self._edge_of = {task: edge for edge in edges for task in edge.tasks}

    @property
    def edges(self) -> Sequence[OutputEdge]:
        return self._edges

    @property
    def stays_inside(self) -> bool:
        """True if the stream has receivers and all of them are in the same worker."""
        return bool(self._edges) and all(edge.send_queue is None for edge in self._edges)

    @property
    def has_batches(self) -> bool:
        """True if Arrow batches wait, or a stream that a component addresses itself."""
        return self._batch_rows > 0 or self.stream.direct

    def take_all(self) -> TakenRows:
        """Remove all waiting rows, which the caller has copied from ``columns``."""
        rows = self.waiting()
        self._stats.emitted += rows
        self.emitted += rows
        taken = TakenRows(rows, None if self.origins is None else self.origins.take(rows), self.born)
        self._clear()
        return taken

    def count_sent(self, rows: int, size: int) -> None:
        """Count rows that were passed on inside the worker."""
        self._stats.sent += rows
        self._stats.sent_bytes += size

    @property
    def direct_targets(self) -> Collection[int]:
        """The tasks that may be named as the target of a tuple; empty if the stream is not direct."""
        return self._edge_of.keys() if self.stream.direct else ()

    def waiting(self) -> int:
        """Rows emitted and not yet sent."""
        return len(self.columns[0]) + self._batch_rows

    def full(self) -> bool:
        """Enough rows wait to fill a frame for each target."""
        return self.waiting() >= self._frame_rows * self._fan_out

    def reroute(self, tasks: tuple[int, ...], routes: Mapping[int, int]) -> list[Segment]:
        """Set the migration routes of the subscriber with these tasks. Returns the segments that this ends."""
        ended = []
        for edge in self._edges:
            if edge.migration_routes is not None and edge.tasks == tasks:
                ended += edge.migration_routes.set(routes)
        return ended

    def ready(self) -> bool:
        """Emitted now, a tuple would leave at once: no receiver of this stream is overloaded."""
        queues = (edge.send_queue for edge in self._edges)
        return all(queue is None or queue.room() > self.waiting() for queue in queues)

    def room(self) -> int:
        """How many tuples emitted now would leave at once, or at least a small frame of them; 0 if none would."""
        rooms = [edge.send_queue.room() for edge in self._edges if edge.send_queue is not None]
        free = min(rooms, default=math.inf) - self.waiting()
        return 0 if free <= 0 else int(min(max(free, LEAST_ROWS), _MOST_ROWS))

    def add_batch(self, batch: pa.RecordBatch, task: int | None) -> None:
        """Add the rows of a batch component. ``task`` is the target task on a direct stream, otherwise None."""
        self._batches.append(batch)
        self._batch_rows += batch.num_rows
        if task is not None:
            self._batch_tasks += [task] * batch.num_rows

    def flush(self) -> None:
        """Send all waiting rows. Rows that cannot be sent are reported and failed."""
        rows = self.waiting()
        if not rows:
            return
        self._stats.emitted += rows
        self.emitted += rows
        anchors = whole = None if self.origins is None else self.origins.take(rows)
        try:
            if self._edges or anchors is not None:
                batch, tasks, anchors = self._collect(anchors)
                shares = self._shares(batch, tasks, anchors)
                if self.origins is not None and anchors is not None:
                    self.origins.routed(anchors, sent_once(shares, batch.num_rows))
                for task, chosen in shares:
                    part = anchors if anchors is None or chosen is ALL_ROWS else anchors.take(chosen)
                    self._send_frames(task, select_rows(batch, chosen), part)
        finally:
            if self.origins is not None and whole is not None:
                self.origins.sent(whole)
            self._clear()

    def _collect(self, anchors: Anchoring | None) -> tuple[pa.RecordBatch, list[int], Anchoring | None]:
        """The waiting rows as one batch, their target tasks on a direct stream, and their anchors. Rows with a
        value that does not fit are left out."""
        batches, tasks = self._batches, self._batch_tasks
        if self.columns[0]:
            try:
                arrays = self._arrays(self.columns)
                tasks = tasks + self.tasks
            except _MISFIT:
                keep = self._fitting_rows(anchors)
                arrays = self._arrays([[column[row] for row in keep] for column in self.columns])
                tasks = tasks + [self.tasks[row] for row in keep if self.tasks]
                anchors = None if anchors is None else anchors.take(np.array(keep, np.int64))
            batches = [*batches, pa.RecordBatch.from_arrays(arrays, names=list(self.stream.field_names))]
        return (batches[0] if len(batches) == 1 else self._joined(batches)), tasks, anchors

    def _shares(
        self, batch: pa.RecordBatch, tasks: list[int], anchors: Anchoring | None
    ) -> list[tuple[int, Rows]]:
        """⟨Task, the rows that it gets⟩ for all subscribers."""
        if not batch.num_rows:
            return []
        if self.stream.direct:
            target_of = np.array(tasks)
            return [(task, np.flatnonzero(target_of == task)) for task in dict.fromkeys(tasks)]
        shares: list[tuple[int, Rows]] = []
        unsent: dict[int, Exception] = {}
        for edge in self._edges:
            assert edge.router is not None
            try:
                split = edge.router.split(batch)
            except USER_ERRORS:  # a key of another type, or a user's grouping, which may raise anything
                split = self._split_each(edge, edge.router, batch, unsent)
            assigned = [(edge.tasks[position], chosen) for position, chosen in split]
            shares += (
                assigned
                if edge.migration_routes is None
                else edge.migration_routes.apply(assigned, batch.num_rows)
            )
        if unsent:
            columns = [to_values(column) for column in batch.take(pa.array(list(unsent))).columns]
            for (row, error), *values in zip(unsent.items(), *columns, strict=True):
                self._fail(anchors, row, values, error)
        return shares

    def _split_each(
        self, edge: OutputEdge, router: Router, batch: pa.RecordBatch, unsent: dict[int, Exception]
    ) -> Split:
        """Split the batch row by row, after the split of the whole batch has raised. A row for which it raises
        again is reported and added to ``unsent``; the others are sent."""
        rows_of: dict[int, list[int]] = {}
        for row in range(batch.num_rows):
            try:
                split = router.split(batch.slice(row, 1))
            except USER_ERRORS as error:
                blamed = blame(self.stream.component, f"grouping {edge.grouping}", error)
                self._report(blamed)
                unsent.setdefault(row, blamed)
            else:
                for position, chosen in split:
                    copies = len(range(1)[chosen]) if isinstance(chosen, slice) else len(chosen)
                    rows_of.setdefault(position, []).extend([row] * copies)
        return [(position, np.array(rows, np.int64)) for position, rows in sorted(rows_of.items())]

    def _fail(self, anchors: Anchoring | None, row: int, values: Sequence[Any], error: Exception) -> None:
        """Called for a row that does not reach all its receivers: fails its roots, or turns it into a dead
        letter."""
        if anchors is not None and self.origins is not None:
            self.origins.tracker.fail_row(anchors, row, str(error))
        if self.add_dead_letter is not None:
            self.add_dead_letter(values, str(error))

    def _joined(self, batches: list[pa.RecordBatch]) -> pa.RecordBatch:
        """Concatenate the batches. The inferred type of a column may differ between them; such a column is
        converted again from its values."""
        first = batches[0].schema
        if all(batch.schema.equals(first) for batch in batches):
            return pa.concat_batches(batches)
        columns = []
        for index, field in enumerate(self.stream.fields):
            parts = [batch.column(index) for batch in batches]
            if all(part.type == parts[0].type for part in parts):
                columns.append(pa.concat_arrays(parts))
            else:
                columns.append(to_column([value for part in parts for value in to_values(part)], field.type))
        return pa.RecordBatch.from_arrays(columns, names=list(self.stream.field_names))

    def _arrays(self, columns: Sequence[Sequence[Any]]) -> list[pa.Array]:
        return [to_column(column, field.type) for column, field in zip(columns, self.stream.fields, strict=True)]

    def _fitting_rows(self, anchors: Anchoring | None) -> list[int]:
        """The rows whose values all fit their declared types. Every other row is reported and failed."""
        misfits: dict[int, FieldTypeError] = {}
        for column, field in zip(self.columns, self.stream.fields, strict=True):
            for row, value in enumerate(column):
                try:
                    to_column([value], field.type)
                except _MISFIT:
                    misfits[row] = FieldTypeError(
                        f"component '{self.stream.component}', stream '{self.stream.name}'",
                        f"field '{field.name}' is declared {field.type or 'without a type'}, but "
                        f"{value!r} of type {type(value).__name__} does not fit",
                        "Emit a value of that type, or declare the field without one."
                        if field.type
                        else "Emit a value that can be pickled.",
                    )
        for row, error in misfits.items():
            self._report(error)
            self._fail(anchors, row, [column[row] for column in self.columns], error)
        return [row for row in range(len(self.columns[0])) if row not in misfits]

    def _send_frames(self, task: int, batch: pa.RecordBatch, anchors: Anchoring | None) -> None:
        """Send a batch to one task in frames of about ``frame_bytes`` bytes."""
        rows = batch.num_rows
        born = self._now() if self.born is None else self.born
        edge = self._edge_of[task]
        send_queue, source = (
            edge.send_queue,
            None if edge.migration_routes is None else edge.migration_routes.newest,
        )
        wanted = self._frame_rows if send_queue is None else min(self._frame_rows, send_queue.frame_rows)
        frames = max(1, round(rows / wanted))  # frames of equal size, without a small remainder
        for number in range(frames):
            begin, end = rows * number // frames, rows * (number + 1) // frames
            part = batch if frames == 1 else batch.slice(begin, end - begin)
            lineage = None
            if anchors is not None and self.origins is not None:
                lineage = self.origins.lineage(anchors if frames == 1 else anchors.take(slice(begin, end)))
            size = self._send(self.number, task, part, born, lineage, source)
            self._stats.sent += part.num_rows
            self._stats.sent_bytes += size
            if size:
                per_row = size / part.num_rows
                self._frame_rows = max(1, min(_MOST_ROWS, int(self._frame_bytes / per_row)))

    def _clear(self) -> None:
        for column in self.columns:
            column.clear()
        self.tasks.clear()
        self._batches.clear()
        self._batch_tasks.clear()
        self._batch_rows = 0
        self.born = None


def sent_once(shares: Sequence[tuple[int, Rows]], rows: int) -> bool:
    """True if every row goes to exactly one task."""
    if len(shares) == 1 and isinstance(shares[0][1], slice):
        return shares[0][1] is ALL_ROWS or shares[0][1] == slice(0, rows)
    copies = np.zeros(rows, np.int64)
    for _, chosen in shares:
        if isinstance(chosen, slice):
            copies[chosen] += 1
        else:
            copies += np.bincount(chosen, minlength=rows)
    return bool(np.all(copies == 1))


def select_rows(batch: pa.RecordBatch, rows: Rows) -> pa.RecordBatch:
    """The rows of a batch that a target gets."""
    if rows is ALL_ROWS:
        return batch
    if isinstance(rows, slice):
        return batch.slice(rows.start, rows.stop - rows.start)
    return batch.take(pa.array(rows))
