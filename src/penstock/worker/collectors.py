"""Collectors: the objects with which components emit tuples. Tuple components make one call for each emitted
tuple, so ``emit`` is a closure made for the stream."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NoReturn

import numpy as np
import pyarrow as pa

from penstock.acking.lineage import Anchors, Lineage, of_all, of_groups, part_of
from penstock.columns import to_column
from penstock.errors import ComponentError, FieldCountError, FieldTypeError
from penstock.metrics.stats import TaskStats
from penstock.topology.components import Columns
from penstock.topology.streams import DEFAULT_STREAM, Stream
from penstock.topology.tuples import Tuple
from penstock.worker.outputs import StreamOutput
from penstock.worker.tracking import MessageIds, Tracker

Outputs = Mapping[str, StreamOutput]


Append = Callable[[Sequence[Any]], None]
Emit = Callable[..., None]


def make_append(output: StreamOutput) -> Append:
    """Make the function that adds the values of one tuple to the waiting columns, all or none. It raises
    ``FieldCountError``."""
    stream = output.stream
    adds = [column.append for column in output.columns]

    def append(values: Sequence[Any]) -> None:
        if isinstance(values, str) or not hasattr(values, "__len__") or len(values) != len(adds):
            _wrong_count(stream, values)
        for add, value in zip(adds, values, strict=True):
            add(value)

    return append


def make_emit(output: StreamOutput | None, emit_on: Callable[[str, Sequence[Any]], None]) -> Emit:
    """Make the ``emit`` of a tuple component. ``output`` is its default stream, unless that is direct or
    missing; ``emit_on`` emits on any other stream.

    ``emit`` is called for every tuple, so streams of one or two fields have special versions: unpacking checks
    the number of values and reads them in one step.
    """
    if output is None or len(output.columns) > 2:
        append = None if output is None else make_append(output)

        def emit(values: Sequence[Any], stream: str = DEFAULT_STREAM, anchors: Any = None) -> None:
            if stream is DEFAULT_STREAM and append is not None:
                append(values)
            else:
                emit_on(stream, values)

        return emit
    declared = output.stream
    if len(output.columns) == 1:
        add = output.columns[0].append

        def emit_one(values: Sequence[Any], stream: str = DEFAULT_STREAM, anchors: Any = None) -> None:
            if stream is DEFAULT_STREAM:
                try:
                    (value,) = values
                except (ValueError, TypeError):
                    _wrong_count(declared, values)
                if value is values:  # "a" unpacks to "a"
                    _wrong_count(declared, values)
                add(value)
            else:
                emit_on(stream, values)

        return emit_one
    add_first, add_second = (column.append for column in output.columns)

    def emit_two(values: Sequence[Any], stream: str = DEFAULT_STREAM, anchors: Any = None) -> None:
        if stream is DEFAULT_STREAM:
            try:
                first, second = values
            except (ValueError, TypeError):
                _wrong_count(declared, values)
            if values.__class__ is str:
                _wrong_count(declared, values)
            add_first(first)
            add_second(second)
        else:
            emit_on(stream, values)

    return emit_two


class TupleCollector:
    """The collector of basic bolts, and the base class of the collectors of rich bolts and spouts."""

    def __init__(self, component: str, outputs: Outputs) -> None:
        self._component, self._outputs = component, outputs
        self._append = {name: make_append(output) for name, output in outputs.items()}
        default = outputs.get(DEFAULT_STREAM)
        self.emit = make_emit(None if default is None or default.stream.direct else default, self._emit_on)

    def emit_direct(
        self, task: int, values: Sequence[Any], stream: str = DEFAULT_STREAM, anchors: Any = None
    ) -> None:
        output = direct_output(self._component, self._outputs, stream, task)
        self._append[stream](values)
        output.tasks.append(task)

    def emit_columns(self, *columns: Sequence[Any], stream: str = DEFAULT_STREAM) -> None:
        output = named_output(self._component, self._outputs, stream)
        if output.stream.direct:
            _direct_only(output.stream)
        if len(columns) != len(output.columns) or len(set(map(len, columns))) != 1:
            _wrong_count(output.stream, [f"{len(column)} values" for column in columns])
        for waiting, column in zip(output.columns, columns, strict=True):
            waiting.extend(column)

    def _emit_on(self, stream: str, values: Sequence[Any]) -> None:
        output = named_output(self._component, self._outputs, stream)
        if output.stream.direct:
            _direct_only(output.stream)
        self._append[stream](values)


class RichTupleCollector(TupleCollector):
    """The collector of rich bolts. If acks are not tracked, it only counts them."""

    def __init__(
        self,
        component: str,
        outputs: Outputs,
        stats: TaskStats,
        tracker: Tracker | None,
        give_up: Callable[[Iterable[Any], str], None] = lambda values, error: None,
    ) -> None:
        """``give_up`` is called for a failed tuple that no spout will emit again."""
        super().__init__(component, outputs)
        self._stats, self._tracker, self._give_up = stats, tracker, give_up
        if tracker is not None:
            plain = self.emit

            def emit(values: Sequence[Any], stream: str = DEFAULT_STREAM, anchors: Any = None) -> None:
                plain(values, stream)
                self._anchor(outputs[stream], anchors)

            self.emit = emit

    def emit_direct(
        self, task: int, values: Sequence[Any], stream: str = DEFAULT_STREAM, anchors: Any = None
    ) -> None:
        super().emit_direct(task, values, stream)
        if self._tracker is not None:
            self._anchor(self._outputs[stream], anchors)

    def ack(self, tup: Tuple) -> None:
        held = _held(tup)
        if held is not None:
            held.ack(tup)
        self._stats.acked += 1

    def fail(self, tup: Tuple, error: str = "") -> None:
        held = _held(tup)
        if held is not None:
            held.fail(tup, error or f"component '{self._component}' failed it")
        elif not tup.is_tick:
            self._give_up(tup, error or f"component '{self._component}' failed it")
        self._stats.failed += 1

    def _anchor(self, output: StreamOutput, anchors: Tuple | Sequence[Tuple] | None) -> None:
        """Record the anchors of the row that was emitted last. A tuple that is acked already has no effect as an
        anchor."""
        if not anchors or output.origins is None:
            return
        given = [anchors] if isinstance(anchors, Tuple) else anchors
        lineages = [held.lineage(tup) for tup in given if (held := _held(tup)) is not None]
        if lineages:
            output.origins.add(of_all(lineages, 1), output.waiting())


class HeldTuples:
    """The tuples of one frame that a rich bolt has received and not yet acked. Tuples with the same roots form a
    group, which is acked when all its tuples are."""

    def __init__(self, lineage: Lineage, tracker: Tracker) -> None:
        self._lineage, self._tracker = lineage, tracker
        self._left = np.diff(lineage.ends, prepend=0).tolist()

    def mark(self, tuples: Iterable[Tuple]) -> Iterator[Tuple]:
        """Return the tuples, each with a reference to its group."""
        for tup, group in zip(tuples, self._lineage.group_of_rows().tolist(), strict=True):
            tup.__dict__[_HELD] = (self, group)
            yield tup

    def lineage(self, tup: Tuple) -> Lineage:
        return part_of(self._lineage, tup.__dict__[_HELD][1])

    def ack(self, tup: Tuple) -> None:
        _, group = tup.__dict__.pop(_HELD)  # so that a second ack has no effect
        self._left[group] -= 1
        if not self._left[group]:
            self._tracker.tally.add(self._lineage.entries(group, group + 1))

    def fail(self, tup: Tuple, error: str) -> None:
        _, group = tup.__dict__.pop(_HELD)
        entries = self._lineage.entries(group, group + 1)
        self._tracker.fail(entries.first, entries.length, error)


_HELD = "_penstock_held"


def _held(tup: Tuple) -> HeldTuples | None:
    found = getattr(tup, "__dict__", {}).get(_HELD)
    return None if found is None else found[0]


class SpoutTupleCollector(TupleCollector):
    """The collector of spouts. If acks are not tracked, ``done`` collects the message ids, which the executor
    acks when the guarantee allows it."""

    def __init__(self, component: str, outputs: Outputs) -> None:
        super().__init__(component, outputs)
        self.done: list[Any] = []
        self._note = {name: self._noting(output) for name, output in outputs.items()}
        self.emit = self._make_emit(self.emit, outputs.get(DEFAULT_STREAM))

    def ready(self, stream: str = DEFAULT_STREAM) -> bool:
        return named_output(self._component, self._outputs, stream).ready()

    def _make_emit(self, emit_tuple: Emit, default: StreamOutput | None) -> Emit:
        """Make an ``emit`` that also records the message id. A stream of one field has a version without the
        second call."""
        notes, note_default = self._note, self._note.get(DEFAULT_STREAM)

        def emit(values: Sequence[Any], stream: str = DEFAULT_STREAM, msg_id: Any = None) -> None:
            emit_tuple(values, stream)
            if stream is DEFAULT_STREAM and note_default is not None:
                note_default(msg_id)
            else:
                notes[stream](msg_id)

        if default is None or default.stream.direct or len(default.columns) > 1 or note_default is None:
            return emit
        add, note = default.columns[0].append, note_default

        def emit_one(values: Sequence[Any], stream: str = DEFAULT_STREAM, msg_id: Any = None) -> None:
            if stream is DEFAULT_STREAM and values.__class__ is list and len(values) == 1:
                add(values[0])
                note(msg_id)
            else:
                emit(values, stream, msg_id)

        return emit_one

    def emit_direct(
        self, task: int, values: Sequence[Any], stream: str = DEFAULT_STREAM, msg_id: Any = None
    ) -> None:
        super().emit_direct(task, values, stream)
        self._note[stream](msg_id)

    def emit_columns(self, *columns: Sequence[Any], stream: str = DEFAULT_STREAM) -> None:
        super().emit_columns(*columns, stream=stream)
        for _ in columns[0]:
            self._note[stream](None)

    def _noting(self, output: StreamOutput) -> Callable[[Any], None]:
        if isinstance(output.origins, MessageIds):
            return output.origins.ids.append
        done = self.done

        def note(msg_id: Any) -> None:
            if msg_id is not None:
                done.append(msg_id)

        return note


class ArrowCollector:
    """The base class of the collectors of batch components. ``notes`` has one item for each tuple: its anchor or
    its message id."""

    _notes_name: ClassVar[str]
    """The name of the argument ``notes`` in error messages."""

    def __init__(self, component: str, outputs: Outputs) -> None:
        self._component, self._outputs = component, outputs

    def _add_batch(
        self, columns: Columns, stream: str, notes: Sequence[Any] | None
    ) -> tuple[StreamOutput, int, Sequence[Any] | None]:
        output = named_output(self._component, self._outputs, stream)
        if output.stream.direct:
            _direct_only(output.stream)
        return output, self._add(output, columns, None, notes), notes

    def _add_direct(
        self, task: int, columns: Columns, stream: str, notes: Sequence[Any] | None
    ) -> tuple[StreamOutput, int, Sequence[Any] | None]:
        output = direct_output(self._component, self._outputs, stream, task)
        return output, self._add(output, columns, task, notes), notes

    def _add(self, output: StreamOutput, columns: Columns, task: int | None, notes: Sequence[Any] | None) -> int:
        """Add the rows, all or none, and return their number. Raises ``FieldCountError`` or ``FieldTypeError``."""
        batch = as_batch(output.stream, columns)
        rows = int(batch.num_rows)
        if notes is not None and len(notes) != rows:
            raise FieldCountError(
                _where(output.stream),
                f"{self._notes_name} must have one item for each tuple, but there are {len(notes)} for {rows}",
            )
        if rows:
            output.add_batch(batch, task)
        return rows


class BoltArrowCollector(ArrowCollector):
    """The collector of batch bolts. ``lineage`` is that of the batch being executed; None if acks are not
    tracked."""

    _notes_name = "anchors"
    lineage: Lineage | None = None
    _everything: Anchors | None = None

    def begin(self, lineage: Lineage | None) -> None:
        """Called before each batch, with its lineage."""
        self.lineage, self._everything = lineage, None

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
        if anchors is not None:
            chosen = lineage.group_of_rows()[np.asarray(anchors, np.int64)]
            output.origins.add(of_groups(lineage, chosen), output.waiting())
            return
        if self._everything is None:
            self._everything = of_all([lineage], 0)
        output.origins.add(self._everything._replace(sets=np.zeros(rows, np.int64)), output.waiting())


class SpoutArrowCollector(ArrowCollector):
    """The collector of batch spouts. ``done`` is used as in ``SpoutTupleCollector``."""

    _notes_name = "msg_ids"

    def __init__(self, component: str, outputs: Outputs) -> None:
        super().__init__(component, outputs)
        self.done: list[Any] = []

    def ready(self, stream: str = DEFAULT_STREAM) -> bool:
        return named_output(self._component, self._outputs, stream).ready()

    def emit_batch(
        self, columns: Columns, stream: str = DEFAULT_STREAM, msg_ids: Sequence[Any] | None = None
    ) -> None:
        self._note(*self._add_batch(columns, stream, msg_ids))

    def emit_batch_direct(
        self, task: int, columns: Columns, stream: str = DEFAULT_STREAM, msg_ids: Sequence[Any] | None = None
    ) -> None:
        self._note(*self._add_direct(task, columns, stream, msg_ids))

    def _note(self, output: StreamOutput, rows: int, msg_ids: Sequence[Any] | None) -> None:
        ids = msg_ids.tolist() if isinstance(msg_ids, np.ndarray) else msg_ids
        if isinstance(output.origins, MessageIds):
            output.origins.ids += [None] * rows if ids is None else ids
        elif ids is not None:
            self.done += ids


def as_batch(stream: Stream, columns: Columns) -> pa.RecordBatch:
    """Convert the columns to a record batch that has the fields of the stream, in order and with their declared
    types. Raises ``FieldCountError`` or ``FieldTypeError``."""
    names = stream.field_names
    if isinstance(columns, pa.RecordBatch):
        if tuple(columns.schema.names) == names and all(
            columns.schema.field(index).type == field.type for index, field in enumerate(stream.fields)
        ):
            return columns
        named = columns.schema.names
        if sorted(named) != sorted(names):
            _wrong_count(stream, named)
        given: Sequence[Any] = [columns.column(name) for name in names]
    elif isinstance(columns, Mapping):
        missing = [name for name in names if name not in columns]
        if missing or len(columns) != len(names):
            _wrong_count(stream, list(columns))
        given = [columns[name] for name in names]
    else:
        given = columns
    if len(given) != len(names):
        _wrong_count(stream, given)
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
                _where(stream),
                f"field '{field.name}' is declared {field.type}, but a column does not fit that type ({error})",
            ) from None
        arrays.append(column)
    if len({len(array) for array in arrays}) > 1:
        lengths = ", ".join(f"{name}: {len(array)}" for name, array in zip(names, arrays, strict=True))
        raise FieldCountError(_where(stream), f"the columns of a batch have different lengths ({lengths})")
    return pa.RecordBatch.from_arrays(arrays, names=list(names))


def named_output(component: str, outputs: Outputs, stream: str) -> StreamOutput:
    """The output of a declared stream. Raises ``ComponentError`` for any other name."""
    output = outputs.get(stream)
    if output is None:
        near = difflib.get_close_matches(stream, outputs, 1)
        raise ComponentError(
            f"component '{component}'",
            f"it emitted on stream '{stream}', which it does not declare (it declares "
            f"{', '.join(outputs) or 'none'})",
            f"Did you mean '{near[0]}'?" if near else "Declare it in declare_output_fields.",
        )
    return output


def direct_output(component: str, outputs: Outputs, stream: str, task: int) -> StreamOutput:
    """The output of a direct stream. Raises ``ComponentError`` if the stream is not direct or ``task`` does not
    subscribe to it."""
    output = named_output(component, outputs, stream)
    if not output.stream.direct:
        raise ComponentError(
            _where(output.stream),
            "emit_direct was called, but the stream is not direct",
            "Declare it with direct=True.",
        )
    if task not in output.direct_targets:
        raise ComponentError(
            _where(output.stream),
            f"emit_direct named task {task!r}, which does not subscribe to the stream "
            f"(the subscribers' tasks are {sorted(output.direct_targets)})",
            "The ids of a component's tasks are in context.tasks.",
        )
    return output


def _where(stream: Stream) -> str:
    return f"component '{stream.component}', stream '{stream.name}'"


def _direct_only(stream: Stream) -> NoReturn:
    raise ComponentError(
        _where(stream),
        "emit was called, but the stream is direct",
        "Call emit_direct(task, values) and name the receiving task.",
    )


def _wrong_count(stream: Stream, values: Any) -> NoReturn:
    if isinstance(values, str) or not hasattr(values, "__len__"):
        got, hint = f"{values!r} was emitted", f"Wrap it: emit([{values!r}])."
    else:
        got, hint = (
            f"{len(values)} value{' was' if len(values) == 1 else 's were'} emitted: {values!r}",
            "Emit one value per declared field.",
        )
    raise FieldCountError(
        _where(stream),
        f"it has {len(stream.fields)} field{'' if len(stream.fields) == 1 else 's'} "
        f"({', '.join(stream.field_names)}), but {got}",
        hint,
    )
