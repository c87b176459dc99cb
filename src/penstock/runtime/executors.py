"""The executors: run a task's spout or bolt for a moment at a time.

``run`` does at most about ``QUANTUM`` seconds of work and returns, so that the slot can look at its clock,
send what is due and serve the other tasks. How many calls fit is learnt from how long they took.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Generic, TypeVar

import pyarrow as pa

from penstock.clock import Clock
from penstock.columns import to_values
from penstock.errors import ComponentError, FrameError
from penstock.frames import codec
from penstock.metrics.stats import TaskStats
from penstock.runtime.collectors import (
    ArrowCollector,
    RichTupleCollector,
    SpoutTupleCollector,
    TupleCollector,
)
from penstock.runtime.failures import blame
from penstock.runtime.inbox import Inbox, Parcel
from penstock.runtime.outputs import StreamOutput
from penstock.topology.components import (
    BaseBolt,
    BaseSpout,
    BasicBolt,
    BatchBolt,
    BatchSpout,
    Component,
    Conf,
    Context,
    RichBolt,
    Source,
    Spout,
)
from penstock.topology.streams import Stream
from penstock.topology.tuples import TICK, Tuple, tuple_type

QUANTUM = 0.002  # seconds; the linger's order of magnitude: no more often is anything due
_MOST_CALLS = 4096  # between two looks at the clock, however short the calls

C = TypeVar("C", bound=Component)
Report = Callable[[Exception], None]


class Executor(ABC, Generic[C]):
    """One task: its component's instance, what it has emitted, what it has counted."""

    def __init__(
        self, component: C, context: Context, outputs: dict[str, StreamOutput], stats: TaskStats, clock: Clock
    ) -> None:
        self.component, self.context, self.outputs, self.stats = component, context, outputs, stats
        self._clock = clock
        self._buffers = list(outputs.values())
        self.waiting: Callable[[], int] = (
            self._buffers[0].waiting if len(self._buffers) == 1 else self._count_waiting
        )
        """Rows emitted and not yet sent. Asked after every ``next_tuple``, hence the short way for one."""
        self._calls = 16
        self.report: Report = self._raise

    @abstractmethod
    def open(self, conf: Conf) -> None:
        """Call the component's own ``open`` or ``prepare``."""

    @abstractmethod
    def run(self) -> bool:
        """Work for a moment. False: there was nothing to do."""

    @abstractmethod
    def close(self) -> None:
        """Call the component's own ``close`` or ``cleanup``."""

    def _count_waiting(self) -> int:
        return sum(buffer.waiting() for buffer in self._buffers)

    def flush(self, only_full: bool = False) -> None:
        for buffer in self._buffers:
            if not only_full or buffer.full():
                buffer.flush()

    def _guard(self, call: str, function: Callable[..., None], *args: Any) -> None:
        """Call user code; what it raises becomes an error that names the component."""
        try:
            function(*args)
        except Exception as error:  # user code may raise anything
            raise blame(self.context.component, call, error) from error

    def _note_birth(self, born: float) -> None:
        """What was just emitted stems from tuples that left their spout at ``born``."""
        for buffer in self._buffers:
            if buffer.waiting() and (buffer.born is None or buffer.born > born):
                buffer.born = born

    def _learn(self, calls: int, seconds: float) -> None:
        self.stats.busy += seconds
        fitting = int(calls * QUANTUM / seconds) if seconds > 0 else _MOST_CALLS
        self._calls = max(1, min(_MOST_CALLS, fitting, self._calls * 4))

    @staticmethod
    def _raise(error: Exception) -> None:
        raise error


class SpoutExecutor(Executor[BaseSpout]):
    """Calls ``next_tuple`` or ``next_batch`` while active."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.active = False
        self._done: list[Any] = []
        self._next: Callable[[], None]

    def open(self, conf: Conf) -> None:
        spout = self.component
        if isinstance(spout, Spout):
            collector = SpoutTupleCollector(self.context.component, self.outputs)
            self._next, self._done = spout.next_tuple, collector.done
            self._guard("open", spout.open, conf, self.context, collector)
        else:
            assert isinstance(spout, BatchSpout)
            self._next = spout.next_batch
            self._guard(
                "open", spout.open, conf, self.context, ArrowCollector(self.context.component, self.outputs)
            )

    def activate(self) -> None:
        if not self.active:
            self._guard("activate", self.component.activate)
            self.active = True

    def deactivate(self) -> None:
        if self.active:
            self._guard("deactivate", self.component.deactivate)
            self.active = False

    def run(self) -> bool:
        if not self.active:
            return False
        before = rows = self.waiting()
        calls = 0
        born = self._clock.now()
        started = self._clock.monotonic()
        next_tuple, waiting = self._next, self.waiting
        try:
            for calls in range(1, self._calls + 1):  # noqa: B007 - the number of calls made is used below
                next_tuple()
                after = waiting()
                if after == rows:
                    break
                rows = after
        except Exception as error:  # user code may raise anything
            self.report(blame(self.context.component, self._next.__name__, error))
        self._learn(max(calls, 1), self._clock.monotonic() - started)
        emitted = waiting() - before
        if emitted:
            self._note_birth(born)
            self.stats.executed += emitted
        if self._done:
            self._ack_sent()
        return emitted > 0

    def close(self) -> None:
        self._guard("close", self.component.close)

    def _ack_sent(self) -> None:
        """At most once a message is done when it is sent, as in Storm without ackers."""
        done = self._done[:]
        self._done.clear()
        for msg_id in done:
            try:
                self.component.ack(msg_id)
            except Exception as error:  # user code may raise anything; the next message is another matter
                self.report(blame(self.context.component, "ack", error))
        self.stats.acked += len(done)


class BoltExecutor(Executor[BaseBolt]):
    """Takes parcels from the inbox and executes them, a chunk of tuples or a whole batch at a time."""

    def __init__(
        self,
        component: BaseBolt,
        context: Context,
        outputs: dict[str, StreamOutput],
        stats: TaskStats,
        clock: Clock,
        inbox: Inbox,
        streams: tuple[Stream, ...],
        tick_interval: float | None,
    ) -> None:
        super().__init__(component, context, outputs, stats, clock)
        self.inbox = inbox
        self.frames_done = 0
        self._streams = streams
        self._schemas = [codec.declared_schema([(f.name, f.type) for f in s.fields]) for s in streams]
        self._expected: dict[tuple[int, int], int] = {}
        self._parcel: Parcel | None = None
        self._left = 0
        self._tuples: Iterator[Any] = iter(())
        self._plain = isinstance(component, BasicBolt) and component.plain_tuples
        self._execute: Callable[[Tuple], None]
        self._collector: ArrowCollector | None = None
        self.tick_interval = tick_interval
        self.next_tick: float | None = None

    @property
    def busy(self) -> bool:
        """A parcel is being executed or waits."""
        return self._parcel is not None or bool(self.inbox)

    @property
    def queued(self) -> int:
        return self.inbox.length + self._left

    def open(self, conf: Conf) -> None:
        bolt, component = self.component, self.context.component
        if isinstance(bolt, BatchBolt):
            self._collector = ArrowCollector(component, self.outputs)
            self._guard("prepare", bolt.prepare, conf, self.context)
        elif isinstance(bolt, RichBolt):
            self._execute = bolt.execute
            collector = RichTupleCollector(component, self.outputs, self.stats)
            self._guard("prepare", bolt.prepare, conf, self.context, collector)
        else:
            assert isinstance(bolt, BasicBolt)
            self._basic = TupleCollector(component, self.outputs)
            self._guard("prepare", bolt.prepare, conf, self.context)
        if self.tick_interval is not None:
            self.next_tick = self._clock.monotonic() + self.tick_interval

    def run(self) -> bool:
        if self._parcel is None and not self._begin():
            return False
        assert self._parcel is not None
        born = self._parcel.header.born
        if self._collector is not None:
            self._run_batch(self._parcel)
        else:
            self._run_chunk()
        self._note_birth(born)
        if not self._left:
            self.stats.latency.record(max(self._clock.now() - born, 0.0), self._parcel.header.rows)
            self.frames_done += not isinstance(self._parcel.content, pa.RecordBatch)
            self._parcel = None
        return True

    def tick(self) -> None:
        """Hand the bolt its tick tuple."""
        assert self.tick_interval is not None and self.next_tick is not None
        now = self._clock.monotonic()
        while self.next_tick <= now:  # ticks missed while the task was busy are not made up for
            self.next_tick += self.tick_interval
        born = self._clock.now()
        bolt = self.component
        try:
            if isinstance(bolt, BatchBolt):
                assert self._collector is not None
                bolt.tick(self._collector)
            elif isinstance(bolt, BasicBolt):
                bolt.execute(TICK, self._basic)
            else:
                self._execute(TICK)
        except Exception as error:  # user code may raise anything
            self.report(blame(self.context.component, "tick", error))
        self._note_birth(born)

    def close(self) -> None:
        self._guard("cleanup", self.component.cleanup)

    def _begin(self) -> bool:
        parcel = self.inbox.take()
        if parcel is None:
            return False
        header = parcel.header
        self.stats.received += header.rows
        self._parcel, self._left = parcel, header.rows
        self._check_sequence(parcel)
        if self._collector is None:
            batch = self._decode(parcel)
            stream = self._streams[header.stream]
            rows = zip(*map(to_values, batch.columns), strict=True)
            kind = tuple_type(stream.component, stream.name, header.source_task, stream.field_names)
            self._tuples = rows if self._plain else map(kind, rows)
        return True

    def _decode(self, parcel: Parcel) -> pa.RecordBatch:
        if isinstance(parcel.content, pa.RecordBatch):
            return parcel.content
        header = parcel.header
        try:
            return codec.decode(header, parcel.content, self._schemas[header.stream])
        except (FrameError, IndexError) as error:
            raise FrameError(
                f"component '{self.context.component}', task {self.context.task}",
                f"a frame from task {header.source_task} must decode",
                str(error),
                "All nodes must run the same versions of penstock and pyarrow.",
            ) from error

    def _check_sequence(self, parcel: Parcel) -> None:
        """Frames from one task to another arrive once and in order; anything else is an error to show."""
        if isinstance(parcel.content, pa.RecordBatch):
            return
        header = parcel.header
        key = (header.source_task, header.stream)
        expected = self._expected.get(key, 0)
        self._expected[key] = header.sequence + 1
        if header.sequence != expected:
            self.report(
                ComponentError(
                    f"component '{self.context.component}', task {self.context.task}",
                    f"frame {expected} from task {header.source_task} was next",
                    f"frame {header.sequence}",
                    "Frames were lost, doubled or overtaken on the way.",
                )
            )

    def _run_chunk(self) -> None:
        count = min(self._calls, self._left)
        chunk = islice(self._tuples, count)
        started = self._clock.monotonic()
        tup: Tuple | None = None
        bolt = self.component
        while True:
            try:
                if isinstance(bolt, BasicBolt):
                    execute, collector = bolt.execute, self._basic
                    for tup in chunk:
                        execute(tup, collector)
                else:
                    call = self._execute
                    for tup in chunk:
                        call(tup)
                break
            except Exception as error:  # user code may raise anything; the next tuple is another matter
                self.report(blame(self.context.component, "execute", error, tup))
        self._learn(count, self._clock.monotonic() - started)
        self._left -= count
        self.stats.executed += count

    def _run_batch(self, parcel: Parcel) -> None:
        header = parcel.header
        batch = self._decode(parcel)
        stream = self._streams[header.stream]
        bolt = self.component
        assert isinstance(bolt, BatchBolt) and self._collector is not None
        started = self._clock.monotonic()
        try:
            bolt.execute_batch(batch, Source(stream.component, stream.name, header.source_task), self._collector)
        except Exception as error:  # user code may raise anything
            self.report(blame(self.context.component, "execute_batch", error))
        self.stats.busy += self._clock.monotonic() - started
        self.stats.executed += header.rows
        self._left = 0
