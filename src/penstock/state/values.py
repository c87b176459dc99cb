"""The state of a task as its component uses it (values and maps by name), and the snapshots taken of it."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from penstock.errors import StateError
from penstock.state.decoded import DecodedChain
from penstock.state.encoding import StateChange, count_rows, dumps, encode_value, form_of, is_plain, pickled_value
from penstock.state.maps import MapState, Merge, Owner
from penstock.state.shares import Share
from penstock.state.tracked_map import NO_DEFAULT

_State = TypeVar("_State", "ValueState", MapState)


class ValueState:
    """A single value that survives the process. Read and assign ``.value``. Created by ``TaskState.value``.

    The value may be any picklable object, including Arrow arrays and tables. At each snapshot it is pickled,
    unless it is the same number, text or tuple of these as last time, and it is written if the pickle has changed.
    Changes in place are therefore detected. For much data with few changes, use a map.
    """

    __slots__ = ("_mark", "_seen", "_written", "before", "merge", "name", "value", "with_keys")

    def __init__(
        self, name: str, default: Any = None, merge: Merge | None = None, with_keys: bool = False
    ) -> None:
        self.name, self.merge, self.with_keys = name, merge, with_keys
        self.before: dict[int, Any] = {}
        """After a change of the number of tasks: the values of the previous tasks from which this task takes
        state, by task index."""
        self.value = self._seen = default
        self._mark = _mark(dumps(default, name))
        self._written = False  # an unchanged default is not written

    def __repr__(self) -> str:
        return f"ValueState({self.value!r})"

    def load(self, parts: Sequence[bytes]) -> None:
        """Called by ``TaskState``. The last part is the current value."""
        pickled = pickled_value(parts[-1])
        self.value = self._seen = pickle.loads(pickled)
        self._mark, self._written = _mark(pickled), True

    def adopt(self, chains: Mapping[int, Sequence[bytes]], share: Share) -> None:
        """Called by ``TaskState`` with the chains of the previous tasks, by their index. A value goes to the task
        with its index; the values of removed tasks are merged into it, and a new task starts with the default. A
        value created ``with_keys`` goes to all tasks to which keys may go."""
        found = {source: pickle.loads(pickled_value(parts[-1])) for source, parts in sorted(chains.items())}
        mine = [value for source, value in found.items() if self.with_keys or share.succeeds(source)]
        for value in mine[1:]:
            if self.merge is not None:
                mine[0] = self.merge(mine[0], value)
            elif dumps(value, self.name) != dumps(mine[0], self.name):
                raise StateError(
                    f"state {self.name!r}",
                    f"tasks that are merged have different values, {mine[0]!r} and {value!r}, and the state "
                    "does not say how to merge them",
                    "Give it a merge: state.value(..., merge=operator.add).",
                )
        self.before = found
        if mine:
            self.value = self._seen = mine[0]
            self._written = True

    def take(self, full: bool, compact: bool = True) -> StateChange | None:
        """Called by ``TaskState``. Returns the value if its pickle changed since the last call, or if ``full`` and
        there is a value. It is always written as a whole."""
        if not full and self.value is self._seen and is_plain(self.value):
            return None
        pickled = dumps(self.value, self.name)
        mark = _mark(pickled)
        if mark == self._mark and not (full and self._written):
            return None
        self._seen, self._mark, self._written = self.value, mark, True
        return StateChange("full", 1, partial(encode_value, pickled))


@dataclass(frozen=True)
class TaskSnapshot:
    """The state of a task, or its changes, at one moment. Later changes do not affect it.

    Every snapshot must be written, in the order in which they were taken, because each change is contained in one
    snapshot only. If one is lost, the next must be full.
    """

    full: bool
    """The snapshot contains the complete state and needs no earlier snapshot."""
    changes: Mapping[str, StateChange]
    sizes: dict[str, int] = field(default_factory=dict, repr=False)

    def __bool__(self) -> bool:
        return bool(self.changes)

    def encode(self) -> dict[str, tuple[str, int, bytes]]:
        """State name → (``"full"`` or ``"delta"``, rows, bytes). Runs on another thread than the component, and
        accesses nothing that the component can change."""
        encoded = {}
        for name, change in self.changes.items():
            data = change.encode()
            encoded[name] = (change.kind, change.rows, data)
            self.sizes[name] = len(data) + (self.sizes.get(name, 0) if change.kind == "delta" else 0)
        return encoded


class TaskState:
    """Values and maps by name. With at-least-once and exactly-once delivery they survive the process; with
    at-most-once delivery they are plain memory.

    Get the states in ``open`` or ``prepare`` and keep them: a name always returns the same object, with its
    restored content. A restored state that the component does not ask for is kept unchanged. All calls come from
    the thread of the task; only ``TaskSnapshot.encode`` may run on another thread.
    """

    def __init__(self) -> None:
        self._states: dict[str, ValueState | MapState] = {}
        self._unclaimed: dict[str, Sequence[bytes]] = {}
        self._inherited: dict[str, dict[int, Sequence[bytes]]] = {}
        """After a change of the number of tasks: the chains of the previous tasks, by state name and task
        index."""
        self._share: Share | None = None
        self._sizes: dict[str, int] = {}
        self._owes_full = False
        self.counted = 0
        """The value of ``keys`` at the last snapshot. Reports use it, because counting takes time."""

    def value(
        self, name: str, default: Any = None, merge: Merge | None = None, with_keys: bool = False
    ) -> ValueState:
        """The value of this name, or ``default`` until one is assigned. If the number of tasks is halved,
        ``merge`` combines the values of two tasks; if it is doubled, new tasks start with the default. Use
        ``with_keys`` for a value that describes the keys in the task's maps, such as the time up to which they are
        processed: each task then starts with the merged values of all tasks that had keys of it."""
        return self._claim(name, ValueState, "value", default, merge, with_keys)

    def map(
        self, name: str, default: Any = NO_DEFAULT, merge: Merge | None = None, owner: Owner | None = None
    ) -> MapState:
        """The map of this name. With ``default``, an immutable value such as 0, missing keys read as that value.

        If the number of tasks changes, keys move to the task to which the grouping of the bolt's input sends their
        tuples. By default a key is the value of the grouping field or, with several fields, a tuple that begins
        with their values. Otherwise ``owner`` returns the value, or the tuple of values, for a key. With grouping
        by one field, keys that are tuples require ``owner``, because such a tuple could be the value itself or
        begin with it. ``merge`` combines two values if tasks with the same key are merged, as with shuffle
        grouping.
        """
        return self._claim(name, MapState, "map", default, merge, owner)

    def restore(self, parts: Mapping[str, Sequence[bytes]]) -> None:
        """Called once, before the component opens, with the full part and the deltas of each state, oldest first.
        Later snapshots must be added to the chains from which the parts came (``SnapshotWriter.adopt``); otherwise
        the first snapshot must be full."""
        self._unclaimed.update({name: _kept(chain) for name, chain in parts.items() if chain})
        self._sizes.update({name: sum(map(len, chain)) for name, chain in self._unclaimed.items()})

    def inherit(self, parts: Mapping[int, Mapping[str, Sequence[bytes]]], share: Share) -> None:
        """Called once instead of ``restore`` if the number of tasks has changed, with the state of the previous
        tasks by their index. Only those in ``share.sources`` are needed. The first snapshot is full."""
        for source, states in parts.items():
            for name, chain in states.items():
                if chain:
                    self._inherited.setdefault(name, {})[source] = _kept(chain)
        self._share, self._owes_full = share, True

    def snapshot(self, full: bool = False, compact: bool = True) -> TaskSnapshot:
        """Snapshot the changes since the last snapshot, or everything. Called in the main loop of the worker,
        between two tuples. The time depends on the changes, not on the size of the state, except for full copies.
        Mutable values are pickled here, because the component may change them immediately afterwards. Without
        ``compact`` only changes are included, even if a full copy is due: for the moment before a replacement,
        when other workers wait.

        If it raises (a value cannot be pickled), nothing is lost: the next snapshot is full.
        """
        full = full or self._owes_full
        self._owes_full = True
        # states that the component did not ask for are kept, as far as they belong to this task
        for name in list(self._inherited):
            kind = form_of(next(iter(self._inherited[name].values()))[0])
            unasked = MapState(name) if kind == "map" else ValueState(name)
            self._inherit(name, unasked)
            self._states[name] = unasked
        changes = {name: change for name, state in self._states.items() if (change := state.take(full, compact))}
        if full:
            changes |= {name: _untouched(chain) for name, chain in self._unclaimed.items()}
        self._owes_full = False
        self.counted = self.keys
        return TaskSnapshot(full, changes, self._sizes)

    def __bool__(self) -> bool:
        return bool(self._states or self._unclaimed or self._inherited)

    @property
    def keys(self) -> int:
        """The number of entries of all maps, plus one per value. Counts rows for a restored state that the
        component has not asked for."""
        asked = sum(len(state) if isinstance(state, MapState) else 1 for state in self._states.values())
        return asked + sum(count_rows(part) for chain in self._unclaimed.values() for part in chain)

    @property
    def bytes(self) -> int:
        """The size of the state in the store: each full part and the deltas after it, as far as encoded."""
        return sum(list(self._sizes.values()))  # a copy, because encode may add a name concurrently

    def _inherit(self, name: str, made: ValueState | MapState) -> None:
        assert self._share is not None
        made.adopt(self._inherited.pop(name), self._share)

    def _claim(self, name: str, kind: type[_State], form: str, *how: Any) -> _State:
        state = self._states.get(name)
        chain = self._unclaimed.get(name)
        if chain is None and name in self._inherited:
            chain = next(iter(self._inherited[name].values()))
        if state is None and (chain is None or form_of(chain[0]) == form):
            made = kind(name, *how)
            if name in self._inherited:
                self._inherit(name, made)
            elif chain is not None:
                made.load(self._unclaimed.pop(name))
            self._states[name] = made
            return made
        if isinstance(state, kind):
            return state
        raise StateError(
            f"state {name!r}",
            f"{form}({name!r}) was called, but it "
            f"{'was restored' if state is None else 'is in use'} as a "
            f"{'map' if form == 'value' else 'value'}",
            "Give one of the two another name.",
        )


def _kept(chain: Sequence[bytes]) -> Sequence[bytes]:
    return chain if isinstance(chain, DecodedChain) else list(chain)


def _untouched(chain: Sequence[bytes]) -> StateChange:
    return StateChange("full", sum(map(count_rows, chain)), lambda: b"".join(chain))


def _mark(pickled: bytes) -> bytes:
    return hashlib.blake2b(pickled, digest_size=16).digest()
