"""Rows the store will never take, kept with its words until someone looks at them: ``penstock dlq``.

Sent back, a row is put in the queue again: (1) put it, (2) strike out the dead letter. A crash between the two
leaves it in both.
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
from penstock.persist.stores import StoreUnavailable
from penstock.replay.dead_letters import DiskDeadLetterStore
from penstock.replay.records import ReplayRecord

_SENDER = "dead letters"  # as a writer of the queue; of a folder: with a slash and a number of its own


class DeadLetterRow(NamedTuple):
    """A row, known by the entry that brought it and its place there."""

    id: str
    row: pa.Table
    error: str
    time: float


class DeadLetterRows:
    """The dead letters of one component, in a local folder. A row that is added a second time is kept once: a
    processor that died after it had kept a row, and before it had written the others, meets it again."""

    def __init__(self, folder: Path, component: str) -> None:
        self._dead_letters = DiskDeadLetterStore(folder)
        self._component = component
        self._known: set[str] = set()

    def add(self, rows: Sequence[DeadLetterRow]) -> None:
        """Durable on return."""
        try:
            # An orphan may have kept one since: it is looked for each time.
            self._known.update(dead_letter.record.payload[0] for dead_letter in self._dead_letters.arrivals())
            new = [row for row in rows if row.id not in self._known]
            self._dead_letters.add([self._record(row) for row in new])
        except OSError as error:
            raise StoreUnavailable(
                f"component '{self._component}', dead letters",
                f"a row that the store refused cannot be kept ({type(error).__name__}: {error})",
                "Check space and permissions in the state directory; until then nothing is written.",
            ) from error

    def close(self) -> None:
        self._dead_letters.close()

    def _record(self, row: DeadLetterRow) -> ReplayRecord:
        """For people the values, and for the store, should it be sent back, the row as it was."""
        (values,) = row.row.to_pylist()
        payload = (row.id, values, pack(_SENDER, 0, 0, row.row))
        return ReplayRecord(payload, 1, row.error, self._component, row.time)


def send_rows_back(dead_letters: DiskDeadLetterStore, queue: QueueClient, ids: Collection[int]) -> int:
    """Give dead letters to the processor once more, behind all that waits. Returns how many.

    The processor skips entries of an incarnation that is older than the newest it has seen of the same writer. So
    of one folder's dead letters one call at a time registers and puts (``exclusive``), and dead letters in several
    folders, as of tasks that have moved between machines, have writers of their own.
    """
    sender = _sender(dead_letters.folder)
    with dead_letters.exclusive():
        chosen = [dead_letter for dead_letter in dead_letters.read_all() if dead_letter.id in ids]
        if not chosen:
            return 0
        if any(dead_letter.record.damaged for dead_letter in chosen):
            raise EntryDamaged(
                f"dead letters in {dead_letters.folder}",
                "a dead letter cannot be read, so it cannot be sent back: "
                f"{next(dead_letter.record.error for dead_letter in chosen if dead_letter.record.damaged)}",
                "Send the others back by their ids. Drop it, or use the key file it was signed with.",
            )
        incarnation = queue.register(sender)
        rows = [unpack(dead_letter.record.payload[2]).table() for dead_letter in chosen]
        queue.put([pack(sender, incarnation, number, row) for number, row in enumerate(rows)], sender, incarnation)
        dead_letters.remove([dead_letter.id for dead_letter in chosen])
    return len(chosen)


def _sender(folder: Path) -> str:
    place = f"{socket.gethostname()}:{folder.resolve()}"
    return f"{_SENDER}/{hashlib.blake2b(place.encode(), digest_size=4).hexdigest()}"
