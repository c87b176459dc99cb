"""A task's state, as its component uses it: values and maps by name, and the snapshots a snapshot is made of."""

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
from penstock.state.maps import _NONE, MapState, Merge, Owner
from penstock.state.shares import Share

_State = TypeVar("_State", "ValueState", MapState)


class ValueState:
    """One value that survives: ``.value`` is read and assigned. Made by ``TaskState.value``.

    Any picklable value, Arrow arrays and tables included. It is pickled at each snapshot unless it is the very
    number, text or tuple of such that was written last, and written when the pickle differs: so a change in
    place is seen too. For much data with few changes, take a map.
    """

    __slots__ = ("_mark", "_seen", "_written", "before", "merge", "name", "value", "with_keys")

    def __init__(
        self, name: str, default: Any = None, merge: Merge | None = None, with_keys: bool = False
    ) -> None:
        self.name, self.merge, self.with_keys = name, merge, with_keys
        self.before: dict[int, Any] = {}
        """Where the number of tasks has changed: what the tasks before had, by their number, of those this task
        takes something over from."""
        self.value = self._seen = default
        self._mark = _mark(dumps(default, name))
        self._written = False  # a default that nobody changed is not worth a snapshot

    def __repr__(self) -> str:
        return f"ValueState({self.value!r})"

    def load(self, parts: Sequence[bytes]) -> None:
        """Called by ``TaskState``: the last part holds."""
        pickled = pickled_value(parts[-1])
        self.value = self._seen = pickle.loads(pickled)
        self._mark, self._written = _mark(pickled), True

    def adopt(self, chains: Mapping[int, Sequence[bytes]], share: Share) -> None:
        """Called by ``TaskState``: the chains of the tasks before, by their number. A value goes to the task of
        its own number; those of tasks that are no more are merged into it. A new task begins with the default. One
        that goes ``with_keys`` goes to all tasks that keys may go to."""
        found = {source: pickle.loads(pickled_value(parts[-1])) for source, parts in sorted(chains.items())}
        mine = [value for source, value in found.items() if self.with_keys or share.succeeds(source)]
        for value in mine[1:]:
            if self.merge is not None:
                mine[0] = self.merge(mine[0], value)
            elif dumps(value, self.name) != dumps(mine[0], self.name):
                raise StateError(
                    f"state {self.name!r}",
                    f"tasks that become one have different values, {mine[0]!r} and {value!r}, and it "
                    "does not say how to merge them",
                    "Give it a merge: state.value(..., merge=operator.add).",
                )
        self.before = found
        if mine:
            self.value = self._seen = mine[0]
            self._written = True

    def take(self, full: bool, compact: bool = True) -> StateChange | None:
        """Called by ``TaskState``: the value, if its pickle changed since the last call, or ``full`` and there is
        one to write. It is written whole in any case."""
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
    """A task's state, or what changed in it, at one moment. Later changes do not reach it.

    Each snapshot must be written, in the order they were taken: changes are told once. If one is lost, the next
    must be full.
    """

    full: bool
    """It holds all there is, and needs nothing written before it."""
    changes: Mapping[str, StateChange]
    sizes: dict[str, int] = field(default_factory=dict, repr=False)

    def __bool__(self) -> bool:
        return bool(self.changes)

    def encode(self) -> dict[str, tuple[str, int, bytes]]:
        """State name → (``"full"`` or ``"delta"``, rows, bytes). Meant for another thread than the component's:
        it touches nothing the component can reach."""
        encoded = {}
        for name, change in self.changes.items():
            data = change.encode()
            encoded[name] = (change.kind, change.rows, data)
            self.sizes[name] = len(data) + (self.sizes.get(name, 0) if change.kind == "delta" else 0)
        return encoded


class TaskState:
    """Values and maps by name. What a component keeps here survives its process, from the delivery level at least
    once on; at most once it is just memory.

    Ask for states in ``open`` or ``prepare`` and keep them: a name gives the same object each time, holding what
    was restored. A restored name that nobody asks for is kept as it is. All calls come from the task's own thread;
    only ``TaskSnapshot.encode`` may run in another.
    """

    def __init__(self) -> None:
        self._states: dict[str, ValueState | MapState] = {}
        self._unclaimed: dict[str, Sequence[bytes]] = {}
        self._inherited: dict[str, dict[int, Sequence[bytes]]] = {}
        """Of the tasks before, where their number has changed: by their number, by name."""
        self._share: Share | None = None
        self._sizes: dict[str, int] = {}
        self._owes_full = False
        self.counted = 0
        """``keys`` at the last snapshot: for other threads, which must not touch the maps."""

    def value(
        self, name: str, default: Any = None, merge: Merge | None = None, with_keys: bool = False
    ) -> ValueState:
        """The value of that name; ``default`` until one is assigned. When the number of tasks is halved, ``merge``
        makes one of two tasks' values; when it is doubled, the new tasks begin with the default. A value that says
        something of the keys in the task's maps, as how far in time they are, goes ``with_keys``: each task begins
        with the values, merged, of all tasks that had keys of its."""
        return self._claim(name, ValueState, "value", default, merge, with_keys)

    def map(
        self, name: str, default: Any = _NONE, merge: Merge | None = None, owner: Owner | None = None
    ) -> MapState:
        """The map of that name. With ``default``, a plain value such as 0, missing keys read as that.

        When the number of tasks changes, keys go where the grouping of the bolt's input sends their tuples from
        then on. A key is taken to be the value of the field it groups by, or, of several fields, a tuple that
        begins with their values; else ``owner`` gives the value, or the tuple of values, for a key. Behind a
        grouping by one field, keys that are tuples need ``owner``: it tells a value from a tuple that begins with
        it. ``merge`` makes one of two values where two tasks have the same key and become one, as behind a
        shuffle grouping."""
        return self._claim(name, MapState, "map", default, merge, owner)

    def restore(self, parts: Mapping[str, Sequence[bytes]]) -> None:
        """Called once, before the component opens: for each name its full part and the changes after it, oldest
        first. The chains they come from must be the ones that later snapshots are added to
        (``SnapshotWriter.adopt``), else the first snapshot must be full."""
        self._unclaimed.update({name: _kept(chain) for name, chain in parts.items() if chain})
        self._sizes.update({name: sum(map(len, chain)) for name, chain in self._unclaimed.items()})

    def inherit(self, parts: Mapping[int, Mapping[str, Sequence[bytes]]], share: Share) -> None:
        """Called once instead of ``restore`` where the number of tasks has changed: what the tasks before had, by
        their number; only ``share.sources`` are needed. The first snapshot is full."""
        for source, states in parts.items():
            for name, chain in states.items():
                if chain:
                    self._inherited.setdefault(name, {})[source] = _kept(chain)
        self._share, self._owes_full = share, True

    def snapshot(self, full: bool = False, compact: bool = True) -> TaskSnapshot:
        """What changed since the last snapshot, or everything. Called in the main loop, between two tuples. The
        time it takes goes with the changes, not with the size of the state, save for full copies; mutable values
        are pickled here, since the component may change them right after. Without ``compact`` only changes are
        snapshotted, also where it would be time to write a whole map again: for the moment before a switch, when
        others wait.

        If it raises (a value that cannot be pickled), nothing is lost: the next snapshot is full.
        """
        full = full or self._owes_full
        self._owes_full = True
        for name in list(self._inherited):  # nobody asked for it: it is kept all the same, as far as it is ours
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
        """Entries of all maps, and one for each value. Rows, where nobody asked for a restored state yet."""
        asked = sum(len(state) if isinstance(state, MapState) else 1 for state in self._states.values())
        return asked + sum(count_rows(part) for chain in self._unclaimed.values() for part in chain)

    @property
    def bytes(self) -> int:
        """What the state takes in the store: each full part and the changes after it, as far as encoded."""
        return sum(list(self._sizes.values()))  # the list: encode may add a name meanwhile

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
