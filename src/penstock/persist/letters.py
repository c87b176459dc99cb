"""Rows the store will never take, kept with its words until someone looks at them: ``penstock dlq``.

Sent back, a row is put in the queue again: (1) put it, (2) strike out the letter. A crash between the two leaves
it in both.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from penstock.persist.entries import EntryDamaged, pack, unpack
from penstock.persist.queues import QueueClient
from penstock.persist.stores import StoreAway
from penstock.replay.dead_letters import DiskDeadLetters
from penstock.replay.records import Record

_SENDER = "dead letters"  # as a writer of the queue; of a folder: with a slash and a number of its own


class DeadRow(NamedTuple):
    """A row, known by the entry that brought it and its place there."""

    id: str
    row: pa.Table
    error: str
    time: float


class DeadRows:
    """The dead letters of one component, in a local folder. A row that is added a second time is kept once: a
    processor that died after it had kept a row, and before it had written the others, meets it again."""

    def __init__(self, folder: Path, component: str) -> None:
        self._letters = DiskDeadLetters(folder)
        self._component = component
        self._known: set[str] = set()

    def add(self, rows: Sequence[DeadRow]) -> None:
        """Durable on return."""
        try:
            # An orphan may have kept one since: it is looked for each time.
            self._known.update(letter.record.payload[0] for letter in self._letters.arrivals())
            new = [row for row in rows if row.id not in self._known]
            self._letters.add([self._record(row) for row in new])
        except OSError as error:
            raise StoreAway(
                f"component '{self._component}', dead letters",
                "a row the store refuses is kept",
                f"{type(error).__name__}: {error}",
                "See to space and rights in the state directory; until then nothing is written.",
            ) from error

    def close(self) -> None:
        self._letters.close()

    def _record(self, row: DeadRow) -> Record:
        """For people the values, and for the store, should it be sent back, the row as it was."""
        (values,) = row.row.to_pylist()
        payload = (row.id, values, pack(_SENDER, 0, 0, row.row))
        return Record(payload, 1, row.error, self._component, row.time)


def put_again(letters: DiskDeadLetters, queue: QueueClient, ids: Collection[int]) -> int:
    """Give dead letters to the processor once more, behind all that waits. Returns how many.

    The processor skips entries of a life that is older than the newest it has seen of the same writer. So of one
    folder's letters one call at a time registers and puts (``exclusive``), and letters in several folders, as of
    tasks that have moved between machines, have writers of their own.
    """
    sender = _sender(letters.folder)
    with letters.exclusive():
        chosen = [letter for letter in letters.letters() if letter.id in ids]
        if not chosen:
            return 0
        if any(letter.record.damaged for letter in chosen):
            raise EntryDamaged(
                f"dead letters in {letters.folder}",
                "only a letter that can be read can be sent back",
                next(letter.record.error for letter in chosen if letter.record.damaged),
                "Send the others back by their ids. Drop it, or use the key file it was signed with.",
            )
        life = queue.register(sender)
        rows = [unpack(letter.record.payload[2]).table() for letter in chosen]
        queue.put([pack(sender, life, number, row) for number, row in enumerate(rows)], sender, life)
        letters.remove([letter.id for letter in chosen])
    return len(chosen)


def _sender(folder: Path) -> str:
    place = f"{socket.gethostname()}:{folder.resolve()}"
    return f"{_SENDER}/{hashlib.blake2b(place.encode(), digest_size=4).hexdigest()}"
