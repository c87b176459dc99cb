"""Copies of a committed epoch from one state directory to another: savepoints, and starts from them.

The target is changed by one step, the last: the exclusive creation of a manifest of a new generation. The files it
needs are copied before that under names of that generation, so they replace nothing, and each part is checked when
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
    """Raises ``StateError`` where one of the two is the other, or inside it."""
    if source.overlaps(target):
        raise StateError(
            what,
            f"it overlaps with the topology's own state directory ({source.url} and {target.url})",
            "Give another path.",
        )


def verify(source: StateStore, manifest: Manifest) -> None:
    """Read all that a manifest needs. Raises ``SnapshotCorrupt`` where a part is not whole."""
    for file, parts in manifest.files.items():
        _read(source, file, parts)


def copy_files(source: StateStore, manifest: Manifest, target: StateStore, generation: int) -> Manifest:
    """Copy the files a manifest needs; returns the manifest to create in the target: it refers to the copies."""
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
    return dataclasses.replace(manifest, tasks=tasks, generation=generation, base=(0, 0), dead_letters=())


def find(savepoint: StateStore) -> Manifest:
    """What a savepoint holds. Raises ``StateMissing`` where there is none."""
    found = manifests.newest(savepoint)
    if found is None or not found.epoch:
        raise StateMissing(
            f"savepoint {savepoint.url}", "there is no savepoint here", "Check the path given to --from."
        )
    return found


def write_savepoint(source: StateStore, manifest: Manifest, target: StateStore) -> None:
    """Make the target a savepoint that stands alone. One that is there already stays valid until the new one is
    whole. Raises ``StateError`` where the target is a topology's state directory."""
    check_apart(source, target, f"savepoint {target.url}")
    target.check_owner()
    record = read_record(target, newest_generation(target))
    if record is not None and record.process:
        raise StateError(
            f"savepoint {target.url}",
            "this is the state directory of a topology, of process "
            f"{record.process.get('pid', '?')} on {record.process.get('host', '?')}",
            "Give another path.",
        )
    owner = Ownership(manifest.topology)
    generation = owner.claim(target)
    copy_files(source, manifest, target, generation).write(target)
    owner.check(target)  # of two savepoints at once in one place, the later one stays
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
