"""A spout that reads Kafka topics in batches."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.connectors.dead_letters import give_up
from penstock.connectors.inflight import InFlight
from penstock.connectors.kafka_client import BrokerErrors, Options, ask, client_library, connecting, log, where
from penstock.connectors.kafka_decoding import Decoder
from penstock.connectors.kafka_positions import Directory, Partition, Start, check_start, owned
from penstock.errors import ComponentError, TopologyError
from penstock.storage.start_record import StartRecord
from penstock.topology.components import BatchSpout, BatchSpoutCollector, Conf, Context, Failure
from penstock.topology.streams import OutputDeclarer

GiveUp: TypeAlias = Callable[[Mapping[str, Any], Failure], None]

_OFFSET_BITS = 48  # of a message id; the other 15 are the partition's number in the task
_OFFSET_MASK = (1 << _OFFSET_BITS) - 1
_LAG_SECONDS = 2.0  # between two looks at how far the partitions reach: often enough for a screen
_COMMIT_SECONDS = 1.0  # between two commits to the group at most once, where no snapshot sets the pace


@dataclass
class _Reading:
    """One partition of this task."""

    topic: str
    number: int
    position: int
    """The next offset to read."""
    flight: InFlight

    @property
    def key(self) -> str:
        return _name((self.topic, self.number))


def _name(partition: Partition) -> str:
    return f"{partition[0]}/{partition[1]}"


class KafkaSpout(BatchSpout):
    """Reads topics; each task has partitions of its own, spread as ``kafka_positions.owned`` says.

    Where a task goes on after a restart: at the position in its state, which with its topology's guarantee is the
    read position (exactly once) or the mark below which everything is acked (at least once); without one in the
    state, and not exactly once, at the offset committed under ``group``; else at ``start``. The offsets that
    "latest" or a time stand for are durable before the first tuple is emitted, at least once and exactly once. A
    partition that was made while the topology ran, or stood still, is read from its beginning.

    At least once a tuple that fails is emitted again, at most ``max_attempts`` times in all; then it goes to
    ``on_give_up`` with the failure, or is a dead letter where there is none or it raises, and counts as done.
    Attempts are not counted across a restart. Only committed transactions of producers are read."""

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
        """``fields`` is what is emitted: field name to part of the record (value, key, topic, partition, offset
        or timestamp, in ms). ``decode`` is what values and keys become: "text" or "bytes". ``group`` is where
        offsets are committed for others to see.
        ``batch`` is the most records in one call; ``discover_interval`` the seconds between two looks for new
        partitions. ``on_give_up`` gets the record: its emitted fields, topic, partition and offset. ``options``
        are librdkafka's, for security and tuning."""
        self._bootstrap, self._topics = bootstrap, [topics] if isinstance(topics, str) else list(topics)
        self._start, self._group, self._decoder = start, group, Decoder(fields, decode)
        self._batch, self._interval = batch, discover_interval
        self._max_attempts, self._on_give_up, self._options = max_attempts, on_give_up, dict(options)
        self._check()

    def _check(self) -> None:
        if not self._topics or not all(self._topics) or len(set(self._topics)) < len(self._topics):
            raise TopologyError(
                "KafkaSpout", f"topics is {self._topics!r}, not one or more different names", "Name a topic."
            )
        check_start(self._start)
        for name, value in (("batch", self._batch), ("max_attempts", self._max_attempts)):
            if value < 1:
                raise TopologyError(
                    "KafkaSpout", f"{name} is {value!r}, which is less than 1", "Leave it out to get the default."
                )

    def declare_output_fields(self, declarer: OutputDeclarer) -> None:
        declarer.declare(*((field.name, field.type) for field in self._decoder.schema))

    # -- start and end

    def open(self, conf: Conf, context: Context, collector: BatchSpoutCollector) -> None:
        self._kafka = client_library()
        self._context, self._collector = context, collector
        self._where = where(context.component, context.task)
        self._tracked = context.delivery == "at_least_once"
        self._keeps = context.delivery != "at_most_once"
        self.errors = BrokerErrors(self._where, self._bootstrap)
        self.given_up = 0
        self._attempts: dict[int, int] = {}
        self._again: deque[int] = deque()
        self._readings: list[_Reading] = []
        self._index: dict[Partition, int] = {}
        self._next_commit = time.monotonic() + _COMMIT_SECONDS
        self._noted: dict[Partition, int] = {}
        """The offsets in the newest snapshot."""
        self._noted_before: dict[Partition, int] = {}
        self._lag: dict[str, int] = {}
        self._next_lag = 0.0
        self._decoder.open(self._where, self.errors)
        self._consumer = self._kafka.Consumer(
            {
                "bootstrap.servers": self._bootstrap,
                "group.id": self._group or f"penstock.{context.topology}.{context.component}",
                "enable.auto.commit": False,
                "enable.auto.offset.store": False,
                "auto.offset.reset": "error",  # a position that is gone is reported, not passed over
                "isolation.level": "read_committed",
                "fetch.queue.backoff.ms": 5,  # a full local queue is fetched for again soon; the default is 1 s
                "queued.max.messages.kbytes": 16_384,  # read ahead; the default of 64 MB outweighs the worker
                "error_cb": self.errors.note,
                "log_level": 2,
                **connecting(self._options),
            }
        )
        self._directory = Directory(self._where, self._bootstrap, self._topics, self._interval, self._options)
        self._counts = self._directory.counts()
        self._take(self._starts(owned(self._topics, self._counts, context.index, context.parallelism)))

    def _starts(self, partitions: list[Partition]) -> dict[Partition, int]:
        """Where to begin, by the rules in the class's docstring."""
        saved = dict(self._context.state.map("offsets").items()) if self._keeps else {}
        known = dict(self._context.state.map("partitions").items()) if self._keeps else {}
        self._record = StartRecord(self._context)
        if self._moves and not (known and all(_name(each) in saved for each in partitions)):
            kept = self._record.load()
            saved = {**kept.get("offsets", {}), **saved}
            known = {**kept.get("partitions", {}), **known}
            starts = self._look_up(partitions, saved, known)
            found = {
                "offsets": {_name(each): offset for each, offset in starts.items()},
                "partitions": {**self._counts, **known},
            }
            if found != kept:
                self._record.keep(found)
            return starts
        return self._look_up(partitions, saved, known)

    @property
    def _moves(self) -> bool:
        """``start`` stands for other offsets each time Kafka is asked."""
        return self._start == "latest" or isinstance(self._start, datetime)

    def _look_up(
        self, partitions: list[Partition], saved: Mapping[str, int], known: Mapping[str, int]
    ) -> dict[Partition, int]:
        starts = {each: saved[_name(each)] for each in partitions if _name(each) in saved}
        rest = [each for each in partitions if each not in starts]
        if self._group and rest and self._context.delivery != "exactly_once":
            asked = [self._kafka.TopicPartition(*each) for each in rest]
            found = ask(self._where, self._bootstrap, lambda timeout: self._consumer.committed(asked, timeout))
            starts.update({(each.topic, each.partition): each.offset for each in found if each.offset >= 0})
        new = [each for each in partitions if each not in starts and each[1] >= known.get(each[0], each[1] + 1)]
        starts.update(self._directory.offsets(new, "earliest"))
        starts.update(self._directory.offsets([each for each in partitions if each not in starts], self._start))
        return starts

    def _take(self, starts: Mapping[Partition, int]) -> None:
        """Read these partitions too."""
        for (topic, number), offset in starts.items():
            self._index[topic, number] = len(self._readings)
            self._readings.append(_Reading(topic, number, offset, InFlight(offset)))
        self._consumer.incremental_assign(
            [self._kafka.TopicPartition(*each, offset) for each, offset in starts.items()]
        )

    def close(self) -> None:
        if not self._keeps:
            self._commit_to_group(self._done())
        self._consumer.close()

    # -- reading

    def next_batch(self) -> None:
        self.errors.check()  # before records are taken: what is taken must be emitted
        if self._again:
            self._emit_again()
        messages = self._consumer.consume(self._batch, 0)
        if messages:
            self._take_in(messages)
        for topic, count in self._directory.news().items():
            if count > self._counts[topic]:
                self._discover(topic, count)
        now = time.monotonic()
        if not self._keeps and self._group and now >= self._next_commit:
            self._commit_to_group(self._done())
            self._next_commit = now + _COMMIT_SECONDS
        if now >= self._next_lag:
            self._next_lag = now + _LAG_SECONDS
            self._lag = self._measure_lag()

    def lag(self) -> Mapping[str, int]:
        """Records of each partition (``topic/number``) behind the last one read, as of some seconds ago. Offsets
        that transactions use for themselves are counted: an idle partition with them may show 1."""
        return self._lag

    def _measure_lag(self) -> dict[str, int]:
        """From what the last fetch told the client of each partition's end: no request is made. A partition that
        was not fetched from yet is left out."""
        found = {}
        for reading in self._readings:
            place = self._kafka.TopicPartition(reading.topic, reading.number)
            _, end = self._consumer.get_watermark_offsets(place, cached=True)
            if end >= 0:
                found[reading.key] = max(0, end - reading.position)
        return found

    def _take_in(self, messages: list[Any]) -> None:
        """Emit the records, then see to the errors among them: the consumer will not bring these records again,
        whatever is wrong with another partition."""
        if not any(map(self._kafka.Message.error, messages)):
            self._emit(messages)
            return
        records = [each for each in messages if each.error() is None]
        if records:
            self._emit(records)
        faults = []
        for each in messages:
            if each.error() is not None:
                try:
                    self._refused(each)
                except ComponentError as fault:
                    faults.append(fault)
        if faults:
            raise faults[0]

    def _emit(self, messages: list[Any]) -> None:
        message = self._kafka.Message
        self.errors.clear()
        places = self._places(messages)
        bounds = [0, len(messages)]
        if places[0] != places[-1] or np.any(places != places[0]):  # of several partitions: group them
            order = np.argsort(places, kind="stable")
            messages, places = [messages[row] for row in order.tolist()], places[order]
            bounds = [0, *(np.flatnonzero(np.diff(places)) + 1).tolist(), len(messages)]
        offsets = np.fromiter(map(message.offset, messages), np.int64, len(messages))
        rows = self._decoder.rows(messages, offsets)
        if self._tracked:
            ids: Any = (places << _OFFSET_BITS) | offsets
            self._collector.emit_batch(rows, msg_ids=ids)
        else:
            self._collector.emit_batch(rows)
        for first, last in pairwise(bounds):
            reading = self._readings[places[first]]
            reading.position = int(offsets[last - 1]) + 1
            if self._tracked:
                reading.flight.add(offsets[first:last], rows.slice(first, last - first))

    def _places(self, messages: list[Any]) -> npt.NDArray[np.int64]:
        """For each message its partition's place in this task."""
        if len(self._readings) == 1:
            return np.zeros(len(messages), np.int64)
        message = self._kafka.Message
        keys = zip(map(message.topic, messages), map(message.partition, messages), strict=True)
        return np.fromiter(map(self._index.__getitem__, keys), np.int64, len(messages))

    def _discover(self, topic: str, count: int) -> None:
        """The topic has more partitions than before: read those that are this task's, from their beginning."""
        before, self._counts[topic] = self._counts[topic], count
        index, parallelism = self._context.index, self._context.parallelism
        mine = owned(self._topics, self._counts, index, parallelism)
        log.info("%s: topic '%s' has %d partitions now, %d before", self._where, topic, count, before)
        self._take({each: 0 for each in mine if each not in self._index})

    def _refused(self, message: Any) -> None:
        """An error came in place of a record."""
        error = message.error()
        self.errors.note(error)
        if error.name() != "_AUTO_OFFSET_RESET":
            return
        reading = self._readings[self._index[message.topic(), message.partition()]]
        place = self._kafka.TopicPartition(reading.topic, reading.number, reading.position)
        try:
            first, end = self._consumer.get_watermark_offsets(place, timeout=1.0)  # it has just answered
        except self._kafka.KafkaException:
            first, end = reading.position, reading.position  # ask for the same record again
        if end < reading.position:
            raise ComponentError(
                f"{self._where}, Kafka at {self._bootstrap}",
                f"{reading.topic} partition {reading.number} ends at {end}, but "
                f"{reading.position} records of it were read",
                "Was the topic deleted and created again? Then start the topology with a new state directory.",
            )
        if first > reading.position:
            self.errors.counts["lost"] += first - reading.position
            log.error(
                "%s: %s partition %d: %d records from offset %d on were deleted by Kafka before they were read",
                *(self._where, reading.topic, reading.number, first - reading.position, reading.position),
            )
        place.offset = reading.position = max(first, reading.position)
        self._consumer.incremental_unassign([place])  # a partition in this state cannot be sought
        self._consumer.incremental_assign([place])

    # -- acks

    def ack(self, msg_id: int) -> None:
        self.ack_many([msg_id])

    def ack_many(self, msg_ids: Sequence[int]) -> None:
        ids = np.asarray(msg_ids, np.int64)
        if self._attempts:
            for msg_id in ids.tolist():
                self._attempts.pop(msg_id, None)
        places, offsets = ids >> _OFFSET_BITS, ids & _OFFSET_MASK
        for place in np.unique(places).tolist():
            self._readings[place].flight.ack(offsets[places == place])

    def fail(self, msg_id: int, failure: Failure) -> None:
        attempts = self._attempts.get(msg_id, 0) + 1
        if attempts < self._max_attempts:
            self._attempts[msg_id] = attempts
            self._again.append(msg_id)
            return
        reading, offset = self._readings[msg_id >> _OFFSET_BITS], msg_id & _OFFSET_MASK
        record = reading.flight.row(offset).to_pylist()[0]
        record.update(topic=reading.topic, partition=reading.number, offset=offset)
        failure = Failure(failure.component, failure.error, attempts)
        if self._hand_over(record, failure) or give_up(self._context, tuple(record.values()), failure):
            self.given_up += 1
            self.ack_many([msg_id])
        else:
            self._again.append(msg_id)

    def _hand_over(self, record: Mapping[str, Any], failure: Failure) -> bool:
        """Give the record to the user's function. False: there is none, or it raised; then it is a dead letter."""
        if self._on_give_up is None:
            return False
        try:
            self._on_give_up(record, failure)
        except Exception as error:  # user code may raise anything
            self._context.report(
                ComponentError(
                    self._where,
                    f"on_give_up failed ({type(error).__name__}: {error})",
                    "The record is a dead letter instead.",
                )
            )
            return False
        self._context.gave_up(1)
        return True

    def _emit_again(self) -> None:
        ids = [self._again.popleft() for _ in range(min(len(self._again), self._batch))]
        array: Any = np.array(ids, np.int64)
        rows = [self._readings[each >> _OFFSET_BITS].flight.row(each & _OFFSET_MASK) for each in ids]
        table = pa.Table.from_batches(rows, self._decoder.schema).combine_chunks()
        self._collector.emit_batch(table.to_batches()[0], msg_ids=array)

    # -- positions that survive

    def before_snapshot(self) -> None:
        if not self._keeps:
            return
        offsets, known = self._context.state.map("offsets"), self._context.state.map("partitions")
        self._noted_before, self._noted = self._noted, self._done()
        for reading in self._readings:
            offset = self._noted[reading.topic, reading.number]
            if offsets.get(reading.key) != offset:  # what did not change need not be written
                offsets[reading.key] = offset
        for topic, count in self._counts.items():
            if known.get(topic) != count:
                known[topic] = count

    def after_commit(self) -> None:
        """Tell the group what is in a committed snapshot, and nothing later: a partition, or a record, that is in
        no committed state yet would be skipped by a start that goes by the group. Exactly once the epoch after
        the committed one may have been snapshotted already, so the snapshot before the newest is taken."""
        self._commit_to_group(self._noted if self._tracked else self._noted_before)
        self._record.on_committed()

    def _done(self) -> dict[Partition, int]:
        """The first offset of each partition that is not done."""
        return {
            (each.topic, each.number): each.flight.mark if self._tracked else each.position
            for each in self._readings
        }

    def _commit_to_group(self, offsets: Mapping[Partition, int]) -> None:
        """Tell Kafka how far this task is, for others to see. Does not wait."""
        if self._group and offsets:
            self._consumer.commit(
                offsets=[self._kafka.TopicPartition(*each, offset) for each, offset in offsets.items()],
                asynchronous=True,
            )
