"""Spouts that emit given rows, and a bolt that keeps the tuples it receives."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from penstock.topology.components import BasicBolt, Collector, Conf, Context, Failure, Spout, SpoutCollector
from penstock.topology.streams import FieldSpec, OutputDeclarer
from penstock.topology.tuples import Tuple


class FeederSpout(Spout):
    """Emits the rows passed to it, then the rows that the test feeds it through the runner.

    With several tasks, row i of the initial rows is emitted by task i mod the number of tasks.
    """

    def __init__(self, *fields: FieldSpec, rows: Iterable[Sequence[Any]] = ()) -> None:
        self._fields = fields
        self._rows = deque(rows)
        self.acked: list[Any] = []
        self.failed: list[Any] = []

    def declare_output_fields(self, declarer: OutputDeclarer) -> None:
        declarer.declare(*self._fields)

    def open(self, conf: Conf, context: Context, collector: SpoutCollector) -> None:
        self._collector = collector
        self._rows = deque(list(self._rows)[context.index :: context.parallelism])

    def feed(self, rows: Iterable[Sequence[Any]]) -> None:
        """Add rows; each ``next_tuple`` emits one. The message id of a row is the row itself."""
        self._rows.extend(rows)

    def next_tuple(self) -> None:
        if self._rows:
            row = self._rows.popleft()
            self._collector.emit(row, msg_id=tuple(row))

    def ack(self, msg_id: Any) -> None:
        self.acked.append(msg_id)

    def fail(self, msg_id: Any, failure: Failure) -> None:
        self.failed.append(msg_id)


class NumberSpout(Spout):
    """Emits ⟨task, n⟩ for n = 0, 1, 2 … ``count`` - 1 in each task, so that a receiver can detect loss, duplicates
    and reordering."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._next = 0

    def declare_output_fields(self, declarer: OutputDeclarer) -> None:
        declarer.declare(("task", int), ("n", int))

    def open(self, conf: Conf, context: Context, collector: SpoutCollector) -> None:
        self._task, self._collector = context.task, collector

    def next_tuple(self) -> None:
        if self._next < self._count:
            self._collector.emit((self._task, self._next))
            self._next += 1


class CaptureBolt(BasicBolt):
    """Keeps every tuple it receives, in order. ``LocalRunner.captured`` returns them."""

    def __init__(self) -> None:
        self.tuples: list[Tuple] = []

    def execute(self, tup: Tuple, collector: Collector) -> None:
        self.tuples.append(tup)
