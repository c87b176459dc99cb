"""Base classes of the components that users write: spouts and bolts, for single tuples or for Arrow batches.

An instance is created on the driver, pickled, and unpickled once per task. ``open`` or ``prepare`` runs in the
worker process of the task; create connections and state there. All methods of one task are called from one thread,
unless their documentation says otherwise.
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
    """The stream and the task that emitted the tuples of a batch."""

    component: str
    stream: str
    task: int
    range_offset: int = 0
    """Only if the bolt may be migrated: the tuples belong to a range of the tuples that ``task`` sent to this
    bolt. This is the position of the range, from any first position on."""
    range_length: int = 0
    """The number of tuples in the range, for all tasks of the bolt. 0 if it is not known."""


class AddDeadLetters(Protocol):
    """The type of ``Context.add_dead_letters``."""

    def __call__(
        self, rows: Sequence[Sequence[Any]], failure: Failure | Sequence[Failure], *, once: str = ""
    ) -> None:
        """Write dead letters.

        ``failure`` is one reason for all rows, or one per row. With ``once``, the new dead letters replace those
        that the task wrote earlier under the same name, even from an earlier process and even if ``rows`` is
        empty. Use it for work that is repeated after a restart, such as publishing an epoch. If two runs of the
        topology exist at the same time, the dead letters of the newer run are kept. Without ``once``, dead letters
        may be duplicated after a restart.
        """


@dataclass(frozen=True)
class Context:
    """What a task knows about itself and its topology. Passed to ``open`` or ``prepare``."""

    topology: str
    component: str
    task: int
    """The task's id, unique in the topology."""
    index: int
    """The position of the task among the tasks of its component, from 0."""
    tasks: Mapping[str, tuple[int, ...]]
    """The task ids of every component, lowest first."""
    node: str = ""
    delivery: str = "at_most_once"
    """The delivery guarantee of the topology (setting ``delivery.guarantee``)."""
    state: TaskState = field(default_factory=TaskState, compare=False)
    """The state of the task: values and maps. It survives the process, unless delivery is at most once."""
    folder: str = ""
    """A folder (a path or fsspec URL) of this task that survives the process. Empty with at-most-once delivery."""
    generation: int = 0
    """The generation of the run that this task belongs to, counted in the state directory: a later run has a
    larger number. A worker that moves to another process keeps its generation. 0 if the topology keeps no
    state."""
    shared: str = ""
    """A folder (a path or fsspec URL) that all tasks of the component share and that survives them, with every
    delivery guarantee. The task has to create it."""
    grouped_by: tuple[str, ...] = ()
    """The fields by which the input of the bolt is grouped. Empty if no input uses fields grouping."""
    inputs: tuple[tuple[str, str], ...] = ()
    """⟨Component, stream⟩ of every stream that the bolt reads."""
    waiting: Mapping[str, int] = field(default_factory=dict, compare=False)
    """Tuples of an earlier run that wait when the task begins: of its own under the name of its component, and of
    the components whose data may be migrated."""
    report: Callable[[Exception], None] = field(default=lambda error: None, compare=False)
    """Count a ``PenstockError`` and show it in the live view. For errors that do not concern a tuple. Never stops
    the topology, regardless of ``delivery.on_error``. May be called from any thread."""
    gave_up: Callable[[int], None] = field(default=lambda count: None, compare=False)
    """Count messages that a spout does not emit again, or rows that a sink rejects. Shown as ``given_up``."""
    late: Callable[[int], None] = field(default=lambda rows: None, compare=False)
    """Count tuples that arrived too late for their window."""
    add_dead_letters: AddDeadLetters = field(default=lambda rows, failure, *, once="": None, compare=False)
    """Write rows (values in the order of the fields) that the task gives up to the dead letters, with the reason.
    They are durable when the call returns, are counted, and are shown by ``penstock dlq``. Raises ``StateError``
    if they cannot be written. Call it from the thread of the task or from the thread that commits."""
    wake: Callable[[], None] = field(default=lambda: None, compare=False)
    """Ask for the next call of the spout at once. A spout that reads ahead on a thread of its own calls it when
    something has arrived; without it, the spout is asked again after ``transport.spout_pause``. May be called from
    any thread."""
    publish: Callable[[Sequence[Sequence[Any]]], None] = field(default=lambda rows: None, compare=False)
    """Replace the rows that this task shows in the live view. Intended for a few rows a few times per second, not
    for data: only the newest rows of each report interval are sent."""

    @property
    def parallelism(self) -> int:
        """The number of tasks of the component."""
        return len(self.tasks[self.component])


class Collector(Protocol):
    """Emits the output of a basic bolt. Emitted tuples are anchored to the input tuple, which is acked
    automatically."""

    def emit(self, values: Sequence[Any], stream: str = DEFAULT_STREAM) -> None:
        """Emit one tuple, with one value per field."""

    def emit_columns(self, *columns: Sequence[Any], stream: str = DEFAULT_STREAM) -> None:
        """Emit several tuples: one sequence of values per field, all of the same length. Equivalent to calling
        ``emit`` for each tuple, but cheaper."""

    def emit_direct(self, task: int, values: Sequence[Any], stream: str = DEFAULT_STREAM) -> None:
        """Emit one tuple on a direct stream to the task with this id."""


class RichCollector(Protocol):
    """Emits the output of a rich bolt. The bolt anchors, acks and fails its tuples itself."""

    def emit(
        self,
        values: Sequence[Any],
        stream: str = DEFAULT_STREAM,
        anchors: Tuple | Sequence[Tuple] | None = None,
    ) -> None:
        """Emit one tuple, anchored to any number of input tuples."""

    def emit_direct(
        self,
        task: int,
        values: Sequence[Any],
        stream: str = DEFAULT_STREAM,
        anchors: Tuple | Sequence[Tuple] | None = None,
    ) -> None:
        """Emit one tuple on a direct stream to the task with this id."""

    def ack(self, tup: Tuple) -> None:
        """Mark the tuple as processed."""

    def fail(self, tup: Tuple, error: str = "") -> None:
        """Mark the tuple as failed. ``error`` is the reason, which is passed to the spout and recorded in dead
        letters."""


@dataclass(frozen=True)
class Failure:
    """The reason why a tuple of a spout failed."""

    component: str
    """The component in which it failed. Empty for a time-out."""
    error: str
    attempts: int = 1
    handed_on: bool = False
    """The tuple did not fail. The topology is being replaced, and the new form reads the tuple again; or an acker
    was lost, and the spout must emit the tuple again. This is not an attempt."""


class SpoutCollector(Protocol):
    """Emits the output of a spout. A tuple without a message id is not tracked."""

    def emit(self, values: Sequence[Any], stream: str = DEFAULT_STREAM, msg_id: Any = None) -> None:
        """Emit one tuple. ``msg_id`` is passed to ``ack`` or ``fail`` of the spout later."""

    def emit_direct(
        self, task: int, values: Sequence[Any], stream: str = DEFAULT_STREAM, msg_id: Any = None
    ) -> None:
        """Emit one tuple on a direct stream to the task with this id."""

    def ready(self, stream: str = DEFAULT_STREAM) -> bool:
        """Return True if a tuple emitted on this stream is sent at once, False if it would be queued because a
        receiver is overloaded. A spout with several streams that checks this keeps the other streams at full rate.
        A spout that does not check is paused completely when too many tuples are queued."""


class BatchCollector(Protocol):
    """Emits the output of a batch bolt as whole columns."""

    def emit_batch(
        self, columns: Columns, stream: str = DEFAULT_STREAM, anchors: Sequence[int] | None = None
    ) -> None:
        """Emit many tuples: a record batch, a mapping of field to column, or columns in field order.

        A column is an Arrow array or anything that ``pyarrow.array`` accepts. ``anchors`` gives, for each tuple,
        the row of the input batch that it stems from. Without ``anchors``, every tuple is anchored to the whole
        batch. This costs less, but one failure then fails the whole batch.
        """

    def emit_batch_direct(
        self, task: int, columns: Columns, stream: str = DEFAULT_STREAM, anchors: Sequence[int] | None = None
    ) -> None:
        """Emit many tuples on a direct stream to the task with this id."""


class BatchSpoutCollector(Protocol):
    """Emits the output of a batch spout as whole columns."""

    def emit_batch(
        self, columns: Columns, stream: str = DEFAULT_STREAM, msg_ids: Sequence[Any] | None = None
    ) -> None:
        """Emit many tuples. ``msg_ids`` has one message id per tuple (a list, range or numpy array). Without it
        the tuples are not tracked. Ids in an array of int64 take the least memory while their tuples are open."""

    def emit_batch_direct(
        self, task: int, columns: Columns, stream: str = DEFAULT_STREAM, msg_ids: Sequence[Any] | None = None
    ) -> None:
        """Emit many tuples on a direct stream to the task with this id."""

    def ready(self, stream: str = DEFAULT_STREAM) -> bool:
        """As ``SpoutCollector.ready``."""

    def room(self, stream: str = DEFAULT_STREAM) -> int:
        """Return how many tuples the spout may emit now: within its limits, and at once."""


class Component(ABC):
    """Base class of all spouts and bolts."""

    def declare_output_fields(self, declarer: OutputDeclarer) -> None:  # noqa: B027 - sinks declare nothing
        """Declare each stream that this component emits on. Called once, on the driver, while the topology is
        built."""

    def cautions(self, where: str, delivery: str) -> Sequence[str]:
        """What users should know before the topology runs with this delivery guarantee, as sentences; shown by
        ``penstock plan`` and in the log at the start. Raises ``TopologyError`` if the component cannot keep the
        guarantee; ``where`` names the component. Called on the driver while the topology is built."""
        return ()

    def before_snapshot(self) -> None:  # noqa: B027 - most components keep their state in context.state at all times
        """Write everything that must survive into ``context.state``. Called immediately before a snapshot of the
        task's state."""

    def after_commit(self) -> None:  # noqa: B027 - only components that notify an external system need it
        """Called some time after a snapshot of this task became part of a committed epoch. The call is not
        guaranteed: a restart skips it."""


class BaseSpout(Component):
    """Base class of ``Spout`` and ``BatchSpout``."""

    def activate(self) -> None:
        """Called before the first ``next_tuple`` or ``next_batch``, and each time the topology is activated
        again."""

    def deactivate(self) -> None:
        """Called when the topology is deactivated. ``next_tuple`` is not called again before ``activate``."""

    def close(self) -> None:
        """Called at a graceful end. The call is not guaranteed: a killed process calls nothing."""

    def ack(self, msg_id: Any) -> None:
        """Called when the tuple with this message id is processed. At least once: all tuples derived from it were
        acked. Exactly once: its epoch is committed. At most once: it was sent."""

    def ack_many(self, msg_ids: Sequence[Any]) -> None:
        """Called with all message ids that were acked since the last call. Override it if the spout can ack many
        at once; the default calls ``ack`` for each. The ids are a list, or, if the spout emits all its ids as
        numpy arrays of int64, such an array."""
        for msg_id in msg_ids:
            self.ack(msg_id)

    def lag(self) -> Mapping[str, int]:
        """The number of records not yet read, per partition of the source, for status and metrics. Called a few
        times per second between calls of the other methods, and once after ``close``. Return known numbers and
        make no request to a server, because all tasks of the worker wait for the result."""
        return {}

    def fail(self, msg_id: Any, failure: Failure) -> None:
        """Called when the tuple with this message id failed or timed out (at-least-once delivery only). Emit it
        again or give it up. ``penstock.replay`` implements both."""

    def fail_many(self, msg_ids: Sequence[Any], failure: Failure) -> None:
        """Called with message ids that failed together, for the same reason. Override it if the spout can fail
        many at once; the default calls ``fail`` for each. The form of the ids is that of ``ack_many``."""
        for msg_id in msg_ids:
            self.fail(msg_id, failure)

    def settled(self) -> bool:
        """False while the spout is writing failed tuples to a queue of its own. True if another process of this
        task would find them: in the queue, or behind the position in ``Context.state``. Asked between calls of the
        other methods; must not wait. A spout that becomes settled by itself calls ``Context.wake``."""
        return True


class Spout(BaseSpout):
    """A spout that emits single tuples."""

    def open(self, conf: Conf, context: Context, collector: SpoutCollector) -> None:
        """Called once in the worker process, before all other methods. Keep the collector."""

    @abstractmethod
    def next_tuple(self) -> None:
        """Emit one or a few tuples and return; never block. If there is nothing to emit, return: the next call
        comes about 1 ms later."""


class BatchSpout(BaseSpout):
    """A spout that emits Arrow batches."""

    def open(self, conf: Conf, context: Context, collector: BatchSpoutCollector) -> None:
        """Called once in the worker process, before all other methods. Keep the collector."""

    @abstractmethod
    def next_batch(self) -> None:
        """Emit one batch and return; never block. A few thousand tuples per batch are a good size."""


class BaseBolt(Component):
    """Base class of all bolts."""

    tick_interval: float | None = None
    """Seconds between tick tuples, unless the topology overrides it with ``set_tick_interval``."""

    same_task: tuple[str, ...] = ()
    """Tuples with equal values in all these fields must reach the same task. If the bolt has several tasks, all
    its inputs must be grouped by the same subset of these fields, or globally. Empty: any tuple may reach any
    task."""

    reads: tuple[str, ...] = ()
    """Fields that every subscribed stream must have. Checked while the topology is built."""

    control_stream: ClassVar[str] = ""
    """The name of a stream that every task of this bolt gets from all components it reads which declare one of
    that name. The subscription, by all grouping, is made while the topology is built. It carries no data of keys,
    so the rules for the inputs of the bolt do not apply to it."""

    emits_partials: ClassVar[bool] = False
    """True: any task of this bolt may execute the tuples of a key, regardless of the grouping, because the bolt
    emits partials that downstream bolts merge (``penstock.aggregates.merges``), at once or behind further bolts of
    this kind. Data is migrated only between tasks of such bolts."""

    merges_partials: ClassVar[bool] = False
    """True: this bolt merges partials from any task in any order. The data of a bolt is migrated only if all its
    downstream bolts merge partials."""

    def cleanup(self) -> None:
        """Called at a graceful end. The call is not guaranteed: a killed process calls nothing."""


class BasicBolt(BaseBolt):
    """The usual base class of a bolt: emitted tuples are anchored to the input tuple, and the input tuple is acked
    automatically."""

    plain_tuples: ClassVar[bool] = False
    """True: tuples arrive as plain Python tuples, without field names and source, and there are no ticks. Saves
    about a third of the cost per tuple in a bolt that does very little with each."""

    def prepare(self, conf: Conf, context: Context) -> None:
        """Called once in the worker process, before the first tuple."""

    @abstractmethod
    def execute(self, tup: Tuple, collector: Collector) -> None:
        """Called for each tuple, in order per source task, and for each tick tuple (``tup.is_tick``)."""


class RichBolt(BaseBolt):
    """A bolt that anchors, acks and fails tuples itself: for joins, windows and batching."""

    def prepare(self, conf: Conf, context: Context, collector: RichCollector) -> None:
        """Called once in the worker process, before the first tuple. Keep the collector."""

    @abstractmethod
    def execute(self, tup: Tuple) -> None:
        """Called for each tuple, in order per source task, and for each tick tuple (``tup.is_tick``)."""


class BatchBolt(BaseBolt):
    """A bolt that processes whole Arrow record batches, for speed."""

    def prepare(self, conf: Conf, context: Context) -> None:
        """Called once in the worker process, before the first batch."""

    @abstractmethod
    def execute_batch(self, batch: pa.RecordBatch, source: Source, collector: BatchCollector) -> None:
        """Called for each batch. All its tuples come from one source task, in order."""

    def skip_batch(self, batch: pa.RecordBatch, source: Source, collector: BatchCollector) -> None:
        """Called instead of ``execute_batch`` for a batch that is dropped because all its tuples have timed out.
        The spouts emit them again."""

    def tick(self, collector: BatchCollector) -> None:
        """Called at the tick interval of the bolt, if one is set. Replaces the tick tuple."""


class TransactionalSink(BaseBolt):
    """A bolt that writes to an external system in two phases. ``prepare_commit`` makes the rows of an epoch
    durable but keeps them invisible; ``commit`` makes them visible after the epoch is committed.

    With exactly-once delivery the epochs are those of the topology. Otherwise each task commits independently,
    about every second, and its tuples are acked after the commit.

    A sink that cannot accept rows at the moment (a server is down, a disk is full) raises ``SinkBusy`` or an
    ``OSError`` from any method. The same call is then repeated, with growing pauses, until it succeeds; no tuple
    fails meanwhile. A sink that rejects rows permanently raises a ``ComponentError``. The rejected rows are then
    located by bisection and written to the dead letters, and the other rows are written to the sink. Any other
    exception may be caused by the system or by a row. It is treated as a temporary outage and retried, unless a
    single row fails again while other rows are accepted.
    """

    commit_interval: ClassVar[float] = 1.0
    """Seconds between the commits of a task, unless delivery is exactly once. Its tuples stay unacked for that
    long. 0: the task commits whenever its inbox is empty, for sinks with cheap commits."""

    def prepare(self, conf: Conf, context: Context) -> None:
        """Called in the worker process before all other methods: once at the start, and again after the sink
        reported an outage."""

    @abstractmethod
    def recover(self, tokens: Sequence[Any]) -> None:
        """Called after ``prepare`` and before the first ``write``. Commit these tokens, which an earlier process
        of this task prepared, and discard everything else that an earlier process prepared or wrote partially.
        Never remove anything that a newer generation (``context.generation``) has staged."""

    def ready(self) -> bool:
        """Return whether the sink accepts tuples now. While it returns False the inbox of the task fills up and
        backpressure slows the senders. Called every few milliseconds while it returns False."""
        return True

    @abstractmethod
    def write(self, batch: pa.RecordBatch, source: Source) -> None:
        """Add rows to the open transaction, all or none: if this method raises, it must not have added any row of
        the batch. Rows that the sink rejects permanently are located by bisection. Alternatively, pass them to
        ``context.add_dead_letters`` and write the rest."""

    @abstractmethod
    def prepare_commit(self, epoch: int) -> Any:
        """Make the rows written since the last call durable. Return a JSON token that identifies them to
        ``commit`` in this process or a later one, or None if there are no rows.

        ``epoch`` grows from call to call. If the method reports an outage, the rows stay in the transaction, and
        it is called again before the next ``write``. If it raises any other exception the transaction is
        discarded. The rows are then written again in smaller portions; with exactly-once delivery the topology
        restarts instead.
        """

    @abstractmethod
    def commit(self, token: Any) -> None:
        """Make the rows of the token visible. Must do nothing for a token that was committed before. With
        exactly-once delivery it is called from another thread than the other methods, concurrently with
        ``write``."""
