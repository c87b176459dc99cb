"""Rows that the store rejected permanently, kept with its error message for ``penstock dlq``.

A row that is sent back is put into the queue again, in two steps: (1) put it; (2) remove the dead letter. After a
crash between the two it is in both.
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

_SENDER = "dead letters"  # begins the name of the writer that sends dead letters back; a digest follows


class DeadLetterRow(NamedTuple):
    """A rejected row. ``id`` consists of the name of its entry and the index of the row there."""

    id: str
    row: pa.Table
    error: str
    time: float


class DeadLetterRows:
    """The dead letters of one component, in a local folder. A row that is added twice is stored once: if a
    processor dies after it stored a row and before it wrote the others, the next processor adds the row again."""

    def __init__(self, folder: Path, component: str) -> None:
        self._dead_letters = DiskDeadLetterStore(folder)
        self._component = component
        self._known: set[str] = set()

    def add(self, rows: Sequence[DeadLetterRow]) -> None:
        """Store rows; they are durable on return. Raises ``StoreUnavailable``."""
        try:
            # Read each time: another processor, whose worker has died, may have added some.
            self._known.update(dead_letter.record.payload[0] for dead_letter in self._dead_letters.arrivals())
            new = [row for row in rows if row.id not in self._known]
            self._dead_letters.add([self._record(row) for row in new])
        except OSError as error:
            raise StoreUnavailable(
                f"component '{self._component}', dead letters",
                f"a rejected row cannot be stored as a dead letter ({type(error).__name__}: {error})",
                "Check free space and permissions in the state directory. Nothing is written until then.",
            ) from error

    def close(self) -> None:
        self._dead_letters.close()

    def _record(self, row: DeadLetterRow) -> ReplayRecord:
        """The values are for people; the packed row is for the store if it is sent back."""
        (values,) = row.row.to_pylist()
        payload = (row.id, values, pack(_SENDER, 0, 0, row.row))
        return ReplayRecord(payload, 1, row.error, self._component, row.time)


def send_rows_back(dead_letters: DiskDeadLetterStore, queue: QueueClient, ids: Collection[int]) -> int:
    """Put dead letters into the queue again, after everything that waits there. Returns their number. Raises
    ``EntryDamaged`` if one of them cannot be read.

    The processor skips entries of an incarnation that is older than the newest it has seen of the same writer.
    Therefore one call at a time registers and puts the dead letters of a folder (``exclusive``), and each folder
    has its own writer; a component has several folders if its tasks have moved between machines.
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
                "Send the others back by their ids. Drop this one, or use the key file it was signed with.",
            )
        incarnation = queue.register(sender)
        rows = [unpack(dead_letter.record.payload[2]).table() for dead_letter in chosen]
        queue.put([pack(sender, incarnation, number, row) for number, row in enumerate(rows)], sender, incarnation)
        dead_letters.remove([dead_letter.id for dead_letter in chosen])
    return len(chosen)


def _sender(folder: Path) -> str:
    place = f"{socket.gethostname()}:{folder.resolve()}"
    return f"{_SENDER}/{hashlib.blake2b(place.encode(), digest_size=4).hexdigest()}"
