"""The replayer of one spout task: three thin threads that do what ``decisions`` says.

One thread reads To and Eden ahead of the spout, one exchanges From and To, one (backflow) writes what failed to
From and to the dead letters. The spout's own thread never waits for a disk or a server.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any

from penstock.clock import Clock, SystemClock
from penstock.errors import PenstockError
from penstock.replay.decisions import (
    Acked,
    Arrived,
    Decisions,
    Done,
    Event,
    Failed,
    Instruction,
    Origin,
    QueuesChecked,
    Read,
    ReplayEntry,
    Stored,
    StoreRecords,
    Swap,
    Swapped,
    Taken,
)
from penstock.replay.eden import Eden
from penstock.replay.positions import KeptPosition
from penstock.replay.queues import Queues, ReplayQueue
from penstock.replay.records import ReplayRecord
from penstock.state.values import TaskState, ValueState
from penstock.storage.segments import QueueDamaged
from penstock.topology.components import Failure

CAPACITY = 4096  # tuples read ahead: what comes back waits behind them, so no more than a large batch
_EDEN_PAUSE = 0.005  # s until Eden is asked again after it had nothing: short beside a hop, and cheap
_CHECK_EVERY = 40  # pauses between two looks at From and To, for dead letters that were sent back: 0.2 s
_RETRY_PAUSE = 1.0  # s until a failed disk or server is tried again

_log = logging.getLogger(__name__)


def claim(state: TaskState) -> tuple[ValueState, ValueState]:
    """Where the positions of the queues that were made as From and as To are kept."""
    return state.value("replay.from"), state.value("replay.to")


class Replayer:
    """Reads, takes back what failed, remembers what is done. All calls are for one thread, the task's. They wait
    for a read under way at most; ``committed`` also for the disk."""

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
    ) -> None:
        """``eden`` is open, and so are the queues; both become the replayer's, which closes them. In ``state`` are
        the queues' positions; without it they are remembered for as long as the replayer is there. ``report`` is
        told of records that cannot be read, from any thread."""
        self._eden, self._queues, self._report = eden, queues, report
        self._width = len(eden.fields)
        self._found: list[tuple[int, ReplayRecord]] = []
        """What the read under way has brought and is not handed on."""
        self._given_up = 0
        self._positions = [
            KeptPosition(queue, kept)
            for queue, kept in zip(
                (queues.from_, queues.to), claim(TaskState() if state is None else state), strict=True
            )
        ]
        self._clock = clock or SystemClock()
        self._exchanged = queues.pointer.load()
        self._max_attempts = max_attempts
        self._decisions = Decisions(max_attempts, capacity, from_holds=not self._from.empty)
        self._state = threading.Lock()  # of the decisions; Done is carried out under it
        self._sources = {Origin.EDEN: threading.Lock(), Origin.TO: threading.Lock()}  # always taken last
        self._read: deque[ReplayEntry] = deque()
        self._arrived = threading.Condition(threading.Lock())
        self._errors: deque[Exception] = deque(maxlen=10)
        self._stop = threading.Event()
        self._inboxes: dict[type, SimpleQueue[Any]] = {kind: SimpleQueue() for kind in (Read, Swap, StoreRecords)}
        self._threads = [
            threading.Thread(target=run, name=f"replay-{name}", daemon=True)
            for name, run in (
                ("read", self._run_reader),
                ("swap", lambda: self._run(Swap, self._swap)),
                ("backflow", lambda: self._run(StoreRecords, self._store)),
            )
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()
        self._handle(QueuesChecked())

    def take(self, limit: int) -> list[ReplayEntry]:
        """Up to ``limit`` tuples for the spout to emit; none when none is there now. Raises what a thread ran
        into, once; the thread tries again."""
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
        """How many dead letters there are more than at the last call."""
        with self._state:
            count, self._given_up = self._given_up, 0
            return count

    def refuse(self, entry: ReplayEntry, error: str) -> None:
        """The tuple cannot be emitted: it is a dead letter at once."""
        record = entry.record.failed(Failure("", error), self._clock.now())
        self._handle(Failed([(entry, record._replace(attempts=max(record.attempts, self._max_attempts)))]))

    def ack(self, entries: Sequence[ReplayEntry]) -> None:
        self._handle(Acked(entries))

    def fail(self, entry: ReplayEntry, failure: Failure) -> None:
        self._handle(Failed([(entry, entry.record.failed(failure, self._clock.now()))]))

    def note(self) -> None:
        """Bring the positions in the task's state up to date; a snapshot follows, or ``close``."""
        with self._sources[Origin.EDEN]:
            self._eden.before_snapshot()
        with self._sources[Origin.TO]:
            for position in self._positions:
                position.note()

    def on_committed(self) -> None:
        """The snapshot after the last ``note`` is committed. A disk or server that fails now costs space only,
        which the next commit gives back."""
        try:
            with self._sources[Origin.EDEN]:
                self._eden.after_commit()
            with self._sources[Origin.TO]:
                for position in self._positions:
                    position.on_committed()
        except (OSError, PenstockError) as error:
            _log.warning("replay: %s; what is done with stays stored until the next commit", error)

    @property
    def outstanding(self) -> int:
        """Tuples that were read and are neither acked nor safely in From or with the dead letters."""
        with self._state:
            return self._decisions.outstanding

    def close(self) -> None:
        """Write what has failed so far, note the positions and let go of everything. Tuples on their way are read
        again by the next replayer; so is, in another process, what was done since the last committed epoch."""
        self._stop.set()
        for inbox in self._inboxes.values():
            inbox.put(None)
        for thread in self._threads:
            if thread.is_alive():
                thread.join()
        self._finish()
        self._decisions.validate()
        self.note()
        self._eden.close()
        self._queues.close()

    @property
    def _to(self) -> ReplayQueue:
        return self._queues.from_ if self._exchanged else self._queues.to

    @property
    def _from(self) -> ReplayQueue:
        return self._queues.to if self._exchanged else self._queues.from_

    def _handle(self, event: Event) -> None:
        with self._state:
            for instruction in self._decisions.handle(event):
                if isinstance(instruction, Done):
                    self._done(instruction)
                else:
                    self._inboxes[type(instruction)].put(instruction)

    def _done(self, instruction: Done) -> None:
        with self._sources[instruction.origin]:
            source = self._eden if instruction.origin is Origin.EDEN else self._to
            source.done(instruction.positions)

    def _run(self, kind: type[Instruction], act: Callable[[Any], None]) -> None:
        """A thread's life: carry out instructions until told to stop; the ones it has by then too."""
        inbox = self._inboxes[kind]
        while (instruction := inbox.get()) is not None:
            self._retry(act, instruction)

    def _run_reader(self) -> None:
        inbox, pauses = self._inboxes[Read], 0
        while not self._stop.is_set():
            try:
                instruction = inbox.get(timeout=_EDEN_PAUSE)
            except Empty:
                pauses += 1
                self._handle(self._check_queues() if pauses % _CHECK_EVERY == 0 else QueuesChecked())
                continue
            if instruction is not None:
                self._retry(self._read_some, instruction)

    def _retry(self, act: Callable[[Any], None], instruction: Instruction) -> None:
        """Carry out an instruction, again and again while it fails, until told to stop."""
        while True:
            try:
                act(instruction)
                return
            except (
                Exception
            ) as error:  # disks, servers, and an Eden of the user's: whatever it is, the spout says it
                _log.warning("replay: %s; trying again", error)
                self._errors.append(error)
                with self._arrived:
                    self._arrived.notify_all()
                if self._stop.wait(_RETRY_PAUSE):
                    return

    def _finish(self) -> None:
        """Carry out what the threads left: failures that waited for a store or a swap under way."""
        left = True
        while left:
            left = False
            for kind, act in ((Swap, self._swap), (StoreRecords, self._store)):
                while not self._inboxes[kind].empty():
                    if (instruction := self._inboxes[kind].get()) is not None:
                        act(instruction)
                        left = True

    def _read_some(self, instruction: Read) -> None:
        entries: list[ReplayEntry] = []
        while not entries:  # no entries mean that nothing is left; so where all were set aside, read on
            if not self._found:
                self._found = self._read_from(instruction.origin, instruction.limit)
            if not self._found:
                break
            whole = [each for each in self._found if not self._fault(each[1])]
            if len(whole) < len(self._found):
                self._store_unemittable(instruction.origin)
            entries = [ReplayEntry(instruction.origin, position, record) for position, record in whole]
            self._found = []
        self._handle(Arrived(instruction.origin, entries))
        if entries:
            with self._arrived:
                self._read.extend(entries)
                self._arrived.notify_all()

    def _read_from(self, origin: Origin, limit: int) -> list[tuple[int, ReplayRecord]]:
        with self._sources[origin]:
            if origin is Origin.TO:
                return self._to.read(limit)
            found = self._eden.read(limit)
        return [(at, each if isinstance(each, ReplayRecord) else ReplayRecord(each)) for at, each in found]

    def _fault(self, record: ReplayRecord) -> str:
        """Why the record cannot be emitted; empty if it can."""
        if record.damaged:
            return record.error
        if len(record.payload) != self._width:
            return f"{len(record.payload)} values for {self._width} fields"
        return ""

    def _store_unemittable(self, origin: Origin) -> None:
        """What cannot be emitted goes to the dead letters (1), and only then counts as done where it was read (2).
        If (1) raises, it is done again with the same records."""
        now = self._clock.now()
        dead_letters = [
            (at, record.failed(Failure("replay queue", fault), now))
            for at, record in self._found
            if (fault := self._fault(record))
        ]
        self._queues.dead.add([record for _, record in dead_letters])
        with self._sources[origin]:
            source = self._eden if origin is Origin.EDEN else self._to
            source.done([at for at, _ in dead_letters])
        with self._state:
            self._given_up += len(dead_letters)
        self._report(
            QueueDamaged(
                "replay queue" if origin is Origin.TO else "source of a ReplaySpout",
                f"{len(dead_letters)} records cannot be read back as they were written; the "
                f"first: {dead_letters[0][1].error}",
                "They are dead letters: see them with penstock dlq, remove the cause, and send them back.",
            )
        )

    def _check_queues(self) -> QueuesChecked:
        with self._sources[Origin.TO]:
            return QueuesChecked(to=not self._to.empty, from_=not self._from.empty)

    def _swap(self, _: Swap) -> None:
        """Exchange From and To: a pointer, no copying. To is drained, but no epoch may have been committed since:
        its records stay, before what fails from now on. A crash reads them again, when it is To the next time."""
        with self._sources[Origin.TO]:
            self._queues.pointer.store(not self._exchanged)
            self._exchanged = not self._exchanged
        self._handle(Swapped())

    def _store(self, instruction: StoreRecords) -> None:
        if instruction.back:
            self._from.append(instruction.back)
        if instruction.dead:
            self._queues.dead.add(instruction.dead)
            with self._state:
                self._given_up += len(instruction.dead)
        self._handle(Stored())
