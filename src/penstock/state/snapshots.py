"""Snapshot files. A file contains the snapshots that the tasks of one worker took at one moment.

A state is restored from its chain: a full part and the deltas after it, oldest first, most of them in files of
earlier snapshots. A manifest contains the chains of each task.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from penstock import signing
from penstock.errors import SnapshotCorrupt, StateError
from penstock.state.store import StateStore, is_missing
from penstock.state.values import TaskSnapshot

FOLDER = "snapshots"
_NAME = re.compile(rf"{FOLDER}/gen-(\d+)-epoch-(\d+)-.*")
_PURPOSE = "state.part"


@dataclass(frozen=True)
class SnapshotPart:
    """The location of the bytes that one snapshot wrote of one state."""

    file: str
    offset: int
    length: int
    signature: str
    """The signature of the bytes with the deployment key, in hexadecimal. It is verified before the bytes are
    unpickled."""
    kind: str
    """``full`` or ``delta``; ``frames`` for tuples that a marker overtook."""
    rows: int

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> SnapshotPart:
        return cls(**fields)


Chains: TypeAlias = Mapping[str, Mapping[str, Sequence[SnapshotPart]]]
"""Task → state → parts, oldest first."""


def snapshot_name(epoch: int, generation: int, stage: int, worker: int) -> str:
    """The name of a worker's snapshot of an epoch. The generation separates it from the snapshots that another
    query run writes for the same epoch."""
    return f"gen-{generation:08d}-epoch-{epoch:012d}-stage-{stage:03d}-worker-{worker:04d}"


def copy_name(epoch: int, generation: int, number: int) -> str:
    """The name of a file that was copied from or to a savepoint."""
    return f"{FOLDER}/gen-{generation:08d}-epoch-{epoch:012d}-copy-{number:06d}.bin"


def epoch_of(file: str) -> int:
    """The epoch of a snapshot file."""
    found = written_by(file)
    assert found is not None
    return found[1]


def written_by(file: str) -> tuple[int, int] | None:
    """The generation and the epoch of a snapshot file. None if the file is not a snapshot."""
    found = _NAME.fullmatch(file)
    return (int(found[1]), int(found[2])) if found else None


class SnapshotWriter:
    """Writes the snapshots of one worker and keeps the chains of its tasks. Used by one thread at a time.
    Snapshots must be written in the order in which they were taken."""

    def __init__(self, store: StateStore) -> None:
        self._store = store
        self._chains: dict[str, dict[str, list[SnapshotPart]]] = {}
        self._broken: set[str] = set()

    @property
    def broken(self) -> bool:
        """True if a write failed, so that its changes are missing in the chains. Take full snapshots
        (``snapshot(full=True)``) until this is False again. Until then ``write`` rejects other snapshots of these
        tasks, including those already taken, because a chain with a gap would restore an inconsistent state."""
        return bool(self._broken)

    def adopt(self, chains: Chains) -> None:
        """Continue the chains from which the tasks were restored."""
        self._chains = {
            task: {state: list(parts) for state, parts in states.items()} for task, states in chains.items()
        }
        self._broken.clear()

    def write(self, name: str, snapshots: Mapping[str, TaskSnapshot]) -> dict[str, dict[str, list[SnapshotPart]]]:
        """Write the snapshots (task → snapshot) as one file, ``snapshots/<name>.bin``; no file if nothing changed.
        Returns the complete chains of all known tasks. If it raises, the chains do not change and these tasks are
        ``broken``."""
        gaps = sorted(task for task in self._broken & snapshots.keys() if not snapshots[task].full)
        if gaps:
            raise StateError(
                f"snapshot {name}",
                "after a failed write the next snapshot of a task must be full, but those of "
                f"{', '.join(gaps)} contain only changes",
                "Call snapshot(full=True) while the writer is broken.",
            )
        try:
            chains, data = self._extended(f"{FOLDER}/{name}.bin", snapshots)
            if data:
                self._store.write(f"{FOLDER}/{name}.bin", data)
        except BaseException:
            self._broken.update(snapshots)
            raise
        self._chains = chains
        self._broken -= snapshots.keys()
        return {task: {state: list(parts) for state, parts in states.items()} for task, states in chains.items()}

    def _extended(
        self, file: str, snapshots: Mapping[str, TaskSnapshot]
    ) -> tuple[dict[str, dict[str, list[SnapshotPart]]], bytes]:
        """The chains extended by the snapshots, and the content of the file."""
        chains = dict(self._chains)
        pieces: list[bytes] = []
        offset = 0
        for task, snapshot in snapshots.items():
            states = {} if snapshot.full else dict(chains.get(task, {}))
            for state, (kind, rows, data) in snapshot.encode().items():
                part = make_part(file, offset, data, kind, rows)
                states[state] = [part] if kind == "full" else [*states[state], part]
                pieces.append(data)
                offset += len(data)
            chains[task] = states
        return chains, b"".join(pieces)


def make_part(file: str, offset: int, data: bytes, kind: str, rows: int) -> SnapshotPart:
    """Sign bytes that are written to a file of snapshots."""
    return SnapshotPart(file, offset, len(data), signing.sign(_PURPOSE, data).hex(), kind, rows)


def read_parts(store: StateStore, chains: Chains) -> dict[str, dict[str, list[bytes]]]:
    """Read and verify the bytes of the chains. Raises ``SnapshotCorrupt`` if a part was altered."""
    return {
        task: {state: [read_part(store, part) for part in parts] for state, parts in states.items()}
        for task, states in chains.items()
    }


def read_part(store: StateStore, part: SnapshotPart) -> bytes:
    """Read and verify the bytes of one part."""
    try:
        data = store.read(part.file, part.offset, part.length)
    except StateError as error:
        if is_missing(error):
            raise _corrupt(store, part, "there is no such file") from error
        raise
    check(store, part, data)
    return data


def check(store: StateStore, part: SnapshotPart, data: bytes) -> None:
    """Verify that these are the bytes of the part. Raises ``SnapshotCorrupt`` if not."""
    if len(data) != part.length:
        raise _corrupt(store, part, f"the file ends {part.length - len(data):,} bytes early")
    if not signing.is_signed(_PURPOSE, data, bytes.fromhex(part.signature)):
        raise _corrupt(store, part, "their signature differs")


def _corrupt(store: StateStore, part: SnapshotPart, got: str) -> SnapshotCorrupt:
    return SnapshotCorrupt(
        f"snapshot file {store.url}/{part.file}",
        f"the {part.length:,} bytes at {part.offset:,} are not what was written there: {got}",
        "Restore the file from a backup, or start from an earlier epoch or a savepoint with intact files.",
    )
