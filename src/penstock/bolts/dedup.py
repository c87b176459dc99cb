"""A bolt that drops duplicate tuples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np
import pyarrow as pa

from penstock.bolts.recent_keys import RecentKeys, join
from penstock.errors import ComponentError, TopologyError
from penstock.topology.components import BatchBolt, BatchCollector, Conf, Context, Source
from penstock.topology.hashing import hash_fields
from penstock.topology.streams import FieldSpec, OutputDeclarer

_TICKS = 16  # minimum number of ticks per period: a restart extends the period by at most one tick
_LONGEST_TICK = 1.0  # seconds; with longer periods a restart extends the period by at most this time


class DedupBolt(BatchBolt):
    """Passes tuples on unchanged, except those whose fields ``by`` were seen in the last ``period`` seconds.

    ``fields`` are the fields of its input, with their types if declared; ``by`` are the fields that are compared,
    by default all. With several tasks the input must be grouped by fields of ``by``; this is checked when the
    topology is built.

    The bolt remembers hashes in Bloom filters. Its memory is therefore bounded, and **a new tuple is dropped with
    a probability of up to** ``error_rate``. ``capacity`` is the number of distinct keys that a task receives in a
    period; if there are more, the bolt forgets keys earlier and keeps the error rate. A key is remembered for one
    to two periods of the topology's running time, counted from the tuple that passed. A million keys at an error
    rate of 0.001 take 4 MB: two filters of 2 MB.

    With at-least-once and exactly-once delivery the loss of tuples must be allowed explicitly with ``lossy=True``.
    With at-least-once delivery more tuples are lost: a tuple that failed downstream of this bolt is emitted again
    and dropped. The number of dropped tuples and the estimated error rate are shown in the live view.

    The bolt measures time by ticks, so its tick interval must not be changed.
    """

    def __init__(
        self,
        *fields: FieldSpec,
        by: str | Sequence[str] | None = None,
        period: float = 600.0,
        capacity: int = 1_000_000,
        error_rate: float = 0.001,
        lossy: bool = False,
    ) -> None:
        names = [field if isinstance(field, str) else field[0] for field in fields]
        self._fields = fields
        self.same_task = tuple(names if by is None else [by] if isinstance(by, str) else by)
        self._period, self._capacity, self._error_rate, self._lossy = period, capacity, error_rate, lossy
        self._check(names)
        self.tick_interval = period / max(_TICKS, math.ceil(period / _LONGEST_TICK))

    def declare_output_fields(self, declarer: OutputDeclarer) -> None:
        declarer.declare(*self._fields)

    def prepare(self, conf: Conf, context: Context) -> None:
        if context.delivery != "at_most_once" and not self._lossy:
            raise self._refused(context)
        self._anchored = context.delivery == "at_least_once"
        self._publish = context.publish
        self.memory = RecentKeys(self._capacity, self._error_rate)
        state, merge = context.state, partial(join, self._capacity)
        # With keys: a new task must know the keys that its predecessors have seen.
        self._by = state.value("seen by", None, with_keys=True)
        self._now = state.value("seen now", (), merge, with_keys=True)
        self._before = state.value("seen before", (), merge, with_keys=True)
        self._age = state.value("seconds into the period", 0.0, max, with_keys=True)
        self._counts = state.value("seen, dropped, early", (0, 0, 0), _add)
        if self._by.value in (None, self.same_task):
            self.memory.thaw(self._now.value, self._before.value)
        else:  # the hashes were computed from other fields
            self._now.value = self._before.value = ()
        self._by.value = self.same_task
        self.seen, self.dropped, self.memory.early = self._counts.value
        self._show()

    def execute_batch(self, batch: pa.RecordBatch, source: Source, collector: BatchCollector) -> None:
        for field in self.same_task:
            self._check_field(batch, field)
        new = self.memory.new(hash_fields(batch, self.same_task))
        passed = int(new.sum())
        self.seen += batch.num_rows
        self.dropped += batch.num_rows - passed
        if passed < batch.num_rows:
            rows = np.flatnonzero(new)
            batch = batch.take(pa.array(rows))
            collector.emit_batch(batch, anchors=rows.tolist() if self._anchored else None)
        else:
            collector.emit_batch(batch, anchors=range(passed) if self._anchored else None)
        self._show()

    def tick(self, collector: BatchCollector) -> None:
        assert self.tick_interval is not None
        self._age.value += self.tick_interval
        if self._age.value > self._period - self.tick_interval / 2:
            self._age.value = 0.0
            self.memory.rotate()
        self._show()

    def before_snapshot(self) -> None:
        """A filter that did not change keeps the same value and is not written again. The previous filter
        is written once per period, the current one with each snapshot, since new keys set bits everywhere in
        it."""
        if self.memory.now_changed:
            self._now.value = self.memory.freeze_now()
        if self.memory.before_changed:
            self._before.value = self.memory.freeze_before()
        self._counts.value = self.seen, self.dropped, self.memory.early

    def _show(self) -> None:
        memory = self.memory
        rows: list[tuple[str, object]] = [
            ("seen", self.seen),
            ("dropped", self.dropped),
            ("estimated error rate", f"{memory.error_rate:.2g}"),
        ]
        if memory.early:
            rows.append(("forgot early", memory.early))
        self._publish(rows)

    def _check_field(self, batch: pa.RecordBatch, field: str) -> None:
        if batch.schema.get_field_index(field) < 0:
            raise ComponentError(
                f"field '{field}'",
                f"the input has no such field, only {', '.join(batch.schema.names)}",
                "Name its fields in DedupBolt(...) and in by=.",
            )

    def _check(self, names: Sequence[str]) -> None:
        strange = [field for field in self.same_task if field not in names]
        if not self.same_task or strange:
            raise TopologyError(
                "DedupBolt",
                f"by= names fields that it does not have: {', '.join(map(repr, strange))}"
                if strange
                else "it has no field to compare tuples by",
                f"Its fields are: {', '.join(map(str, names))}."
                if names
                else 'Name the fields of its input: DedupBolt("order", "amount", by="order").',
            )
        whole = isinstance(self._capacity, int)
        numbers = all(isinstance(value, int | float) for value in (self._period, self._error_rate))
        if not (whole and numbers and self._capacity >= 1 and 0 < self._period < math.inf):
            raise TopologyError(
                "DedupBolt",
                "period must be greater than 0 s and capacity a whole number of at least 1, not "
                f"{self._period!r} and {self._capacity!r}",
                "Estimate how many different keys a task gets in a period.",
            )
        if not 0 < self._error_rate <= 0.5:
            raise TopologyError(
                "DedupBolt",
                f"error_rate must be above 0 and at most 0.5, not {self._error_rate!r}",
                "0.001 drops one new tuple in a thousand at worst; a tenth of that takes a third more memory.",
            )

    def _refused(self, context: Context) -> ComponentError:
        level = context.delivery.replace("_", " ")
        why = (
            "a tuple that failed behind it comes again and would be dropped"
            if context.delivery == "at_least_once"
            else f"it takes up to {self._error_rate:g} of the new tuples for old ones and drops them"
        )
        return ComponentError(
            f"component '{context.component}'",
            f"its DedupBolt may lose tuples, which {level} delivery does not allow by default: {why}",
            "Allow it with DedupBolt(..., lossy=True), or keep the keys in a map: context.state.map('seen').",
        )


def _add(one: Sequence[int], other: Sequence[int]) -> tuple[int, ...]:
    return tuple(mine + theirs for mine, theirs in zip(one, other, strict=True))
