"""Eden: the source of a ``ReplaySpout``, which provides fresh tuples.

This module contains ``QueueEden`` and ``SpoutEden``; ``penstock.connectors`` contains sources for files and Kafka
topics. A custom source is a subclass of ``Eden`` that can be read again from a position.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from penstock.columns import to_values
from penstock.errors import ComponentError
from penstock.replay.embedded import DiskQueue, EmbeddedStore
from penstock.replay.positions import KeptPosition
from penstock.replay.queues import ReplayStore
from penstock.topology.components import BatchSpout, Columns, Conf, Context
from penstock.topology.streams import DEFAULT_STREAM, FieldSpec, OutputDeclarer


class Eden(ABC):
    """A source that stores in ``Context.state`` how far it has been processed. Created on the driver and pickled;
    ``open`` runs in the task's process. ``read`` and ``done`` are called by several threads, but only by one at a
    time; the other methods are called by the task's thread."""

    fields: tuple[FieldSpec, ...]
    """The fields of its tuples, in the form in which a spout declares them."""

    @abstractmethod
    def open(self, conf: Conf, context: Context) -> None:
        """Called in the task's process before the other methods, and again after a ``close``. Resumes at the
        position in ``context.state``, or begins at the start if there is none."""

    @abstractmethod
    def read(self, limit: int) -> list[tuple[int, tuple[Any, ...]]]:
        """Up to ``limit`` tuples with their positions; none if there are none at present. Must not block.
        Positions are arbitrary numbers by which ``done`` identifies the tuples. A tuple that cannot be read may be
        replaced by a ``ReplayRecord`` that is ``damaged``; it becomes a dead letter."""

    def wait(self, seconds: float) -> bool:
        """Block until ``read`` may find something, at most for this time. Called by the thread that calls
        ``read``, after it found nothing, while other threads may call ``done``. Returns False if the source cannot
        wait; it is then read again after a pause."""
        return False

    @abstractmethod
    def done(self, positions: Iterable[int]) -> None:
        """These tuples are acked or stored in another queue, in any order. The stored position passes a tuple only
        when all tuples before it are done."""

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

    def done(self, positions: Iterable[int]) -> None:
        self._queue.done(positions)

    def before_snapshot(self) -> None:
        self._position.save()

    def after_commit(self) -> None:
        self._position.on_committed()

    def close(self) -> None:
        self._queue.close()


class SpoutEden(Eden):
    """Any batch spout as a source. The spout must emit with integer message ids and store how far it was acked.

    The spout receives an ack for each tuple that is acked or stored in another queue, and never a failure. A
    position that it keeps in ``Context.state`` becomes durable with the task's snapshots.
    """

    def __init__(self, spout: BatchSpout) -> None:
        declarer = OutputDeclarer(type(spout).__name__)
        spout.declare_output_fields(declarer)
        self.fields = tuple(
            field.name if field.type is None else (field.name, field.type)
            for field in declarer.streams[DEFAULT_STREAM].fields
        )
        self._spout = spout

    def open(self, conf: Conf, context: Context) -> None:
        self._emitted: deque[tuple[int, tuple[Any, ...]]] = deque()
        self._spout.open(conf, context, _Catcher(self._emitted))
        self._spout.activate()

    def read(self, limit: int) -> list[tuple[int, tuple[Any, ...]]]:
        if not self._emitted:
            self._spout.next_batch()
        return [self._emitted.popleft() for _ in range(min(limit, len(self._emitted)))]

    def done(self, positions: Iterable[int]) -> None:
        self._spout.ack_many(list(positions))

    def before_snapshot(self) -> None:
        self._spout.before_snapshot()

    def after_commit(self) -> None:
        self._spout.after_commit()

    def lag(self) -> Mapping[str, int]:
        return self._spout.lag()

    def close(self) -> None:
        self._spout.deactivate()
        self._spout.close()


class _Catcher:
    """A collector that keeps rows and message ids."""

    def __init__(self, emitted: deque[tuple[int, tuple[Any, ...]]]) -> None:
        self._emitted = emitted

    def ready(self, stream: str = DEFAULT_STREAM) -> bool:
        return True

    def emit_batch(
        self, columns: Columns, stream: str = DEFAULT_STREAM, msg_ids: Sequence[Any] | None = None
    ) -> None:
        if msg_ids is None:
            raise ComponentError(
                "SpoutEden",
                "the source emits tuples without message ids",
                "Only a spout whose tuples are acked can be a source for replay.",
            )
        found = columns.columns if isinstance(columns, pa.RecordBatch) else columns
        if isinstance(found, Mapping):
            found = list(found.values())
        values = [to_values(column) if isinstance(column, pa.Array) else column for column in found]
        self._emitted.extend(zip(map(int, msg_ids), zip(*values, strict=True), strict=True))

    def emit_batch_direct(
        self, task: int, columns: Columns, stream: str = DEFAULT_STREAM, msg_ids: Sequence[Any] | None = None
    ) -> None:
        raise ComponentError(
            "SpoutEden", "the source calls emit_batch_direct, but it must have one plain stream", "Use emit_batch."
        )
