"""The interface of the memory read/write queue (MRWQ, *Lu 2020*, section 4.4), which holds results for the store
outside the process that produced them.

A custom implementation must pass ``tests/contract/test_persist_queues.py``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from penstock.errors import ComponentError

ENTRY_BYTES = 512 << 10  # maximum bytes of an entry: memcached rejects values of 1 MiB


class QueueUnavailable(ComponentError):
    """The queue does not answer, or its medium is full. The operation may have been carried out; it is safe to
    repeat it."""


class WriterSuperseded(ComponentError):
    """Another process has taken this writer's place. Nothing was put."""


class PersistentQueue(ABC):
    """The settings of a queue: created by the user on the driver and pickled; ``open`` runs in each process that
    uses the queue. A component has one queue: any number of tasks put entries, one processor reads them."""

    max_bytes: int
    """The number of bytes that may wait. The bolt accepts no tuples above it; each writer may exceed it by one
    entry."""

    exactly_once: ClassVar[bool] = True
    """False: a ``PersistBolt`` with this queue is refused with exactly-once delivery."""

    @property
    def volatile(self) -> str:
        """What loses acknowledged results, as the end of a sentence for people. Empty: nothing that the queue
        outlives."""
        return ""

    @abstractmethod
    def check(self, where: str, folder: str) -> None:
        """Raise a ``PenstockError`` if the queue can never be opened with this folder or installation, for example
        because a library is missing. Accesses nothing outside the process."""

    @abstractmethod
    def open(self, name: str, folder: str) -> QueueClient:
        """The queue of that name. ``folder`` is a persistent path or URL that the component's tasks share, for a
        queue that needs one. Need not connect to a server yet."""

    @abstractmethod
    def __str__(self) -> str:
        """What and where the queue is, for people; without passwords."""


class QueueClient(ABC):
    """The connection of one process to a queue. All calls come from one thread. A writer calls ``register``,
    ``put`` and ``waiting``; the processor calls the other methods. Every method except ``close`` may raise
    ``QueueUnavailable`` within some seconds and may then be called again; the client reconnects by itself.

    Only one processor should read a queue, but two at the same time do no harm: reading removes nothing, and only
    entries that are in the store are released.
    """

    @abstractmethod
    def id(self) -> str:
        """The id of the queue, created and stored with it. Another queue of the same name, and a queue that has
        lost its contents, have a different id. Progress is stored under it. After a ``read`` that returned entries
        it is the id of the queue they were read from. Called after each such ``read``, so it must be fast."""

    @abstractmethod
    def register(self, writer: str) -> int:
        """Begin a new incarnation of a writer and return its number. The number is greater than all earlier ones,
        including those of a queue that has lost its contents; therefore it is at least the time in
        milliseconds."""

    @abstractmethod
    def put(self, entries: Sequence[bytes], writer: str = "", incarnation: int = 0) -> None:
        """Append entries (not empty, at most about ``ENTRY_BYTES`` each) in order, after all entries of calls that
        have returned. On return they are as durable as this kind of queue allows. If it raises
        ``QueueUnavailable``, a prefix of them may have been stored.

        With a writer and its incarnation, it raises ``WriterSuperseded`` if a later incarnation is registered: a
        worker that was replaced and resumes must not put old results after new ones."""

    @abstractmethod
    def waiting(self) -> int:
        """The approximate number of bytes that were put and not released. Called often, so it must be fast."""

    @abstractmethod
    def read(self, limit: int) -> list[tuple[int, bytes]]:
        """Up to ``limit`` entries after those that this client has read, with their positions, in order; none if
        there are none at present. Does not block. Begins with the oldest entry not released. Positions are valid
        only for this client and increase from call to call until ``rewind``."""

    @abstractmethod
    def rewind(self) -> None:
        """Continue reading at the oldest entry not released."""

    @abstractmethod
    def release(self, position: int) -> None:
        """The entries up to this position are in the store and may be removed. A position that is lower than that
        of an earlier call has no effect."""

    warning: str = ""
    """Why the queue is less durable than it could be, for people. Empty if it is not, and before the first
    answer."""

    @property
    @abstractmethod
    def losses(self) -> int:
        """The number of entries that, as far as this client knows, the queue has lost or given up since it was
        opened. 0 for a queue that cannot lose any."""

    @abstractmethod
    def close(self) -> None:
        """Close files and connections. Never raises ``QueueUnavailable``."""


def superseded(where: str, writer: str) -> WriterSuperseded:
    return WriterSuperseded(
        where,
        f"another process has registered as '{writer}' since",
        "This process was replaced. If two topologies of the same name share the queue, rename one.",
    )
