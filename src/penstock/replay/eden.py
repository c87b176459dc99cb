"""Eden: the source of a ``ReplaySpout``, which provides fresh tuples.

This module contains ``QueueEden``; ``penstock.connectors`` contains sources for files and Kafka topics. A custom
source is a subclass of ``Eden`` that can be read again at a position.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.acking.lineage import I64
from penstock.replay.embedded import DiskQueue, EmbeddedStore
from penstock.replay.positions import KeptPosition
from penstock.replay.queues import ReplayStore
from penstock.replay.records import ReplayRecord
from penstock.topology.components import Conf, Context
from penstock.topology.streams import FieldSpec


class Eden(ABC):
    """A source that can be read again, and that stores in ``Context.state`` how far it has been processed.
    Created on the driver and pickled; ``open`` runs in the task's process. ``read`` and ``done`` are called by
    several threads, but only by one at a time; ``read_again`` is called by another thread meanwhile; the other
    methods are called by the task's thread.

    What cannot be read again, such as a socket, cannot be an Eden: write it to a queue and read that
    (``QueueEden``).
    """

    fields: tuple[FieldSpec, ...]
    """The fields of its tuples, in the form in which a spout declares them."""

    @abstractmethod
    def open(self, conf: Conf, context: Context) -> None:
        """Called in the task's process before the other methods, and again after a ``close``. Resumes at the
        position in ``context.state``, or begins at the start if there is none."""

    @abstractmethod
    def read(self, limit: int) -> list[tuple[int, tuple[Any, ...]]]:
        """Up to ``limit`` tuples with their positions; none if there are none at present. Must not block.
        Positions are numbers from 0 to 2**62 - 1 by which ``done`` and ``read_again`` find the tuples; two tuples
        in flight have different ones. A tuple that cannot be read may be replaced by a ``ReplayRecord`` that is
        ``damaged``; it becomes a dead letter."""

    @abstractmethod
    def read_again(self, positions: I64) -> Sequence[tuple[Any, ...] | ReplayRecord]:
        """The tuples at these positions, which were read, have failed and are not done. The positions are
        ascending and in an array of int64. Returns at least one tuple, and fewer than asked for if memory
        suggests it: those at the first positions. A tuple that is no longer there is replaced by
        ``records.lost(position, reason)``; it becomes a dead letter. An exception means that the source is
        unavailable: the call is repeated after a pause. May block. Must not disturb ``read``, and no two calls
        run at the same time."""

    def wait(self, seconds: float) -> bool:
        """Block until ``read`` may find something, at most for this time. Called by the thread that calls
        ``read``, after it found nothing, while other threads may call ``done``. Returns False if the source cannot
        wait; it is then read again after a pause."""
        return False

    @abstractmethod
    def done(self, positions: I64) -> None:
        """These tuples are acked or stored in another queue, in any order. The stored position passes a tuple only
        when all tuples before it are done. ``read_again`` is not called for them any more."""

    @abstractmethod
    def before_snapshot(self) -> None:
        """Write the position to ``Context.state``; see ``Component``. Also called before ``close``. The position
        must not be stored durably elsewhere, because it is valid only once the epoch is committed."""

    def after_commit(self) -> None:  # noqa: B027 - optional
        """See ``Component``."""

    def lag(self) -> Mapping[str, int]:
        """See ``BaseSpout``."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Close files and connections."""

    def store(self) -> ReplayStore:
        """The store of this source's replay queues, unless the spout is given another one."""
        return EmbeddedStore()


class QueueEden(Eden):
    """A ``DiskQueue`` that other programs append to. Records that committed epochs have processed are removed from
    it. A task without state, or from an old savepoint, starts at the oldest remaining record.

    With several tasks, each task reads a separate queue: the folders ``0``, ``1`` … below the given one.
    """

    def __init__(self, folder: str | Path, fields: tuple[FieldSpec, ...]) -> None:
        self._folder = Path(folder)
        self.fields = tuple(fields)

    def open(self, conf: Conf, context: Context) -> None:
        folder = self._folder / str(context.index) if context.parallelism > 1 else self._folder
        self._queue = DiskQueue(folder)
        self._position = KeptPosition(self._queue, context.state.value("eden"))

    def read(self, limit: int) -> list[tuple[int, tuple[Any, ...]]]:
        return [
            (position, record if record.damaged else record.payload)
            for position, record in self._queue.read(limit)
        ]

    def read_again(self, positions: I64) -> list[tuple[Any, ...] | ReplayRecord]:
        return [each if each.damaged else each.payload for each in self._queue.read_again(positions)]

    def done(self, positions: I64) -> None:
        self._queue.done(positions)

    def before_snapshot(self) -> None:
        self._position.save()

    def after_commit(self) -> None:
        self._position.on_committed()

    def close(self) -> None:
        self._queue.close()
