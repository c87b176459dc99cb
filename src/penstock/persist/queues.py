"""The memory read/write queue (MRWQ): where results wait for the store, outside the process that made them.

``tests/contract/test_persist_queues.py`` is what one of your own must pass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from penstock.errors import ComponentError

ENTRY_BYTES = 512 << 10  # the most a writer puts into one entry: memcached refuses values of 1 MiB


class QueueUnavailable(ComponentError):
    """The queue does not answer, or has no space left on its medium. What was asked may have happened: asking
    again is right."""


class WriterSuperseded(ComponentError):
    """Another process has taken this writer's place. Nothing of what was to be put is there."""


class PersistentQueue(ABC):
    """Where a queue is kept: made by the user on the driver and pickled; ``open`` runs in each process that uses
    it. A component has one queue: any number of tasks put, one processor reads."""

    max_bytes: int
    """What may wait. The bolt takes no tuples while there is more; one entry of each writer may go beyond it."""

    @abstractmethod
    def check(self, where: str, folder: str) -> None:
        """Raise a ``PenstockError`` if it can never be opened with this folder or this installation: a missing
        library, a URL where a path is needed. Looks at nothing outside the process."""

    @abstractmethod
    def open(self, name: str, folder: str) -> QueueClient:
        """The queue of that name. ``folder`` is a path or URL that the component's tasks share and that survives
        them, for a queue that needs one. Does not need to reach a server yet."""

    @abstractmethod
    def __str__(self) -> str:
        """For people: what it is and where, without passwords."""


class QueueClient(ABC):
    """One process's hold on a queue. All calls come from one thread; a writer calls ``register``, ``put`` and
    ``waiting``, the processor all the others. Every call but ``close`` may raise ``QueueUnavailable`` within some
    seconds, and may then be repeated; after a server came back the same client goes on.

    Two processors at a time do no harm, though only one is meant to be: reading takes nothing away, and releasing
    is only ever done for what is in the store.
    """

    @abstractmethod
    def id(self) -> str:
        """Made with the queue and kept in it: another queue of the same name has another, and so has one that has
        lost its memory. Progress in the store is kept by it. After a ``read`` that brought entries it is the id of
        the queue they were read from. Cheap: asked after each such ``read``."""

    @abstractmethod
    def register(self, writer: str) -> int:
        """Begin a new incarnation of a writer: greater than all its incarnations before, and also than any of a
        queue that has lost its memory since (so at least the time in milliseconds)."""

    @abstractmethod
    def put(self, entries: Sequence[bytes], writer: str = "", incarnation: int = 0) -> None:
        """Append entries (never empty, at most about ``ENTRY_BYTES`` each), in order, behind all that was put
        before by anyone who has returned. On return they are as durable as this queue makes anything. When it
        raises ``QueueUnavailable``, some first ones may be there.

        With a writer and its incarnation, raises ``WriterSuperseded`` if a later incarnation of it is registered:
        a worker that was replaced and wakes up must not put old results behind new ones."""

    @abstractmethod
    def waiting(self) -> int:
        """About how many bytes were put and not yet released. Cheap: asked before each put."""

    @abstractmethod
    def read(self, limit: int) -> list[tuple[int, bytes]]:
        """Up to ``limit`` entries that follow what this client has read, with their positions, in order; none when
        there are no more now. Does not wait. Begins with the oldest entry not released. A position is good for
        the client that gave it, and grows from call to call until ``rewind``."""

    @abstractmethod
    def rewind(self) -> None:
        """Read from the oldest entry not released again."""

    @abstractmethod
    def release(self, position: int) -> None:
        """The entries up to this position are in the store and may go. Never goes back: releasing less than was
        released before does nothing."""

    warning: str = ""
    """Why the queue promises less than it could, for the user to read; empty where it does not, and before the
    first call that reached it."""

    @property
    @abstractmethod
    def losses(self) -> int:
        """Entries that this client knows the queue has lost or given up since it was opened; 0 for those that do
        not lose any."""

    @abstractmethod
    def close(self) -> None:
        """Let go of files and connections. Never raises ``QueueUnavailable``."""


def superseded(where: str, writer: str) -> WriterSuperseded:
    return WriterSuperseded(
        where,
        f"another process has begun since to put as '{writer}'",
        "This one was replaced. If two topologies of one name share the queue, rename one.",
    )
