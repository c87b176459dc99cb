"""The base of stores that write rows one by one, without a transaction over them.

Every row has a key and a version, and the store keeps the values of the highest version, whatever the order in
which they arrive (Cassandra and HBase call it a timestamp). Besides, the store can replace one small text if it is
as expected. With these two, a write takes four steps:

1. Read the state of the queue: its progress, and the last version. The progress must be the expected one.
2. Claim the next version: replace the state by the same progress with that version.
3. Write the rows with this version, each key once.
4. Replace the claimed state by the new progress.

A crash between two steps leaves the old progress, so the next processor writes the same rows again, with a higher
version. A processor that stalls in step 3 and resumes after a successor has taken over writes with a lower
version: none of its rows replaces a newer one, and step 4 tells it that it was overtaken. So each key ends with
the row that was put last. Readers may see a part of a write before its end.
"""

from __future__ import annotations

import json
import time
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace

import pyarrow as pa

from penstock.clock import Clock, SystemClock
from penstock.persist.stores import Overtaken, Reject, StoreClient
from penstock.storage.tables import Rejected
from penstock.texts import parse_json

CLAIM_SECONDS = 1.0
"""Seconds that a processor waits for the write of another one that has claimed a version. Not needed for
correctness: without it two processors could overtake each other for ever."""
_LOOK_SECONDS = 0.05  # between two looks at a claim


@dataclass(frozen=True)
class WriteState:
    """What a store records for a queue."""

    progress: str = ""
    version: int = 0
    claimed: bool = False
    """True while rows of this version are being written, or if that was never completed."""

    def encode(self) -> str:
        return json.dumps([self.version, self.claimed, self.progress])

    @classmethod
    def decode(cls, text: str) -> WriteState:
        """The state that ``encode`` encoded; the first one for an empty text."""
        if not text:
            return cls()
        version, claimed, progress = parse_json(text)
        return cls(progress, version, claimed)


class FencedClient(StoreClient):
    """Writes by the steps above. A subclass has the calls of its store."""

    def __init__(
        self,
        place: str,
        units: int,
        spacing: int,
        clock: Clock | None = None,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        """A version is a time since 1970 with ``units`` per second, or more; two versions are at least ``spacing``
        apart."""
        self._place, self._units, self._spacing = place, units, spacing
        self._clock, self._pause = clock or SystemClock(), pause

    @abstractmethod
    def read_state(self, queue: str) -> str:
        """The state text of the queue; empty if there is none."""

    @abstractmethod
    def swap_state(self, queue: str, before: str, after: str) -> bool:
        """Replace the state text ``before`` (empty: there is none) by ``after``, atomically and durably. Returns
        False if it is another one."""

    @abstractmethod
    def write_rows(self, rows: pa.Table, version: int) -> list[Rejected]:
        """Write the rows durably with this version, or slightly higher ones, less than ``spacing`` above. Of rows
        with the same key the last one counts. Returns those that the store will never accept."""

    def progress(self, queue: str) -> str:
        return WriteState.decode(self.read_state(queue)).progress

    def write(self, queue: str, rows: pa.Table, before: str, after: str, reject: Reject) -> None:
        found = self._awaited(queue)
        state = WriteState.decode(found)
        if state.progress != before:
            raise self._overtaken(queue)
        if rows.num_rows:
            version = max(state.version + self._spacing, int(self._clock.now() * self._units))
            state = replace(state, version=version, claimed=True)
            found = self._swapped(queue, found, state)
            if rejected := self.write_rows(rows, version):
                reject(rejected)
        self._swapped(queue, found, WriteState(after, state.version))

    def _awaited(self, queue: str) -> str:
        """The state text, once no other processor is at work as far as can be told."""
        found = self.read_state(queue)
        until = self._clock.monotonic() + CLAIM_SECONDS
        while WriteState.decode(found).claimed and self._clock.monotonic() < until:
            self._pause(_LOOK_SECONDS)
            before, found = found, self.read_state(queue)
            if found != before:
                until = self._clock.monotonic() + CLAIM_SECONDS
        return found

    def _swapped(self, queue: str, found: str, state: WriteState) -> str:
        text = state.encode()
        if not self.swap_state(queue, found, text):
            raise self._overtaken(queue)
        return text

    def _overtaken(self, queue: str) -> Overtaken:
        return Overtaken(self._place, f"another processor also writes for '{queue}'")
