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
from penstock.state.decoded import DecodedChain
from penstock.state.shares import Share
from penstock.state.snapshots import SnapshotPart, SnapshotWriter, read_part, snapshot_name
from penstock.state.store import StateStore
from penstock.worker.worker import Restored, Worker, WorkerSnapshot

Entries = Mapping[str, Mapping[str, Any]]
"""Task key → ``{"parts": {state: [part]}, "tokens": [token]}``, as JSON. Where the number of the component's tasks
has changed: ``{"before": n, "now": n, "owners": rule, "sources": {task: {state: [part]}}, "tokens": []}``, with
those of the tasks before that it needs something of."""


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
    """Used by one thread at a time. ``generation`` tells the files of this start of the topology from those of
    others; it may be set later than ``ahead`` is called, but not than ``write``."""

    def __init__(self, folder: str, worker: WorkerId, generation: int, crash: CrashPoint) -> None:
        self.generation = generation
        self._store = StateStore(folder)
        self._writer = SnapshotWriter(self._store)
        self._worker, self._crash = worker, crash
        self._written = 0
        self._ahead: dict[tuple[Any, ...], _Ahead] = {}

    def ahead(self, entries: Entries) -> None:
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

    def restore(self, entries: Entries) -> dict[str, Restored]:
        """What the tasks begin with. Raises ``SnapshotCorrupt``."""
        found: dict[str, dict[int | None, dict[str, Sequence[bytes]]]] = {key: {} for key in entries}
        goes_on: dict[str, dict[str, list[SnapshotPart]]] = {
            key: {} for key, entry in entries.items() if "before" not in entry
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

    def write(self, worker: Worker, snapshot: WorkerSnapshot) -> dict[str, dict[str, Any]]:
        """Write what was snapshotted (step 3 of a commit). Raises ``StateError``; then the tasks owe a full
        snapshot."""
        name = snapshot_name(snapshot.epoch, self.generation, self._worker.stage, self._worker.index)
        self._written += 1  # at least once a worker with spouts and bolts writes twice in an epoch
        name = f"{name}-{self._written}"
        try:
            chains = self._writer.write(name, snapshot.snapshots)
        except Exception:
            worker.needs_full_snapshot |= set(snapshot.snapshots)
            raise
        self._crash("written", snapshot.epoch)
        return {
            key: {
                "parts": {state: [part.to_json() for part in parts] for state, parts in chains[key].items()},
                "tokens": snapshot.tokens.get(key, []),
            }
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


def _chains(entries: Entries) -> Iterator[_Chain]:
    for key, entry in entries.items():
        share = (entry["before"], entry["now"], Owners.from_json(entry["owners"])) if "before" in entry else None
        sources = {None: entry["parts"]} if share is None else entry["sources"]
        for source, states in sources.items():
            for state, parts in states.items():
                chain = [SnapshotPart.from_json(part) for part in parts]
                yield _Chain(key, None if source is None else int(source), state, chain, share)


def _restored(
    key: str, entry: Mapping[str, Any], found: Mapping[int | None, Mapping[str, Sequence[bytes]]]
) -> Restored:
    if "before" not in entry:
        return Restored(found.get(None, {}), entry["tokens"])
    share = _share(key, entry["before"], entry["now"], Owners.from_json(entry["owners"]))
    sources = {source: states for source, states in found.items() if source is not None}
    return Restored(tokens=entry["tokens"], sources=sources, share=share)


def _share(key: str, before: int, now: int, owners: Owners) -> Share:
    return owners.share(int(key.rpartition("/")[2]), before, now)
