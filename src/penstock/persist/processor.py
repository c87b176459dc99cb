"""The processor: reads the queue and writes to the store in bulk.

It has nothing of its own to lose. A write, in steps: (1) read entries, passing over those the store has; (2) hand
rows that the store will never take to the dead letters; (3) write the rest and the new progress in one
transaction; (4) release the entries. Killed in any gap, the next processor reads the same entries again, and the
progress in the store says which of them are new.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

from penstock.clock import Clock
from penstock.persist.dead_letters import DeadLetterRow, DeadLetterRows
from penstock.persist.entries import QueueEntry, unpack
from penstock.persist.policy import Flushing, Patience
from penstock.persist.progress import WriteProgress
from penstock.persist.queues import QueueClient, QueueUnavailable
from penstock.persist.stores import Overtaken, StoreClient, StoreUnavailable
from penstock.storage.tables import Rejected

log = logging.getLogger("penstock.persist")

_READ_ENTRIES = 16  # asked for at a time: at most 8 MB, usually far less
_MOST_BYTES = 16 << 20  # of entries in hand: then they are written, however few rows they are
_POLL = 0.02  # s between two looks at an empty queue: small beside a flush period, and costs 0.1 % of a core


@dataclass
class ProcessorStatus:
    """What the processor tells the worker, which shows it."""

    written: int = 0
    """Rows in the store, since this processor began."""
    rejected: int = 0
    """Rows among the dead letters."""
    again: int = 0
    """Entries passed over because the store had them."""
    lost: int = 0
    """Entries the queue has lost."""
    waiting: int = 0
    """Bytes in the queue."""
    trouble: str = ""
    """What keeps it from writing now; empty while nothing does."""
    attempts: int = 0
    """How often that has happened in a row."""
    pause: float = 0.0
    """Seconds until the next attempt."""
    warning: str = ""
    """Why the queue promises less than it could."""


class Processor:
    """One queue into one store. ``turn`` does what is due; who calls it waits ``wait()`` seconds in between."""

    def __init__(
        self,
        name: str,
        queue: QueueClient,
        store: StoreClient,
        dead: DeadLetterRows,
        flushing: Flushing,
        clock: Clock,
        crash: Callable[[str], None] = lambda step: None,
    ) -> None:
        self.status = ProcessorStatus()
        self._name, self._queue, self._store, self._dead = name, queue, store, dead
        self._flushing, self._clock, self._crash = flushing, clock, crash
        self._patience = Patience()
        self._recorded: str | None = None
        """The store's progress; None where it has to be asked for."""
        self._id = ""
        """The queue's."""
        self._key = ""
        """What the progress is kept by: the queue's name and id."""
        self._replaced_by = ""
        """The id of the queue that has taken the place of this one; empty while none has."""
        self._limit = flushing.rows
        """Rows for one write; halved when the store did not take them, for it may be that they are too many."""
        self.calling_since: float | None = None
        """When the call of the store began that is going on now; for a watchdog in another thread."""
        self.empty = False
        """The last turn was told to flush, and left nothing in the queue."""
        self._entries: list[tuple[int, QueueEntry]] = []
        """In hand, with their positions."""
        self._rows = self._bytes = 0
        self._position = self._released = -1
        self._saw_end = False

    def turn(self, flush: bool = False) -> None:
        """Read what has come, and write it if that is due, or wanted now."""
        now = self._clock.monotonic()
        if self._patience.wait(now):
            return
        self.empty = False
        try:
            if self._recorded is None:
                self._begin()
            self._read()
            if self._replaced_by:
                self._follow()
                self._read()
            if flush or self._bytes >= _MOST_BYTES or self._flushing.due(now, self._rows):
                self._write()
            self._release()
            self.empty = flush and self._saw_end and not self._entries and self._queue.waiting() <= 0
        except Overtaken as error:
            log.info("%s", error)
            self._recorded = None
        except (StoreUnavailable, QueueUnavailable) as error:
            if isinstance(error, StoreUnavailable):
                self._limit = max(1, self._limit // 2)
            self._patience.failed(self._clock.monotonic())
            self.status.trouble, self.status.attempts = str(error), self._patience.attempts
        else:
            self._patience.succeeded()
            self.status.trouble, self.status.attempts = "", 0

    def wait(self) -> float:
        """Seconds until the next turn has something to do, or something may have come."""
        now = self._clock.monotonic()
        return self._patience.wait(now) or (_POLL if self._saw_end else 0.0)

    def report(self) -> ProcessorStatus:
        self.status.lost, self.status.warning = self._queue.losses, self._queue.warning
        self.status.pause = self._patience.wait(self._clock.monotonic())
        if not self.status.trouble:
            try:
                self.status.waiting = self._queue.waiting()
            except QueueUnavailable as error:
                self.status.trouble = str(error)
        return self.status

    def close(self) -> None:
        self._queue.close()
        self._store.close()
        self._dead.close()

    def _begin(self) -> None:
        """Take up what the queue has not released, with what the store knows of it."""
        self._queue.rewind()
        self._replaced_by = ""
        self._take_up(self._queue.id())

    def _take_up(self, id: str, before: WriteProgress | None = None) -> None:
        """Go on with the queue of that id, from what the store knows of it; also from ``before``, what the store
        knows of the queue in whose place it is. The store is told that at once: the next processor will not know
        of the other queue."""
        key = f"{self._name} {id}"
        with self._calling():
            recorded = self._store.progress(key)
        self._progress = WriteProgress.decode(recorded)
        """The store's, and what is in hand."""
        if before is not None:
            self._progress = self._progress.with_all_of(before)
            known = self._progress.encode()
            with self._calling():
                self._store.write(key, pa.table({}), recorded, known, lambda rejected: None)
            recorded = known
        self._id, self._key, self._replaced_by = id, key, ""
        self._entries, self._rows, self._bytes = [], 0, 0
        self._position = self._released = -1
        self._saw_end = False
        self._recorded = recorded

    def _follow(self) -> None:
        """The queue has lost its memory, or another is in its place. What is in hand was read from the one before
        and is written as such. Its progress holds for the new one too: a writer that did not hear from the old one
        whether its entry arrived puts it again, by the same name."""
        log.warning("queue '%s' was replaced by one with the id %s", self._name, self._replaced_by)
        self._write()
        assert self._recorded is not None
        self._queue.rewind()
        self._take_up(self._replaced_by, WriteProgress.decode(self._recorded))

    def _read(self) -> None:
        """Until enough is in hand, nothing has come, or another queue is in the place of this one: what was read
        of that is read again when ``_follow`` is done."""
        self._saw_end = False
        while not self._replaced_by and self._rows < self._flushing.rows and self._bytes < _MOST_BYTES:
            found = self._queue.read(_READ_ENTRIES)
            if not found:
                self._saw_end = True
                return
            id = self._queue.id()
            if id != self._id:
                self._replaced_by = id
                return
            for position, data in found:
                entry = unpack(data)
                self._position = position
                if self._progress.is_new(entry):
                    self._progress.take(entry)
                    self._entries.append((position, entry))
                    self._rows += entry.rows
                    self._bytes += len(data)
                else:
                    self.status.again += 1

    def _write(self) -> None:
        """Write what is in hand; where it is much, or its types do not go together, in several steps."""
        while self._entries:
            assert self._recorded is not None
            entries, table = _together([entry for _, entry in self._entries], self._limit)
            progress = WriteProgress.decode(self._recorded)
            for entry in entries:
                progress.take(entry)
            after = progress.encode()
            self._rejected = 0
            with self._calling():
                self._store.write(self._key, table, self._recorded, after, self._rejecter(entries, table))
            self._crash("written")
            self._recorded = after
            self._entries = self._entries[len(entries) :]
            self.status.written += table.num_rows - self._rejected
            self.status.rejected += self._rejected
            self._flushing.wrote(self._clock.monotonic())
            self._limit = min(2 * self._limit, self._flushing.rows)
        self._rows = self._bytes = 0

    @contextlib.contextmanager
    def _calling(self) -> Iterator[None]:
        self.calling_since = self._clock.monotonic()
        try:
            yield
        finally:
            self.calling_since = None

    def _rejecter(self, entries: Sequence[QueueEntry], table: pa.Table) -> Callable[[Sequence[Rejected]], None]:
        """Keeps rows the store refuses, each known by its entry and its place there."""
        firsts = list(itertools.accumulate((entry.rows for entry in entries), initial=0))

        def reject(rejected: Sequence[Rejected]) -> None:
            rows = []
            for each in rejected:
                place = bisect.bisect_right(firsts, each.row) - 1
                entry = entries[place]
                id = f"{entry.writer}.{entry.incarnation}.{entry.number}.{each.row - firsts[place]}"
                rows.append(DeadLetterRow(id, table.slice(each.row, 1), each.error, self._clock.now()))
            self._dead.add(rows)
            self._rejected = len(rows)
            self._crash("rejected")

        return reject

    def _release(self) -> None:
        """Whatever was read and is not in hand is in the store."""
        done = self._entries[0][0] - 1 if self._entries else self._position
        if done > self._released:
            self._queue.release(done)
            self._released = done
            self._crash("released")


def _together(entries: Sequence[QueueEntry], limit: int) -> tuple[Sequence[QueueEntry], pa.Table]:
    """The first of the entries, and those after it up to ``limit`` rows as far as they go together without a value
    changing: a field whose type differs ends them, unless one of the two knows only None."""
    tables = [entries[0].table()]
    schema, rows = tables[0].schema, entries[0].rows
    for entry in entries[1:]:
        if rows + entry.rows > limit:
            break
        table = entry.table()
        if table.schema != schema:
            try:
                schema = pa.unify_schemas([schema, table.schema])
            except pa.ArrowException:
                break
        tables.append(table)
        rows += entry.rows
    return entries[: len(tables)], pa.concat_tables(tables, promote_options="default")


def drained(processor: Processor, until: float, clock: Clock, pause: Callable[[float], None]) -> bool:
    """Write all that is in the queue, however few rows, for as long as ``until`` says; True: it is empty."""
    while True:
        processor.turn(flush=True)
        left = until - clock.monotonic()
        if processor.empty or left <= 0:
            return processor.empty
        pause(min(processor.wait(), left))
