"""The interfaces of stateless replay: a queue, the pointer that determines which of two queues is To, and their
store.

``penstock.replay.embedded`` implements them on a local disk, ``penstock.connectors.kafka_replay`` on Kafka. A
custom implementation must pass ``tests/contract/test_queues.py``.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.acking.lineage import I64
from penstock.errors import EnvironmentFault
from penstock.replay.progress import Positions
from penstock.replay.records import ReplayRecord
from penstock.topology.components import Context

if TYPE_CHECKING:
    from penstock.replay.dead_letters import DeadLetterStore

__all__ = ["Pointer", "Queues", "QueuesBusy", "ReplayQueue", "ReplayRecord", "ReplayStore"]


class QueuesBusy(EnvironmentFault):
    """Another process uses this task's replay queues."""


class ReplayQueue(ABC):
    """A FIFO queue of records. The position at which its reader resumes after a restart is part of the task's
    state (``KeptPosition``); the queue itself only knows which records are no longer needed.

    One process reads the queue. ``append`` may be called by any thread and process at any time, ``read_again``
    by a thread of its own; the other methods are called by one thread at a time.
    """

    @abstractmethod
    def append(self, records: Sequence[ReplayRecord]) -> None:
        """Append records; they are durable on return. If it raises, some of them may have been stored: the caller
        appends all of them again, which may duplicate some."""

    @abstractmethod
    def read(self, limit: int) -> list[tuple[int, ReplayRecord]]:
        """Up to ``limit`` records with their positions, in order; empty only if there are no more at present. A
        record that cannot be read is returned as a damaged record. Does not wait for new records, though a server
        may take a moment to return existing ones. Advances the read cursor, which is kept in memory: a new process
        begins at the oldest record that was not released."""

    @abstractmethod
    def read_again(self, positions: I64) -> list[ReplayRecord]:
        """The records at some positions that were read and are not done, in ascending order. At least one, and
        fewer than asked for if memory or time suggest it: those at the first positions. A record that is no longer
        there is returned as a lost record (``records.lost``). Does not move the read cursor, and is called by one
        thread while other threads call the other methods."""

    @abstractmethod
    def seek(self, position: int) -> None:
        """Continue reading at this position, or at the oldest record that was not released if that is later.
        Called at most once, before the first ``read``."""

    @abstractmethod
    def done(self, positions: Positions) -> None:
        """These records are done. ``position`` passes a record only when it and all records before it are done."""

    @property
    @abstractmethod
    def position(self) -> int:
        """Where a restart resumes: the first record that is not done, or the next to be read."""

    @property
    @abstractmethod
    def empty(self) -> bool:
        """True if there is no unread record, including those that other processes have appended."""

    @abstractmethod
    def release(self, position: int) -> None:
        """No process will read the records before this position again; durable on return. Their space may be
        reused. Records from this position on are kept, whether they were read or not."""

    @abstractmethod
    def close(self) -> None:
        """Close files and connections. Releases no records."""


class Pointer(ABC):
    """Stores which of the two queues is To. Queues are never renamed or copied; only the pointer changes."""

    @abstractmethod
    def load(self) -> bool:
        """True if From and To are exchanged; False before the first ``store``."""

    @abstractmethod
    def store(self, exchanged: bool) -> None:
        """Set the pointer atomically; it is durable on return."""


@dataclass(frozen=True)
class Queues:
    """The replay queues of one spout task. ``from_`` and ``to`` are named as they were created; ``pointer`` stores
    whether they have been exchanged since."""

    from_: ReplayQueue
    to: ReplayQueue
    dead: DeadLetterStore
    pointer: Pointer
    release: Callable[[], None] = lambda: None
    """Called last, by ``close``: allows another process to open the queues."""

    def close(self) -> None:
        with contextlib.ExitStack() as closing:  # all of them, even if one raises
            for close in (self.release, self.dead.close, self.to.close, self.from_.close):  # the last one first
                closing.callback(close)


class ReplayStore(ABC):
    """A place for replay queues. Created on the driver and pickled; ``open`` runs in the task's process."""

    @abstractmethod
    def check(self, context: Context) -> None:
        """Raise a ``PenstockError`` if the queues cannot be kept there. Called once, before ``open``. Opens and
        changes nothing."""

    @abstractmethod
    def open(self, context: Context) -> Queues:
        """The queues of this task, created on the first run. Raises ``QueuesBusy`` at once while another process
        has them open."""
