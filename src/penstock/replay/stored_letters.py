"""Dead letters in a state directory: rows that a sink rejected, tuples that a spout without a replay queue gave
up.

They lie in the component's shared folder, a folder for each task, so that ``penstock dlq`` finds them on any file
system that the state directory may be on. They can be listed, shown and dropped; there is no queue to send them
back to.
"""

from __future__ import annotations

import json
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
            encoded = [encode(record) for record in records[first : first + _PER_FILE]]
            data = b"".join(_LENGTH.pack(len(each)) + each for each in encoded)
            number = max(self._numbers(), default=0) + 1
            while not self._store.create(_file(number), data):
                number += 1

    def letters(self) -> list[Letter]:
        struck = self._struck()
        found: list[Letter] = []
        for number in self._numbers():
            for place, data in enumerate(_split(self._store.read(_file(number)))):
                id = number * _PER_FILE + place
                if id not in struck:
                    found.append(Letter(id, decode(data)))
        return found

    def remove(self, ids: Collection[int]) -> None:
        """(1) mark each letter; (2) remove files that hold no other, but for the newest."""
        numbers = self._numbers()
        for id in sorted(ids):
            if id // _PER_FILE in numbers:
                self._store.create(f"{_STRUCK}/{id}", b"")
        struck = self._struck()
        for number in numbers[:-1]:
            all_of_it = range(number * _PER_FILE, number * _PER_FILE + self._count(number))
            if struck.issuperset(all_of_it):
                self._store.remove(_file(number))
                for id in all_of_it:
                    self._store.remove(f"{_STRUCK}/{id}")

    def close(self) -> None:
        """Nothing is held."""

    def _count(self, number: int) -> int:
        return sum(1 for _ in _split(self._store.read(_file(number))))

    def _numbers(self) -> list[int]:
        return [int(name.rpartition("/")[2]) for name in self._store.list("added/")]

    def _struck(self) -> set[int]:
        return {int(name.rpartition("/")[2]) for name in self._store.list(f"{_STRUCK}/")}


def find(state_dir: str) -> Iterator[tuple[dict[str, object], StateStore]]:
    """All tasks below a state directory that keep letters so: what ``about`` wrote, and where."""
    root = StateStore(state_dir)
    for name in root.list():
        parts = name.split("/")
        if len(parts) > 2 and parts[-1] == ABOUT and parts[-3] == FOLDER:
            yield parse_json(root.read(name)), root.child(name.rpartition("/")[0])


def _file(number: int) -> str:
    return f"added/{number:09d}"


def _split(data: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(data):
        (length,) = _LENGTH.unpack_from(data, at)
        yield data[at + 4 : at + 4 + length]
        at += 4 + length
