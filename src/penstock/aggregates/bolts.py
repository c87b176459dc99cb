"""The bolts of a ``Reduce``: one makes partials, one merges them, one merges them by window.

None of them waits for a tick: what a batch changed is emitted with it and stems from it. So nothing is held back
that a graceful end could lose, and a tuple is acked no sooner than its partial is merged.
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
from penstock.state.maps import MapState, Owner
from penstock.topology.components import BatchBolt, BatchCollector, Conf, Context, Source
from penstock.topology.streams import OutputDeclarer

Merges = Mapping[str, Merge[Any, Any]]


NEWEST, TUPLES = "partial_newest", "partial_tuples"
"""Fields of a partial with a window: the time of the newest tuple in it, and how many tuples it stands for."""


class PartialBolt(BatchBolt):
    """Emits ⟨key…, partial…⟩ for each key of each batch; with a window ⟨key…, pane, partial_newest,
    partial_tuples, partial…⟩ for each key and pane.

    It keeps nothing from batch to batch. Any task may get any tuple.
    """

    emits_partials = True

    def __init__(self, key: Sequence[str], merges: Merges, window: Window | None = None) -> None:
        self._key, self._merges, self._window = key, merges, window
        time = [] if window is None else [window.time]
        values = [merge.field for merge in merges.values() if merge.field is not None]
        self.reads = tuple(dict.fromkeys([*key, *time, *values]))

    def declare_output_fields(self, declarer: OutputDeclarer) -> None:
        declarer.declare(*self._key, *(["pane", NEWEST, TUPLES] if self._window else []), *self._merges)

    def execute_batch(self, batch: pa.RecordBatch, source: Source, collector: BatchCollector) -> None:
        keys = [column_of(batch, field) for field in self._key]
        if self._window is None:
            collector.emit_batch(reduce_rows(batch, keys, self._merges))
            return
        panes, times = self._window.panes_of(column_of(batch, self._window.time))
        keys.append(panes)
        order, bounds = by_key(keys, batch.num_rows)
        newest = np.maximum.reduceat(times[order], bounds[:-1]) if batch.num_rows else times
        rows = reduce_rows(batch, keys, self._merges)
        collector.emit_batch([*rows[: len(keys)], newest, np.diff(bounds), *rows[len(keys) :]])


class MergeBolt(BatchBolt):
    """Merges partials and emits ⟨key…, result…⟩, as they now are, for each key that a batch changed.

    All partials of a key must come to one task: group by fields of the key, or globally. It keeps a partial per
    key and merge, in state, for ever.
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
        """What is merged so far: for each merge a map of key (a tuple where it has several fields) to partial."""

    def execute_batch(self, batch: pa.RecordBatch, source: Source, collector: BatchCollector) -> None:
        keys = keys_of(batch, self._key)
        results = []
        changed: dict[Any, Any] = {}
        for name, merge in self._merges.items():
            changed = merge_into(self.partials[name], merge, keys, to_values(column_of(batch, name)))
            results.append(list(map(merge.result, changed.values())))
        collector.emit_batch([*key_columns(list(changed), self._key), *results])


class WindowBolt(BatchBolt):
    """Merges partials by pane and emits ⟨key…, window_end, result…⟩ once for each key and window, when the window
    is over: when this task has seen a tuple ``lateness`` past its end.

    Partials that come too late for one of their windows or more are emitted, as they are, on the stream ``late``;
    they count in the windows that are not over yet. A window that is not over is kept in state and not emitted,
    also at the end. All partials of a key must come to one task.

    At least once a result that fails behind this bolt, or that a restart overtakes, is lost: the tuples that ended
    the window are emitted again, and find it over. Exactly once none is lost.

    When the number of tasks changes, tasks that were at different windows may become one: it is at the last of
    theirs, and emits what the others had still to emit with the next batch.
    """

    merges_partials = True

    def __init__(self, key: Sequence[str], merges: Merges, window: Window) -> None:
        self._key, self._merges, self._window = key, merges, window
        self.same_task, self.reads = tuple(key), (*key, "pane", NEWEST, TUPLES, *merges)

    def declare_output_fields(self, declarer: OutputDeclarer) -> None:
        declarer.declare(*self._key, "window_end", *self._merges)
        declarer.declare(*self._key, "pane", *self._merges, stream="late")

    def prepare(self, conf: Conf, context: Context) -> None:
        state, self._count_late = context.state, context.late
        owner = owner_of(self._key, context.grouped_by)
        of_pair = functools.partial(_owner_of_pair, owner) if context.grouped_by else None
        self.partials = {
            name: state.map(name, merge=merge.merge, owner=of_pair) for name, merge in self._merges.items()
        }
        """For each merge a map of ⟨pane, key⟩ to partial."""
        # With spaces: no field has that name.
        self._over = state.value("last window over", merge=_later, with_keys=True)
        self._owed = state.map("windows owed", merge=_earlier, owner=owner)
        """Keys whose task was behind that of others, to the last window it had emitted."""
        self._keys: dict[int, dict[Any, tuple[int, Any]]] = {}  # of each pane that is kept, and theirs in the maps
        first = next(iter(self.partials.values()))
        self._note(first)
        self._note_owed(first)

    def execute_batch(self, batch: pa.RecordBatch, source: Source, collector: BatchCollector) -> None:
        if self._owed:  # before what comes now is merged: for these windows it is late
            self._emit_owed(collector)
        panes = to_values(column_of(batch, "pane"))
        newest = max(to_values(column_of(batch, NEWEST)))
        over = self._over.value
        if over is not None and min(panes) < over:
            late = [row for row, pane in enumerate(panes) if pane < over]
            late_rows = batch.take(pa.array(late))
            self._count_late(sum(to_values(column_of(late_rows, TUPLES))))
            collector.emit_batch(late_rows.drop_columns([NEWEST, TUPLES]), stream="late", anchors=late)
            batch = batch.filter(pa.array([pane + self._window.panes > over for pane in panes]))
            panes = to_values(column_of(batch, "pane"))
        if not panes:
            return
        keys = list(zip(panes, keys_of(batch, self._key), strict=True))
        self._note(keys)
        for name, merge in self._merges.items():
            merge_into(self.partials[name], merge, keys, to_values(column_of(batch, name)))
        self._close(self._window.over(newest), collector)

    def _note(self, keys: Iterable[tuple[int, Any]]) -> None:
        for pane, key in keys:
            self._keys.setdefault(pane, {})[key] = pane, key

    def _note_owed(self, partials: MapState) -> None:
        keys = iter(partials)
        for task, count in partials.taken_over:
            over = self._over.before.get(task)
            for _, key in islice(keys, count):
                if over != self._over.value:
                    self._owed.setdefault(key, over)

    def _emit_owed(self, collector: BatchCollector) -> None:
        owed = self._owed.copy()
        since = None if None in owed.values() else min(owed.values())
        for window in self._windows(since, self._over.value):
            self._emit(window, {key for key, over in owed.items() if over is None or over < window}, collector)
        self._owed.clear()

    def _close(self, last: int, collector: BatchCollector) -> None:
        """Emit the windows up to this one, and forget the panes that no later one has."""
        over = self._over.value
        if over is not None and last <= over:
            return
        for window in self._windows(over, last):
            self._emit(window, None, collector)
        for pane in [pane for pane in self._keys if pane + self._window.panes <= last]:
            for key in self._keys.pop(pane).values():
                for state in self.partials.values():
                    del state[key]
        self._over.value = last

    def _emit(self, window: int, only: set[Any] | None, collector: BatchCollector) -> None:
        """The results of a window, of these keys or of all."""
        found: dict[Any, Any] = {}
        results = []
        for name, merge in self._merges.items():
            found = self._partials_in(window, self.partials[name], merge, only)
            results.append(list(map(merge.result, found.values())))
        ends = [self._window.end(window)] * len(found)
        if found:
            collector.emit_batch([*key_columns(list(found), self._key), ends, *results])

    def _windows(self, over: int | None, last: int) -> list[int]:
        """Those after ``over`` up to ``last`` with a tuple in them: there may be an age between two tuples."""
        found = {window for pane in self._keys for window in self._window.windows_of(pane)}
        return sorted(window for window in found if (over is None or window > over) and window <= last)

    def _partials_in(
        self, window: int, state: MapState, merge: Merge[Any, Any], only: set[Any] | None
    ) -> dict[Any, Any]:
        """The partial of each key in the window; the same keys in the same order for every merge."""
        found: dict[Any, Any] = {}
        for pane in self._window.panes_in(window):
            keys = self._keys.get(pane, {})
            if only is not None:
                keys = {key: place for key, place in keys.items() if key in only}
            fold(found, merge, keys, state.get_columns(list(keys.values())))
        return found


def merge_into(
    state: MapState, merge: Merge[Any, Any], keys: Sequence[Any], partials: Sequence[Any]
) -> dict[Any, Any]:
    """Merge each partial into that of its key; gives those that changed, as they now are."""
    changed = dict(zip(keys, state.get_columns(keys), strict=True))
    fold(changed, merge, keys, partials)
    state.update(changed)
    return changed


def fold(into: dict[Any, Any], merge: Merge[Any, Any], keys: Iterable[Any], partials: Iterable[Any]) -> None:
    """Merge each partial into that of its key, of which None is as good as none. What is in ``into`` may change in
    place; ``partials`` do not."""
    join, zero = merge.merge, merge.zero
    for key, partial in zip(keys, partials, strict=True):
        before = into.get(key)
        into[key] = join(zero() if before is None else before, partial)


def _owner_of_pair(owner: Owner | None, pair: tuple[int, Any]) -> Any:
    """Of a ⟨pane, key⟩ what the input is grouped by."""
    return pair[1] if owner is None else owner(pair[1])


def _later(one: int | None, other: int | None) -> int | None:
    return max((window for window in (one, other) if window is not None), default=None)


def _earlier(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else min(one, other)
