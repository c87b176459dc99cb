"""Eden: the source above the spout, from which fresh tuples come.

``QueueEden`` and ``SpoutEden`` are here; a file's lines and a Kafka topic are in ``penstock.connectors``. A source
of your own is a subclass that can be read again from a position: that is all replay asks of it.
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
    """A source that remembers in ``Context.state`` how far it is done with. Made on the driver and pickled;
    ``open`` runs in the task's process. ``read`` and ``done`` are called by several threads, one at a time, the
    others by the task's own."""

    fields: tuple[FieldSpec, ...]
    """The fields of what it reads, as a spout declares them."""

    @abstractmethod
    def open(self, conf: Conf, context: Context) -> None:
        """Called in the task's process before anything else, and again after a ``close``: find the position in
        ``context.state``, or begin at the start where there is none."""

    @abstractmethod
    def read(self, limit: int) -> list[tuple[int, tuple[Any, ...]]]:
        """Up to ``limit`` tuples with their positions (whatever numbers ``done`` is to know them by); none when
        there is nothing now. Never blocks. In the place of one that cannot be read there may be a ``ReplayRecord``
        that is ``damaged``: it becomes a dead letter."""

    @abstractmethod
    def done(self, positions: Iterable[int]) -> None:
        """These tuples are done with: acked, or safely in another queue. In any order; the position passes one
        only when all before it are done."""

    @abstractmethod
    def before_snapshot(self) -> None:
        """As in ``Component``: bring the position in ``Context.state`` up to date. Also called before ``close``.
        Make it durable nowhere else: it holds when the epoch is committed, and not before."""

    def after_commit(self) -> None:  # noqa: B027 - most need nothing
        """As in ``Component``."""

    def lag(self) -> Mapping[str, int]:
        """As in ``BaseSpout``."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Let go of files and connections."""

    def store(self) -> ReplayStore:
        """Where the replay queues of this source are kept unless the spout is told otherwise."""
        return EmbeddedStore()


class QueueEden(Eden):
    """A ``DiskQueue`` that other programs append to. What committed epochs are done with is removed from it: its
    start, for a task without state or from an old savepoint, is the oldest record left.

    With several tasks each reads a queue of its own: the folder ``0``, ``1`` … below the given one.
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
        self._position.note()

    def after_commit(self) -> None:
        self._position.on_committed()

    def close(self) -> None:
        self._queue.close()


class SpoutEden(Eden):
    """Any batch spout as a source, if it emits with message ids, in numbers, and remembers how far it was acked.

    The spout sees an ack for all that is acked or safely in another queue, and no failure ever. Where it keeps its
    position in ``Context.state``, that becomes durable with the task's snapshots.
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
