"""Executors of bolts: each takes parcels from its inbox and executes a chunk of tuples or a whole batch at a
time."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from operator import length_hint
from typing import Any, ClassVar, TypeVar

import numpy as np
import pyarrow as pa

from penstock.acking import lineage as lineages
from penstock.acking.flights import Trace
from penstock.acking.lineage import Lineage
from penstock.columns import ColumnBatch, to_values, values_of
from penstock.control.backpressure import OverloadDetector
from penstock.errors import FrameError, FramesLost, SinkRefused
from penstock.frames import codec
from penstock.frames.header import UNNUMBERED, Header
from penstock.topology.components import (
    BaseBolt,
    BatchBolt,
    Conf,
    RichBolt,
    Source,
)
from penstock.topology.streams import Stream
from penstock.topology.tuples import TICK, Tuple, rows_of, tuple_type
from penstock.worker.arrow_collectors import BoltArrowCollector
from penstock.worker.collectors import HeldTuples, RichTupleCollector
from penstock.worker.executor import Executor
from penstock.worker.failures import USER_ERRORS, blame
from penstock.worker.inbox import Inbox
from penstock.worker.parcel import Parcel
from penstock.worker.tracking import Ancestry

_TIMEOUT_SLACK = 1.0
"""Seconds added to the message timeout. The header of a frame carries the birth of its oldest tuple; its
youngest tuple may be that much younger."""

B = TypeVar("B", bound=BaseBolt)


class Remaining:
    """The rows of several iterators that are not yet read, as a length hint."""

    def __init__(self, parts: Sequence[Iterator[Any]]) -> None:
        self._parts = parts

    def __length_hint__(self) -> int:
        return sum(map(length_hint, self._parts))


class BoltExecutor(Executor[B]):
    """The part that is the same for all kinds of bolts. Used by the worker's loop only."""

    takes_columns: ClassVar[bool] = False
    """True: ``_take`` accepts a ``ColumnBatch``, with tuples of several senders."""
    in_batches: ClassVar[bool] = False
    """True: one call executes all tuples of a parcel."""

    def __init__(
        self,
        *args: Any,
        inbox: Inbox,
        streams: tuple[Stream, ...],
        tick_interval: float | None = None,
        overload_detector: OverloadDetector | None = None,
        timeout: float = math.inf,
    ) -> None:
        super().__init__(*args)
        self._timeout = timeout
        self._holds_timeouts = False
        self._timeouts_since = 0.0
        self.inbox = inbox
        self._overload_detector = overload_detector
        self.frames_done = 0
        self._streams = streams
        self._schemas = [codec.declared_schema([(f.name, f.type) for f in s.fields]) for s in streams]
        self.expected: dict[tuple[int, int], int] = {}
        """The number of the next frame, by sender and stream."""
        self.arrived_before: tuple[int, ...] = (0, 0)
        """Tuples and bytes that arrived before the task moved to this process."""
        self._parcel: Parcel | None = None
        self._lineage: Ancestry | None = None
        self._left = self._rows_taken = 0
        """Tuples of the current parcel: not executed yet, and all of them."""
        self._most_calls = 1
        """Calls in the current run, for executors that execute a part of a parcel."""
        self.tick_interval = tick_interval
        self.next_tick: float | None = None

    @property
    def busy(self) -> bool:
        """True while a parcel is being executed or waits in the inbox."""
        return self._parcel is not None or bool(self.inbox)

    def unfinished(self) -> tuple[Parcel, int] | None:
        """The parcel that is being executed, and how many of its tuples are executed. None if there is none."""
        return None if self._parcel is None else (self._parcel, self._rows_taken - self._left)

    @property
    def may_run(self) -> bool:
        """True if there is work, and flow control and the dead letter store accept its results."""
        return (
            self.busy
            and self._calls_permitted() > 0
            and (self.dead_letters is None or not self.dead_letters.waits)
        )

    @property
    def arrived_inside(self) -> tuple[int, int]:
        """Tuples and bytes that have entered the task's inbox, here and before the task moved to this process."""
        tuples, size = self.arrived_before
        return tuples + self.inbox.arrived - self.inbox.behind, size + self.inbox.arrived_bytes

    @property
    def queued(self) -> int:
        return self.inbox.length + self._left

    def open(self, conf: Conf) -> None:
        self._open(conf)
        if self.tick_interval is not None:
            self.next_tick = self._clock.monotonic() + self.tick_interval

    def run(self) -> bool:
        if self._parcel is None and not self.inbox:
            return False  # before the other checks, because it is asked most often
        permitted = self._calls_permitted()
        if not permitted or not self._store_dead_letters_if_full():
            return False
        self._most_calls = int(min(self._calls_per_run, permitted))
        if self._parcel is None:
            parcel = self.inbox.take()
            if parcel is None:
                return False
            self._begin(parcel)
            if self._is_timed_out(parcel.header):
                self.stats.expired += parcel.header.rows
                self._skip(parcel)
                if isinstance(self._lineage, Trace):
                    self._lineage.lose()
                self._end()
                return True
            self._take(self._decode(parcel))
        assert self._parcel is not None
        header = self._parcel.header
        self.timer.start()
        done = self._work()
        self._learn(done, self.timer.stop(1 if self.in_batches else done))
        self._left -= done
        self.inbox.executing = self._left
        self.stats.executed += done
        self._executed += done
        self._note_birth(header.born)
        if not self._left:
            self.stats.latency.record(max(self._clock.now() - header.born, 0.0), header.rows)
            self._end()
        return True

    def tick(self) -> None:
        """Execute the bolt's tick tuple. Raises ``SinkRefused``; other errors of user code are reported."""
        assert self.tick_interval is not None and self.next_tick is not None
        now = self._clock.monotonic()
        while self.next_tick <= now:  # ticks missed while the task was busy are skipped
            self.next_tick += self.tick_interval
        born = self._clock.now()
        try:
            self._tick()
        except SinkRefused:
            raise
        except USER_ERRORS as error:  # user code may raise anything
            self.report(blame(self.context.component, "tick", error))
        self._note_birth(born)

    def hold_timeouts(self, held: bool) -> None:
        """While ``held``, no tuple counts as timed out. When the hold ends, the timeout of every tuple starts
        again."""
        if self._holds_timeouts and not held:
            self._timeouts_since = self._clock.now()
        self._holds_timeouts = held

    def close(self) -> None:
        self._guard("cleanup", self.component.cleanup)

    # ---- implemented by each kind of bolt --------------------------------------------------------------

    @abstractmethod
    def _open(self, conf: Conf) -> None:
        """Create the collector and call the component's ``prepare``."""

    @abstractmethod
    def _take(self, batch: Any) -> None:
        """Accept the tuples of the next parcel."""

    @abstractmethod
    def _work(self) -> int:
        """Execute some tuples of the current parcel and return how many."""

    def _tick(self) -> None: ...

    def _skip(self, parcel: Parcel) -> None:
        """The current parcel is dropped, because all its tuples have timed out."""

    # ---- shared ----------------------------------------------------------------------------------------

    def _begin(self, parcel: Parcel) -> None:
        header = parcel.header
        self.stats.received += header.rows
        self.stats.received_bytes += parcel.bytes
        if self._overload_detector is not None and header.sequence != UNNUMBERED:
            self._overload_detector.record_consumed(header.source_task, header.rows)
        self._parcel, self._left, self._rows_taken = parcel, header.rows, header.rows
        self.inbox.executing = header.rows
        self._check_sequence(parcel)
        self._lineage = parcel.lineage
        if self.tracker is not None and header.lineage_bytes and isinstance(parcel.content, pa.Buffer):
            self._lineage = lineages.unpack(codec.lineage_of(header, parcel.content), self.tracker.key)

    def _end(self) -> None:
        assert self._parcel is not None
        self.frames_done += self._parcel.is_numbered
        self._parcel = self._lineage = None
        self._left = self.inbox.executing = 0

    def _is_timed_out(self, header: Header) -> bool:
        """True if every tuple of the parcel descends from roots that have timed out. The spouts emit them again,
        so executing the tuples now would only delay the following ones."""
        lineage = self._lineage
        if lineage is None or self._holds_timeouts:
            return False
        if self._clock.now() - max(header.born, self._timeouts_since) < self._timeout + _TIMEOUT_SLACK:
            return False
        if isinstance(lineage, Trace):
            return lineage.tracked
        return len(np.unique(lineage.group)) == len(lineage.ends)  # no tuple is untracked

    def _source(self) -> Source:
        assert self._parcel is not None
        header = self._parcel.header
        stream = self._streams[header.stream]
        return Source(stream.component, stream.name, header.source_task, header.range_offset, header.range_length)

    def _tuples(
        self, columns: Sequence[list[Any]], held: bool = False
    ) -> tuple[Iterator[Tuple], Iterator[Any] | Remaining]:
        """The rows of the parcel as tuples, each of which knows its sender, and an object whose length hint is the
        number of rows that are not yet read."""
        assert self._parcel is not None
        header, sources = self._parcel.header, self._parcel.sources
        stream = self._streams[header.stream]

        def kind(task: int) -> type[Tuple]:
            return tuple_type(stream.component, stream.name, task, stream.field_names, held)

        if not sources:
            return rows_of(kind(header.source_task), columns)
        parts = []
        begin = 0
        for task, count in sources:
            parts.append(rows_of(kind(task), [column[begin : begin + count] for column in columns]))
            begin += count
        return chain.from_iterable(rows for rows, _ in parts), Remaining([left for _, left in parts])

    def _ack_all(self) -> None:
        if self._lineage is not None and self.tracker is not None:
            self.tracker.ack(self._lineage)

    def _fail_all(self, error: Exception) -> None:
        if self._lineage is not None and self.tracker is not None:
            self.tracker.fail_all(self._lineage, self._rows_taken, str(error))

    def _decode(self, parcel: Parcel) -> pa.RecordBatch | ColumnBatch:
        """The tuples of a parcel; as columns only if the sender knows that the executor ``takes_columns``."""
        if not isinstance(parcel.content, pa.Buffer):
            return parcel.content
        header = parcel.header
        try:
            return codec.decode(header, parcel.content, self._schemas[header.stream])
        except (FrameError, IndexError) as error:
            raise FrameError(
                f"component '{self.context.component}', task {self.context.task}",
                f"a frame from task {header.source_task} cannot be decoded: {error}",
                "All nodes must run the same versions of Penstock and pyarrow.",
            ) from error

    def _check_sequence(self, parcel: Parcel) -> None:
        """Check that frames from one task arrive once and in order. With exactly-once delivery a violation is
        raised, because an epoch with missing tuples must not be committed. Otherwise it is only reported: with
        at-least-once delivery the lost tuples time out and are emitted again."""
        if not parcel.is_numbered:
            return
        header = parcel.header
        key = (header.source_task, header.stream)
        expected = self.expected.get(key, 0)
        self.expected[key] = header.sequence + 1
        if header.sequence != expected:
            error = FramesLost(
                f"component '{self.context.component}', task {self.context.task}",
                f"frame {header.sequence} from task {header.source_task} arrived where frame {expected} was next",
                "Frames were lost, duplicated or reordered in transit.",
            )
            if self.context.delivery == "exactly_once":
                raise error
            self.report(error)


class RichExecutor(BoltExecutor[RichBolt]):
    """Runs a ``RichBolt``, which anchors, acks and fails tuples itself. A tuple whose ``execute`` raises is
    failed."""

    takes_columns = True

    def _open(self, conf: Conf) -> None:
        self._rows: Iterator[Tuple] = iter(())
        self._collector = RichTupleCollector(
            self.context.component, self.outputs, self.stats, self.tracker, self._add_dead_letter
        )
        self._guard("prepare", self.component.prepare, conf, self.context, self._collector)

    def _tick(self) -> None:
        self.component.execute(TICK)

    def _take(self, batch: pa.RecordBatch | ColumnBatch) -> None:
        columns = values_of(batch)
        if self._lineage is None or self.tracker is None:
            self._rows, _ = self._tuples(columns)
        else:
            assert isinstance(self._lineage, Lineage), "a worker with rich bolts keeps no flights"
            self._rows = HeldTuples(self._lineage, self.tracker).mark(self._tuples(columns, held=True)[0])

    def _work(self) -> int:
        count = min(self._most_calls, self._left)
        chunk = islice(self._rows, count)
        execute = self.component.execute
        tup: Tuple | None = None
        while True:
            try:
                for tup in chunk:
                    execute(tup)
                return count
            except USER_ERRORS as error:  # user code may raise anything; continue with the next tuple
                blamed = blame(self.context.component, "execute", error, tup)
                self.report(blamed)
                assert tup is not None
                self._collector.fail(tup, str(blamed))


class BatchExecutor(BoltExecutor[BatchBolt]):
    """Runs a ``BatchBolt``: one call for each parcel, which is acked when ``execute_batch`` returns and failed
    when it raises."""

    in_batches = True

    def _open(self, conf: Conf) -> None:
        self._batch: pa.RecordBatch | None = None
        self._collector = BoltArrowCollector(self.context.component, self.outputs)
        self._guard("prepare", self.component.prepare, conf, self.context)

    def _tick(self) -> None:
        self._collector.begin(None)
        self.component.tick(self._collector)

    def _take(self, batch: pa.RecordBatch) -> None:
        self._batch = batch

    def _skip(self, parcel: Parcel) -> None:
        self._collector.begin(None)
        try:
            self.component.skip_batch(self._decode(parcel), self._source(), self._collector)
        except USER_ERRORS as error:  # user code may raise anything
            self.report(blame(self.context.component, "skip_batch", error))

    def _work(self) -> int:
        self._collector.begin(self._lineage, self._rows_taken)
        try:
            self.component.execute_batch(self._batch, self._source(), self._collector)
        except USER_ERRORS as error:  # user code may raise anything
            blamed = blame(self.context.component, "execute_batch", error)
            self.report(blamed)
            self._fail_all(blamed)
            if self.dead_letters is not None and self._batch is not None:
                for values in zip(*map(to_values, self._batch.columns), strict=True):
                    self._add_dead_letter(values, str(blamed))
        self._ack_all()
        self._batch = None
        return self._left
