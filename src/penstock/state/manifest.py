"""Manifests: one small file says that an epoch is committed, and what the state of each task was.

A manifest is written last, whole, so it is there or it is not: that is the commit point. Everything else in the
store is of use only as far as a manifest refers to it, and can be cleaned up at any time by these rules.
"""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import SnapshotCorrupt
from penstock.state.snapshots import FOLDER as SNAPSHOTS
from penstock.state.snapshots import Part, check, epoch_of
from penstock.state.store import StateStore

log = logging.getLogger(__name__)

FOLDER = "manifests"
GENERATIONS = "generations"


@dataclass(frozen=True)
class TaskEntry:
    """A task in a manifest."""

    parts: Mapping[str, list[Part]] = field(default_factory=dict)
    """State name → its chain, oldest first."""
    tokens: list[Any] = field(default_factory=list)
    """What its sink prepared, to be committed with this epoch (JSON)."""


@dataclass(frozen=True)
class Manifest:
    """A committed epoch."""

    topology: str
    epoch: int
    delivery: str
    attempt: int
    """Which start of the topology wrote it."""
    created: float
    """Wall time, seconds since 1970, as the caller saw it."""
    tasks: Mapping[str, TaskEntry]
    """By ``component/index``."""
    parallelism: Mapping[str, int]
    """Component → number of its tasks."""

    def write(self, store: StateStore) -> None:
        """Commit: after this the epoch holds, before it it does not."""
        text = json.dumps(
            {
                **vars(self),
                "tasks": {
                    task: {
                        "parts": {
                            state: [part.to_json() for part in chain] for state, chain in entry.parts.items()
                        },
                        "tokens": entry.tokens,
                    }
                    for task, entry in self.tasks.items()
                },
            }
        ).encode()
        store.write(_file(self.epoch), b"%b\n%08x\n" % (text, zlib.crc32(text)))

    @classmethod
    def read(cls, store: StateStore, name: str) -> Manifest:
        """Raises ``SnapshotCorrupt`` if it is not what was written."""
        text, _, crc = store.read(name).removesuffix(b"\n").rpartition(b"\n")
        if crc != b"%08x" % zlib.crc32(text) or not text:
            raise SnapshotCorrupt(
                f"manifest {store.url}/{name}",
                "must end with the checksum of its content",
                "other content than was written",
                "Remove it to start from the epoch before, or restore it from a backup.",
            )
        fields = json.loads(text)
        fields["tasks"] = {
            task: TaskEntry(
                {state: [Part.from_json(part) for part in chain] for state, chain in entry["parts"].items()},
                entry["tokens"],
            )
            for task, entry in fields["tasks"].items()
        }
        return cls(**fields)

    @property
    def chains(self) -> dict[str, Mapping[str, list[Part]]]:
        """Task → state → parts, as ``read_parts`` and ``SnapshotWriter.adopt`` take them."""
        return {task: entry.parts for task, entry in self.tasks.items()}

    @property
    def files(self) -> dict[str, list[Part]]:
        """The snapshot files it needs, and of each the parts it needs."""
        found: dict[str, list[Part]] = {}
        for entry in self.tasks.values():
            for chain in entry.parts.values():
                for part in chain:
                    found.setdefault(part.file, []).append(part)
        return found


def epochs(store: StateStore) -> list[int]:
    """The committed epochs that still have a manifest, oldest first."""
    prefix = f"{FOLDER}/epoch-"
    return [int(name.removeprefix(prefix).removesuffix(".json")) for name in store.list(prefix)]


def newest(store: StateStore, before: int | None = None) -> Manifest | None:
    """The last committed epoch (earlier than ``before``), None where nothing was committed. A manifest that cannot
    be read is reported and passed over; if that leaves none, ``SnapshotCorrupt``: starting from nothing in silence
    would do again what was committed."""
    found = [epoch for epoch in epochs(store) if before is None or epoch < before]
    manifests = _readable(store, found)
    manifest = next(manifests, None)
    if manifest is None and found:
        raise SnapshotCorrupt(
            f"state store {store.url}",
            "at least one of its manifests must be readable",
            f"{len(found)} that {'is' if len(found) == 1 else 'are'} not",
            "Restore the manifests from a backup or start from a savepoint; "
            "to begin again from nothing, remove the folder.",
        )
    return manifest


def discard_after(store: StateStore, epoch: int) -> None:
    """Take back the commits after ``epoch``, the last first, so that a crash in between leaves a valid history."""
    for each in reversed(epochs(store)):
        if each > epoch:
            store.remove(_file(each))


def remove(store: StateStore, epoch: int) -> None:
    """Take back the commit of one epoch."""
    store.remove(_file(epoch))


def clear_later(store: StateStore, epoch: int) -> None:
    """For recovery from ``epoch``: remove the snapshot files of later epochs, which never were committed (or were
    taken back by ``discard_after``)."""
    for file in store.list(f"{SNAPSHOTS}/"):
        if epoch_of(file) > epoch:
            store.remove(file)


def prune(store: StateStore, keep: int = 2) -> None:
    """Keep the newest ``keep`` manifests that can be read and the snapshot files they need; remove the rest. A
    file of an epoch after the newest manifest stays: its manifest may be about to be written."""
    kept: list[Manifest] = []
    for manifest in _readable(store, epochs(store)):
        kept.append(manifest)
        if len(kept) == keep:
            break
    if not kept:
        return
    for epoch in epochs(store):  # manifests first: a crash may leave files without a manifest, never the reverse
        if epoch < kept[-1].epoch:
            store.remove(_file(epoch))
    needed = {file for manifest in kept for file in manifest.files}
    for file in store.list(f"{SNAPSHOTS}/"):
        if file not in needed and epoch_of(file) <= kept[0].epoch:
            store.remove(file)


def copy(source: StateStore, manifest: Manifest, target: StateStore) -> None:
    """A savepoint: the manifest and the files it needs, so that ``target`` stands alone. Every part is checked as
    it is read and again in the target; the manifest comes last. ``SnapshotCorrupt`` where a part is not whole."""
    for file, parts in manifest.files.items():
        data = source.read(file)
        _check_all(source, parts, data)
        target.write(file, data)
        _check_all(target, parts, target.read(file))
    manifest.write(target)


def claim(store: StateStore) -> int:
    """Become the one who writes to this store: a number higher than any before. Whoever held it finds out by
    ``still_mine``. Also removes manifests and snapshots that were left half written."""
    while True:
        number = max(_generations(store), default=0) + 1
        if not store.create(_generation(number), b""):
            continue  # somebody took it in between
        held = _generations(store)
        if max(held) == number:
            break
        store.remove(_generation(number))  # taken long after looking, below others that came and went meanwhile
    for older in held:
        if older < number:
            store.remove(_generation(older))
    for folder in (SNAPSHOTS, FOLDER):  # not where others may just be claiming
        store.sweep(folder)
    return number


def still_mine(store: StateStore, generation: int) -> bool:
    """Has nobody claimed the store since? Ask before each commit."""
    return max(_generations(store), default=0) == generation


def _readable(store: StateStore, found: list[int]) -> Iterator[Manifest]:
    """Manifests from the newest on, as they are asked for; those that cannot be read are reported."""
    for epoch in reversed(found):
        try:
            yield Manifest.read(store, _file(epoch))
        except SnapshotCorrupt as error:
            log.error("%s Passed over: epoch %d counts as not committed.", error, epoch)


def _check_all(store: StateStore, parts: list[Part], data: bytes) -> None:
    for part in parts:
        check(store, part, data[part.offset : part.offset + part.length])


def _file(epoch: int) -> str:
    return f"{FOLDER}/epoch-{epoch:012d}.json"


def _generation(number: int) -> str:
    return f"{GENERATIONS}/{number:08d}"


def _generations(store: StateStore) -> list[int]:
    return [int(name.rpartition("/")[2]) for name in store.list(f"{GENERATIONS}/")]
