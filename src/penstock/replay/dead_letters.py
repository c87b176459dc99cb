"""Dead letters: tuples that failed too often, kept with the history of their failures for an operator.

A dead letter can be shown, dropped, or sent back to From with its attempts reset to zero (a damaged record is then
decoded once more). All of this is possible while the topology runs, because any process may append to the log of
dead letters and to From. Sending back takes two steps: (1) append to From; (2) mark the dead letter as removed.
After a crash between the two it is in both, so the tuple is processed at least once.
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

_DEAD_LETTER, _REMOVED = b"L", b"S"


@dataclass(frozen=True)
class DeadLetter:
    """A dead letter. Ids are unique in one store and never reused."""

    id: int
    record: ReplayRecord


class DeadLetterStore(ABC):
    """A store of dead letters. Any process may use it at any time. Methods raise ``OSError`` and
    ``PenstockError``."""

    @abstractmethod
    def add(self, records: Sequence[ReplayRecord]) -> None:
        """Store records; they are durable on return."""

    @abstractmethod
    def read_all(self) -> list[DeadLetter]:
        """All dead letters, oldest first."""

    @abstractmethod
    def remove(self, ids: Collection[int]) -> None:
        """Remove dead letters permanently. Unknown ids are ignored."""

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """A lock for processes that read dead letters and then remove them. Other processes may append meanwhile.
        A store without locks admits several processes; a dead letter that two of them send back is then emitted
        twice."""
        yield

    @abstractmethod
    def close(self) -> None:
        """Close files and connections."""


def send_back(queues: Queues, ids: Collection[int]) -> int:
    """Give dead letters another ``max_attempts`` attempts; they are emitted before fresh data. Returns the number
    of dead letters sent back, without those that another process has sent back or dropped meanwhile."""
    with queues.dead.exclusive():
        chosen = [dead_letter for dead_letter in queues.dead.read_all() if dead_letter.id in ids]
        current_from(queues).append([dead_letter.record.reset() for dead_letter in chosen])
        queues.dead.remove([dead_letter.id for dead_letter in chosen])
    return len(chosen)


def drop(dead: DeadLetterStore, ids: Collection[int]) -> int:
    """Remove dead letters permanently. Returns the number of dead letters removed."""
    with dead.exclusive():
        chosen = [dead_letter.id for dead_letter in dead.read_all() if dead_letter.id in ids]
        dead.remove(chosen)
    return len(chosen)


def current_from(queues: Queues) -> ReplayQueue:
    """The queue that is From now. The topology may exchange the queues at any time; what is appended to this queue
    is then read a little sooner."""
    return queues.to if queues.pointer.load() else queues.from_


def removed_ids(data: bytes) -> list[int]:
    """The ids in a record that marks dead letters as removed. Empty if the record is damaged: they are then
    kept."""
    try:
        found = parse_json(data)
    except ValueError:
        return []
    return [id for id in found if type(id) is int] if type(found) is list else []


class DiskDeadLetterStore(DeadLetterStore):
    """Dead letters in a folder. The id of a dead letter is its number in the log; a removal is a separate
    record."""

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
                if data[:1] == _REMOVED:
                    for id in removed_ids(data[1:]):
                        found.pop(id, None)
                else:  # a dead letter, or a record of another program, which is shown as a damaged dead letter
                    found[number] = data.removeprefix(_DEAD_LETTER)
        reader.close()
        return [DeadLetter(number, decode_dead_letter(data)) for number, data in found.items()]

    def arrivals(self) -> Iterator[DeadLetter]:
        """The dead letters that any process has added since the last call; all of them on the first call."""
        if self._arrived is None:
            self._arrived = self._log.reader(0)
        while batch := self._arrived.read(1000):
            for number, data in batch:
                if data[:1] == _DEAD_LETTER:
                    yield DeadLetter(number, decode_dead_letter(data[1:]))

    def remove(self, ids: Collection[int]) -> None:
        """Steps: (1) append a record that marks them as removed; (2) remove leading segments without dead
        letters."""
        if not ids:
            return
        number = self._log.append([_REMOVED + json.dumps(sorted(ids)).encode()])
        left = self.read_all()
        self._log.drop_before(left[0].id if left else number + 1)

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Takes a lock that the kernel releases when the process dies. Raises ``TimeoutError`` after some
        seconds."""
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
