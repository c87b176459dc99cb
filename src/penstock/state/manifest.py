"""Manifests. The manifest of an epoch is one small file that marks the epoch as committed and refers to the state
of each task.

A manifest is created last, as a whole and exclusively, so it either exists or does not: this is the commit point.
All other files in the store matter only if a manifest refers to them.

Its name contains the generation of its writer, the manifest from which that generation started (its base), and the
epoch. A driver that takes over first writes a manifest of its own generation with the epoch it starts from. From
then on that manifest decides: manifests that an older generation writes later rank lower and are not part of the
history. Returning to an earlier epoch, starting from nothing and starting from a savepoint are therefore one
atomic step each and remove nothing.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from penstock import signing
from penstock.errors import SnapshotCorrupt, StateError
from penstock.state.snapshots import FOLDER as SNAPSHOTS
from penstock.state.snapshots import SnapshotPart, written_by
from penstock.state.store import StateStore, is_missing
from penstock.texts import parse_json

log = logging.getLogger(__name__)

FOLDER = "manifests"
_NAME = re.compile(rf"{FOLDER}/gen-(\d{{8}})-base-(\d{{8}})-(\d{{12}})-epoch-(\d{{12}})\.json")
_PURPOSE = "state.manifest"


@dataclass(frozen=True, order=True)
class Name:
    """The name of a manifest. The highest in this order decides."""

    generation: int
    """The generation of its writer."""
    base: tuple[int, int]
    """The generation and epoch of the manifest that its writer took over. (0, 0): it started from nothing or a
    savepoint."""
    epoch: int
    """0: nothing is committed yet."""

    @property
    def file(self) -> str:
        base = "{:08d}-{:012d}".format(*self.base)
        return f"{FOLDER}/gen-{self.generation:08d}-base-{base}-epoch-{self.epoch:012d}.json"

    @classmethod
    def parse(cls, file: str) -> Name | None:
        """None if the file is not a manifest."""
        found = _NAME.fullmatch(file)
        if found is None:
            return None
        generation, base_generation, base_epoch, epoch = map(int, found.groups())
        return cls(generation, (base_generation, base_epoch), epoch)


@dataclass(frozen=True)
class TaskEntry:
    """The state of one task in a manifest."""

    parts: Mapping[str, list[SnapshotPart]] = field(default_factory=dict)
    """The chain of each state, oldest part first."""
    tokens: list[Any] = field(default_factory=list)
    """JSON tokens that its sink prepared, to be committed with this epoch."""


class ScaledBolt(NamedTuple):
    """A bolt that was scaled while the topology ran."""

    declared: int
    """Parallelism in the program."""
    declared_tasks: int
    parallelism: int
    """What was chosen instead."""


@dataclass(frozen=True)
class OvertakenEntry:
    """The tuples that wait for one task."""

    parts: list[SnapshotPart]
    """Where they are stored, in the order in which the task has to process them."""
    streams: list[int]
    """The numbers of their streams."""


@dataclass(frozen=True)
class OvertakenFrames:
    """The tuples that the marker of an epoch has overtaken: who begins with this epoch processes them first.
    Frames refer to streams and tasks by the numbers of the query run that stored them."""

    streams: list[tuple[str, str, list[tuple[str, str]]]]
    """Component, name and fields of each stream; fields are ⟨name, type⟩."""
    tasks: Mapping[int, str]
    """The key of each task, by its number."""
    entries: Mapping[str, OvertakenEntry]
    """By key of the task for which the tuples wait."""

    def to_json(self) -> dict[str, Any]:
        return {
            "streams": self.streams,
            "tasks": list(self.tasks.items()),
            "entries": {
                key: {"parts": [part.to_json() for part in entry.parts], "streams": entry.streams}
                for key, entry in self.entries.items()
            },
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> OvertakenFrames:
        return cls(
            [(component, name, [(a, b) for a, b in columns]) for component, name, columns in fields["streams"]],
            dict(fields["tasks"]),
            {
                key: OvertakenEntry(list(map(SnapshotPart.from_json, entry["parts"])), entry["streams"])
                for key, entry in fields["entries"].items()
            },
        )

    def moved(self, names: Mapping[str, str]) -> OvertakenFrames:
        """The same tuples in copies of their files. ``names``: file → copy."""
        entries = {
            key: dataclasses.replace(
                entry, parts=[dataclasses.replace(part, file=names[part.file]) for part in entry.parts]
            )
            for key, entry in self.entries.items()
        }
        return dataclasses.replace(self, entries=entries)


@dataclass(frozen=True)
class Manifest:
    """A committed epoch, or the starting point of a generation."""

    topology: str
    epoch: int
    delivery: str
    generation: int
    """The generation that wrote it."""
    base: tuple[int, int]
    """See ``Name.base``."""
    created: float
    """Wall-clock time of the caller, in seconds since 1970."""
    tasks: Mapping[str, TaskEntry]
    """By ``component/index``."""
    parallelism: Mapping[str, int]
    """The number of tasks of each component."""
    dead_letters: tuple[tuple[int, int], ...] = ()
    """Pairs of generation and epoch, one for each earlier generation that committed epochs in this directory: its
    newest epoch that is still valid. Dead letters of its later epochs are void."""
    overtaken: OvertakenFrames | None = None
    """None if all tuples of the epoch were processed."""
    scaled: Mapping[str, ScaledBolt] = field(default_factory=dict)
    """The bolts that were scaled while the topology ran."""

    @property
    def name(self) -> Name:
        return Name(self.generation, self.base, self.epoch)

    def write(self, store: StateStore) -> None:
        """Commit the epoch. Raises ``StateError`` if a different manifest has this name. A manifest with the same
        content was written by an earlier attempt that received no answer, and is accepted."""
        data = self._encode()
        if store.create(self.name.file, data) or store.read(self.name.file) == data:
            return
        raise StateError(
            f"manifest {store.url}/{self.name.file}",
            "there is another manifest of that name",
            "Two drivers may have claimed one generation: use a store that creates files exclusively.",
        )

    def _encode(self) -> bytes:
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
                "overtaken": None if self.overtaken is None else self.overtaken.to_json(),
            }
        ).encode()
        signature = signing.sign(_PURPOSE, text).hex().encode()
        return b"%b\n%08x %b\n" % (text, zlib.crc32(text), signature)

    @classmethod
    def read(cls, store: StateStore, name: Name) -> Manifest:
        """Read and verify a manifest. Raises ``SnapshotCorrupt`` if it was altered or signed with another key."""
        text, _, last = store.read(name.file).removesuffix(b"\n").rpartition(b"\n")
        crc, _, signature = last.partition(b" ")
        where = f"manifest {store.url}/{name.file}"
        if crc != b"%08x" % zlib.crc32(text) or not text or len(signature) != 2 * signing.SIGNATURE_BYTES:
            raise SnapshotCorrupt(
                where,
                "its content does not match its checksum",
                "Restore it from a backup, or remove it to start from the previous epoch.",
            )
        if not _is_signed(text, signature):
            raise SnapshotCorrupt(
                where,
                "it is signed with the key of another deployment",
                f"Use the key file of the deployment that wrote it ({signing.KEY_FILE}); here it is "
                f"{signing.key_path()}.",
            )
        try:
            fields = parse_json(text)
        except ValueError as error:
            raise SnapshotCorrupt(where, f"it is not valid JSON ({error})") from error
        try:
            found = cls._from_fields(fields)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise SnapshotCorrupt(
                where,
                f"it was not written by this version of Penstock ({type(error).__name__}: {error})",
                "Use the version that wrote it, or another delivery.state_dir.",
            ) from error
        if found.name != name:
            raise SnapshotCorrupt(where, f"it was written under another name, {found.name.file}", "Rename it.")
        return found

    @classmethod
    def _from_fields(cls, fields: dict[str, Any]) -> Manifest:
        """The inverse of how a manifest is written. Raises whatever fields of another version lead to."""
        fields["base"] = tuple(fields["base"])
        fields["dead_letters"] = tuple((generation, epoch) for generation, epoch in fields.get("dead_letters", ()))
        overtaken = fields.get("overtaken")
        fields["overtaken"] = None if overtaken is None else OvertakenFrames.from_json(overtaken)
        fields["scaled"] = {bolt: ScaledBolt(*each) for bolt, each in fields.get("scaled", {}).items()}
        fields["tasks"] = {
            task: TaskEntry(
                {
                    state: [SnapshotPart.from_json(part) for part in chain]
                    for state, chain in entry["parts"].items()
                },
                entry["tokens"],
            )
            for task, entry in fields["tasks"].items()
        }
        return cls(**fields)

    def taken_over(self, generation: int) -> Manifest:
        """The manifest that another generation writes when it starts from this one."""
        base = (self.generation, self.epoch)
        return dataclasses.replace(self, generation=generation, base=base, dead_letters=self.dead_letters_after)

    @property
    def dead_letters_after(self) -> tuple[tuple[int, int], ...]:
        """``dead_letters`` for the generation that follows this manifest, even if that starts from nothing."""
        committed = self.epoch > self.base[1]
        return (*self.dead_letters, (self.generation, self.epoch)) if committed else self.dead_letters

    def holds(self, generation: int, epoch: int) -> bool:
        """Whether this generation committed the epoch and no later query run repeats it."""
        if generation == self.generation:
            return epoch <= self.epoch
        return epoch <= dict(self.dead_letters).get(generation, -1)

    @property
    def chains(self) -> dict[str, Mapping[str, list[SnapshotPart]]]:
        """Task → state → parts, the argument of ``read_parts`` and ``SnapshotWriter.adopt``."""
        return {task: entry.parts for task, entry in self.tasks.items()}

    @property
    def files(self) -> dict[str, list[SnapshotPart]]:
        """The snapshot files it needs, each with the parts it needs."""
        found: dict[str, list[SnapshotPart]] = {}
        for entry in self.tasks.values():
            for chain in entry.parts.values():
                for part in chain:
                    found.setdefault(part.file, []).append(part)
        for waiting in self.overtaken.entries.values() if self.overtaken is not None else ():
            for part in waiting.parts:
                found.setdefault(part.file, []).append(part)
        return found


def nothing(
    topology: str, delivery: str, generation: int, created: float, dead_letters: tuple[tuple[int, int], ...] = ()
) -> Manifest:
    """The manifest of a generation that starts from nothing. Dead letters of earlier runs are kept."""
    return Manifest(topology, 0, delivery, generation, (0, 0), created, {}, {}, dead_letters)


def dead_letters_so_far(store: StateStore) -> tuple[tuple[int, int], ...]:
    """``Manifest.dead_letters`` for a generation that follows those in this store but does not start from them."""
    try:
        found = newest(store)
    except SnapshotCorrupt:  # the names at least show what the newest generations committed
        highest: dict[int, int] = {}
        for name in history(store):
            highest[name.generation] = max(name.epoch, highest.get(name.generation, 0))
        return tuple(sorted(highest.items()))
    return () if found is None else found.dead_letters_after


def history(store: StateStore) -> list[Name]:
    """The valid manifests, newest first: those of the newest generation, then those of the generation it took over
    up to the epoch it started from, and so on."""
    return _history(_names(store))


def epochs(store: StateStore) -> list[int]:
    """The committed epochs that still have a manifest, oldest first."""
    return sorted({name.epoch for name in history(store)} - {0})


def newest(store: StateStore, before: int | None = None) -> Manifest | None:
    """The manifest to start from: the last committed epoch (before ``before``), or the manifest with epoch 0 of a
    generation that started from nothing. None if there is no manifest. Unreadable manifests are logged and
    skipped. Raises ``SnapshotCorrupt`` if all are unreadable, because starting from nothing would silently repeat
    what was committed."""
    tries = 3
    while True:
        found = [name for name in history(store) if before is None or name.epoch < before]
        try:
            manifest = next(_readable(store, found), None)
            break
        except StateError as error:
            tries -= 1
            if not tries or not is_missing(error):
                raise
            # The owner committed another manifest and removed this one meanwhile: list again.
    if manifest is None and found:
        raise SnapshotCorrupt(
            f"state store {store.url}",
            f"none of its {len(found)} manifests can be read"
            if len(found) > 1
            else "its only manifest cannot be read",
            "Restore the manifests (or the deployment key that signed them) from a backup or start from a "
            "savepoint. To start from nothing, remove the folder.",
        )
    return manifest


def prune(store: StateStore, generation: int, keep: int = 2) -> None:
    """Remove old manifests and snapshot files. Called by the owner immediately after it verified its ownership.
    Keeps the newest ``keep`` epochs with a readable manifest and the snapshot files they need, and files of its
    own generation that are newer than the newest manifest, because their manifest may be about to be written.

    Safe for a driver that is superseded meanwhile: the new owner started from the newest manifest, which is kept,
    and its own files have a higher generation and are never touched.
    """
    names = _names(store)
    if not names or names[0].generation > generation:
        return
    kept: list[Manifest] = []
    for manifest in _readable(store, _history(names)):
        kept.append(manifest)
        if len({each.epoch for each in kept}) == keep:
            break
    if not kept:
        return
    lowest = kept[-1].name
    in_history = set(_history(names))
    # manifests first: a crash may leave files without a manifest, but no manifest without its files
    for name in names:
        if name < lowest or name not in in_history:
            store.remove(name.file)
    needed = {file for manifest in kept for file in manifest.files}
    for file in store.list(f"{SNAPSHOTS}/"):
        wrote = written_by(file)
        if wrote is not None and wrote <= (generation, kept[0].epoch) and file not in needed:
            store.remove(file)


def sweep(store: StateStore, generation: int) -> None:
    """Remove partially written files of earlier generations."""

    def older(name: str) -> bool:
        base = name.rpartition("/")[2]
        return base.startswith("gen-") and base[4:12] < f"{generation:08d}"

    for folder in (SNAPSHOTS, FOLDER):
        store.sweep(folder, older)


def _names(store: StateStore) -> list[Name]:
    """The names of all manifests, highest first."""
    found = (Name.parse(file) for file in store.list(f"{FOLDER}/"))
    return sorted((name for name in found if name is not None), reverse=True)


def _history(names: list[Name]) -> list[Name]:
    found: list[Name] = []
    for name in names:
        if found:
            above = found[-1]
            continues = name.generation == above.generation
            begins = name.generation == above.base[0] and name.epoch <= above.base[1]
            if not continues and not begins:
                continue
        found.append(name)
    return found


def _readable(store: StateStore, found: list[Name]) -> Iterator[Manifest]:
    """Read manifests lazily in this order. Unreadable ones are logged and skipped."""
    for name in found:
        try:
            yield Manifest.read(store, name)
        except SnapshotCorrupt as error:
            log.error("%s The manifest is skipped: epoch %d counts as not committed.", error, name.epoch)


def _is_signed(text: bytes, signature: bytes) -> bool:
    try:
        return signing.is_signed(_PURPOSE, text, bytes.fromhex(signature.decode()))
    except ValueError:
        return False
