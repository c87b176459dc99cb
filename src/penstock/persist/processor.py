"""The processor: reads the queue and writes to the store in bulk.

It keeps no state of its own. A write takes four steps: (1) read entries, skipping those that the store has; (2)
store rows that the store will never accept as dead letters; (3) write the other rows and the new progress in one
transaction;
(4) release the entries. If the processor is killed between two steps, the next one reads the same entries again,
and the progress in the store tells which of them are new.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

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

_READ_ENTRIES = 16  # entries per read call: at most 8 MB, usually far less
_MOST_BYTES = 16 << 20  # bytes of pending entries at which they are written even if they have few rows
_POLL = 0.02  # seconds between two reads of an empty queue: short beside a flush period, and 0.1 % of a core


@dataclass
class ProcessorStatus:
    """The status that the processor reports to the worker, which shows it."""

    written: int = 0
    """Rows written to the store since this processor started."""
    rejected: int = 0
    """Rows stored as dead letters."""
    again: int = 0
    """Entries skipped because the store had them."""
    lost: int = 0
    """Entries that the queue has lost."""
    waiting: int = 0
    """Bytes in the queue."""
    trouble: str = ""
    """The error that prevents writing at present; empty if there is none."""
    attempts: int = 0
    """The number of consecutive failures."""
    pause: float = 0.0
    """Seconds until the next attempt."""
    warning: str = ""
    """Why the queue is less durable than it could be; empty if it is not."""


@dataclass
class PendingEntries:
    """Entries that were read from the queue and are not in the store yet, and the positions around them."""

    entries: list[tuple[int, QueueEntry]] = field(default_factory=list)
    """The entries with their positions."""
    rows: int = 0
    bytes: int = 0
    position: int = -1
    """The position of the last entry read."""
    released: int = -1
    """The position up to which the queue has released entries."""

    def add(self, position: int, entry: QueueEntry, size: int) -> None:
        self.entries.append((position, entry))
        self.rows += entry.rows
        self.bytes += size

    @property
    def done(self) -> int:
        """The position up to which all entries read are in the store."""
        return self.entries[0][0] - 1 if self.entries else self.position


class Processor:
    """Moves the entries of one queue to one store. The caller calls ``turn`` repeatedly, from one thread, and
    waits ``wait()`` seconds between two calls."""

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
        """The progress recorded in the store; None if it has to be read."""
        self._id = ""
        """The id of the queue."""
        self._replaced_by = ""
        """The id of the queue that has replaced this one; empty if none has."""
        self._limit = flushing.rows
        """The maximum number of rows per write; halved when a write fails, because the rows may be too many."""
        self.calling_since: float | None = None
        """When the present call of the store began, for a watchdog on another thread; None between calls."""
        self.empty = False
        """True if the last turn was called with ``flush`` and left nothing in the queue."""
        self._pending = PendingEntries()
        self._at_end = False
        """True if the last read found no more entries."""

    def turn(self, flush: bool = False) -> None:
        """Read new entries, and write them if a write is due or ``flush`` is True. Does not raise for an
        unavailable queue or store; it sets ``status.trouble`` and tries again after a pause."""
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
            if flush or self._pending.bytes >= _MOST_BYTES or self._flushing.due(now, self._pending.rows):
                self._write()
            self._release()
            self.empty = flush and self._at_end and not self._pending.entries and self._queue.waiting() <= 0
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
        """Seconds until the next turn should be called."""
        now = self._clock.monotonic()
        return self._patience.wait(now) or (_POLL if self._at_end else 0.0)

    def report(self) -> ProcessorStatus:
        """The status, brought up to date."""
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

    @property
    def _key(self) -> str:
        """The name of the progress in the store: the queue's name and id."""
        return f"{self._name} {self._id}"

    def _begin(self) -> None:
        """Start at the oldest entry that the queue has not released, with the progress in the store."""
        self._queue.rewind()
        self._replaced_by = ""
        self._use_queue(self._queue.id())

    def _use_queue(self, id: str, before: WriteProgress | None = None) -> None:
        """Continue with the queue of that id and its progress in the store, merged with ``before``, the progress
        of the queue that it replaced. The merged progress is stored at once, because the next processor will not
        know of the other queue."""
        key = f"{self._name} {id}"
        with self._calling():
            recorded = self._store.progress(key)
        self._progress = WriteProgress.decode(recorded)
        """The progress in the store, plus the pending entries."""
        if before is not None:
            self._progress = self._progress.merged(before)
            known = self._progress.encode()
            with self._calling():
                self._store.write(key, pa.table({}), recorded, known, lambda rejected: None)
            recorded = known
        self._id, self._replaced_by = id, ""
        self._pending = PendingEntries()
        self._at_end = False
        self._recorded = recorded

    def _follow(self) -> None:
        """The queue has lost its contents, or another queue has replaced it. The pending entries were read from
        the previous queue and are written under its progress. This progress applies to the new queue as well: a
        writer that did not learn whether its entry arrived puts it again with the same name."""
        log.warning("queue '%s' was replaced by one with the id %s", self._name, self._replaced_by)
        self._write()
        assert self._recorded is not None
        self._queue.rewind()
        self._use_queue(self._replaced_by, WriteProgress.decode(self._recorded))

    def _read(self) -> None:
        """Read until enough entries are pending, there are no more, or another queue has replaced this one;
        entries of the latter are read again after ``_follow``."""
        pending = self._pending
        self._at_end = False
        while not self._replaced_by and pending.rows < self._flushing.rows and pending.bytes < _MOST_BYTES:
            found = self._queue.read(_READ_ENTRIES)
            if not found:
                self._at_end = True
                return
            id = self._queue.id()
            if id != self._id:
                self._replaced_by = id
                return
            for position, data in found:
                entry = unpack(data)
                pending.position = position
                if self._progress.is_new(entry):
                    self._progress.add(entry)
                    pending.add(position, entry, len(data))
                else:
                    self.status.again += 1

    def _write(self) -> None:
        """Write the pending entries, in several steps if they are many or their types are incompatible."""
        pending = self._pending
        while pending.entries:
            assert self._recorded is not None
            entries, table = _together([entry for _, entry in pending.entries], self._limit)
            progress = WriteProgress.decode(self._recorded)
            for entry in entries:
                progress.add(entry)
            after = progress.encode()
            rejected: list[DeadLetterRow] = []
            with self._calling():
                reject = self._rejecter(entries, table, rejected)
                self._store.write(self._key, table, self._recorded, after, reject)
            self._crash("written")
            self._recorded = after
            pending.entries = pending.entries[len(entries) :]
            self.status.written += table.num_rows - len(rejected)
            self.status.rejected += len(rejected)
            self._flushing.on_written(self._clock.monotonic())
            self._limit = min(2 * self._limit, self._flushing.rows)
        pending.rows = pending.bytes = 0

    @contextlib.contextmanager
    def _calling(self) -> Iterator[None]:
        self.calling_since = self._clock.monotonic()
        try:
            yield
        finally:
            self.calling_since = None

    def _rejecter(
        self, entries: Sequence[QueueEntry], table: pa.Table, stored: list[DeadLetterRow]
    ) -> Callable[[Sequence[Rejected]], None]:
        """A function that stores rejected rows as dead letters, each identified by its entry and its index there,
        and sets ``stored`` to them."""
        firsts = list(itertools.accumulate((entry.rows for entry in entries), initial=0))

        def reject(rejected: Sequence[Rejected]) -> None:
            rows = []
            for each in rejected:
                place = bisect.bisect_right(firsts, each.row) - 1
                entry = entries[place]
                id = f"{entry.writer}.{entry.incarnation}.{entry.number}.{each.row - firsts[place]}"
                rows.append(DeadLetterRow(id, table.slice(each.row, 1), each.error, self._clock.now()))
            self._dead.add(rows)
            stored[:] = rows
            self._crash("rejected")

        return reject

    def _release(self) -> None:
        """Release the entries that are in the store."""
        done = self._pending.done
        if done > self._pending.released:
            self._queue.release(done)
            self._pending.released = done
            self._crash("released")


def _together(entries: Sequence[QueueEntry], limit: int) -> tuple[Sequence[QueueEntry], pa.Table]:
    """The longest prefix of the entries, at least one and at most ``limit`` rows, that fits one schema without
    changing a value, and its rows. A field whose type differs ends it, unless all values of one of the two are
    None."""
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
    """Write everything in the queue until it is empty or the time is ``until``. Returns True if it is empty."""
    while True:
        processor.turn(flush=True)
        left = until - clock.monotonic()
        if processor.empty or left <= 0:
            return processor.empty
        pause(min(processor.wait(), left))
