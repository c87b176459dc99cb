"""Dead letters: tuples that failed too often, kept with their story until someone looks at them.

A dead letter can be shown, sent back (to From, its attempts counted from zero; a damaged record is read once more)
or dropped. All of it may happen while
the topology runs: the embedded store is a log that any process may append to, and so is From, so sending back is
(1) append to From, (2) strike out the dead letter. A crash between the two leaves it in both: at least once.
"""

from __future__ import annotations

import contextlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.private_folder import open_here
from penstock.replay.queues import Queues, ReplayQueue
from penstock.replay.records import ReplayRecord, decode_dead_letter, encode_dead_letter
from penstock.storage.segments import LogReader, SegmentLog, lock
from penstock.texts import parse_json

_DEAD_LETTER, _STRUCK = b"L", b"S"


@dataclass(frozen=True)
class DeadLetter:
    """A dead letter. Ids are unique in one store and never used again."""

    id: int
    record: ReplayRecord


class DeadLetterStore(ABC):
    """A store of dead letters. Any process may use it at any time."""

    @abstractmethod
    def add(self, records: Sequence[ReplayRecord]) -> None:
        """Keep records; on return they are durable."""

    @abstractmethod
    def read_all(self) -> list[DeadLetter]:
        """All there are, oldest first."""

    @abstractmethod
    def remove(self, ids: Collection[int]) -> None:
        """Take dead letters out for good. Ids that are not there are ignored."""

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Within it no other process is within it: for those who read dead letters and then remove them. Appending
        goes on. A store without locks lets several in: then a dead letter that two of them send back comes
        twice."""
        yield

    @abstractmethod
    def close(self) -> None:
        """Let go of files and connections."""


def send_back(queues: Queues, ids: Collection[int]) -> int:
    """Give dead letters another ``max_attempts`` attempts: they come back before fresh data. Returns how many:
    those that another process has sent back or dropped meanwhile are left out."""
    with queues.dead.exclusive():
        chosen = [dead_letter for dead_letter in queues.dead.read_all() if dead_letter.id in ids]
        current_from(queues).append([dead_letter.record.forgiven() for dead_letter in chosen])
        queues.dead.remove([dead_letter.id for dead_letter in chosen])
    return len(chosen)


def drop(dead: DeadLetterStore, ids: Collection[int]) -> int:
    """Remove dead letters for good. Returns how many were there to remove."""
    with dead.exclusive():
        chosen = [dead_letter.id for dead_letter in dead.read_all() if dead_letter.id in ids]
        dead.remove(chosen)
    return len(chosen)


def current_from(queues: Queues) -> ReplayQueue:
    """Which queue is From now. The topology may exchange them at any instant; then what is appended to this one
    is read a little sooner."""
    return queues.to if queues.pointer.load() else queues.from_


def struck_ids(data: bytes) -> list[int]:
    """The ids in a record that strikes dead letters out; none where it is damaged: then they stay."""
    try:
        found = parse_json(data)
    except ValueError:
        return []
    return [id for id in found if type(id) is int] if type(found) is list else []


class DiskDeadLetterStore(DeadLetterStore):
    """Dead letters in a folder. A dead letter's id is its number in the log; a removal is a record of its own."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._log = SegmentLog(self.folder)
        self._arrived: LogReader | None = None

    def add(self, records: Sequence[ReplayRecord]) -> None:
        if records:
            self._log.append([_DEAD_LETTER + encode_dead_letter(record) for record in records])

    def read_all(self) -> list[DeadLetter]:
        found: dict[int, bytes] = {}
        reader = self._log.reader(0)
        while batch := reader.read(1000):
            for number, data in batch:
                if data[:1] == _STRUCK:
                    for id in struck_ids(data[1:]):
                        found.pop(id, None)
                else:  # a dead letter; or what someone else wrote, which is shown as a damaged one
                    found[number] = data.removeprefix(_DEAD_LETTER)
        reader.close()
        return [DeadLetter(number, decode_dead_letter(data)) for number, data in found.items()]

    def arrivals(self) -> Iterator[DeadLetter]:
        """The dead letters that were added since the last call, by whatever process; at first, all there are."""
        if self._arrived is None:
            self._arrived = self._log.reader(0)
        while batch := self._arrived.read(1000):
            for number, data in batch:
                if data[:1] == _DEAD_LETTER:
                    yield DeadLetter(number, decode_dead_letter(data[1:]))

    def remove(self, ids: Collection[int]) -> None:
        """(1) append a record that strikes them out; (2) remove leading segments that hold no dead letter any
        more."""
        if not ids:
            return
        number = self._log.append([_STRUCK + json.dumps(sorted(ids)).encode()])
        left = self.read_all()
        self._log.drop_before(left[0].id if left else number + 1)

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """By a lock that the kernel drops when the process dies. Raises ``TimeoutError`` after some seconds."""
        file = open_here(self.folder / "removal.lock", os.O_RDWR | os.O_CREAT)
        try:
            lock(file)
            yield
        finally:
            os.close(file)

    def close(self) -> None:
        if self._arrived is not None:
            self._arrived.close()
        self._log.close()
