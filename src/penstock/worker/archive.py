"""A worker's side of the state directory: restores its tasks and writes what they snapshot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from penstock.errors import SnapshotCorrupt, StateUnavailable
from penstock.faults import CrashPoint
from penstock.plan.model import WorkerId
from penstock.plan.owners import Owners
from penstock.protocol.task_states import InheritedTask, SavedTask, TaskStates
from penstock.state.decoded import DecodedChain
from penstock.state.shares import Share
from penstock.state.snapshots import SnapshotPart, SnapshotWriter, read_part, snapshot_name
from penstock.state.store import StateStore
from penstock.worker.snapshots import Restored, WorkerSnapshot


@dataclass(frozen=True)
class _Chain:
    """A chain that a task is to begin with."""

    key: str
    source: int | None
    """The task before that it comes from; None: the task itself."""
    state: str
    parts: list[SnapshotPart]
    share: tuple[int, int, Owners] | None

    @property
    def place(self) -> tuple[Any, ...]:
        """Two chains of one place are the same state, earlier and later."""
        return self.key, self.source, self.state, self.share

    def decoder(self) -> DecodedChain:
        if self.share is None or self.source is None:
            return DecodedChain()
        share = _share(self.key, *self.share)
        if share.hash is None:
            return DecodedChain()  # all of it
        return DecodedChain(partial(share.of, source=self.source, state=self.state))


@dataclass
class _Ahead:
    """What was read of a chain so far."""

    chain: DecodedChain
    parts: list[SnapshotPart] = field(default_factory=list)


class WorkerArchive:
    """Used by one thread at a time: by the loop until the tasks are restored, then by background jobs."""

    def __init__(self, folder: str, worker: WorkerId, crash: CrashPoint) -> None:
        self._generation = 0
        self._store = StateStore(folder)
        self._writer = SnapshotWriter(self._store)
        self._worker, self._crash = worker, crash
        self._written = 0
        self._ahead: dict[tuple[Any, ...], _Ahead] = {}

    def prefetch(self, entries: TaskStates) -> None:
        """Read and decode what ``restore`` will probably be asked for, while others still write: entries of the
        newest epoch committed so far. Called again, it reads what is new since. What cannot be read any more (the
        epoch was followed by others, and its files removed) is left to ``restore``."""
        read: dict[tuple[Any, ...], _Ahead] = {}
        for chain in _chains(entries):
            known = self._known(chain) or _Ahead(chain.decoder())
            try:
                self._catch_up(known, chain)
            except (SnapshotCorrupt, StateUnavailable):
                continue
            read[chain.place] = known
        self._ahead = read

    def restore(self, entries: TaskStates, generation: int) -> dict[str, Restored]:
        """What the tasks begin with. ``generation``: in the names of the files written from now on, so that they
        differ from those of other query runs. Raises ``SnapshotCorrupt``."""
        self._generation = generation
        found: dict[str, dict[int | None, dict[str, Sequence[bytes]]]] = {key: {} for key in entries}
        goes_on: dict[str, dict[str, list[SnapshotPart]]] = {
            key: {} for key, entry in entries.items() if isinstance(entry, SavedTask)
        }
        for chain in _chains(entries):
            known = self._known(chain)
            if known is None:
                data: Sequence[bytes] = [read_part(self._store, part) for part in chain.parts]
            else:
                self._catch_up(known, chain)
                data = known.chain
            found[chain.key].setdefault(chain.source, {})[chain.state] = data
            if chain.source is None:
                goes_on[chain.key][chain.state] = chain.parts
        self._ahead = {}  # the tasks take it over
        self._writer.adopt(goes_on)
        return {key: _restored(key, entry, found[key]) for key, entry in entries.items()}

    def write(self, snapshot: WorkerSnapshot) -> dict[str, SavedTask]:
        """Write a snapshot (step 3 of a commit). Raises ``StateError``; then the next snapshot of these tasks must
        be full."""
        name = snapshot_name(snapshot.epoch, self._generation, self._worker.stage, self._worker.index)
        self._written += 1  # at least once a worker with spouts and bolts writes twice in an epoch
        name = f"{name}-{self._written}"
        chains = self._writer.write(name, snapshot.snapshots)
        self._crash("written", snapshot.epoch)
        return {
            key: SavedTask(
                {state: list(parts) for state, parts in chains[key].items()}, snapshot.tokens.get(key, [])
            )
            for key in snapshot.snapshots
        }

    def _known(self, chain: _Chain) -> _Ahead | None:
        """What was read of the chain ahead; None where that is nothing, or the chain was begun anew since."""
        known = self._ahead.get(chain.place)
        return known if known is not None and chain.parts[: len(known.parts)] == known.parts else None

    def _catch_up(self, known: _Ahead, chain: _Chain) -> None:
        for part in chain.parts[len(known.parts) :]:
            known.chain.add(read_part(self._store, part))
            known.parts.append(part)


def _chains(entries: TaskStates) -> Iterator[_Chain]:
    for key, entry in entries.items():
        if isinstance(entry, SavedTask):
            for state, parts in entry.parts.items():
                yield _Chain(key, None, state, parts, None)
        else:
            share = (entry.before, entry.now, entry.owners)
            for source, states in entry.sources.items():
                for state, parts in states.items():
                    yield _Chain(key, source, state, parts, share)


def _restored(
    key: str, entry: SavedTask | InheritedTask, found: Mapping[int | None, Mapping[str, Sequence[bytes]]]
) -> Restored:
    if isinstance(entry, SavedTask):
        return Restored(found.get(None, {}), entry.tokens)
    sources = {source: states for source, states in found.items() if source is not None}
    return Restored(tokens=entry.tokens, sources=sources, share=_share(key, entry.before, entry.now, entry.owners))


def _share(key: str, before: int, now: int, owners: Owners) -> Share:
    return owners.share(int(key.rpartition("/")[2]), before, now)
