"""Dead letters: tuples that failed too often, kept with their story until someone looks at them.

A letter can be shown, sent back (to From, its attempts counted from zero) or dropped. All of it may happen while
the topology runs: the embedded store is a log that any process may append to, and so is From, so sending back is
(1) append to From, (2) strike out the letter. A crash between the two leaves it in both: at least once.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.replay.queues import Queue, Queues
from penstock.replay.records import Record, decode, encode
from penstock.replay.segments import LogReader, SegmentLog

_LETTER, _STRUCK = b"L", b"S"


@dataclass(frozen=True)
class Letter:
    """A dead letter. Ids are unique in one store and never used again."""

    id: int
    record: Record


class DeadLetters(ABC):
    """A store of dead letters. Any process may use it at any time."""

    @abstractmethod
    def add(self, records: Sequence[Record]) -> None:
        """Keep records; on return they are durable."""

    @abstractmethod
    def letters(self) -> list[Letter]:
        """All there are, oldest first."""

    @abstractmethod
    def remove(self, ids: Collection[int]) -> None:
        """Take letters out for good. Ids that are not there are ignored."""

    @abstractmethod
    def close(self) -> None:
        """Let go of files and connections."""


def send_back(queues: Queues, ids: Collection[int]) -> int:
    """Give dead letters another ``max_attempts`` attempts: they come back before fresh data. Returns how many."""
    records = [letter.record.forgiven() for letter in queues.dead.letters() if letter.id in ids]
    current_from(queues).append(records)
    queues.dead.remove(ids)
    return len(records)


def current_from(queues: Queues) -> Queue:
    """Which queue is From now. The topology may exchange them at any instant; then what is appended to this one
    is read a little sooner."""
    return queues.to if queues.pointer.load() else queues.from_


class DiskDeadLetters(DeadLetters):
    """Dead letters in a folder. A letter's id is its number in the log; a removal is a record of its own."""

    def __init__(self, folder: str | Path) -> None:
        self._log = SegmentLog(Path(folder))
        self._arrived: LogReader | None = None

    def add(self, records: Sequence[Record]) -> None:
        if records:
            self._log.append([_LETTER + encode(record) for record in records])

    def letters(self) -> list[Letter]:
        found: dict[int, bytes] = {}
        reader = self._log.reader(0)
        while batch := reader.read(1000):
            for number, data in batch:
                if data[:1] == _LETTER:
                    found[number] = data
                else:
                    for id in json.loads(data[1:]):
                        found.pop(id, None)
        reader.close()
        return [Letter(number, decode(data[1:])) for number, data in found.items()]

    def arrivals(self) -> Iterator[Letter]:
        """The letters that were added since the last call, by whatever process; at first, all there are."""
        if self._arrived is None:
            self._arrived = self._log.reader(0)
        while batch := self._arrived.read(1000):
            for number, data in batch:
                if data[:1] == _LETTER:
                    yield Letter(number, decode(data[1:]))

    def remove(self, ids: Collection[int]) -> None:
        """(1) append a record that strikes them out; (2) remove leading segments that hold no letter any more."""
        if not ids:
            return
        number = self._log.append([_STRUCK + json.dumps(sorted(ids)).encode()])
        left = self.letters()
        self._log.drop_before(left[0].id if left else number + 1)

    def close(self) -> None:
        if self._arrived is not None:
            self._arrived.close()
        self._log.close()
