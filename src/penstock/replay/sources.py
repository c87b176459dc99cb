"""Eden, From and To of one task, with their locks and positions: the part of the replayer that does input and
output."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from penstock.acking.lineage import I64
from penstock.errors import ComponentError
from penstock.replay.eden import Eden
from penstock.replay.places import Origin, first_origin
from penstock.replay.positions import KeptPosition
from penstock.replay.queues import Queues, ReplayQueue
from penstock.replay.records import ReplayRecord
from penstock.state.values import TaskState, ValueState


def position_values(state: TaskState) -> tuple[ValueState, ValueState]:
    """The values of the task's state that hold the positions of the queues created as From and as To."""
    return state.value("replay.from"), state.value("replay.to")


class ReplaySources:
    """Called by the threads of a ``Replayer`` and by the task's thread. A lock per origin serialises the calls to
    Eden and to the queues, except ``append``, ``add_dead_letters`` and ``read_again``, which need none: so acks do
    not wait while failed tuples are read again. Methods may raise ``OSError`` and ``PenstockError``, or whatever a
    user's Eden raises."""

    def __init__(self, eden: Eden, queues: Queues, state: TaskState | None) -> None:
        """``eden`` and ``queues`` are open. Without ``state`` the positions are kept only in memory."""
        self.eden, self.queues = eden, queues
        values = position_values(TaskState() if state is None else state)
        self._positions = [
            KeptPosition(queue, kept) for queue, kept in zip((queues.from_, queues.to), values, strict=True)
        ]
        self._exchanged = queues.pointer.load()
        self._locks = {origin: threading.Lock() for origin in Origin}  # always taken last

    def read(self, origin: Origin, limit: int) -> list[tuple[int, ReplayRecord]]:
        """Up to ``limit`` records with their positions; none if there are none at present."""
        with self._locks[origin]:
            if origin is Origin.TO:
                return self._to.read(limit)
            found = self.eden.read(limit)
        return [(at, each if isinstance(each, ReplayRecord) else ReplayRecord(each)) for at, each in found]

    def read_again(self, places: I64) -> list[ReplayRecord]:
        """The records at the first of some sorted places; at least one. A record that is no longer there is
        damaged. Called by the backflow thread, which runs only while the queues are not exchanged."""
        origin, positions = first_origin(places)
        found: Sequence[Any] = (self._to if origin is Origin.TO else self.eden).read_again(positions)
        if not 0 < len(found) <= len(positions):
            raise ComponentError(
                f"read_again of {type(self.eden).__name__}",
                f"it returned {len(found)} tuples for {len(positions)} positions",
                "It must return at least one tuple and at most one for each position.",
            )
        return [each if isinstance(each, ReplayRecord) else ReplayRecord(each) for each in found]

    def done(self, origin: Origin, positions: I64) -> None:
        """The records at these positions are acked or stored elsewhere."""
        with self._locks[origin]:
            source = self.eden if origin is Origin.EDEN else self._to
            source.done(positions)

    def append(self, records: Sequence[ReplayRecord]) -> None:
        """Append records to From."""
        self._from.append(records)

    def add_dead_letters(self, records: Sequence[ReplayRecord]) -> None:
        self.queues.dead.add(records)

    @property
    def from_holds(self) -> bool:
        """True if From contains records. Takes no lock."""
        return not self._from.empty

    def has_unread(self) -> tuple[bool, bool]:
        """Whether To and From contain unread records."""
        with self._locks[Origin.TO]:
            return not self._to.empty, self.from_holds

    def swap(self) -> None:
        """Exchange From and To by storing the pointer; nothing is copied. The records of the drained queue stay in
        it, since no epoch may have been committed after they were processed. After a crash they are read again the
        next time that queue is To."""
        with self._locks[Origin.TO]:
            self.queues.pointer.store(not self._exchanged)
            self._exchanged = not self._exchanged

    def save_positions(self) -> None:
        """Write the positions to the task's state. Called by the task's thread before a snapshot and before
        ``close``."""
        with self._locks[Origin.EDEN]:
            self.eden.before_snapshot()
        with self._locks[Origin.TO]:
            for position in self._positions:
                position.save()

    def on_committed(self) -> None:
        """The snapshot after the last ``save_positions`` is committed: release records that are no longer
        needed."""
        with self._locks[Origin.EDEN]:
            self.eden.after_commit()
        with self._locks[Origin.TO]:
            for position in self._positions:
                position.on_committed()

    def close(self) -> None:
        try:
            self.eden.close()
        finally:
            self.queues.close()

    @property
    def _to(self) -> ReplayQueue:
        return self.queues.from_ if self._exchanged else self.queues.to

    @property
    def _from(self) -> ReplayQueue:
        return self.queues.to if self._exchanged else self.queues.from_
