"""The interfaces of stateless replay (SPEC 2.5): a queue, the pointer that says which of two is To, and the place
that keeps both. On local disk they are in ``penstock.replay.embedded``, on Kafka in
``penstock.connectors.kafka_replay``; ``tests/contract/test_queues.py`` is what one of your own must pass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.errors import EnvironmentFault
from penstock.replay.records import ReplayRecord
from penstock.topology.components import Context

if TYPE_CHECKING:
    from penstock.replay.dead_letters import DeadLetterStore

__all__ = ["Pointer", "Queues", "QueuesBusy", "ReplayQueue", "ReplayRecord", "ReplayStore"]


class QueuesBusy(EnvironmentFault):
    """Another process works with this task's replay queues."""


class ReplayQueue(ABC):
    """A FIFO of records. Where its reader has to go on after a restart is part of the task's state
    (``KeptPosition``); the queue itself only knows what nobody will ever want again.

    One process reads it. ``append`` may come from any thread and process at any time; the other calls are made by
    one thread at a time.
    """

    @abstractmethod
    def append(self, records: Sequence[ReplayRecord]) -> None:
        """Add records at the end; on return they are durable. When it raises, some of them may be stored:
        appending all of them again is right, and may double some."""

    @abstractmethod
    def read(self, limit: int) -> list[tuple[int, ReplayRecord]]:
        """Up to ``limit`` records with their positions, in order; none only when there are no more now. One that
        cannot be read is among them as a damaged record. Does not
        wait for records to come, though a server may take a moment to hand out what it has. Moves the read cursor,
        which lives in memory: a new process begins at the oldest record that was not released."""

    @abstractmethod
    def seek(self, position: int) -> None:
        """Read from there on, or from the oldest record that was not released if that is later. Called at most
        once, before the first ``read``."""

    @abstractmethod
    def done(self, positions: Iterable[int]) -> None:
        """These records are done with. ``position`` passes a record only when it and all before it are done."""

    @property
    @abstractmethod
    def position(self) -> int:
        """Where a restart would have to read on: the first record that is not done, or the next to be read."""

    @property
    @abstractmethod
    def empty(self) -> bool:
        """Nothing is unread. Looks for what others have appended."""

    @abstractmethod
    def release(self, position: int) -> None:
        """No process reads records before that position any more: durable on return, and their space may be used
        again. Those from it on stay, whether they were read or not."""

    @abstractmethod
    def close(self) -> None:
        """Let go of files and connections. Releases nothing."""


class Pointer(ABC):
    """Which of the two queues is To. A queue is never renamed or copied: only this changes."""

    @abstractmethod
    def load(self) -> bool:
        """True when From and To are exchanged; False before the first ``store``."""

    @abstractmethod
    def store(self, exchanged: bool) -> None:
        """Set it; on return it is durable, and at no instant is it neither."""


@dataclass(frozen=True)
class Queues:
    """What stands above one task of a spout, beside its source. ``from_`` and ``to`` are as they were named when
    they were made; ``pointer`` says whether they have been exchanged since."""

    from_: ReplayQueue
    to: ReplayQueue
    dead: DeadLetterStore
    pointer: Pointer
    release: Callable[[], None] = lambda: None
    """Called last: lets another process have them."""

    def close(self) -> None:
        for part in (self.from_, self.to, self.dead):
            part.close()
        self.release()


class ReplayStore(ABC):
    """Where replay queues are kept. Made on the driver and pickled; ``open`` runs in the task's process."""

    @abstractmethod
    def check(self, context: Context) -> None:
        """Raise a ``PenstockError`` if the queues cannot be kept there. Called once, before all else; takes
        nothing and changes nothing."""

    @abstractmethod
    def open(self, context: Context) -> Queues:
        """The queues of this task, made on the first run. Raises ``QueuesBusy`` while another process holds
        them, at once."""
