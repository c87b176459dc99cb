"""The executor of basic bolts. It records which emitted tuple stems from which input tuple, because a basic bolt
does not say."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from operator import length_hint
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.acking import lineage as lineages
from penstock.acking.flights import MadeRows, Trace
from penstock.acking.lineage import Lineage
from penstock.columns import ColumnBatch, values_of
from penstock.topology.components import BasicBolt, Conf
from penstock.topology.tuples import TICK
from penstock.worker.bolts import BoltExecutor, Remaining
from penstock.worker.collectors import TupleCollector
from penstock.worker.failures import USER_ERRORS, blame
from penstock.worker.flight_tracking import FlightOrigins

OnFailure = Callable[[BaseException, Any, int], None]
"""on_failure(error, tuple, row)"""


class BasicExecutor(BoltExecutor[BasicBolt]):
    """Runs a ``BasicBolt``: emitted tuples are anchored to the input tuple, which is acked when ``execute``
    returns and failed when it raises."""

    takes_columns = True

    def _open(self, conf: Conf) -> None:
        self._collector = TupleCollector(self.context.component, self.outputs)
        self._rows: Iterator[Any] = iter(())
        self._values: Iterator[Any] | Remaining = iter(())
        """Its length hint, the number of rows that are not yet read, tells which row is being executed."""
        self._groups_acked = 0
        self._lengths = [buffer.columns[0].__len__ for buffer in self._buffers]
        """Functions that return the number of waiting rows of each stream. They run in C."""
        self._guard("prepare", self.component.prepare, conf, self.context)

    def _tick(self) -> None:
        self.component.execute(TICK, self._collector)

    def _take(self, batch: pa.RecordBatch | ColumnBatch) -> None:
        columns = values_of(batch)
        if self.component.plain_tuples:
            first = iter(columns[0])
            self._rows, self._values = zip(first, *columns[1:], strict=True), first
        else:
            self._rows, self._values = self._tuples(columns)
        self._groups_acked = 0

    def _work(self) -> int:
        count = min(self._most_calls, self._left)
        chunk = islice(self._rows, count)
        lineage = self._lineage
        if lineage is None:
            self._execute(chunk)
        elif isinstance(lineage, Trace):
            self._execute_traced(chunk, lineage)
            if count == self._left and self.tracker is not None:
                self.tracker.ack(lineage)
        elif not self._buffers or len(lineage.ends) == 1:
            self._execute_as_one(chunk, lineage)
            self._ack_done(lineage, count)
        else:
            self._execute_marked(chunk, lineage)
            self._ack_done(lineage, count)
        return count

    def _execute(self, chunk: Iterable[Any]) -> None:
        execute, collector = self.component.execute, self._collector
        tup: Any = None
        while True:
            try:
                for tup in chunk:
                    execute(tup, collector)
                return
            except USER_ERRORS as error:  # user code may raise anything; continue with the next tuple
                blamed = blame(self.context.component, "execute", error, tup)
                self.report(blamed)
                self._add_dead_letter(tup, str(blamed))

    def _execute_marked(self, chunk: Iterable[Any], lineage: Lineage) -> None:
        """As ``_execute``, and record which input tuple each emitted row descends from."""
        begin = lineage.rows - self._left
        before = [length() for length in self._lengths]
        marks = self._mark(chunk, lambda error, tup, row: self._fail_row(error, tup, lineage, begin + row))
        groups = lineage.group_of_rows()[begin : begin + len(marks[0])]
        for buffer, start, ends in zip(self._buffers, before, marks, strict=True):
            if ends[-1] > start and buffer.origins is not None:
                sets = np.repeat(groups, np.diff(ends, prepend=start))
                buffer.origins.add(lineages.of_groups(lineage, sets), ends[-1])

    def _execute_traced(self, chunk: Iterable[Any], trace: Trace) -> None:
        """The same for flights."""
        begin = self._rows_taken - self._left

        def fail(error: BaseException, tup: Any, row: int) -> None:
            assert self.tracker is not None
            blamed = blame(self.context.component, "execute", error, tup)
            self.report(blamed)
            self.tracker.fail_row(trace, begin + row, str(blamed))

        if not self._buffers:
            self._execute_counted(chunk, lambda error, tup, row: fail(error, tup, row - begin))
            return
        before = [length() for length in self._lengths]
        marks = self._mark(chunk, fail)
        for buffer, start, ends in zip(self._buffers, before, marks, strict=True):
            rows = ends[-1] - start
            if rows:
                assert isinstance(buffer.origins, FlightOrigins)
                buffer.origins.add_trace(MadeRows(trace, begin, ends, start, rows), rows, ends[-1])

    def _mark(self, chunk: Iterable[Any], fail: OnFailure) -> list[list[int]]:
        """Execute tuples. Returns for each stream the number of waiting rows after each tuple, which tells which
        input tuple each emitted row descends from."""
        execute, collector = self.component.execute, self._collector
        marks: list[list[int]] = [[] for _ in self._lengths]
        notes = [(mark.append, length) for mark, length in zip(marks, self._lengths, strict=True)]
        note, length = notes[0]
        tup: Any = None
        while True:
            try:
                if len(notes) == 1:
                    for tup in chunk:
                        execute(tup, collector)
                        note(length())
                else:
                    for tup in chunk:
                        execute(tup, collector)
                        for note_, length_ in notes:
                            note_(length_())
                return marks
            except USER_ERRORS as error:  # user code may raise anything; continue with the next tuple
                fail(error, tup, len(marks[0]))
                for note_, length_ in notes:
                    note_(length_())

    def _execute_counted(self, chunk: Iterable[Any], fail: OnFailure) -> None:
        """Execute tuples without recording what they emit. ``fail`` is called with the row of the parcel."""
        execute, collector = self.component.execute, self._collector
        tup: Any = None
        while True:
            try:
                for tup in chunk:
                    execute(tup, collector)
                return
            except USER_ERRORS as error:  # user code may raise anything; continue with the next tuple
                fail(error, tup, self._rows_taken - length_hint(self._values) - 1)

    def _execute_as_one(self, chunk: Iterable[Any], lineage: Lineage) -> None:
        """As ``_execute_marked``, for rows that all have the same roots or a bolt without output. There is no
        need to record which row descends from which tuple."""
        before = [length() for length in self._lengths]
        self._execute_counted(chunk, lambda error, tup, row: self._fail_row(error, tup, lineage, row))
        for buffer, start in zip(self._buffers, before, strict=True):
            rows = buffer.waiting()
            if rows > start and buffer.origins is not None:
                buffer.origins.add(lineages.of_groups(lineage, np.zeros(rows - start, np.int64)), rows)

    def _ack_done(self, lineage: Lineage, count: int) -> None:
        assert self.tracker is not None
        done = int(np.searchsorted(lineage.ends, lineage.rows - self._left + count, "right"))
        if done > self._groups_acked:
            self.tracker.tally.add(lineage.entries(self._groups_acked, done))
            self._groups_acked = done

    def _fail_row(self, error: BaseException, tup: Any, lineage: Lineage, row: int) -> None:
        assert self.tracker is not None
        blamed = blame(self.context.component, "execute", error, tup)
        self.report(blamed)
        group = int(np.searchsorted(lineage.ends, row, "right"))
        entries = lineage.entries(group, group + 1)
        self.tracker.fail(entries.first, entries.length, str(blamed))
