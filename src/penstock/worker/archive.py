"""A worker's access to the state directory: it restores the state of tasks and writes their snapshots."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from penstock.errors import ComponentError, SnapshotCorrupt, StateUnavailable
from penstock.faults import CrashPoint
from penstock.plan.model import WorkerId
from penstock.plan.owners import OwnerRule
from penstock.protocol.task_states import InheritedTask, OvertakenTuples, SavedTask, TaskStates
from penstock.state.decoded import DecodedChain
from penstock.state.shares import Share
from penstock.state.snapshots import FOLDER, SnapshotPart, SnapshotWriter, make_part, read_part, snapshot_name
from penstock.state.store import StateStore
from penstock.worker.overtaking import Recording, StoredFrame, stored_frames
from penstock.worker.snapshots import Restored, WorkerSnapshot


@dataclass(frozen=True)
class _Chain:
    """The chain of snapshot parts from which one state of a task is restored."""

    key: str
    source: int | None
    """Index of the task that wrote the chain, if the number of tasks has changed; None: the task itself."""
    state: str
    parts: list[SnapshotPart]
    share: tuple[int, int, OwnerRule] | None

    @property
    def place(self) -> tuple[Any, ...]:
        """Identifies the state. Two chains with the same ``place`` are an earlier and a later version of one
        state."""
        return self.key, self.source, self.state, self.share

    def decoder(self) -> DecodedChain:
        if self.share is None or self.source is None:
            return DecodedChain()
        share = _share(self.key, *self.share)
        if share.hash is None:
            return DecodedChain()  # the task gets the whole state
        return DecodedChain(partial(share.of, source=self.source, state=self.state))


@dataclass
class _Prefetched:
    """The parts of a chain that have been read before ``restore``."""

    chain: DecodedChain
    parts: list[SnapshotPart] = field(default_factory=list)


class WorkerArchive:
    """Reads and writes the snapshots of one worker. Not thread-safe: the worker's loop uses it until the tasks
    are restored, afterwards only background jobs do, one at a time."""

    def __init__(self, folder: str, worker: WorkerId, crash: CrashPoint) -> None:
        self._generation = 0
        self._store = StateStore(folder)
        self._writer = SnapshotWriter(self._store)
        self._worker, self._crash = worker, crash
        self._written = 0
        self._prefetched: dict[tuple[Any, ...], _Prefetched] = {}

    def prefetch(self, entries: TaskStates) -> None:
        """Read and decode the state that ``restore`` will probably need, while the old workers still write.
        ``entries`` belong to the newest committed epoch; a further call reads only the new parts. A chain that
        cannot be read is skipped and left to ``restore``: its files may have been removed after a later
        commit."""
        read: dict[tuple[Any, ...], _Prefetched] = {}
        for chain in _chains(entries):
            known = self._find_prefetched(chain) or _Prefetched(chain.decoder())
            try:
                self._catch_up(known, chain)
            except (SnapshotCorrupt, StateUnavailable):
                continue
            read[chain.place] = known
        self._prefetched = read

    def restore(self, entries: TaskStates, generation: int) -> dict[str, Restored]:
        """Read the state with which the tasks begin. ``generation`` becomes part of the names of all files that
        are written from now on, so that they differ from those of other query runs. Raises ``SnapshotCorrupt``,
        or ``StateError`` for errors of the file system."""
        self._generation = generation
        found: dict[str, dict[int | None, dict[str, Sequence[bytes]]]] = {key: {} for key in entries}
        own_chains: dict[str, dict[str, list[SnapshotPart]]] = {
            key: {} for key, entry in entries.items() if isinstance(entry, SavedTask)
        }
        for chain in _chains(entries):
            known = self._find_prefetched(chain)
            if known is None:
                data: Sequence[bytes] = [read_part(self._store, part) for part in chain.parts]
            else:
                self._catch_up(known, chain)
                data = known.chain
            found[chain.key].setdefault(chain.source, {})[chain.state] = data
            if chain.source is None:
                own_chains[chain.key][chain.state] = chain.parts
        self._prefetched = {}  # from now on the tasks own the decoded chains
        self._writer.adopt(own_chains)
        return {key: _restored(key, entry, found[key]) for key, entry in entries.items()}

    def write(self, snapshot: WorkerSnapshot) -> tuple[dict[str, SavedTask], dict[str, OvertakenTuples]]:
        """Write a snapshot and return the chains that a manifest refers to, and the tuples that the marker of the
        epoch overtook, by receiving task. Called in a background job. Raises ``StateError``; the next snapshot of
        these tasks must then be full. Raises ``ComponentError`` if a sink's token is not JSON."""
        name = snapshot_name(snapshot.epoch, self._generation, self._worker.stage, self._worker.index)
        self._written += 1  # with at-least-once delivery a worker with spouts and bolts writes twice in an epoch
        name = f"{name}-{self._written}"
        chains = self._writer.write(name, snapshot.snapshots)
        overtaken = self._write_overtaken(name, snapshot.overtaken)
        self._crash("written", snapshot.epoch)
        tasks = {
            key: SavedTask(
                {state: list(parts) for state, parts in chains[key].items()},
                _as_json(key, snapshot.tokens.get(key, [])),
            )
            for key in snapshot.snapshots
        }
        return tasks, overtaken

    def _write_overtaken(self, name: str, recording: Recording | None) -> dict[str, OvertakenTuples]:
        """Write overtaken frames, a few megabytes in each file."""
        found: dict[str, OvertakenTuples] = {}
        if recording is None:
            return found
        for number, chunks in enumerate(recording.files()):
            file = f"{FOLDER}/{name}-overtaken-{number:06d}.bin"
            offset = 0
            for chunk in chunks:
                known = found.setdefault(chunk.task, OvertakenTuples([], []))
                known.parts.append(make_part(file, offset, chunk.data, "frames", chunk.rows))
                known.streams.extend(sorted(chunk.streams.difference(known.streams)))
                offset += len(chunk.data)
            self._store.write(file, b"".join(chunk.data for chunk in chunks))
        return found

    def read_waiting(self, part: SnapshotPart) -> Iterator[StoredFrame]:
        """Read overtaken frames that a snapshot contains. Raises as ``restore`` does."""
        return stored_frames(read_part(self._store, part))

    def _find_prefetched(self, chain: _Chain) -> _Prefetched | None:
        """The prefetched parts of the chain; None if there are none, or if a full snapshot has replaced them."""
        known = self._prefetched.get(chain.place)
        return known if known is not None and chain.parts[: len(known.parts)] == known.parts else None

    def _catch_up(self, known: _Prefetched, chain: _Chain) -> None:
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
        return Restored(found.get(None, {}), json.loads(entry.tokens))
    sources = {source: states for source, states in found.items() if source is not None}
    return Restored(
        tokens=json.loads(entry.tokens), sources=sources, share=_share(key, entry.before, entry.now, entry.owners)
    )


def _share(key: str, before: int, now: int, owners: OwnerRule) -> Share:
    return owners.share(int(key.rpartition("/")[2]), before, now)


def _as_json(key: str, tokens: Sequence[Any]) -> str:
    """Encode the tokens of a sink's task. Raises ``ComponentError`` if a token is not JSON."""
    try:
        return json.dumps(list(tokens))
    except (TypeError, ValueError) as error:
        raise ComponentError(
            f"component '{key.rpartition('/')[0]}'",
            f"prepare_commit returned a token that is not JSON ({error})",
            "Return numbers, texts, lists or dicts.",
        ) from error
