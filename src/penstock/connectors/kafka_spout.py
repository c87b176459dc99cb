"""A spout that reads Kafka topics in batches."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any, ClassVar, TypeAlias

import numpy as np
import pyarrow as pa

from penstock.connectors.dead_letters import give_up
from penstock.connectors.inflight import InFlight, PositionsInFlight
from penstock.connectors.kafka_client import BrokerErrors, Options, client_library, where
from penstock.connectors.kafka_decoding import Decoder
from penstock.connectors.kafka_positions import KafkaSource, Partition, Start, check_start
from penstock.connectors.kafka_reader import TopicReader
from penstock.errors import ComponentError, TopologyError
from penstock.topology.components import BatchSpout, BatchSpoutCollector, Conf, Context, Failure
from penstock.topology.streams import OutputDeclarer

GiveUp: TypeAlias = Callable[[Mapping[str, Any], Failure], None]

OFFSET_BITS = 48
"""Bits of a message id for the offset; the other bits are the index of the partition in the task."""
OFFSET_MASK = (1 << OFFSET_BITS) - 1
_COMMIT_SECONDS = 1.0  # seconds between two commits to the group with at-most-once delivery (it has no snapshots)


class KafkaSpout(BatchSpout):
    """Reads topics. Each task reads its own partitions, as distributed by ``kafka_positions.owned``.

    After a restart a task resumes at the position in its state: the read position with exactly-once delivery, or
    the offset below which everything is acked with at-least-once delivery. Without a position in the state, and
    unless delivery is exactly once, it resumes at the offset committed under ``group``; otherwise it begins at
    ``start``. With at-least-once and exactly-once delivery the offsets that "latest" or a time resolve to are
    stored durably before the first tuple is emitted. A partition that was added while the topology ran, or was
    stopped, is read from its beginning.

    With at-least-once delivery a failed tuple is emitted again until it has had ``max_attempts`` attempts. Then it
    is passed to ``on_give_up`` with the failure, or becomes a dead letter if there is no such function or it
    raises, and counts as done. Attempts are not counted across a restart. Only committed transactions of producers
    are read.
    """

    flight: ClassVar[type[InFlight | PositionsInFlight]] = InFlight
    """What is kept of the records of a partition that are emitted and not acked."""

    def __init__(
        self,
        bootstrap: str,
        topics: str | Sequence[str],
        *,
        start: Start = "earliest",
        fields: Mapping[str, str] = MappingProxyType({"line": "value"}),
        decode: str = "text",
        group: str | None = None,
        batch: int = 2000,
        discover_interval: float = 30.0,
        max_attempts: int = 5,
        on_give_up: GiveUp | None = None,
        options: Options = MappingProxyType({}),
    ) -> None:
        """``fields`` maps each emitted field to a part of the record (value, key, topic, partition, offset, or
        timestamp in ms). ``decode`` is the form of values and keys: "text" or "bytes". ``group`` is the consumer
        group to which offsets are committed, for other tools to see. ``batch`` is the maximum number of records
        per call. ``discover_interval`` is the time in seconds between two checks for new partitions.
        ``on_give_up`` receives the record (its emitted fields, topic, partition and offset). ``options`` are
        options of librdkafka, for security and tuning."""
        names = (topics,) if isinstance(topics, str) else tuple(topics)
        self._source = KafkaSource(bootstrap, names, start, group, discover_interval, dict(options))
        self._decoder, self._batch = Decoder(fields, decode), batch
        self._max_attempts, self._on_give_up = max_attempts, on_give_up
        self._check()

    def _check(self) -> None:
        topics = self._source.topics
        if not topics or not all(topics) or len(set(topics)) < len(topics):
            raise TopologyError(
                "KafkaSpout", f"topics is {list(topics)!r}, not one or more different names", "Name a topic."
            )
        check_start(self._source.start)
        for name, value in (("batch", self._batch), ("max_attempts", self._max_attempts)):
            if value < 1:
                raise TopologyError(
                    "KafkaSpout", f"{name} is {value!r}, which is less than 1", "Leave it out to get the default."
                )

    def declare_output_fields(self, declarer: OutputDeclarer) -> None:
        declarer.declare(*((field.name, field.type) for field in self._decoder.schema))

    def open(self, conf: Conf, context: Context, collector: BatchSpoutCollector) -> None:
        self._context, self._collector = context, collector
        self._where = where(context.component, context.task)
        self._tracked = context.delivery == "at_least_once"
        self._stores_positions = context.delivery != "at_most_once"
        self.errors = BrokerErrors(self._where, self._source.bootstrap)
        self.given_up = 0
        self._attempts: dict[int, int] = {}
        self._retries: deque[int] = deque()
        self._next_commit = time.monotonic() + _COMMIT_SECONDS
        self._newest: dict[Partition, int] = {}
        """The offsets in the newest snapshot."""
        self._previous: dict[Partition, int] = {}
        """The offsets in the snapshot before that."""
        self._message = client_library().Message
        self._decoder.open(self._where, self.errors)
        self._reader = TopicReader(self._source, context, self._where, self.errors, self.flight)

    def close(self) -> None:
        if not self._stores_positions:
            self._reader.commit_to_group(self._reader.positions(self._tracked))
        self._reader.close()

    # -- reading

    def next_batch(self) -> None:
        self.errors.check()  # before records are read: a record that was read must be emitted
        if self._retries:
            self._emit_retries()
        messages = self._reader.read(self._batch)
        if messages:
            self._handle(messages)
        self._reader.discover()
        now = time.monotonic()
        if not self._stores_positions and now >= self._next_commit:
            self._reader.commit_to_group(self._reader.positions(self._tracked))
            self._next_commit = now + _COMMIT_SECONDS
        self._reader.update_lag()

    def wait(self, seconds: float) -> None:
        """Block until a record has arrived, at most for this time. For callers of ``next_batch`` on a thread of
        their own."""
        self._reader.wait(seconds)

    def lag(self) -> Mapping[str, int]:
        return self._reader.lag()

    def _handle(self, messages: list[Any]) -> None:
        """Emit the records, then handle the errors among them: the consumer does not return these records again,
        even if another partition has failed."""
        if not any(map(self._message.error, messages)):
            self._emit(messages)
            return
        records = [each for each in messages if each.error() is None]
        if records:
            self._emit(records)
        faults = []
        for each in messages:
            if each.error() is not None:
                try:
                    self._reader.handle_error(each)
                except ComponentError as fault:
                    faults.append(fault)
        if faults:
            raise faults[0]

    def _emit(self, messages: list[Any]) -> None:
        self.errors.clear()
        places = self._reader.places(messages)
        bounds = [0, len(messages)]
        if places[0] != places[-1] or np.any(places != places[0]):  # records of several partitions: group them
            order = np.argsort(places, kind="stable")
            messages, places = [messages[row] for row in order.tolist()], places[order]
            bounds = [0, *(np.flatnonzero(np.diff(places)) + 1).tolist(), len(messages)]
        offsets = np.fromiter(map(self._message.offset, messages), np.int64, len(messages))
        rows = self._decoder.rows(messages, offsets)
        if self._tracked:
            ids: Any = (places << OFFSET_BITS) | offsets
            self._collector.emit_batch(rows, msg_ids=ids)
        else:
            self._collector.emit_batch(rows)
        for first, last in pairwise(bounds):
            reading = self._reader.readings[places[first]]
            reading.position = int(offsets[last - 1]) + 1
            if self._tracked:
                reading.flight.add(offsets[first:last], rows.slice(first, last - first))

    # -- acks

    def ack(self, msg_id: int) -> None:
        self.ack_many([msg_id])

    def ack_many(self, msg_ids: Sequence[int]) -> None:
        ids = np.asarray(msg_ids, np.int64)
        if self._attempts:
            for msg_id in ids.tolist():
                self._attempts.pop(msg_id, None)
        places, offsets = ids >> OFFSET_BITS, ids & OFFSET_MASK
        for place in np.unique(places).tolist():
            self._reader.readings[place].flight.ack(offsets[places == place])

    def fail(self, msg_id: int, failure: Failure) -> None:
        attempts = self._attempts.get(msg_id, 0) + (not failure.handed_on)
        if attempts < self._max_attempts:
            self._attempts[msg_id] = attempts
            self._retries.append(msg_id)
            return
        reading, offset = self._reader.readings[msg_id >> OFFSET_BITS], msg_id & OFFSET_MASK
        record = reading.flight.row(offset).to_pylist()[0]
        record.update(topic=reading.topic, partition=reading.number, offset=offset)
        failure = Failure(failure.component, failure.error, attempts)
        if self._hand_over(record, failure) or give_up(self._context, tuple(record.values()), failure):
            self.given_up += 1
            self.ack_many([msg_id])
        else:
            self._retries.append(msg_id)

    def _hand_over(self, record: Mapping[str, Any], failure: Failure) -> bool:
        """Pass the record to the user's function. Returns False if there is none or it raised; the record then
        becomes a dead letter."""
        if self._on_give_up is None:
            return False
        try:
            self._on_give_up(record, failure)
        except Exception as error:  # user code may raise anything
            self._context.report(
                ComponentError(
                    self._where,
                    f"on_give_up failed ({type(error).__name__}: {error})",
                    "The record becomes a dead letter.",
                )
            )
            return False
        self._context.gave_up(1)
        return True

    def _emit_retries(self) -> None:
        ids = [self._retries.popleft() for _ in range(min(len(self._retries), self._batch))]
        array: Any = np.array(ids, np.int64)
        rows = [self._reader.readings[each >> OFFSET_BITS].flight.row(each & OFFSET_MASK) for each in ids]
        table = pa.Table.from_batches(rows, self._decoder.schema).combine_chunks()
        self._collector.emit_batch(table.to_batches()[0], msg_ids=array)

    # -- positions

    def before_snapshot(self) -> None:
        if not self._stores_positions:
            return
        offsets, known = self._context.state.map("offsets"), self._context.state.map("partitions")
        self._previous, self._newest = self._newest, self._reader.positions(self._tracked)
        for reading in self._reader.readings:
            offset = self._newest[reading.topic, reading.number]
            if offsets.get(reading.key) != offset:  # an assignment would write the entry to the snapshot again
                offsets[reading.key] = offset
        for topic, count in self._reader.counts.items():
            if known.get(topic) != count:
                known[topic] = count

    def after_commit(self) -> None:
        """Commit to the group only offsets of a committed snapshot: a run that starts from the group's offsets
        would skip later records. With exactly-once delivery the snapshot of the next epoch may have been taken
        already, so the offsets of the snapshot before the newest are used."""
        self._reader.on_committed(self._newest if self._tracked else self._previous)
