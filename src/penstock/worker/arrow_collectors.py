"""Collectors of batch components: the objects with which they emit Arrow batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from penstock.acking.flights import MadeRows, Trace
from penstock.acking.lineage import Anchors, of_all, of_groups
from penstock.columns import to_column
from penstock.errors import FieldCountError, FieldTypeError
from penstock.topology.components import Columns
from penstock.topology.streams import DEFAULT_STREAM, Stream
from penstock.worker.emitting import Outputs, direct_only, direct_output, named_output, where, wrong_count
from penstock.worker.flight_tracking import FlightOrigins
from penstock.worker.outputs import StreamOutput
from penstock.worker.tracking import Ancestry, MessageIds


class ArrowCollector:
    """Base class of the collectors of batch bolts and batch spouts. ``notes`` has one item for each tuple of a
    batch: its anchor (bolts) or its message id (spouts). Used by the worker's loop only."""

    _notes_name: ClassVar[str]
    """The name of the parameter that contains the notes, for error messages."""

    def __init__(self, component: str, outputs: Outputs) -> None:
        self._component, self._outputs = component, outputs

    def _add_batch(
        self, columns: Columns, stream: str, notes: Sequence[Any] | None
    ) -> tuple[StreamOutput, int, Sequence[Any] | None]:
        output = named_output(self._component, self._outputs, stream)
        if output.stream.direct:
            direct_only(output.stream)
        return output, self._add(output, columns, None, notes), notes

    def _add_direct(
        self, task: int, columns: Columns, stream: str, notes: Sequence[Any] | None
    ) -> tuple[StreamOutput, int, Sequence[Any] | None]:
        output = direct_output(self._component, self._outputs, stream, task)
        return output, self._add(output, columns, task, notes), notes

    def _add(self, output: StreamOutput, columns: Columns, task: int | None, notes: Sequence[Any] | None) -> int:
        """Add the rows of a batch to the output, all or none. Returns their number. Raises ``FieldCountError`` or
        ``FieldTypeError``."""
        batch = as_batch(output.stream, columns)
        rows = int(batch.num_rows)
        if notes is not None and len(notes) != rows:
            raise FieldCountError(
                where(output.stream),
                f"{self._notes_name} must have one item for each tuple, but there are {len(notes)} for {rows}",
            )
        if rows:
            output.add_batch(batch, task)
        return rows


class BoltArrowCollector(ArrowCollector):
    """The collector of batch bolts. ``lineage`` is the lineage of the batch that is being executed; None if acks
    are not tracked."""

    _notes_name = "anchors"
    lineage: Ancestry | None = None
    _all_anchors: Anchors | None = None

    def begin(self, lineage: Ancestry | None, rows: int = 0) -> None:
        """Called before the next batch is executed; ``lineage`` is the lineage of that batch, and
        ``rows`` its number of rows."""
        self.lineage, self._all_anchors, self._rows = lineage, None, rows

    def emit_batch(
        self, columns: Columns, stream: str = DEFAULT_STREAM, anchors: Sequence[int] | None = None
    ) -> None:
        self._anchor(*self._add_batch(columns, stream, anchors))

    def emit_batch_direct(
        self, task: int, columns: Columns, stream: str = DEFAULT_STREAM, anchors: Sequence[int] | None = None
    ) -> None:
        self._anchor(*self._add_direct(task, columns, stream, anchors))

    def _anchor(self, output: StreamOutput, rows: int, anchors: Sequence[int] | None) -> None:
        lineage = self.lineage
        if lineage is None or output.origins is None or not rows:
            return
        if isinstance(lineage, Trace):
            assert isinstance(output.origins, FlightOrigins)
            trace = MadeRows(lineage, self._rows, None, 0, rows)
            # Here a wrong anchor is an error of the component.
            made = trace if anchors is None else lineage.take(np.arange(self._rows)[np.asarray(anchors, np.int64)])
            output.origins.add_trace(made, rows, output.waiting())
            return
        if anchors is not None:
            chosen = lineage.group_of_rows()[np.asarray(anchors, np.int64)]
            output.origins.add(of_groups(lineage, chosen), output.waiting())
            return
        if self._all_anchors is None:
            self._all_anchors = of_all([lineage], 0)
        output.origins.add(self._all_anchors._replace(sets=np.zeros(rows, np.int64)), output.waiting())


class SpoutArrowCollector(ArrowCollector):
    """The collector of batch spouts. ``done`` as in ``SpoutTupleCollector``."""

    _notes_name = "msg_ids"

    def __init__(self, component: str, outputs: Outputs) -> None:
        super().__init__(component, outputs)
        self.done: list[Any] = []
        self.limit = 0
        """Waiting rows of all streams that the spout's own limits permit in this run."""
        self.granted: int | None = None
        """What ``room`` returned last in this call of the spout. None: it was not asked."""

    def ready(self, stream: str = DEFAULT_STREAM) -> bool:
        return named_output(self._component, self._outputs, stream).ready()

    def room(self, stream: str = DEFAULT_STREAM) -> int:
        left = self.limit - sum(output.waiting() for output in self._outputs.values())
        self.granted = max(0, min(left, named_output(self._component, self._outputs, stream).room()))
        return self.granted

    def emit_batch(
        self, columns: Columns, stream: str = DEFAULT_STREAM, msg_ids: Sequence[Any] | None = None
    ) -> None:
        self._note(*self._add_batch(columns, stream, msg_ids))

    def emit_batch_direct(
        self, task: int, columns: Columns, stream: str = DEFAULT_STREAM, msg_ids: Sequence[Any] | None = None
    ) -> None:
        self._note(*self._add_direct(task, columns, stream, msg_ids))

    def _note(self, output: StreamOutput, rows: int, msg_ids: Sequence[Any] | None) -> None:
        if isinstance(output.origins, MessageIds):
            output.origins.add_many([None] * rows if msg_ids is None else msg_ids)
        elif msg_ids is not None:
            self.done += msg_ids.tolist() if isinstance(msg_ids, np.ndarray) else msg_ids


def as_batch(stream: Stream, columns: Columns) -> pa.RecordBatch:
    """Make a record batch from the columns: with the stream's fields, in their order and of their declared types.
    Raises ``FieldCountError`` or ``FieldTypeError``."""
    names = stream.field_names
    if isinstance(columns, pa.RecordBatch):
        if tuple(columns.schema.names) == names and all(
            columns.schema.field(index).type == field.type for index, field in enumerate(stream.fields)
        ):
            return columns
        named = columns.schema.names
        if sorted(named) != sorted(names):
            wrong_count(stream, named)
        given: Sequence[Any] = [columns.column(name) for name in names]
    elif isinstance(columns, Mapping):
        missing = [name for name in names if name not in columns]
        if missing or len(columns) != len(names):
            wrong_count(stream, list(columns))
        given = [columns[name] for name in names]
    else:
        given = columns
    if len(given) != len(names):
        wrong_count(stream, given)
    arrays = []
    for field, column in zip(stream.fields, given, strict=True):
        try:
            if isinstance(column, pa.ChunkedArray):
                column = column.combine_chunks()
            elif isinstance(column, np.ndarray):
                column = pa.array(column)
            elif not isinstance(column, pa.Array):
                column = to_column(column if isinstance(column, list) else list(column), field.type)
            if pa.types.is_dictionary(column.type):
                column = column.dictionary_decode()  # a frame carries no dictionaries
            if field.type is not None and column.type != field.type:
                column = column.cast(field.type)
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise FieldTypeError(
                where(stream),
                f"field '{field.name}' is declared {field.type}, and a column does not fit ({error})",
            ) from None
        arrays.append(column)
    if len({len(array) for array in arrays}) > 1:
        lengths = ", ".join(f"{name}: {len(array)}" for name, array in zip(names, arrays, strict=True))
        raise FieldCountError(where(stream), f"the columns of a batch have different lengths ({lengths})")
    return pa.RecordBatch.from_arrays(arrays, names=list(names))
