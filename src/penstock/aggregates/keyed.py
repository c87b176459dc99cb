"""Keyed aggregates with a state of their own: each task of a bolt behind a fields grouping keeps the aggregates of
its keys, and can nevertheless be migrated (Sun 2022).

>>> class Visits(KeyedAggregate):
...     key, results = ("user",), ("visits", "pages")
...     def zero(self): return 0, frozenset()
...     def add(self, state, tup): return state[0] + 1, state[1] | {tup.page}
...     def merge(self, state, other): return state[0] + other[0], state[1] | other[1]
...     def result(self, state): return state[0], len(state[1])
>>> visits = Visits()
>>> builder.set_bolt("count", visits.keyed(), 4).fields_grouping("clicks", "user")
>>> builder.set_bolt("visits", visits.merged(), 2).fields_grouping("count", "user")

The tuples of a key normally reach the task that owns the key. While that task is migrated, another task gets them.
It computes partials of these foreign keys from nothing, and hands them on with the batch, so that it owes nothing
when the migration ends, the topology restarts or the number of tasks changes. The merging bolt is the output node
of the paper: it keeps what the owners say apart from the partials of foreign keys, and merges both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.aggregates.merges import Merge
from penstock.aggregates.rows import is_value, key_columns, keys_of, owner_of
from penstock.columns import to_values, values_of
from penstock.errors import TopologyError
from penstock.state.maps import MapState
from penstock.topology.components import BatchBolt, BatchCollector, Conf, Context, Source
from penstock.topology.hashing import hash_fields
from penstock.topology.streams import OutputDeclarer
from penstock.topology.tuples import Tuple, rows_of, tuple_type

FOREIGN, STATE = "partial_foreign", "partial_state"
"""Fields of what a task hands on: whether it does not own the key, and the state."""


class KeyedAggregate(ABC):
    """What to compute from the tuples of each key. Derive from it, and give its bolts to the topology.

    A state is a plain value that can be pickled. ``merge`` must be associative and commutative, ``zero()`` its
    neutral element, and ``add(state, tup)`` equal to merging with the state of that tuple alone. ``add`` and
    ``merge`` may change and return their first argument, but must not change the second.
    """

    key: tuple[str, ...]
    """The fields of the key. The input of ``keyed()`` is grouped by some or all of them."""
    results: tuple[str, ...]
    """The names of the values that ``result`` returns."""

    @abstractmethod
    def zero(self) -> Any:
        """The state of no tuples; a new object each time if states are mutable."""

    @abstractmethod
    def add(self, state: Any, tup: Tuple) -> Any:
        """The state with one more tuple."""

    @abstractmethod
    def merge(self, state: Any, other: Any) -> Any:
        """The state of the tuples of both states."""

    @abstractmethod
    def result(self, state: Any) -> Sequence[Any]:
        """The results of a state, in the order of ``results``. Must not change it."""

    def keyed(self) -> KeyedBolt:
        """The bolt that keeps the states. Group its input by fields of the key."""
        self._check()
        return KeyedBolt(self)

    def merged(self) -> KeyedMergeBolt:
        """The bolt that merges the states of a key, and emits ⟨key…, result…⟩ for each key that changed. Group its
        input by fields of the key, or globally."""
        self._check()
        return KeyedMergeBolt(self)

    def _check(self) -> None:
        for name in ("key", "results"):
            value = getattr(self, name, ())
            if isinstance(value, str) or not value or not all(isinstance(field, str) for field in value):
                raise TopologyError(
                    type(self).__name__,
                    f"its attribute {name} must be a tuple of field names, not {value!r}",
                    f'Write {name} = ("{"user" if name == "key" else "count"}",), with the comma.',
                )


class KeyedBolt(BatchBolt):
    """Keeps the state of each key that its task owns, and emits ⟨key…, partial_foreign, partial_state⟩ for each
    key of each batch: of its own keys the whole state, of foreign keys the state of the batch.

    The owner of a key is the task to which the fields grouping of the input sends it. States of foreign keys are
    never kept, so the state of a task contains its own keys only. If ``add`` or ``merge`` raises, all tuples of
    the batch fail.
    """

    emits_partials = True

    def __init__(self, aggregate: KeyedAggregate) -> None:
        self._aggregate = aggregate
        self.same_task = self.reads = tuple(aggregate.key)

    def declare_output_fields(self, declarer: OutputDeclarer) -> None:
        declarer.declare(*self._aggregate.key, FOREIGN, STATE)

    def prepare(self, conf: Conf, context: Context) -> None:
        self._grouped_by, self._tasks, self._index = context.grouped_by, context.parallelism, context.index
        owner = owner_of(self._aggregate.key, context.grouped_by)
        self.states: MapState = context.state.map("states", owner=owner)
        """The state of each key that this task owns."""

    def execute_batch(self, batch: pa.RecordBatch, source: Source, collector: BatchCollector) -> None:
        aggregate = self._aggregate
        own: dict[Any, Any] = {}
        foreign: dict[Any, Any] = {}
        rows, _ = rows_of(
            tuple_type(source.component, source.stream, source.task, tuple(batch.schema.names)), values_of(batch)
        )
        for key, tup, mine in zip(keys_of(batch, aggregate.key), rows, self._owned(batch), strict=True):
            states = own if mine else foreign
            state = states[key] if key in states else aggregate.zero()
            states[key] = aggregate.add(state, tup)
        for key, state in own.items():  # after all tuples, so that a batch that fails changes nothing
            before = self.states.get(key)  # the second argument, which is not changed: another merge may raise
            own[key] = state if before is None else aggregate.merge(state, before)
        self.states.update(own)
        keys = [*own, *foreign]
        marks = [False] * len(own) + [True] * len(foreign)
        collector.emit_batch([*key_columns(keys, aggregate.key), marks, [*own.values(), *foreign.values()]])

    def _owned(self, batch: pa.RecordBatch) -> list[bool]:
        """For each row whether this task owns its key."""
        if not self._grouped_by or self._tasks == 1:
            return [True] * batch.num_rows
        owners = hash_fields(batch, self._grouped_by) % np.uint64(self._tasks)
        mine: list[bool] = (owners == np.uint64(self._index)).tolist()
        return mine


class KeyedMergeBolt(BatchBolt):
    """Merges the states of a ``KeyedBolt`` and emits ⟨key…, result…⟩ with the current result for each key that a
    batch changed.

    What the owner of a key says replaces what it said before. States of foreign keys are merged into a state of
    their own, which is kept for good. All states of a key must be sent to the same task.
    """

    merges_partials = True

    def __init__(self, aggregate: KeyedAggregate) -> None:
        self._aggregate = aggregate
        self.same_task, self.reads = tuple(aggregate.key), (*aggregate.key, FOREIGN, STATE)

    def declare_output_fields(self, declarer: OutputDeclarer) -> None:
        declarer.declare(*self._aggregate.key, *self._aggregate.results)

    def prepare(self, conf: Conf, context: Context) -> None:
        owner, merge = owner_of(self._aggregate.key, context.grouped_by), self._aggregate.merge
        self.owned: MapState = context.state.map("owned", owner=owner, merge=merge)
        """The newest state from the owner of each key."""
        self.foreign: MapState = context.state.map("foreign", owner=owner, merge=merge)
        """The merged states from tasks that do not own the key."""

    def execute_batch(self, batch: pa.RecordBatch, source: Source, collector: BatchCollector) -> None:
        aggregate = self._aggregate
        marks, states = (to_values(batch.column(batch.schema.get_field_index(name))) for name in (FOREIGN, STATE))
        owned: dict[Any, Any] = {}
        foreign: dict[Any, Any] = {}
        changed: dict[Any, None] = {}
        for key, mark, state in zip(keys_of(batch, aggregate.key), marks, states, strict=True):
            if mark:
                foreign[key] = aggregate.merge(foreign[key] if key in foreign else aggregate.zero(), state)
            else:
                owned[key] = state
            changed[key] = None
        for key, state in foreign.items():
            before = self.foreign.get(key)  # the second argument, which is not changed: another merge may raise
            foreign[key] = state if before is None else aggregate.merge(state, before)
        results = [
            aggregate.result(
                self._merged(owned.get(key, self.owned.get(key)), foreign.get(key, self.foreign.get(key)))
            )
            for key in changed
        ]
        columns = list(zip(*results, strict=True)) or [() for _ in aggregate.results]
        self.owned.update(owned)  # after all merges and results, so that a batch that fails changes nothing
        self.foreign.update(foreign)
        collector.emit_batch([*key_columns(list(changed), aggregate.key), *columns])

    def state_of(self, key: Any) -> Any:
        """The merged state of a key that has one."""
        return self._merged(self.owned.get(key), self.foreign.get(key))

    def _merged(self, *parts: Any) -> Any:
        state = self._aggregate.zero()
        for part in parts:
            if part is not None:
                state = self._aggregate.merge(state, part)
        return state


class MergedFields(KeyedAggregate):
    """The merges of a ``Reduce`` as a keyed aggregate: its state is the tuple of their partials."""

    def __init__(self, key: Sequence[str], merges: Mapping[str, Merge[Any, Any]]) -> None:
        self.key, self.results = tuple(key), tuple(merges)
        self._merges = tuple(merges.values())

    def zero(self) -> Any:
        return tuple(merge.zero() for merge in self._merges)

    def add(self, state: Any, tup: Tuple) -> Any:
        added = []
        for merge, partial in zip(self._merges, state, strict=True):
            value = None if merge.field is None else tup.value(merge.field)
            added.append(merge.add(partial, value) if merge.field is None or is_value(value) else partial)
        return tuple(added)

    def merge(self, state: Any, other: Any) -> Any:
        parts = zip(self._merges, state, other, strict=True)
        return tuple(merge.merge(partial, more) for merge, partial, more in parts)

    def result(self, state: Any) -> Sequence[Any]:
        return [merge.result(partial) for merge, partial in zip(self._merges, state, strict=True)]
