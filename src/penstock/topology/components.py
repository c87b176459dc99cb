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

from penstock.state.values import TaskState
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


class AddDeadLetters(Protocol):
    """The type of ``Context.add_dead_letters``."""

    def __call__(
        self, rows: Sequence[Sequence[Any]], failure: Failure | Sequence[Failure], *, once: str = ""
    ) -> None:
        """``failure``: of all rows, or one for each. ``once``: dead letters that the task added earlier under the
        same name are replaced, also by a later process, and also by no rows: for what is done again after a
        restart, such as the publishing of an epoch. Of two starts at a time, the dead letters of the newer one
        hold. Without it, dead letters may be there twice after a restart."""


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
    delivery: str = "at_most_once"
    """The topology's level of guarantee, as in the setting of that name."""
    state: TaskState = field(default_factory=TaskState, compare=False)
    """The task's state: values and maps that survive the process, at least once and exactly once."""
    folder: str = ""
    """A folder (a path or fsspec URL) of this task's own that survives the process; empty at most once."""
    generation: int = 0
    """Which start of the topology this task belongs to, by the state directory's count: a later start has a larger
    number. A worker that moves to another process keeps it. 0 where no state is kept."""
    shared: str = ""
    """A folder (a path or fsspec URL) that all tasks of the component share and that survives them, at every
    level. Not made yet."""
    grouped_by: tuple[str, ...] = ()
    """The fields of its input that a bolt's tuples are grouped by; empty without fields grouping."""
    report: Callable[[Exception], None] = field(default=lambda error: None, compare=False)
    """Show a ``PenstockError`` in the live view and count it: for what goes wrong beside the tuples. Never stops
    the topology, whatever ``delivery.on_error`` says. May be called from any thread."""
    gave_up: Callable[[int], None] = field(default=lambda count: None, compare=False)
    """Count messages that a spout does not emit again, or rows that a sink rejects: shown as ``given_up``."""
    late: Callable[[int], None] = field(default=lambda rows: None, compare=False)
    """Count so many tuples as too late for a window."""
    add_dead_letters: AddDeadLetters = field(default=lambda rows, failure, *, once="": None, compare=False)
    """Keep rows (values in the order of the fields) that are given up, with the reason: durable on return,
    counted, shown by ``penstock dlq``. Raises ``StateError`` where they cannot be kept. From the task's own thread
    or the one that commits."""
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

    def fail(self, tup: Tuple, error: str = "") -> None:
        """The tuple could not be processed; ``error`` says why, for the spout and its dead letters."""


@dataclass(frozen=True)
class Failure:
    """Why a spout's tuple failed."""

    component: str
    """Where it failed; empty for a time-out."""
    error: str
    attempts: int = 1


class SpoutCollector(Protocol):
    """What a spout emits with. A tuple without a message id is not tracked."""

    def emit(self, values: Sequence[Any], stream: str = DEFAULT_STREAM, msg_id: Any = None) -> None:
        """Emit one tuple."""

    def emit_direct(
        self, task: int, values: Sequence[Any], stream: str = DEFAULT_STREAM, msg_id: Any = None
    ) -> None:
        """Emit one tuple on a direct stream to the task of that id."""

    def ready(self, stream: str = DEFAULT_STREAM) -> bool:
        """What is emitted on this stream now leaves at once. False: a receiver is overloaded and it would wait.
        A spout with several streams that asks keeps the others at their rate; one that does not ask is held back
        as a whole once too much waits."""


class BatchCollector(Protocol):
    """What a batch bolt emits with: whole columns."""

    def emit_batch(
        self, columns: Columns, stream: str = DEFAULT_STREAM, anchors: Sequence[int] | None = None
    ) -> None:
        """Emit many tuples: a record batch, a mapping of field to column, or columns in field order.

        A column is an Arrow array or anything ``pyarrow.array`` takes. ``anchors`` names for each tuple the
        row of the input batch it stems from; without it each stems from the whole batch, which costs less
        to track, and one failure then fails the whole batch.
        """

    def emit_batch_direct(
        self, task: int, columns: Columns, stream: str = DEFAULT_STREAM, anchors: Sequence[int] | None = None
    ) -> None:
        """Emit many tuples on a direct stream to the task of that id."""


class BatchSpoutCollector(Protocol):
    """What a batch spout emits with: whole columns."""

    def emit_batch(
        self, columns: Columns, stream: str = DEFAULT_STREAM, msg_ids: Sequence[Any] | None = None
    ) -> None:
        """Emit many tuples; ``msg_ids`` has a message id for each (a list, range or numpy array). Without it
        they are not tracked."""

    def emit_batch_direct(
        self, task: int, columns: Columns, stream: str = DEFAULT_STREAM, msg_ids: Sequence[Any] | None = None
    ) -> None:
        """Emit many tuples on a direct stream to the task of that id."""

    def ready(self, stream: str = DEFAULT_STREAM) -> bool:
        """What is emitted on this stream now leaves at once. False: a receiver is overloaded and it would wait.
        A spout with several streams that asks keeps the others at their rate; one that does not ask is held back
        as a whole once too much waits."""


class Component(ABC):
    """What spouts and bolts share."""

    def declare_output_fields(self, declarer: OutputDeclarer) -> None:  # noqa: B027 - sinks declare nothing
        """Called once while the topology is built: declare each stream this component emits on."""

    def before_snapshot(self) -> None:  # noqa: B027 - most keep their state in context.state at all times
        """Called just before the task's state is snapshotted: bring ``context.state`` up to date."""

    def after_commit(self) -> None:  # noqa: B027 - of use to those that tell an outside system
        """Called some time after a snapshot of this task became part of a committed epoch. Not guaranteed:
        a restart skips it."""


class BaseSpout(Component):
    """What the two forms of spout share."""

    def activate(self) -> None:
        """Called before the first ``next_tuple`` and whenever the topology is activated again."""

    def deactivate(self) -> None:
        """Called when the topology is deactivated; ``next_tuple`` is not called until ``activate``."""

    def close(self) -> None:
        """Called at a graceful end. Not guaranteed: a killed process calls nothing."""

    def ack(self, msg_id: Any) -> None:
        """The tuple of this message id is done with. At least once: all that came of it was acked. Exactly
        once: its epoch is committed. At most once: it was sent."""

    def ack_many(self, msg_ids: Sequence[Any]) -> None:
        """``ack`` for each; a spout with a quicker way for many overrides it."""
        for msg_id in msg_ids:
            self.ack(msg_id)

    def lag(self) -> Mapping[str, int]:
        """How many records of each partition of the source have not been read yet, by the partition's name; for
        status and metrics. Called a few times a second by another thread than the rest: return numbers that are
        at hand, and ask no server."""
        return {}

    def fail(self, msg_id: Any, failure: Failure) -> None:
        """The tuple of this message id failed or timed out (at least once only). Emit it again, or give it up;
        ``penstock.replay`` does both."""


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

    def open(self, conf: Conf, context: Context, collector: BatchSpoutCollector) -> None:
        """Called once in the task's process before anything else. Keep the collector."""

    @abstractmethod
    def next_batch(self) -> None:
        """Emit one batch (a few thousand tuples are a good size) and return; never block."""


class BaseBolt(Component):
    """What the three forms of bolt share."""

    tick_interval: float | None = None
    """Seconds between tick tuples unless the topology says otherwise with ``set_tick_interval``."""

    same_task: tuple[str, ...] = ()
    """Tuples that agree in all these fields must come to the same task. Then, with several tasks, all inputs are
    grouped by the same of these fields, or globally. Empty: any tuple may come to any task."""

    reads: tuple[str, ...] = ()
    """Fields that every stream this bolt subscribes to must have: checked while the topology is built."""

    emits_partials: ClassVar[bool] = False
    """True: tuples of one key may be executed by any task of this bolt, whatever the grouping, because what it
    emits is partials that the bolts behind it merge (``penstock.aggregates.merges``). Only such bolts are ever
    migrated."""

    merges_partials: ClassVar[bool] = False
    """True: this bolt merges partials, from any task, in any order. Migration towards a bolt needs it of all bolts
    behind that one."""

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


class TransactionalSink(BaseBolt):
    """The end of a stream in an outside system, in two phases: what was written in an epoch is made durable
    but stays invisible (``prepare_commit``), and becomes visible once the epoch is committed (``commit``).

    Exactly once an epoch is the topology's. Otherwise each task commits on its own, about every second, and its
    tuples are acked when that is done.

    A sink that cannot take anything now (a server that is down, a full disk) raises ``SinkBusy`` or an
    ``OSError``, from any call: the same call is made again, with growing pauses, until it succeeds. No tuple fails
    meanwhile. A sink that rejects rows for good raises a ``ComponentError``: which rows it means is found by
    halving, they go to the dead letters, and the rest is written. Any other exception may be about the system or
    about a row. It counts as away, and is waited for, unless a row alone fails again while other rows are
    taken."""

    commit_interval: ClassVar[float] = 1.0
    """Seconds between a task's own commits, other than exactly once; its tuples stay unacked for so long. 0: it
    commits whenever no more tuples wait for it, for sinks whose commit takes a moment only."""

    def prepare(self, conf: Conf, context: Context) -> None:
        """Called in the task's process before anything else: once, and again after it said that it is away."""

    @abstractmethod
    def recover(self, tokens: Sequence[Any]) -> None:
        """Called after ``prepare``, before the first ``write``: commit these, which an earlier process of this
        task prepared, and drop whatever else an earlier process prepared or left half written. Never remove what a
        newer start (``context.generation``) has staged."""

    def ready(self) -> bool:
        """Whether the sink takes tuples now. While it does not its inbox fills, and backpressure does the rest;
        it is asked again every few milliseconds."""
        return True

    @abstractmethod
    def write(self, batch: pa.RecordBatch, source: Source) -> None:
        """Take rows into the open transaction, all or none: what raises took nothing of the batch. Rows that are
        rejected for good are found by halving; or give them to ``context.add_dead_letters`` and take the rest."""

    @abstractmethod
    def prepare_commit(self, epoch: int) -> Any:
        """Make what was written since the last call durable and return a token (JSON) that ``commit`` will know
        it by, in this process or a later one; None where there is nothing. Epochs grow from call to call. Where
        it says that it is away the rows stay in the transaction: it is called again, and ``write`` not before
        that. Where it raises anything else the transaction is dropped: other than exactly once its rows are
        written again, in parts, and exactly once the topology starts again."""

    @abstractmethod
    def commit(self, token: Any) -> None:
        """Make it visible. May be called again with a token that was committed before: then it does nothing.
        Exactly once it is called from another thread than the rest, while ``write`` goes on."""
