"""Storm's eight groupings and custom groupings, implemented on whole batches.

A ``Grouping`` is inert and is part of the topology. In a source task it creates one ``Router`` per subscribing
component, which splits every batch over the target tasks. Routers only see batches and target positions, no
workers and no Spark, so the simulator runs the same code.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock import native
from penstock.columns import PLAIN_TYPES, ColumnBatch, values_of
from penstock.topology.hashing import check_keys, hash_fields

Rows = slice | npt.NDArray[np.int64]
"""The rows of a batch that one target gets: a slice if they are adjacent (no copy), otherwise their indices in
order."""
Split = list[tuple[int, Rows]]
"""Pairs of target position and rows. Rows keep their order; a target occurs at most once."""

Part = tuple[int, Rows, ColumnBatch]
"""A target position, its rows, and a batch of these rows."""

ALL_ROWS = slice(None)


@dataclass(frozen=True)
class Targets:
    """What a router knows about the component it sends to. Positions number the tasks from the lowest id."""

    tasks: tuple[int, ...]
    source_task: int = 0
    same_worker: tuple[int, ...] = ()
    same_node: tuple[int, ...] = ()
    seed: int = 0
    source_index: int = 0
    """The position of the source task among the tasks of its component."""

    def __len__(self) -> int:
        return len(self.tasks)

    @property
    def together(self) -> bool:
        """All tasks are in the worker of the source, so it makes no difference which of them works first."""
        return len(self.same_worker) == len(self.tasks)


class Router(ABC):
    """Splits the batches of one source task over the tasks of one component. May keep state between batches."""

    takes_columns: ClassVar[bool] = False
    """True: ``split`` also accepts a ``ColumnBatch``. A router that a user wrote gets Arrow batches only."""

    @abstractmethod
    def split(self, batch: pa.RecordBatch) -> Split: ...

    def divide(self, batch: ColumnBatch) -> list[Part]:
        """As ``split``, together with the rows of each target."""
        split = self.split(batch if self.takes_columns else batch.arrow())
        return [(position, rows, batch.select(rows)) for position, rows in split]


class Grouping(ABC):
    """Distributes one subscribed stream over the tasks of the subscriber."""

    name: str

    @abstractmethod
    def router(self, targets: Targets) -> Router: ...

    def key_fields(self) -> tuple[str, ...]:
        """The fields that the grouping reads. Checked against the stream while the topology is built."""
        return ()

    def __str__(self) -> str:
        keys = self.key_fields()
        return f"{self.name}({', '.join(keys)})" if keys else self.name


def by_position(chosen: npt.NDArray[Any], targets: int) -> Split:
    """Convert "row i goes to position chosen[i]" into a ``Split``."""
    if targets == 1:
        return [(0, ALL_ROWS)]
    # A stable sort keeps the order of the rows of each target. numpy sorts 16-bit integers by radix, in linear
    # time.
    if len(chosen) and (chosen == chosen[0]).all():
        return [(int(chosen[0]), ALL_ROWS)]
    order = np.argsort(chosen.astype(np.uint16), kind="stable")
    edges = np.searchsorted(chosen[order], np.arange(targets + 1))
    return [
        (target, order[edges[target] : edges[target + 1]])
        for target in range(targets)
        if edges[target] < edges[target + 1]
    ]


_ROWS_TOGETHER, _ROWS_OF_BATCHES = 256, 8192
"""The least rows of a slice for a task in the same worker, if there are so many: some 50 us of work in the tuple
form, and as much in the batch form. One task after the other does the work, so smaller slices for more tasks only
cost."""


class _EvenRouter(Router):
    """Assigns slices of equal size. Surplus rows rotate over the targets, so their totals differ by at most one;
    if all targets are in the worker of the source, by at most two slices."""

    takes_columns = True

    def __init__(self, positions: Sequence[int], start: int, together: bool = False) -> None:
        self._positions = positions
        self._next = start % len(positions)
        self._together = together

    def split(self, batch: pa.RecordBatch | ColumnBatch) -> Split:
        count, rows, positions = len(self._positions), batch.num_rows, self._positions
        if count == 1:
            return [(positions[0], ALL_ROWS)]
        used = count
        if self._together:
            least = _ROWS_TOGETHER if isinstance(batch, ColumnBatch) else _ROWS_OF_BATCHES
            used = min(count, max(rows // least, 1))
        share, odd = divmod(rows, used)
        result: Split = []
        begin = 0
        for turn in range(used if share else odd):
            end = begin + share + (turn < odd)
            result.append((positions[(self._next + turn) % count], slice(begin, end)))
            begin = end
        self._next = (self._next + (odd if used == count else used)) % count
        return result


class Shuffle(Grouping):
    """Distributes tuples evenly over the target tasks."""

    name = "shuffle"

    def router(self, targets: Targets) -> Router:
        return _EvenRouter(range(len(targets)), targets.source_task + targets.seed, targets.together)


class NoneGrouping(Shuffle):
    """The same as shuffle, for users who do not care about the distribution."""

    name = "none"


class LocalOrShuffle(Grouping):
    """Prefers tasks in the same worker, then tasks on the same node; otherwise the same as shuffle."""

    name = "local_or_shuffle"

    def router(self, targets: Targets) -> Router:
        near = targets.same_worker or targets.same_node or tuple(range(len(targets)))
        return _EvenRouter(near, targets.source_task + targets.seed, near == targets.same_worker)


_KEYS_KNOWN = 32_768
"""Keys whose position a router remembers: a few megabytes. More would not fit into the processor's cache."""
_FEW_ROWS = 64
"""Rows up to which Python sorts them by target faster than numpy, which takes some microseconds for every call."""
_PLAIN = frozenset({*PLAIN_TYPES, NoneType})


class _FieldsRouter(Router):
    takes_columns = True

    def __init__(self, fields: tuple[str, ...], count: int) -> None:
        self._fields, self._count = fields, count
        self._known: dict[Any, int] = {}
        """The position of keys that occurred before. Equal keys have equal hashes, so a dict finds the right
        one."""
        self._looked_up = self._missed = 0
        """Keys looked up and not found since ``_known`` was emptied."""

    def split(self, batch: pa.RecordBatch | ColumnBatch) -> Split:
        plain = isinstance(batch, ColumnBatch) and all(
            _PLAIN.issuperset(map(type, batch.named(field))) for field in self._fields
        )
        if self._count == 1:
            if not plain:
                check_keys(batch, self._fields)  # the bolt may get more tasks later
            return [(0, ALL_ROWS)]
        if plain and 2 * self._missed <= max(self._looked_up, _KEYS_KNOWN):
            assert isinstance(batch, ColumnBatch)
            return _by_position_small(self._look_up(batch), self._count)
        hashes = hash_fields(batch, self._fields)
        if native.FORM is not None:
            order, parts = native.FORM.order_by_target(hashes, self._count)
            if len(parts) == 1:
                return [(parts[0][0], ALL_ROWS)]
            sorted_rows = np.frombuffer(order, np.int64)
            return [(target, sorted_rows[begin:end]) for target, begin, end in parts]
        return by_position(hashes % np.uint64(self._count), self._count)

    def divide(self, batch: ColumnBatch) -> list[Part]:
        """In one pass over the rows in C, if all keys occurred before."""
        if native.FORM is None or self._count == 1 or 2 * self._missed > max(self._looked_up, _KEYS_KNOWN):
            return super().divide(batch)
        columns = [batch.named(field) for field in self._fields]
        if not all(native.FORM.passes(column, _PLAIN) for column in columns):
            return super().divide(batch)
        keys = columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))
        found = native.FORM.distribute(self._known, keys, tuple(batch.values), self._count)
        if found is None:
            return super().divide(batch)
        self._looked_up += len(keys)
        return [
            (target, np.frombuffer(rows, np.int64), ColumnBatch(batch.fields, values))
            for target, rows, values in found
        ]

    def _look_up(self, batch: ColumnBatch) -> list[int]:
        """The position of each row. Keys that rarely repeat are not worth remembering, so the caller stops asking
        when most of them were not found."""
        columns = [batch.named(field) for field in self._fields]
        keys = columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))
        self._looked_up += len(keys)
        try:
            return list(map(self._known.__getitem__, keys))
        except KeyError:
            pass
        if len(self._known) > _KEYS_KNOWN:
            self._known.clear()
        new = [row for row, key in enumerate(keys) if key not in self._known]
        self._missed += len(new)
        hashes = hash_fields(batch.take(new), self._fields) % np.uint64(self._count)
        self._known.update(zip(map(keys.__getitem__, new), hashes.tolist(), strict=True))
        return list(map(self._known.__getitem__, keys))


def _by_position_small(chosen: list[int], targets: int) -> Split:
    """As ``by_position``, for a list that may be short."""
    if len(chosen) > _FEW_ROWS:
        return by_position(np.array(chosen, np.uint16), targets)
    rows_of: dict[int, list[int]] = {}
    if len(set(chosen)) == 1:
        return [(chosen[0], ALL_ROWS)]
    for row, position in enumerate(chosen):
        rows_of.setdefault(position, []).append(row)
    return [(position, np.array(rows)) for position, rows in sorted(rows_of.items())]


class Fields(Grouping):
    """Sends equal keys to the same task. The position is ``hash % tasks``, so doubling the tasks moves half of the
    keys."""

    name = "fields"

    def __init__(self, *fields: str) -> None:
        self.fields = fields

    def key_fields(self) -> tuple[str, ...]:
        return self.fields

    def router(self, targets: Targets) -> Router:
        return _FieldsRouter(self.fields, len(targets))


class _PartialKeyRouter(Router):
    takes_columns = True

    def __init__(self, fields: tuple[str, ...], count: int) -> None:
        self._fields, self._count = fields, count
        self._sent = [0] * count

    def split(self, batch: pa.RecordBatch) -> Split:
        if self._count == 1:
            check_keys(batch, self._fields)  # the bolt may get more tasks later
            return [(0, ALL_ROWS)]
        hashes = hash_fields(batch, self._fields)
        count = np.uint64(self._count)
        first = hashes % count
        # An offset of 1 .. count - 1 from the upper bits makes the second candidate differ from the first.
        second = (first + np.uint64(1) + (hashes >> np.uint64(32)) % (count - np.uint64(1))) % count
        sent = self._sent
        chosen = []
        for one, other in zip(first.tolist(), second.tolist(), strict=True):
            pick = one if sent[one] <= sent[other] else other
            sent[pick] += 1
            chosen.append(pick)
        return by_position(np.array(chosen), self._count)


class PartialKey(Fields):
    """Assigns two candidate tasks to each key; a tuple goes to the one that this source task has sent fewer
    tuples."""

    name = "partial_key"

    def router(self, targets: Targets) -> Router:
        return _PartialKeyRouter(self.fields, len(targets))


class _FixedRouter(Router):
    takes_columns = True

    def __init__(self, positions: Sequence[int]) -> None:
        self._split: Split = [(position, ALL_ROWS) for position in positions]

    def split(self, batch: pa.RecordBatch) -> Split:
        return self._split


class All(Grouping):
    """Sends a copy to every target task."""

    name = "all"

    def router(self, targets: Targets) -> Router:
        return _FixedRouter(range(len(targets)))


class Global(Grouping):
    """Sends everything to the target task with the lowest id."""

    name = "global"

    def router(self, targets: Targets) -> Router:
        return _FixedRouter([0])


class Forward(Grouping):
    """Sends everything to the task with the same index as the source, modulo the number of targets. So the tasks
    of both components form branches of several hops, each of which can be migrated as a whole."""

    name = "forward"

    def router(self, targets: Targets) -> Router:
        return _FixedRouter([targets.source_index % len(targets)])


class Direct(Grouping):
    """The emitter names the task (``emit_direct``), so there is no router."""

    name = "direct"

    def router(self, targets: Targets) -> Router:
        raise TypeError("a direct stream is routed by its emitter")


class CustomGrouping(Grouping):
    """Base class of groupings written by users, for single tuples.

    ``prepare`` runs once per source task. ``choose`` returns the ids (of ``targets.tasks``) of the tasks that get
    the tuple: none, one or several. For more speed, override ``router`` and work on whole batches.
    """

    name = "custom"

    def prepare(self, targets: Targets) -> None:
        """Store what ``choose`` needs."""

    @abstractmethod
    def choose(self, values: tuple[Any, ...]) -> Sequence[int]: ...

    def router(self, targets: Targets) -> Router:
        own = copy.copy(self)  # all source tasks in a process share this object, and each prepares its own copy
        own.prepare(targets)
        return _CustomRouter(own, targets)


class _CustomRouter(Router):
    takes_columns = True

    def __init__(self, grouping: CustomGrouping, targets: Targets) -> None:
        self._grouping = grouping
        self._position = {task: position for position, task in enumerate(targets.tasks)}

    def split(self, batch: pa.RecordBatch) -> Split:
        rows_of: dict[int, list[int]] = {}
        for row, values in enumerate(zip(*values_of(batch), strict=True)):
            for task in self._grouping.choose(values):
                position = self._position.get(task)
                if position is None:
                    raise ValueError(
                        f"grouping {type(self._grouping).__name__} chose task {task}, "
                        f"which is not one of its targets {sorted(self._position)}"
                    )
                rows_of.setdefault(position, []).append(row)
        return [(position, np.array(rows)) for position, rows in sorted(rows_of.items())]
