"""The bolts of a ``Reduce``: one makes partials, one merges them, one merges them by window.

None of them waits for a tick: the changes caused by a batch are emitted with it and anchored to it. Therefore a
graceful shutdown loses nothing, and a tuple is acked only after its partial is merged.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.aggregates.merges import Merge
from penstock.aggregates.rows import by_key, column_of, key_columns, keys_of, owner_of, reduce_rows
from penstock.aggregates.windows import Window
from penstock.columns import to_values
from penstock.control.segments import ArrivalLedger, SourceRange, waiting_position
from penstock.state.maps import MapState, Owner
from penstock.topology.components import BatchBolt, BatchCollector, Conf, Context, Source
from penstock.topology.streams import OutputDeclarer

Merges = Mapping[str, Merge[Any, Any]]


NEWEST, TUPLES = "partial_newest", "partial_tuples"
"""Fields of a partial with a window: the time of its newest tuple, and the number of tuples it was computed
from."""


SEGMENTS = "segments"
"""The stream on which every task that merges partials learns which tuples they were computed from."""


class PartialBolt(BatchBolt):
    """Emits ⟨key…, partial…⟩ for each key of each batch; with a window ⟨key…, pane, partial_newest,
    partial_tuples, partial…⟩ for each key and pane, and then on the stream ``segments`` which tuples of which
    sender these partials are of (``control/segments.py``).

    It keeps no state. Any task may receive any tuple.
    """

    emits_partials = True

    def __init__(self, key: Sequence[str], merges: Merges, window: Window | None = None) -> None:
        self._key, self._merges, self._window = key, merges, window
        time = [] if window is None else [window.time]
        values = [merge.field for merge in merges.values() if merge.field is not None]
        self.reads = tuple(dict.fromkeys([*key, *time, *values]))

    def declare_output_fields(self, declarer: OutputDeclarer) -> None:
        declarer.declare(*self._key, *(["pane", NEWEST, TUPLES] if self._window else []), *self._merges)
        if self._window:
            numbers = [(name, int) for name in ("sender", "offset", "length", "tuples")]
            declarer.declare(*numbers, ("stream", str), "newest", stream=SEGMENTS)

    def execute_batch(self, batch: pa.RecordBatch, source: Source, collector: BatchCollector) -> None:
        if self._window is None:
            keys = [column_of(batch, field) for field in self._key]
            collector.emit_batch(reduce_rows(batch, keys, self._merges))
            return
        newest = None
        try:
            newest = self._emit_by_pane(batch, self._window, collector)
        finally:  # tuples that fail are not waited for: their senders emit them again, at other positions
            self._note(batch.num_rows, source, newest, collector)

    def skip_batch(self, batch: pa.RecordBatch, source: Source, collector: BatchCollector) -> None:
        if self._window is not None:
            self._note(batch.num_rows, source, None, collector)

    def _emit_by_pane(self, batch: pa.RecordBatch, window: Window, collector: BatchCollector) -> float | None:
        """Emit the partials of the batch, and return the newest time in it."""
        keys = [column_of(batch, field) for field in self._key]
        panes, times = window.panes_of(column_of(batch, window.time))
        keys.append(panes)
        order, bounds = by_key(keys, batch.num_rows)
        newest = np.maximum.reduceat(times[order], bounds[:-1]) if batch.num_rows else times
        rows = reduce_rows(batch, keys, self._merges)
        collector.emit_batch([*rows[: len(keys)], newest, np.diff(bounds), *rows[len(keys) :]])
        return times.max().item() if len(times) else None

    @staticmethod
    def _note(rows: int, source: Source, newest: float | None, collector: BatchCollector) -> None:
        values = source.task, source.range_offset, source.range_length, rows, source.stream, newest
        collector.emit_batch([[value] for value in values], stream=SEGMENTS)


class MergeBolt(BatchBolt):
    """Merges partials and emits ⟨key…, result…⟩ with the current result for each key that a batch changed.

    All partials of a key must be sent to the same task: group by fields of the key, or globally. The bolt keeps
    one partial per key and merge in its state and never removes it.
    """

    merges_partials = True

    def __init__(self, key: Sequence[str], merges: Merges) -> None:
        self._key, self._merges = key, merges
        self.same_task, self.reads = tuple(key), (*key, *merges)

    def declare_output_fields(self, declarer: OutputDeclarer) -> None:
        declarer.declare(*self._key, *self._merges)

    def prepare(self, conf: Conf, context: Context) -> None:
        owner = owner_of(self._key, context.grouped_by)
        self.partials = {
            name: context.state.map(name, merge=merge.merge, owner=owner) for name, merge in self._merges.items()
        }
        """The merged partials: for each merge a map of key (a tuple if it has several fields) to partial."""

    def execute_batch(self, batch: pa.RecordBatch, source: Source, collector: BatchCollector) -> None:
        keys = keys_of(batch, self._key)
        changed = merge_all(self.partials, self._merges, keys, batch)
        results = [list(map(merge.result, changed[name].values())) for name, merge in self._merges.items()]
        for name, partials in changed.items():  # after all results, so that a batch that fails changes nothing
            self.partials[name].update(partials)
        collector.emit_batch([*key_columns(list(dict.fromkeys(keys)), self._key), *results])


class WindowBolt(BatchBolt):
    """Merges partials by pane and emits ⟨key…, window_end, result…⟩ once for each key and window, when the window
    is complete: when a sender has sent a tuple whose time is ``lateness`` or more after the end of the window, and
    the partials of all tuples that it sent before have arrived, whichever tasks computed them.

    A partial that is too late for at least one of its windows is emitted unchanged on the stream ``late``; it is
    still counted in its windows that are not complete. A window that is not complete stays in the state and is not
    emitted, even at shutdown. All partials of a key must be sent to the same task.

    With at-least-once delivery, a result that fails downstream of this bolt, or that is in flight during a
    restart, is lost: the tuples that completed the window are emitted again but find it complete. With
    exactly-once delivery no result is lost.

    When the number of tasks changes, tasks that had completed different windows may be merged into one. The new
    task continues after the latest of these windows, and emits the results that the other tasks had not emitted
    with the next batch.
    """

    merges_partials = True
    control_stream = SEGMENTS

    def __init__(self, key: Sequence[str], merges: Merges, window: Window) -> None:
        self._key, self._merges, self._window = key, merges, window
        self.same_task, self.reads = tuple(key), (*key, "pane", NEWEST, TUPLES, *merges)

    def declare_output_fields(self, declarer: OutputDeclarer) -> None:
        declarer.declare(*self._key, "window_end", *self._merges)
        declarer.declare(*self._key, "pane", *self._merges, stream="late")

    def prepare(self, conf: Conf, context: Context) -> None:
        state, self._count_late = context.state, context.late
        self._exactly_once = context.delivery == "exactly_once"
        owner = owner_of(self._key, context.grouped_by)
        of_pair = functools.partial(_owner_of_pair, owner) if context.grouped_by else None
        self.partials = {
            name: state.map(name, merge=merge.merge, owner=of_pair) for name, merge in self._merges.items()
        }
        """For each merge a map of ⟨pane, key⟩ to partial."""
        # These names contain spaces, so no field can have the same name.
        self._complete = state.value("last complete window", merge=_later, with_keys=True)
        """The last complete window."""
        self._overdue = state.map("overdue windows", merge=_earlier, owner=owner)
        """Keys of tasks that were behind when tasks were merged, with the last window that their task had
        emitted."""
        self._keys: dict[int, dict[Any, tuple[int, Any]]] = {}
        """The keys of each pane in the state, with their keys in the maps of ``partials``."""
        first = next(iter(self.partials.values()))
        self._add_keys(first)
        self._find_overdue(first)
        self._is_told = any(stream == SEGMENTS for _, stream in context.inputs)
        """Whether the senders of partials say which tuples they are of."""
        self._generation, self._ledger = context.generation, ArrivalLedger(context.generation)
        self._arrived = state.value("arrived segments", merge=_first)
        """⟨Generation, content of the ledger, what is left of earlier generations⟩ at the last snapshot. Another
        generation numbers its tuples anew."""
        self._behind = state.value("newest time behind a gap", merge=_later)
        """The newest time that did not count at the last snapshot, because other tuples were missing."""
        self._held: float | None = None
        """The newest time that does not count yet, because tuples of earlier generations are missing."""
        self._left = self._left_here = 0
        """Tuples of earlier generations that are missing: those of which partials are not made yet, and rows that
        wait for this task."""
        if self._arrived.value is not None and self._arrived.value[0] == self._generation:
            _, ledger, self._left, self._left_here, self._held = self._arrived.value
            self._ledger.restore(ledger)
        elif context.delivery == "exactly_once":  # otherwise what is missing is emitted again
            parts = [source for source, stream in context.inputs if stream == SEGMENTS]
            self._left = sum(context.waiting.get(part, 0) for part in parts)
            self._left_here, self._held = context.waiting.get(context.component, 0), self._behind.value

    def before_snapshot(self) -> None:
        if self._is_told:
            left = self._left, self._left_here, self._held
            self._arrived.value = self._generation, self._ledger.to_state(), *left
            self._behind.value = _later(self._held, self._ledger.newest_waiting)

    def execute_batch(self, batch: pa.RecordBatch, source: Source, collector: BatchCollector) -> None:
        self._left_here = max(0, self._left_here - batch.num_rows)
        if self._overdue:  # before the batch is merged, because its tuples are late for these windows
            self._emit_overdue(collector)
        if source.stream == SEGMENTS:
            self._execute_notes(batch, collector)
            return
        panes = to_values(column_of(batch, "pane"))
        newest = max(to_values(column_of(batch, NEWEST)))
        complete = self._complete.value
        if complete is not None and min(panes) < complete:
            late = [row for row, pane in enumerate(panes) if pane < complete]
            late_rows = batch.take(pa.array(late))
            self._count_late(sum(to_values(column_of(late_rows, TUPLES))))
            collector.emit_batch(late_rows.drop_columns([NEWEST, TUPLES]), stream="late", anchors=late)
            batch = batch.filter(pa.array([pane + self._window.panes > complete for pane in panes]))
            panes = to_values(column_of(batch, "pane"))
        if not panes:
            return
        keys = list(zip(panes, keys_of(batch, self._key), strict=True))
        changed = merge_all(self.partials, self._merges, keys, batch)
        for name, partials in changed.items():  # after all merges, so that a batch that fails changes nothing
            self.partials[name].update(partials)
        self._add_keys(keys)
        if not self._is_told:
            self._complete_windows(self._window.complete(newest), collector)

    def skip_batch(self, batch: pa.RecordBatch, source: Source, collector: BatchCollector) -> None:
        if source.stream == SEGMENTS:  # these tuples come again at other positions, so they must leave no gap
            self._execute_notes(batch, collector, dropped=True)

    def _execute_notes(self, batch: pa.RecordBatch, collector: BatchCollector, dropped: bool = False) -> None:
        """Enter the tuples whose partials have arrived, and emit the windows that are complete now. The time of
        partials that were ``dropped`` does not count. No time counts before the partials of all tuples of earlier
        generations have arrived."""
        newest, waited = self._held, waiting_position(self._generation)
        for sender, offset, length, tuples, stream, time in zip(*map(to_values, batch.columns), strict=True):
            if dropped:
                time = None
            if length and offset <= waited:
                self._left -= tuples if offset == waited else 0
                time = time if self._exactly_once else None
            elif length:
                time = self._ledger.arrived((sender, stream), SourceRange(offset, length), tuples, time)
            if time is not None and (newest is None or time > newest):
                newest = time
        if self._left > 0 or self._left_here > 0:
            self._held = newest
        elif newest is not None:
            self._held = None
            self._complete_windows(self._window.complete(newest), collector)

    def _add_keys(self, keys: Iterable[tuple[int, Any]]) -> None:
        for pane, key in keys:
            self._keys.setdefault(pane, {})[key] = pane, key

    def _find_overdue(self, partials: MapState) -> None:
        """After a change of the number of tasks, find the keys whose previous task was behind."""
        keys = iter(partials)
        for task, count in partials.taken_over:
            complete = self._complete.before.get(task)
            for _, key in islice(keys, count):
                if complete != self._complete.value:
                    self._overdue.setdefault(key, complete)

    def _emit_overdue(self, collector: BatchCollector) -> None:
        overdue = self._overdue.copy()
        since = None if None in overdue.values() else min(overdue.values())
        for window in self._windows(since, self._complete.value):
            keys = {key for key, complete in overdue.items() if complete is None or complete < window}
            self._emit(window, keys, collector)
        self._overdue.clear()

    def _complete_windows(self, last: int, collector: BatchCollector) -> None:
        """Emit the windows up to ``last``, and remove panes that no later window contains."""
        complete = self._complete.value
        if complete is not None and last <= complete:
            return
        for window in self._windows(complete, last):
            self._emit(window, None, collector)
        for pane in [pane for pane in self._keys if pane + self._window.panes <= last]:
            for key in self._keys.pop(pane).values():
                for state in self.partials.values():
                    del state[key]
        self._complete.value = last

    def _emit(self, window: int, only: set[Any] | None, collector: BatchCollector) -> None:
        """Emit the results of a window, for the keys in ``only`` or for all keys."""
        found: dict[Any, Any] = {}
        results = []
        for name, merge in self._merges.items():
            found = self._partials_in(window, self.partials[name], merge, only)
            results.append(list(map(merge.result, found.values())))
        ends = [self._window.end(window)] * len(found)
        if found:
            collector.emit_batch([*key_columns(list(found), self._key), ends, *results])

    def _windows(self, complete: int | None, last: int) -> list[int]:
        """The windows after ``complete`` up to ``last`` that contain tuples. Empty windows are skipped, because
        there may be any number of them between two tuples."""
        found = {window for pane in self._keys for window in self._window.windows_of(pane)}
        return sorted(window for window in found if (complete is None or window > complete) and window <= last)

    def _partials_in(
        self, window: int, state: MapState, merge: Merge[Any, Any], only: set[Any] | None
    ) -> dict[Any, Any]:
        """The partial of each key in the window. Keys and their order are the same for every merge."""
        found: dict[Any, Any] = {}
        for pane in self._window.panes_in(window):
            keys = self._keys.get(pane, {})
            if only is not None:
                keys = {key: place for key, place in keys.items() if key in only}
            fold(found, merge, keys, state.get_columns(list(keys.values())))
        return found


def merge_all(
    states: Mapping[str, MapState], merges: Merges, keys: Sequence[Any], batch: pa.RecordBatch
) -> dict[str, dict[Any, Any]]:
    """For each merge, the keys of a batch of partials with their new partials. The caller stores them in the
    states. A partial in a state is changed in place only if doing so twice makes no difference, because the batch
    may fail and come again."""
    changed: dict[str, dict[Any, Any]] = {}
    for name, merge in merges.items():
        partials, stored = to_values(column_of(batch, name)), states[name]
        if merge.repeatable:
            changed[name] = dict(zip(keys, stored.get_columns(keys), strict=True))
            fold(changed[name], merge, keys, partials)
            continue
        of_batch: dict[Any, Any] = {}
        fold(of_batch, merge, keys, partials)
        before = zip(of_batch.items(), stored.get_columns(list(of_batch)), strict=True)
        changed[name] = {key: new if old is None else merge.merge(new, old) for (key, new), old in before}
    return changed


def fold(into: dict[Any, Any], merge: Merge[Any, Any], keys: Iterable[Any], partials: Iterable[Any]) -> None:
    """Merge each partial into that of its key; a key whose value is None has no partial yet. Values in ``into``
    may be changed in place; ``partials`` are not changed."""
    join, zero = merge.merge, merge.zero
    for key, partial in zip(keys, partials, strict=True):
        before = into.get(key)
        into[key] = join(zero() if before is None else before, partial)


def _owner_of_pair(owner: Owner | None, pair: tuple[int, Any]) -> Any:
    """The value that the input is grouped by, for a ⟨pane, key⟩."""
    return pair[1] if owner is None else owner(pair[1])


def _first(one: Any, other: Any) -> Any:
    return one


def _later(one: Any, other: Any) -> Any:
    return max((each for each in (one, other) if each is not None), default=None)


def _earlier(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else min(one, other)
