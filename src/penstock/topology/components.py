"""The components a user writes: spouts and bolts, tuple at a time or in Arrow batches.

An instance is built on the driver, pickled, and unpickled once per task; ``open``/``prepare`` runs in the
task's process, where connections and state belong. All calls on one task come from one thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeAlias

import pyarrow as pa

from penstock.topology.streams import DEFAULT_STREAM, OutputDeclarer
from penstock.topology.tuples import Tuple

Conf: TypeAlias = Mapping[str, Any]
Columns: TypeAlias = pa.RecordBatch | Mapping[str, Any] | Sequence[Any]


@dataclass(frozen=True)
class Source:
    """Where the tuples of a batch come from."""

    component: str
    stream: str
    task: int


@dataclass(frozen=True)
class Context:
    """What a task knows of itself and its topology."""

    topology: str
    component: str
    task: int
    """The task's id, unique in the topology."""
    index: int
    """The task's position among its component's tasks, from 0."""
    tasks: Mapping[str, tuple[int, ...]]
    """Task ids of every component, lowest first."""
    node: str = ""
    publish: Callable[[Sequence[Sequence[Any]]], None] = field(default=lambda rows: None, compare=False)
    """Replace the rows this task shows in the live view. For a few rows a few times a second, not for data:
    only the newest rows of each report interval travel."""

    @property
    def parallelism(self) -> int:
        """How many tasks the component has."""
        return len(self.tasks[self.component])


class Collector(Protocol):
    """What a basic bolt emits with. Emitted tuples are anchored to the input, which is acked for it."""

    def emit(self, values: Sequence[Any], stream: str = DEFAULT_STREAM) -> None:
        """Emit one tuple: one value per field."""

    def emit_columns(self, *columns: Sequence[Any], stream: str = DEFAULT_STREAM) -> None:
        """Emit several tuples at once: one sequence of values per field, all of one length. The same as
        ``emit`` for each of them, with one call instead of many."""

    def emit_direct(self, task: int, values: Sequence[Any], stream: str = DEFAULT_STREAM) -> None:
        """Emit one tuple on a direct stream to the task of that id."""


class RichCollector(Protocol):
    """What a rich bolt emits with: anchors, acks and fails are its own affair."""

    def emit(
        self,
        values: Sequence[Any],
        stream: str = DEFAULT_STREAM,
        anchors: Tuple | Sequence[Tuple] | None = None,
    ) -> None:
        """Emit one tuple, anchored to none, one or many inputs."""

    def emit_direct(
        self,
        task: int,
        values: Sequence[Any],
        stream: str = DEFAULT_STREAM,
        anchors: Tuple | Sequence[Tuple] | None = None,
    ) -> None:
        """Emit one tuple on a direct stream to the task of that id."""

    def ack(self, tup: Tuple) -> None:
        """The tuple is done with."""

    def fail(self, tup: Tuple) -> None:
        """The tuple could not be processed."""


class SpoutCollector(Protocol):
    """What a spout emits with. A tuple without a message id is not tracked."""

    def emit(self, values: Sequence[Any], stream: str = DEFAULT_STREAM, msg_id: Any = None) -> None:
        """Emit one tuple."""

    def emit_direct(
        self, task: int, values: Sequence[Any], stream: str = DEFAULT_STREAM, msg_id: Any = None
    ) -> None:
        """Emit one tuple on a direct stream to the task of that id."""


class BatchCollector(Protocol):
    """What batch components emit with: whole columns."""

    def emit_batch(self, columns: Columns, stream: str = DEFAULT_STREAM) -> None:
        """Emit many tuples: a record batch, a mapping of field to column, or columns in field order.

        A column is an Arrow array or anything ``pyarrow.array`` takes.
        """

    def emit_batch_direct(self, task: int, columns: Columns, stream: str = DEFAULT_STREAM) -> None:
        """Emit many tuples on a direct stream to the task of that id."""


class Component(ABC):
    """What spouts and bolts share."""

    def declare_output_fields(self, declarer: OutputDeclarer) -> None:  # noqa: B027 - sinks declare nothing
        """Called once while the topology is built: declare each stream this component emits on."""


class BaseSpout(Component):
    """What the two forms of spout share."""

    def activate(self) -> None:
        """Called before the first ``next_tuple`` and whenever the topology is activated again."""

    def deactivate(self) -> None:
        """Called when the topology is deactivated; ``next_tuple`` is not called until ``activate``."""

    def close(self) -> None:
        """Called at a graceful end. Not guaranteed: a killed process calls nothing."""

    def ack(self, msg_id: Any) -> None:
        """The tuple of this message id has been processed in full (at least once and above)."""

    def fail(self, msg_id: Any) -> None:
        """The tuple of this message id failed or timed out (at least once and above)."""


class Spout(BaseSpout):
    """A source of tuples, one at a time."""

    def open(self, conf: Conf, context: Context, collector: SpoutCollector) -> None:
        """Called once in the task's process before anything else. Keep the collector."""

    @abstractmethod
    def next_tuple(self) -> None:
        """Emit one or a few tuples and return; never block. With nothing to emit just return:
        the next call comes about 1 ms later."""


class BatchSpout(BaseSpout):
    """A source of tuples in Arrow batches."""

    def open(self, conf: Conf, context: Context, collector: BatchCollector) -> None:
        """Called once in the task's process before anything else. Keep the collector."""

    @abstractmethod
    def next_batch(self) -> None:
        """Emit one batch (a few thousand tuples are a good size) and return; never block."""


class BaseBolt(Component):
    """What the three forms of bolt share."""

    tick_interval: ClassVar[float | None] = None
    """Seconds between tick tuples unless the topology says otherwise with ``set_tick_interval``."""

    def cleanup(self) -> None:
        """Called at a graceful end. Not guaranteed: a killed process calls nothing."""


class BasicBolt(BaseBolt):
    """The everyday bolt: what it emits is anchored to its input, and the input is acked for it."""

    plain_tuples: ClassVar[bool] = False
    """True: tuples arrive as plain Python tuples, without field names and source, and there are no ticks. Takes a
    third off the cost of a bolt that does very little with each tuple."""

    def prepare(self, conf: Conf, context: Context) -> None:
        """Called once in the task's process before the first tuple."""

    @abstractmethod
    def execute(self, tup: Tuple, collector: Collector) -> None:
        """Called for each tuple, in order per source task; also for tick tuples (``tup.is_tick``)."""


class RichBolt(BaseBolt):
    """A bolt that anchors, acks and fails on its own: for joins, windows and batching."""

    def prepare(self, conf: Conf, context: Context, collector: RichCollector) -> None:
        """Called once in the task's process before the first tuple. Keep the collector."""

    @abstractmethod
    def execute(self, tup: Tuple) -> None:
        """Called for each tuple, in order per source task; also for tick tuples (``tup.is_tick``)."""


class BatchBolt(BaseBolt):
    """A bolt that sees whole Arrow record batches: for speed."""

    def prepare(self, conf: Conf, context: Context) -> None:
        """Called once in the task's process before the first batch."""

    @abstractmethod
    def execute_batch(self, batch: pa.RecordBatch, source: Source, collector: BatchCollector) -> None:
        """Called for each batch; all its tuples come from one source task, in order."""

    def tick(self, collector: BatchCollector) -> None:
        """Called at the bolt's tick interval, if one is set: a batch bolt's tick tuple."""
