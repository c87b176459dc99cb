"""Dead letters in a state directory: rows that a sink rejected, and tuples of spouts without a replay queue.

They are stored in the component's shared folder, with one folder per task, so ``penstock dlq`` finds them on every
file system that a state directory may be on. They can be listed, shown and dropped, but not sent back, because
there is no queue to send them to.

With exactly-once delivery, work that is repeated after a restart gives up the same rows again. Two rules determine
which dead letters are valid. The rules do not depend on the removal of files, and an outdated process cannot
violate them:

- Dead letters of an epoch have the epoch and the generation of the query run in their name. They are valid only if
  that generation committed that epoch, according to the newest manifest (``Manifest.holds``).
- Other dead letters with a name (of an attempt to publish an epoch) are valid until the same or a newer generation
  adds dead letters, or an empty list of them, under that name.

Invalid files are removed from time to time to save space.
"""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from penstock.errors import StateError
from penstock.replay.dead_letters import DeadLetter, DeadLetterStore
from penstock.replay.records import ReplayRecord, decode, encode
from penstock.state import manifest as manifests
from penstock.state.manifest import Manifest
from penstock.state.store import StateStore, is_missing
from penstock.texts import parse_json

FOLDER = "dead_letters"
"""Folder in the component's shared folder. It contains a folder for each task, named by the task's index."""
ABOUT = "about.json"
_PER_FILE = 1000  # dead letters per file; the last three digits of an id are the index in the file
_LENGTH = struct.Struct("<I")
_REMOVED = "removed"
_EPOCH = "epoch"
_PER_GENERATION = 1_000_000  # file numbers per generation: ranges of generations, and unnamed files, never overlap
_MOST_NAMES = 64  # names whose files a writer remembers: more than the number of epochs that wait to be published


class _File(NamedTuple):
    """A file of dead letters, by its name: ``added/<number>[-<generation>.<once>.<attempt>.<part>]``."""

    number: int
    """The number of its first dead letter, in thousands. Unique: each generation has its own range."""
    name: str
    once: str = ""
    generation: int = 0
    attempt: int = 0
    """The number of the first file that one call of ``add_once`` wrote."""

    @classmethod
    def parse(cls, name: str) -> _File:
        number, _, rest = name.rpartition("/")[2].partition("-")
        generation, _, rest = rest.partition(".")
        once, attempt, *_ = [*rest.rsplit(".", 2), "", ""]
        if not (once and generation.isdecimal() and attempt.isdecimal()):
            return cls(int(number), name)
        return cls(int(number), name, once, int(generation), int(attempt))

    @property
    def epoch(self) -> int | None:
        """The epoch whose commit makes the file valid; None if there is none."""
        kind, _, rest = self.once.partition(".")
        return int(rest.partition(".")[0]) if kind == _EPOCH else None

    @property
    def rank(self) -> tuple[int, int]:
        return self.generation, self.attempt


class StateDeadLetterStore(DeadLetterStore):
    """Stores files of up to 1,000 dead letters. A file is created exclusively and never changed. The removal of a
    dead letter is a separate marker file. A file is removed with its last dead letter, except the newest file,
    whose number determines the next one."""

    def __init__(self, store: StateStore, generation: int = 0) -> None:
        """``generation`` is that of the query run whose task adds dead letters. Such an object is the only writer
        of its generation and lists the folder once. Omit it for reading and removing."""
        self._store, self._generation = store, generation
        self._next: int | None = None
        self._known: dict[str, list[_File]] = {}
        """The valid files of the names used most recently."""

    def about(self, topology: str, component: str, index: int) -> None:
        """Store which task the dead letters belong to, for ``penstock dlq``."""
        about = {"topology": topology, "component": component, "index": index}
        self._store.create(ABOUT, json.dumps(about).encode())

    def add(self, records: Sequence[ReplayRecord]) -> None:
        plain = [file.number for file in self._files() if not file.once] if records else []
        number = max(plain, default=0) + 1
        for first in range(0, len(records), _PER_FILE):
            data = _joined(records[first : first + _PER_FILE])
            while not self._store.create(f"added/{number:09d}", data):
                number += 1

    def add_once(self, records: Sequence[ReplayRecord], once: str) -> int:
        """Store dead letters under the name ``once`` (letters, digits and dots). If equal dead letters exist under
        that name, they are kept with their ids and removal markers. Otherwise the existing ones become invalid,
        even if ``records`` is empty. Returns the number of dead letters that were added."""
        if self._next is None:
            self._begin()
        assert self._next is not None
        known = self._known.get(once, [])
        if not records and not known:
            return 0
        if known and _same(self._read(known), [record._replace(first_failed=0.0) for record in records]):
            return 0
        attempt, starts = self._next, range(0, max(len(records), 1), _PER_FILE)
        self._next += len(starts)  # even if the write fails: it may be unknown whether a file was created
        added = [
            f"added/{attempt + part:09d}-{self._generation}.{once}.{attempt}.{part}" for part in range(len(starts))
        ]
        for name, first in zip(added, starts, strict=True):
            self._create(name, _joined(records[first : first + _PER_FILE]))
        self._remember(once, [_File.parse(name) for name in added])
        for file in known:
            self._remove_file(file)
        return len(records)

    def read_all(self) -> list[DeadLetter]:
        removed = self._removed()
        found: list[DeadLetter] = []
        for file in self._valid():
            with _ignore_missing():
                for place, data in enumerate(self._parts(file.name)):
                    id = file.number * _PER_FILE + place
                    if id not in removed:
                        found.append(DeadLetter(id, decode(data)))
        return found

    def remove(self, ids: Collection[int]) -> None:
        """Steps: (1) mark each dead letter; (2) remove files without remaining ones, except the newest of each
        generation."""
        files = self._files()
        numbers = {file.number for file in files}
        for id in sorted(ids):
            if id // _PER_FILE in numbers:
                self._store.create(f"{_REMOVED}/{id}", b"")
        removed = self._removed()
        newest = {file.generation: file.number for file in files}
        for file in files:
            first = file.number * _PER_FILE
            count = sum(1 for _ in self._parts(file.name))
            is_empty = bool(count) and removed.issuperset(range(first, first + count))
            if is_empty and newest[file.generation] != file.number:
                self._remove_file(file)

    def close(self) -> None:
        """Does nothing: no file is open."""

    def _begin(self) -> None:
        """Read what earlier processes of the task left. This is the only time that a writer lists the folder."""
        files, manifest = self._files(), manifests.newest(self._topology)
        own = [file.number for file in files if file.once and file.generation == self._generation]
        valid = _valid(files, manifest)
        for file in valid:
            of_others = file.generation != self._generation
            if file.once and not (of_others and file.epoch is not None) and file.generation <= self._generation:
                self._known.setdefault(file.once, []).append(file)
        for once in list(self._known)[:-_MOST_NAMES]:
            del self._known[once]
        self._next = max(own, default=(self._generation + 1) * _PER_GENERATION) + 1
        if manifest is not None and manifest.generation >= self._generation:
            for file in set(files) - set(valid):
                if file.generation < self._generation:
                    self._remove_file(file)

    def _create(self, name: str, data: bytes) -> None:
        if not self._store.create(name, data) and self._store.read(name) != data:
            raise StateError(
                f"dead letters {self._store.url}/{name}",
                "another process of the task has written this file already",
            )

    def _remember(self, once: str, files: list[_File]) -> None:
        self._known.pop(once, None)
        self._known[once] = files
        if len(self._known) > _MOST_NAMES:
            del self._known[next(iter(self._known))]

    def _read(self, files: Sequence[_File]) -> list[ReplayRecord] | None:
        """The records of these files; None if one of the files has been removed."""
        try:
            data = [each for file in files for each in self._parts(file.name)]
        except StateError as error:
            if is_missing(error):
                return None
            raise
        return [decode(each)._replace(first_failed=0.0) for each in data]

    def _valid(self) -> list[_File]:
        files = self._files()
        bound = any(file.epoch is not None for file in files)
        return _valid(files, manifests.newest(self._topology) if bound else None)

    @property
    def _topology(self) -> StateStore:
        """The topology's folder, which contains the manifests and ``shared/<component>/dead_letters/<index>``."""
        return StateStore(self._store.url.rsplit("/", 4)[0])

    def _remove_file(self, file: _File) -> None:
        self._store.remove(file.name)
        for id in self._removed():
            if id // _PER_FILE == file.number:
                self._store.remove(f"{_REMOVED}/{id}")

    def _parts(self, name: str) -> Iterator[bytes]:
        return _split(self._store.read(name))

    def _files(self) -> list[_File]:
        """All files, lowest number first."""
        return sorted(_File.parse(name) for name in self._store.list("added/"))

    def _removed(self) -> set[int]:
        return {int(name.rpartition("/")[2]) for name in self._store.list(f"{_REMOVED}/")}


def find(state_dir: str) -> Iterator[tuple[dict[str, object], StateStore]]:
    """All tasks below a state directory that have dead letters: what ``about`` stored, and the folder."""
    root = StateStore(state_dir)
    for name in root.list():
        parts = name.split("/")
        if len(parts) > 2 and parts[-1] == ABOUT and parts[-3] == FOLDER:
            yield parse_json(root.read(name)), root.child(name.rpartition("/")[0])


def epoch_dead_letters(epoch: int, part: int) -> str:
    """The name of dead letters that become valid if the generation that adds them commits the epoch."""
    return f"{_EPOCH}.{epoch}.{part}"


def _valid(files: Sequence[_File], manifest: Manifest | None) -> list[_File]:
    """The valid files, by the two rules in the module docstring."""

    def group(file: _File) -> tuple[str, int]:
        return file.once, 0 if file.epoch is None else file.generation

    newest: dict[tuple[str, int], tuple[int, int]] = {}
    for file in files:
        newest[group(file)] = max(file.rank, newest.get(group(file), file.rank))

    def is_valid(file: _File) -> bool:
        if not file.once:
            return True
        if file.epoch is not None and (manifest is None or not manifest.holds(file.generation, file.epoch)):
            return False
        return file.rank == newest[group(file)]

    return [file for file in files if is_valid(file)]


@contextlib.contextmanager
def _ignore_missing() -> Iterator[None]:
    """A file that its writer removes meanwhile is no longer valid."""
    try:
        yield
    except StateError as error:
        if not is_missing(error):
            raise


def _joined(records: Sequence[ReplayRecord]) -> bytes:
    return b"".join(_LENGTH.pack(len(each)) + each for each in map(encode, records))


def _same(one: list[ReplayRecord] | None, other: list[ReplayRecord]) -> bool:
    try:
        return bool(one == other)
    except Exception:  # comparing payloads runs users' code
        return False


def _split(data: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(data):
        (length,) = _LENGTH.unpack_from(data, at)
        yield data[at + 4 : at + 4 + length]
        at += 4 + length
