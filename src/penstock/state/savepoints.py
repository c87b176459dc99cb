"""Copies a committed epoch from one state directory to another, to write a savepoint or to start from one.

The target changes in one step, the last: the exclusive creation of a manifest of a new generation. The files it
needs are copied before that, under names of that generation, so they replace nothing. Each part is verified when
it is read and again in the target.
"""

from __future__ import annotations

import dataclasses

from penstock.errors import SnapshotCorrupt, StateError, StateMissing
from penstock.state import manifest as manifests
from penstock.state.generations import Ownership, newest_generation, read_record
from penstock.state.manifest import Manifest, TaskEntry
from penstock.state.snapshots import SnapshotPart, check, copy_name
from penstock.state.store import StateStore, is_missing


def check_apart(source: StateStore, target: StateStore, what: str) -> None:
    """Raise ``StateError`` if one of the two folders is or contains the other."""
    if source.overlaps(target):
        raise StateError(
            what,
            f"it overlaps with the topology's own state directory ({source.url} and {target.url})",
            "Choose another path.",
        )


def verify(source: StateStore, manifest: Manifest) -> None:
    """Read everything that a manifest needs. Raises ``SnapshotCorrupt`` if a part is damaged."""
    for file, parts in manifest.files.items():
        _read(source, file, parts)


def copy_files(source: StateStore, manifest: Manifest, target: StateStore, generation: int) -> Manifest:
    """Copy the files that a manifest needs. Returns the manifest to create in the target, which refers to the
    copies."""
    names: dict[str, str] = {}
    for number, (file, parts) in enumerate(manifest.files.items()):
        name = names[file] = copy_name(manifest.epoch, generation, number)
        target.write(name, _read(source, file, parts))
        _read(target, name, [dataclasses.replace(part, file=name) for part in parts])
    tasks = {
        key: TaskEntry(
            {
                state: [dataclasses.replace(part, file=names[part.file]) for part in chain]
                for state, chain in entry.parts.items()
            },
            entry.tokens,
        )
        for key, entry in manifest.tasks.items()
    }
    overtaken = None if manifest.overtaken is None else manifest.overtaken.moved(names)
    return dataclasses.replace(
        manifest, tasks=tasks, generation=generation, base=(0, 0), dead_letters=(), overtaken=overtaken
    )


def find(savepoint: StateStore) -> Manifest:
    """The manifest of a savepoint. Raises ``StateMissing`` if there is none."""
    found = manifests.newest(savepoint)
    if found is None or not found.epoch:
        raise StateMissing(
            f"savepoint {savepoint.url}", "there is no savepoint here", "Check the path given to --from."
        )
    return found


def write_savepoint(source: StateStore, manifest: Manifest, target: StateStore) -> None:
    """Write a self-contained savepoint. A savepoint that already exists in the target stays valid until the new
    one is complete. Raises ``StateError`` if the target is the state directory of a topology."""
    check_apart(source, target, f"savepoint {target.url}")
    target.check_owner()
    record = read_record(target, newest_generation(target))
    if record is not None and record.process:
        raise StateError(
            f"savepoint {target.url}",
            "this is the state directory of a topology that was started by process "
            f"{record.process.get('pid', '?')} on {record.process.get('host', '?')}",
            "Choose another path.",
        )
    owner = Ownership(manifest.topology)
    generation = owner.claim(target)
    copy_files(source, manifest, target, generation).write(target)
    owner.check(target)  # if two savepoints are written to one place at the same time, the later one is kept
    manifests.prune(target, generation, keep=1)


def _read(store: StateStore, file: str, parts: list[SnapshotPart]) -> bytes:
    try:
        data = store.read(file)
    except StateError as error:
        if is_missing(error):
            raise SnapshotCorrupt(
                f"snapshot file {store.url}/{file}", "there is no such file", "Restore it from a backup."
            ) from error
        raise
    for part in parts:
        check(store, part, data[part.offset : part.offset + part.length])
    return data
