"""Collectors: the objects with which components emit tuples. Tuple components make one call for each emitted
tuple, so ``emit`` is a function made for the stream: in C if the native form is available (``penstock.native``),
otherwise a closure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from penstock import native
from penstock.acking.lineage import Lineage, of_all, part_of
from penstock.metrics.stats import TaskStats
from penstock.topology.streams import DEFAULT_STREAM
from penstock.topology.tuples import Tuple
from penstock.worker.emitting import Outputs, direct_only, direct_output, named_output, wrong_count
from penstock.worker.outputs import StreamOutput
from penstock.worker.tracking import MessageIds, Tracker

Append = Callable[[Sequence[Any]], None]
Emit = Callable[..., None]


def make_append(output: StreamOutput) -> Append:
    """Make the function that adds the values of one tuple to the waiting columns, all or none. It raises
    ``FieldCountError``."""
    stream = output.stream
    adds = [column.append for column in output.columns]

    def append(values: Sequence[Any]) -> None:
        if isinstance(values, str) or not hasattr(type(values), "__len__") or len(values) != len(adds):
            wrong_count(stream, values)
        for add, value in zip(adds, values, strict=True):
            add(value)

    return append


def make_emit(output: StreamOutput | None, emit_on: Callable[[str, Sequence[Any]], None]) -> Emit:
    """Make the ``emit`` of a tuple component. ``output`` is its default stream, unless that is direct or
    missing; ``emit_on`` emits on any other stream.

    ``emit`` is called for every tuple, so streams of one or two fields have special versions: unpacking checks
    the number of values and reads them in one step. Most values are lists, and comparing the class costs less
    than ``isinstance``.
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
                    wrong_count(declared, values)
                if values.__class__ is not list and isinstance(values, str):  # "a" unpacks to "a"
                    wrong_count(declared, values)
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
                wrong_count(declared, values)
            if values.__class__ is not list and isinstance(values, str):
                wrong_count(declared, values)
            add_first(first)
            add_second(second)
        else:
            emit_on(stream, values)

    return emit_two


def make_native(
    emit: Emit,
    output: StreamOutput | None,
    keyword: str,
    noted: list[Any] | None = None,
    note_none: bool = False,
) -> Emit:
    """Make the native form of an ``emit`` in pure Python; the same ``emit`` if there is none. ``output`` and
    ``keyword`` are the default stream and the name of the third argument, which is appended to ``noted``; None
    only if ``note_none``."""
    if native.FORM is None or output is None:
        return emit
    return native.FORM.make_emit(emit, output.columns, DEFAULT_STREAM, keyword, noted, note_none)


class TupleCollector:
    """The collector of basic bolts, and the base class of the collectors of rich bolts and spouts."""

    def __init__(self, component: str, outputs: Outputs) -> None:
        self._component, self._outputs = component, outputs
        self._append = {name: make_append(output) for name, output in outputs.items()}
        default = outputs.get(DEFAULT_STREAM)
        self._default = None if default is None or default.stream.direct else default
        self.emit = make_native(make_emit(self._default, self._emit_on), self._default, "anchors")

    def emit_direct(
        self, task: int, values: Sequence[Any], stream: str = DEFAULT_STREAM, anchors: Any = None
    ) -> None:
        output = direct_output(self._component, self._outputs, stream, task)
        self._append[stream](values)
        output.tasks.append(task)

    def emit_columns(self, *columns: Sequence[Any], stream: str = DEFAULT_STREAM) -> None:
        output = named_output(self._component, self._outputs, stream)
        if output.stream.direct:
            direct_only(output.stream)
        if len(columns) != len(output.columns) or len(set(map(len, columns))) != 1:
            wrong_count(output.stream, [f"{len(column)} values" for column in columns])
        for waiting, column in zip(output.columns, columns, strict=True):
            waiting.extend(column)

    def _emit_on(self, stream: str, values: Sequence[Any]) -> None:
        output = named_output(self._component, self._outputs, stream)
        if output.stream.direct:
            direct_only(output.stream)
        self._append[stream](values)


class RichTupleCollector(TupleCollector):
    """The collector of rich bolts. If acks are not tracked, it only counts them."""

    def __init__(
        self,
        component: str,
        outputs: Outputs,
        stats: TaskStats,
        tracker: Tracker | None,
        add_dead_letter: Callable[[Iterable[Any], str], None] = lambda values, error: None,
    ) -> None:
        """``add_dead_letter`` is called for a failed tuple that no spout will emit again."""
        super().__init__(component, outputs)
        self._stats, self._tracker, self._add_dead_letter = stats, tracker, add_dead_letter
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
            self._add_dead_letter(tup, error or f"component '{self._component}' failed it")
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
        self._note = {name: self._make_note(output) for name, output in outputs.items()}
        self.emit = self._make_emit(self.emit)

    def ready(self, stream: str = DEFAULT_STREAM) -> bool:
        return named_output(self._component, self._outputs, stream).ready()

    def _make_emit(self, emit_tuple: Emit) -> Emit:
        """Make an ``emit`` that also records the message id. A stream of one field has a version without the
        second call."""
        default, notes, note_default = self._default, self._note, self._note.get(DEFAULT_STREAM)

        def emit(values: Sequence[Any], stream: str = DEFAULT_STREAM, msg_id: Any = None) -> None:
            emit_tuple(values, stream)
            if stream is DEFAULT_STREAM and note_default is not None:
                note_default(msg_id)
            else:
                notes[stream](msg_id)

        if native.FORM is not None and default is not None:
            if isinstance(default.origins, MessageIds):
                return make_native(emit, default, "msg_id", default.origins.ids, note_none=True)
            return make_native(emit, default, "msg_id", self.done)
        if default is None or len(default.columns) > 1 or note_default is None:
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

    def _make_note(self, output: StreamOutput) -> Callable[[Any], None]:
        if isinstance(output.origins, MessageIds):
            return output.origins.ids.append
        done = self.done

        def note(msg_id: Any) -> None:
            if msg_id is not None:
                done.append(msg_id)

        return note
