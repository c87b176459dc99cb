"""Dead letters in a state directory: rows that a sink rejected, tuples that a spout without a replay queue gave
up.

They lie in the component's shared folder, a folder for each task, so that ``penstock dlq`` finds them on any file
system that the state directory may be on. They can be listed, shown and dropped; there is no queue to send them
back to.

Exactly once, what is done again after a restart gives up the same rows again. Such letters have a name that says
whose they are (the task, the epoch), and are there once.
"""

from __future__ import annotations

import json
import secrets
import struct
from collections.abc import Collection, Iterator, Sequence

from penstock.replay.dead_letters import DeadLetters, Letter
from penstock.replay.records import Record, decode, encode
from penstock.state.store import StateStore
from penstock.texts import parse_json

FOLDER = "letters"
"""In the component's shared folder; below it a folder for each task, named by its index."""
ABOUT = "about.json"
_PER_FILE = 1000  # letters; the last three digits of an id say which
_LENGTH = struct.Struct("<I")
_STRUCK = "struck"
_IDENTITY = "identity"  # the name under which sinks keep theirs too: it means the same


class StoredLetters(DeadLetters):
    """Files of up to 1,000 letters, numbered from 1. A file is created exclusively and never changed; a letter
    that is removed has a mark of its own, and a file goes with its last letter, except the newest: its number says
    which is next."""

    def __init__(self, store: StateStore) -> None:
        self._store = store

    def about(self, topology: str, component: str, index: int) -> None:
        """Say whose letters these are, for ``penstock dlq``."""
        about = {"topology": topology, "component": component, "index": index}
        self._store.create(ABOUT, json.dumps(about).encode())

    def add(self, records: Sequence[Record]) -> None:
        for first in range(0, len(records), _PER_FILE):
            self._add(records[first : first + _PER_FILE], "")

    def add_once(self, records: Sequence[Record], once: str) -> int:
        """``once``: a name (of letters, digits and points) under which these letters are kept a single time: equal
        ones that are there stay, with their ids and marks, and others under that name go. Returns how many were
        not there."""
        parts = [records[first : first + _PER_FILE] for first in range(0, len(records), _PER_FILE)]
        return sum(len(part) for number, part in enumerate(parts) if self._add(part, f"{once}.{number}"))

    def _add(self, records: Sequence[Record], once: str) -> bool:
        files = self._files()
        former = [number for number, name in files.items() if once and name == _file(number, once)]
        story = [record._replace(first_failed=0.0) for record in records]
        for number in former:
            there = [decode(data)._replace(first_failed=0.0) for data in self._parts(files[number])]
            if _same(there, story):
                return False
        encoded = [encode(record) for record in records]
        data = b"".join(_LENGTH.pack(len(each)) + each for each in encoded)
        number = max(files, default=0) + 1
        while not self._store.create(_file(number, once), data):
            number += 1
        for earlier in former:
            self._remove_file(files[earlier], earlier)
        return True

    def letters(self) -> list[Letter]:
        struck = self._struck()
        found: list[Letter] = []
        for number, name in self._files().items():
            for place, data in enumerate(self._parts(name)):
                id = number * _PER_FILE + place
                if id not in struck:
                    found.append(Letter(id, decode(data)))
        return found

    def remove(self, ids: Collection[int]) -> None:
        """(1) mark each letter; (2) remove files that hold no other, but for the newest."""
        files = self._files()
        for id in sorted(ids):
            if id // _PER_FILE in files:
                self._store.create(f"{_STRUCK}/{id}", b"")
        struck = self._struck()
        for number in sorted(files)[:-1]:
            count = sum(1 for _ in self._parts(files[number]))
            if struck.issuperset(range(number * _PER_FILE, number * _PER_FILE + count)):
                self._remove_file(files[number], number)

    def close(self) -> None:
        """Nothing is held."""

    def _remove_file(self, name: str, number: int) -> None:
        self._store.remove(name)
        for id in self._struck():
            if id // _PER_FILE == number:
                self._store.remove(f"{_STRUCK}/{id}")

    def _parts(self, name: str) -> Iterator[bytes]:
        return _split(self._store.read(name))

    def _files(self) -> dict[int, str]:
        """Number to name, lowest first."""
        names = {int(name.rpartition("/")[2].partition("-")[0]): name for name in self._store.list("added/")}
        return dict(sorted(names.items()))

    def _struck(self) -> set[int]:
        return {int(name.rpartition("/")[2]) for name in self._store.list(f"{_STRUCK}/")}


def find(state_dir: str) -> Iterator[tuple[dict[str, object], StateStore]]:
    """All tasks below a state directory that keep letters so: what ``about`` wrote, and where."""
    root = StateStore(state_dir)
    for name in root.list():
        parts = name.split("/")
        if len(parts) > 2 and parts[-1] == ABOUT and parts[-3] == FOLDER:
            yield parse_json(root.read(name)), root.child(name.rpartition("/")[0])


def task_identity(folder: StateStore) -> str:
    """Names a task from its first start on, in its own folder: a start from scratch makes another."""
    folder.create(_IDENTITY, secrets.token_hex(8).encode())
    return folder.read(_IDENTITY).decode()


def _file(number: int, once: str = "") -> str:
    return f"added/{number:09d}-{once}" if once else f"added/{number:09d}"


def _same(one: list[Record], other: list[Record]) -> bool:
    try:
        return bool(one == other)
    except Exception:  # comparing runs users' code
        return False


def _split(data: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(data):
        (length,) = _LENGTH.unpack_from(data, at)
        yield data[at + 4 : at + 4 + length]
        at += 4 + length
