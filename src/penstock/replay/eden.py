"""Eden: the source above the spout, from which fresh tuples come.

``QueueEden`` is here; a file's lines and a Kafka topic are in ``penstock.connectors``. A source of your own is a
subclass that can be read again from a position: that is all replay asks of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from penstock.replay.embedded import DiskQueue, EmbeddedStore
from penstock.replay.queues import ReplayStore
from penstock.topology.components import Conf, Context
from penstock.topology.streams import FieldSpec


class Eden(ABC):
    """A source that remembers how far it is done with. Made on the driver and pickled; ``open`` runs in the task's
    process. Calls come from several threads, one at a time."""

    fields: tuple[FieldSpec, ...]
    """The fields of what it reads, as a spout declares them."""

    @abstractmethod
    def open(self, conf: Conf, context: Context) -> None:
        """Called in the task's process before anything else, and again after a ``close``: find the stored
        position."""

    @abstractmethod
    def read(self, limit: int) -> list[tuple[int, tuple[Any, ...]]]:
        """Up to ``limit`` tuples with their positions, which grow; none when there is nothing now. Never
        blocks."""

    @abstractmethod
    def done(self, positions: Iterable[int]) -> None:
        """These tuples are done with: acked, or safely in another queue. In any order; the stored position passes
        one only when all before it are done."""

    @abstractmethod
    def before_snapshot(self) -> None:
        """Make the stored position durable."""

    def after_commit(self) -> None:  # noqa: B027 - most need nothing
        """As in ``Component``."""

    @abstractmethod
    def close(self) -> None:
        """Let go of files and connections. Commits nothing."""

    def store(self) -> ReplayStore:
        """Where the replay queues of this source are kept unless the spout is told otherwise."""
        return EmbeddedStore()


class QueueEden(Eden):
    """A ``DiskQueue`` that other programs append to.

    With several tasks each reads a queue of its own: the folder ``0``, ``1`` … below the given one.
    """

    def __init__(self, folder: str | Path, fields: tuple[FieldSpec, ...]) -> None:
        self._folder = Path(folder)
        self.fields = tuple(fields)

    def open(self, conf: Conf, context: Context) -> None:
        folder = self._folder / str(context.index) if context.parallelism > 1 else self._folder
        self._queue = DiskQueue(folder)

    def read(self, limit: int) -> list[tuple[int, tuple[Any, ...]]]:
        return [(position, record.payload) for position, record in self._queue.read(limit)]

    def done(self, positions: Iterable[int]) -> None:
        self._queue.done(positions)

    def before_snapshot(self) -> None:
        self._queue.commit()

    def close(self) -> None:
        self._queue.close()
