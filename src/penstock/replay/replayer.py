"""Runs the replay of one spout task: three threads that carry out the instructions of ``decisions``.

One thread reads To and Eden ahead of the spout, one exchanges From and To, and one (the backflow thread) reads
failed tuples again and writes them to From or to the dead letters. The task's own thread never waits for a disk
or a server.

Nothing is kept of a tuple that the spout has taken: its place (``places``) is its message id.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import compress
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from penstock.acking.lineage import I64
from penstock.clock import Clock, SystemClock
from penstock.errors import PenstockError
from penstock.replay.decisions import (
    Acked,
    Arrived,
    Decisions,
    Done,
    Event,
    Failed,
    FailedTuples,
    Instruction,
    QueuesChecked,
    Read,
    ReplayEntry,
    Stored,
    StoreFailed,
    Swap,
    Swapped,
    Taken,
    after_failure,
    is_dead,
)
from penstock.replay.eden import Eden
from penstock.replay.places import Origin, as_places, places_of
from penstock.replay.queues import Queues
from penstock.replay.records import ReplayRecord
from penstock.replay.sources import ReplaySources
from penstock.state.values import TaskState
from penstock.storage.segments import QueueDamaged
from penstock.topology.components import Failure

CAPACITY = 4096  # tuples read ahead; tuples that come back wait behind them, so not more than two large batches
READ_AHEAD_BYTES = 8 * 1024 * 1024  # their size; at 100 MB/s they last for 80 ms, a few reads of a source
_SMALL = 32  # bytes of a value that is neither a text nor bytes
_SIZED = 32  # records of a read whose mean is taken for the size of all
_STORED_AT_A_TIME = 4096  # failed tuples: so many that syncing the disk is little beside them, yet little memory
_EDEN_PAUSE = 0.005  # seconds until Eden is read again after it was empty: short beside a hop, and cheap
_CHECK_EVERY = 0.2  # seconds between two checks of From and To for dead letters that were sent back
_RETRY_PAUSE = 1.0  # seconds until a failed disk or server is tried again

_log = logging.getLogger(__name__)


class Replayer:
    """Reads tuples ahead, stores failed ones, and tracks what is done. All methods are called by the task's
    thread; they wait at most for a read in progress, ``on_committed`` also for the disk."""

    def __init__(
        self,
        eden: Eden,
        queues: Queues,
        *,
        state: TaskState | None = None,
        max_attempts: int = 5,
        capacity: int = CAPACITY,
        clock: Clock | None = None,
        report: Callable[[Exception], None] = lambda error: None,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """``eden`` and ``queues`` are open; the replayer owns them and closes them. ``state`` holds the positions
        of the queues; without it they are kept only in memory. ``report`` is called with errors about records that
        cannot be read, from any thread; ``wake`` when there is something to take."""
        self._report, self._wake = report, wake
        self._sources = ReplaySources(eden, queues, state)
        self._width = len(eden.fields)
        self._found: list[tuple[int, ReplayRecord]] = []
        """The records of the read in progress that are not passed on yet."""
        self._given_up = 0
        self._eden_empty = False
        """The last read of Eden found nothing. Used by the thread that reads."""
        self._clock = clock or SystemClock()
        self._max_attempts = max_attempts
        self._decisions = Decisions(capacity, self._sources.from_holds, READ_AHEAD_BYTES)
        self._unstored = _Unstored()
        """What is left of the last ``StoreFailed``."""
        self._state = threading.Lock()  # guards the decisions; Done is carried out while it is held
        self._read: deque[ReplayEntry] = deque()
        self._arrived = threading.Condition(threading.Lock())
        self._errors: deque[Exception] = deque(maxlen=10)
        self._stop = threading.Event()
        self._inboxes: dict[type, SimpleQueue[Any]] = {kind: SimpleQueue() for kind in (Read, Swap, StoreFailed)}
        self._threads = [
            threading.Thread(target=run, name=f"replay-{name}", daemon=True)
            for name, run in (
                ("read", self._run_reader),
                ("swap", lambda: self._run(Swap, self._swap)),
                ("backflow", lambda: self._run(StoreFailed, self._store)),
            )
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()
        self._handle(QueuesChecked())

    def take(self, limit: int) -> list[ReplayEntry]:
        """Up to ``limit`` tuples for the spout to emit; none if there are none at present. Raises each error of a
        thread once; the thread tries again."""
        if self._errors:
            raise self._errors.popleft()
        count = min(limit, len(self._read))
        entries = [self._read.popleft() for _ in range(count)]
        if entries:
            self._handle(Taken(count))
        return entries

    def wait(self, seconds: float) -> bool:
        """Block until something can be taken; False if the time passes first. For tests and tools."""
        with self._arrived:
            return self._arrived.wait_for(lambda: bool(self._read or self._errors), seconds)

    def take_given_up(self) -> int:
        """The number of dead letters stored since the last call."""
        with self._state:
            count, self._given_up = self._given_up, 0
            return count

    def refuse(self, entry: ReplayEntry, error: str) -> None:
        """The tuple cannot be emitted: it becomes a dead letter without further attempts."""
        places = as_places([entry.place])
        self._handle(Failed(FailedTuples(places, Failure("", error), self._clock.now(), hopeless=True)))

    def ack(self, places: Sequence[int] | I64) -> None:
        self._handle(Acked(as_places(places)))

    def fail(self, places: Sequence[int] | I64, failure: Failure) -> None:
        """These tuples failed together."""
        self._handle(Failed(FailedTuples(as_places(places), failure, self._clock.now())))

    def save_positions(self) -> None:
        """Write the positions to the task's state, before a snapshot and before ``close``."""
        self._sources.save_positions()

    def on_committed(self) -> None:
        """The snapshot after the last ``save_positions`` is committed. If a disk or server fails now, processed
        records only occupy space until the next commit."""
        try:
            self._sources.on_committed()
        except (OSError, PenstockError) as error:
            _log.warning("replay: %s; processed records stay stored until the next commit", error)

    @property
    def outstanding(self) -> int:
        """The number of tuples that were read and are neither acked nor stored in From or as dead letters."""
        with self._state:
            return self._decisions.outstanding

    @property
    def settled(self) -> bool:
        """True if every failed tuple is safely in From or a dead letter. ``wake`` is called when it becomes
        true."""
        with self._state:
            return self._decisions.settled

    def close(self) -> None:
        """Store what has failed so far, save the positions, and close Eden and the queues. The next replayer reads
        the tuples in flight again; one in another process also reads again what was done since the last committed
        epoch. If a disk or server fails meanwhile, this raises and closes all the same: what could not be stored
        is read again, too."""
        self._stop.set()
        for inbox in self._inboxes.values():
            inbox.put(None)
        for thread in self._threads:
            if thread.is_alive():
                thread.join()
        try:
            self._finish()
            self._decisions.validate()
            self.save_positions()
        finally:
            self._sources.close()

    def _handle(self, event: Event) -> None:
        with self._state:
            for instruction in self._decisions.handle(event):
                if isinstance(instruction, Done):
                    self._sources.done(instruction.origin, instruction.positions)
                else:
                    self._inboxes[type(instruction)].put(instruction)

    def _run(self, kind: type[Instruction], act: Callable[[Any], None]) -> None:
        """The main function of the swap and backflow threads: carry out instructions until ``close``, including
        those already queued then."""
        inbox = self._inboxes[kind]
        while (instruction := inbox.get()) is not None:
            self._retry(act, instruction)

    def _run_reader(self) -> None:
        inbox, check_at = self._inboxes[Read], 0.0
        while not self._stop.is_set():
            try:
                waited = self._eden_empty and inbox.empty() and self._wait_for_eden()
                instruction = inbox.get(timeout=0.0 if waited else _EDEN_PAUSE)
            except Empty:
                now, to, from_ = time.monotonic(), False, False
                if now >= check_at:
                    check_at = now + _CHECK_EVERY
                    to, from_ = self._sources.has_unread()
                self._handle(QueuesChecked(to, from_))
                continue
            if instruction is not None:
                self._retry(self._read_some, instruction)

    def _wait_for_eden(self) -> bool:
        """Wait until Eden has something, for ``_EDEN_PAUSE`` at most. Returns False if it did not wait."""
        self._eden_empty = False  # until the next read finds nothing: it may take a while until that is due
        try:
            return self._sources.eden.wait(_EDEN_PAUSE)
        except Exception:  # a server, a user's Eden: the next read raises it, too, and is repeated
            return False

    def _retry(self, act: Callable[[Any], None], instruction: Instruction) -> None:
        """Carry out an instruction; repeat it while it fails, until ``close``."""
        while True:
            try:
                act(instruction)
                return
            except Exception as error:  # a disk, a server, a user's Eden: take() raises it in the task's thread
                _log.warning("replay: %s; retrying", error)
                self._errors.append(error)
                with self._arrived:
                    self._arrived.notify_all()
                if self._stop.wait(_RETRY_PAUSE):
                    return

    def _finish(self) -> None:
        """Carry out what the threads left: failures that waited for a store or a swap in progress."""
        left = True
        while left:
            left = False
            for kind, act in ((Swap, self._swap), (StoreFailed, self._store)):
                while not self._inboxes[kind].empty():
                    if (instruction := self._inboxes[kind].get()) is not None:
                        act(instruction)
                        left = True

    def _read_some(self, instruction: Read) -> None:
        entries: list[ReplayEntry] = []
        while not entries:  # an empty Arrived means that nothing is left, so read on if no record can be emitted
            if not self._found:
                self._found = self._sources.read(instruction.origin, instruction.limit)
            if not self._found:
                break
            positions, records = zip(*self._found, strict=True)
            if any(each.damaged or len(each.payload) != self._width for each in records):
                self._store_unemittable(instruction.origin)
                whole = [each for each in self._found if not self._fault(each[1])]
                positions, records = zip(*whole, strict=True) if whole else ((), ())
            entries = list(map(ReplayEntry, places_of(instruction.origin, positions), records))
            self._found = []
        self._eden_empty = instruction.origin is Origin.EDEN and not entries
        self._handle(Arrived(instruction.origin, len(entries), _mean_size(entries)))
        if entries:
            with self._arrived:
                self._read.extend(entries)
                self._arrived.notify_all()
            self._wake()

    def _fault(self, record: ReplayRecord) -> str:
        """Why the record cannot be emitted; empty if it can."""
        if record.damaged:
            return record.error
        if len(record.payload) != self._width:
            return f"{len(record.payload)} values for {self._width} fields"
        return ""

    def _store_unemittable(self, origin: Origin) -> None:
        """Steps: (1) store the records that cannot be emitted as dead letters; (2) mark them as done at their
        origin. If
        (1) raises, the caller repeats it with the same records."""
        now = self._clock.now()
        dead_letters = [
            (at, record.failed(Failure("replay queue", fault), now))
            for at, record in self._found
            if (fault := self._fault(record))
        ]
        self._sources.add_dead_letters([record for _, record in dead_letters])
        self._sources.done(origin, as_places([at for at, _ in dead_letters]))
        with self._state:
            self._given_up += len(dead_letters)
        where = "replay queue" if origin is Origin.TO else "source of a ReplaySpout"
        self._report(_not_readable(where, [record for _, record in dead_letters]))

    def _swap(self, _: Swap) -> None:
        self._sources.swap()
        self._handle(Swapped())

    def _store(self, instruction: StoreFailed) -> None:
        """Until all tuples are stored: (1) read some again; (2) append them to From or store them as dead letters;
        (3) report that. If one of these raises, the caller repeats it with what is left."""
        if self._unstored.belongs_to is not instruction:
            self._unstored = _Unstored(instruction)
        left = self._unstored
        while len(left.places):
            records = self._sources.read_again(left.places[:_STORED_AT_A_TIME])
            tuples = left.tuples(len(records))
            lost = [record for record in records if record.damaged]
            records = list(map(after_failure, records, tuples))
            is_back = [not is_dead(*each, self._max_attempts) for each in zip(records, tuples, strict=True)]
            back = list(compress(records, is_back))
            dead = [record for record, goes_back in zip(records, is_back, strict=True) if not goes_back]
            if back:
                self._sources.append(back)
            if dead:
                self._sources.add_dead_letters(dead)
                with self._state:
                    self._given_up += len(dead)
            if lost:
                self._report(_not_readable("a failed tuple of a ReplaySpout", lost))
            self._handle(Stored(left.pop(len(records)), len(back)))
        if self.settled:
            self._wake()


class _Unstored:
    """The tuples of an instruction that are not stored yet, in the order of their places."""

    def __init__(self, instruction: StoreFailed | None = None) -> None:
        self.belongs_to = instruction
        self._tuples = instruction.tuples if instruction is not None else ()
        places = np.concatenate([as_places(()), *(each.places for each in self._tuples)])
        which = np.repeat(np.arange(len(self._tuples)), [len(each.places) for each in self._tuples])
        order = np.argsort(places)
        self.places: I64 = places[order]
        self._which = which[order]

    def tuples(self, count: int) -> list[FailedTuples]:
        """For each of the first ``count`` places, the failure it belongs to."""
        return [self._tuples[each] for each in self._which[:count].tolist()]

    def pop(self, count: int) -> I64:
        """Remove the first places, and return them."""
        taken, self.places, self._which = self.places[:count], self.places[count:], self._which[count:]
        return taken


def _mean_size(entries: Sequence[ReplayEntry]) -> float:
    """The mean size of the tuples in bytes, from some of them. Texts and bytes count; other values are small."""
    some = entries[:: max(1, len(entries) // _SIZED)]
    sizes = [
        sum(len(value) if isinstance(value, str | bytes) else _SMALL for value in entry.record.payload)
        for entry in some
    ]
    return sum(sizes) / max(1, len(sizes))


def _not_readable(where: str, records: Sequence[ReplayRecord]) -> QueueDamaged:
    return QueueDamaged(
        where,
        f"{len(records)} records cannot be read back as they were written; the first: {records[0].error}",
        "They are dead letters: see them with penstock dlq, remove the cause, and send them back.",
    )
