"""Dead letters in a state directory: rows that a sink rejected, tuples that a spout without a replay queue gave
up.

They lie in the component's shared folder, a folder for each task, so that ``penstock dlq`` finds them on any file
system that the state directory may be on. They can be listed, shown and dropped; there is no queue to send them
back to.

Exactly once, work that is done again after a restart gives up the same rows again. Two rules decide which dead
letters hold; they need nothing to be removed, and a superseded process cannot break them:

- Dead letters of an epoch have its number and the generation of the start in their name. They hold only if that
  generation committed that epoch: the newest manifest says so (``Manifest.holds``).
- Other dead letters with a name (an attempt to publish an epoch) hold until the same or a newer generation adds
  dead letters, or none, under that name.

Files that do not hold are removed now and then to save space.
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
"""In the component's shared folder; below it a folder for each task, named by its index."""
ABOUT = "about.json"
_PER_FILE = 1000  # dead letters; the last three digits of an id say which
_LENGTH = struct.Struct("<I")
_STRUCK = "struck"
_EPOCH = "epoch"
_PER_GENERATION = (
    1_000_000  # numbers of files: each generation has a range of its own, and dead letters without a name
)
_MOST_NAMES = 64  # whose files a writer knows: more epochs than wait to be published at a time


class _File(NamedTuple):
    """A file of dead letters, by its name: ``added/<number>[-<generation>.<once>.<attempt>.<part>]``."""

    number: int
    """Of its first dead letter, in thousands. Unique: a generation counts in a range of its own."""
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
        """None: it is not bound to the commit of an epoch."""
        kind, _, rest = self.once.partition(".")
        return int(rest.partition(".")[0]) if kind == _EPOCH else None

    @property
    def rank(self) -> tuple[int, int]:
        return self.generation, self.attempt


class StateDeadLetterStore(DeadLetterStore):
    """Files of up to 1,000 dead letters. A file is created exclusively and never changed; a dead letter that is
    removed has a mark of its own, and a file goes with its last dead letter, except the newest: its number says
    which is next."""

    def __init__(self, store: StateStore, generation: int = 0) -> None:
        """``generation``: of the start whose task adds dead letters; such an object is the only writer of its
        generation, and lists the folder once. Without it, to read and remove."""
        self._store, self._generation = store, generation
        self._next: int | None = None
        self._former: dict[str, list[_File]] = {}
        """The files that hold under the names used last."""

    def about(self, topology: str, component: str, index: int) -> None:
        """Say whose dead letters these are, for ``penstock dlq``."""
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
        """``once``: a name (of letters, digits and points) under which these dead letters are kept a single time:
        equal ones that are there stay, with their ids and marks, and others under that name do not hold any more,
        also if ``records`` is empty. Returns how many were not there."""
        if self._next is None:
            self._begin()
        assert self._next is not None
        former = self._former.get(once, [])
        if not records and not former:
            return 0
        if former and _same(self._read(former), [record._replace(first_failed=0.0) for record in records]):
            return 0
        attempt, starts = self._next, range(0, max(len(records), 1), _PER_FILE)
        self._next += len(starts)  # also if it fails: whether a file was written may be unknown then
        added = [
            f"added/{attempt + part:09d}-{self._generation}.{once}.{attempt}.{part}" for part in range(len(starts))
        ]
        for name, first in zip(added, starts, strict=True):
            self._create(name, _joined(records[first : first + _PER_FILE]))
        self._remember(once, [_File.parse(name) for name in added])
        for file in former:
            self._remove_file(file)
        return len(records)

    def read_all(self) -> list[DeadLetter]:
        struck = self._struck()
        found: list[DeadLetter] = []
        for file in self._holding():
            with _gone_is_empty():
                for place, data in enumerate(self._parts(file.name)):
                    id = file.number * _PER_FILE + place
                    if id not in struck:
                        found.append(DeadLetter(id, decode(data)))
        return found

    def remove(self, ids: Collection[int]) -> None:
        """(1) mark each dead letter; (2) remove files that hold no other, but for the newest of a generation."""
        files = self._files()
        numbers = {file.number for file in files}
        for id in sorted(ids):
            if id // _PER_FILE in numbers:
                self._store.create(f"{_STRUCK}/{id}", b"")
        struck = self._struck()
        newest = {file.generation: file.number for file in files}
        for file in files:
            first = file.number * _PER_FILE
            count = sum(1 for _ in self._parts(file.name))
            is_empty = bool(count) and struck.issuperset(range(first, first + count))
            if is_empty and newest[file.generation] != file.number:
                self._remove_file(file)

    def close(self) -> None:
        """Nothing is held."""

    def _begin(self) -> None:
        """Look at what earlier processes of the task left: the only time that a writer lists the folder."""
        files, manifest = self._files(), manifests.newest(self._topology)
        own = [file.number for file in files if file.once and file.generation == self._generation]
        holding = _holding(files, manifest)
        for file in holding:
            of_others = file.generation != self._generation
            if file.once and not (of_others and file.epoch is not None) and file.generation <= self._generation:
                self._former.setdefault(file.once, []).append(file)
        for once in list(self._former)[:-_MOST_NAMES]:
            del self._former[once]
        self._next = max(own, default=(self._generation + 1) * _PER_GENERATION) + 1
        if manifest is not None and manifest.generation >= self._generation:
            for file in set(files) - set(holding):
                if file.generation < self._generation:
                    self._remove_file(file)

    def _create(self, name: str, data: bytes) -> None:
        if not self._store.create(name, data) and self._store.read(name) != data:
            raise StateError(
                f"dead letters {self._store.url}/{name}",
                "another process of the task has written this file already",
            )

    def _remember(self, once: str, files: list[_File]) -> None:
        self._former.pop(once, None)
        self._former[once] = files
        if len(self._former) > _MOST_NAMES:
            del self._former[next(iter(self._former))]

    def _read(self, files: Sequence[_File]) -> list[ReplayRecord] | None:
        """None: somebody has removed one of them."""
        try:
            data = [each for file in files for each in self._parts(file.name)]
        except StateError as error:
            if is_missing(error):
                return None
            raise
        return [decode(each)._replace(first_failed=0.0) for each in data]

    def _holding(self) -> list[_File]:
        files = self._files()
        bound = any(file.epoch is not None for file in files)
        return _holding(files, manifests.newest(self._topology) if bound else None)

    @property
    def _topology(self) -> StateStore:
        """The topology's folder, which has the manifests: ``shared/<component>/dead_letters/<index>`` is in it."""
        return StateStore(self._store.url.rsplit("/", 4)[0])

    def _remove_file(self, file: _File) -> None:
        self._store.remove(file.name)
        for id in self._struck():
            if id // _PER_FILE == file.number:
                self._store.remove(f"{_STRUCK}/{id}")

    def _parts(self, name: str) -> Iterator[bytes]:
        return _split(self._store.read(name))

    def _files(self) -> list[_File]:
        """Lowest number first."""
        return sorted(_File.parse(name) for name in self._store.list("added/"))

    def _struck(self) -> set[int]:
        return {int(name.rpartition("/")[2]) for name in self._store.list(f"{_STRUCK}/")}


def find(state_dir: str) -> Iterator[tuple[dict[str, object], StateStore]]:
    """All tasks below a state directory that keep dead letters so: what ``about`` wrote, and where."""
    root = StateStore(state_dir)
    for name in root.list():
        parts = name.split("/")
        if len(parts) > 2 and parts[-1] == ABOUT and parts[-3] == FOLDER:
            yield parse_json(root.read(name)), root.child(name.rpartition("/")[0])


def epoch_dead_letters(epoch: int, part: int) -> str:
    """The name of dead letters that hold if the generation that adds them commits the epoch."""
    return f"{_EPOCH}.{epoch}.{part}"


def _holding(files: Sequence[_File], manifest: Manifest | None) -> list[_File]:
    """Those that hold, by the two rules."""

    def whose(file: _File) -> tuple[str, int]:
        return file.once, 0 if file.epoch is None else file.generation

    newest: dict[tuple[str, int], tuple[int, int]] = {}
    for file in files:
        newest[whose(file)] = max(file.rank, newest.get(whose(file), file.rank))

    def holds(file: _File) -> bool:
        if not file.once:
            return True
        if file.epoch is not None and (manifest is None or not manifest.holds(file.generation, file.epoch)):
            return False
        return file.rank == newest[whose(file)]

    return [file for file in files if holds(file)]


@contextlib.contextmanager
def _gone_is_empty() -> Iterator[None]:
    """A file that its writer removes meanwhile does not hold any more."""
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
    except Exception:  # comparing runs users' code
        return False


def _split(data: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(data):
        (length,) = _LENGTH.unpack_from(data, at)
        yield data[at + 4 : at + 4 + length]
        at += 4 + length
