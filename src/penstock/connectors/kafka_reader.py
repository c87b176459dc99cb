"""The partitions that one task of a ``KafkaSpout`` reads: their consumer, their positions, and new partitions."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.connectors.inflight import InFlight, PositionsInFlight
from penstock.connectors.kafka_client import BrokerErrors, client_library, connecting, log
from penstock.connectors.kafka_positions import Directory, KafkaSource, Partition, StartOffsets, owned, text_of
from penstock.errors import ComponentError
from penstock.topology.components import Context

_LAG_SECONDS = 2.0  # seconds between two measurements of the lag: often enough for a display


@dataclass
class PartitionReading:
    """One partition of this task."""

    topic: str
    number: int
    position: int
    """The next offset to read."""
    flight: Any
    """Its records that are emitted and not acked: what ``flight`` of the spout creates."""

    @property
    def key(self) -> str:
        return text_of((self.topic, self.number))


class TopicReader:
    """Reads this task's partitions of some topics. Created in ``open``; used by the task's thread only."""

    def __init__(
        self,
        source: KafkaSource,
        context: Context,
        where: str,
        errors: BrokerErrors,
        flight: type[InFlight | PositionsInFlight],
    ) -> None:
        """Blocks until Kafka has answered where to start. Raises ``ComponentError`` if a topic does not exist and
        ``SystemAway`` if Kafka does not answer."""
        self._kafka = client_library()
        self._source, self._context, self._where, self._errors = source, context, where, errors
        self._flight = flight
        self.readings: list[PartitionReading] = []
        self._index: dict[Partition, int] = {}
        self._lag: dict[str, int] = {}
        self._next_lag = 0.0
        self._ahead: list[Any] = []
        """The message that ``wait`` has received."""
        self.group = source.group or f"penstock.{context.topology}.{context.component}"
        """The consumer group, for which the client needs the right to read (ACL)."""
        self.consumer = self._kafka.Consumer(
            {
                "bootstrap.servers": source.bootstrap,
                "group.id": self.group,
                "enable.auto.commit": False,
                "enable.auto.offset.store": False,
                "auto.offset.reset": "error",  # a position that no longer exists is reported, not skipped
                "isolation.level": "read_committed",
                "fetch.queue.backoff.ms": 5,  # fetch again soon after the local queue was full; the default is 1 s
                "queued.max.messages.kbytes": 16_384,  # prefetch; the default of 64 MB exceeds the worker's memory
                "error_cb": errors.note,
                "log_level": 2,
                **connecting(source.options),
            }
        )
        self._directory = Directory(source, where)
        self.counts = self._directory.counts()
        """The number of partitions of each topic."""
        self._starts = StartOffsets(source, context, where, self._directory, self.consumer)
        self._add(self._starts.find(self._owned(), self.counts))

    def read(self, limit: int) -> list[Any]:
        """Up to ``limit`` messages, errors among them. Does not block."""
        more = limit - len(self._ahead)
        messages: list[Any] = self._ahead + (self.consumer.consume(more, 0) if more else [])
        self._ahead = []  # only now: if consume raises, the message is still there
        return messages

    def wait(self, seconds: float) -> None:
        """Block until a message has arrived, at most for this time. Called by the thread that calls ``read``."""
        if not self._ahead:
            message = self.consumer.poll(seconds)
            if message is not None:
                self._ahead.append(message)

    def places(self, messages: list[Any]) -> npt.NDArray[np.int64]:
        """For each message, the index of its partition in ``readings``."""
        if len(self.readings) == 1:
            return np.zeros(len(messages), np.int64)
        message = self._kafka.Message
        keys = zip(map(message.topic, messages), map(message.partition, messages), strict=True)
        return np.fromiter(map(self._index.__getitem__, keys), np.int64, len(messages))

    def discover(self) -> None:
        """Called often. If a topic has more partitions than before, read those of this task from their
        beginning."""
        for topic, count in self._directory.poll_counts().items():
            before = self.counts[topic]
            if count > before:
                self.counts[topic] = count
                log.info("%s: topic '%s' has %d partitions now, %d before", self._where, topic, count, before)
                self._add({each: 0 for each in self._owned() if each not in self._index})

    def handle_error(self, message: Any) -> None:
        """Handle an error that arrived in place of a record. If Kafka has deleted the next record, continue with
        the oldest one. Raises ``ComponentError`` if the topic is shorter than what was read of it."""
        error = message.error()
        self._errors.note(error)
        if error.name() != "_AUTO_OFFSET_RESET":
            return
        reading = self.readings[self._index[message.topic(), message.partition()]]
        place = self._kafka.TopicPartition(reading.topic, reading.number, reading.position)
        try:
            first, end = self.consumer.get_watermark_offsets(place, timeout=1.0)  # the broker has just answered
        except self._kafka.KafkaException:
            first, end = reading.position, reading.position  # ask for the same record again
        if end < reading.position:
            raise ComponentError(
                f"{self._where}, Kafka at {self._source.bootstrap}",
                f"{reading.topic} partition {reading.number} ends at {end}, but "
                f"{reading.position} records of it were read",
                "Was the topic deleted and created again? Then start the topology with a new state directory.",
            )
        if first > reading.position:
            self._errors.counts["lost"] += first - reading.position
            log.error(
                "%s: %s partition %d: Kafka deleted %d records from offset %d on before they were read",
                *(self._where, reading.topic, reading.number, first - reading.position, reading.position),
            )
        place.offset = reading.position = max(first, reading.position)
        self.consumer.incremental_unassign([place])  # seek() does not work for a partition in this state
        self.consumer.incremental_assign([place])

    def lag(self) -> Mapping[str, int]:
        """The number of records of each partition (``topic/number``) after the last one read, some seconds ago.
        Offsets that transactions use for themselves are included: an idle partition with transactions may show
        1."""
        return self._lag

    def update_lag(self) -> None:
        """Measure the lag every ``_LAG_SECONDS``, from the partition ends that came with the last fetch: no
        request is sent. A partition that was not fetched from yet is left out."""
        now = time.monotonic()
        if now < self._next_lag:
            return
        self._next_lag = now + _LAG_SECONDS
        self._lag = {}
        for reading in self.readings:
            place = self._kafka.TopicPartition(reading.topic, reading.number)
            _, end = self.consumer.get_watermark_offsets(place, cached=True)
            if end >= 0:
                self._lag[reading.key] = max(0, end - reading.position)

    def positions(self, tracked: bool) -> dict[Partition, int]:
        """The first offset of each partition that is not acked (``tracked``) or not read."""
        return {
            (each.topic, each.number): each.flight.mark if tracked else each.position for each in self.readings
        }

    def on_committed(self, offsets: Mapping[Partition, int]) -> None:
        """Called after each commit of a snapshot, with offsets from a committed snapshot."""
        self.commit_to_group(offsets)
        self._starts.on_committed()

    def commit_to_group(self, offsets: Mapping[Partition, int]) -> None:
        """Commit offsets to the consumer group, where other tools can see them. Does not block."""
        if self._source.group and offsets:
            self.consumer.commit(
                offsets=[self._kafka.TopicPartition(*each, offset) for each, offset in offsets.items()],
                asynchronous=True,
            )

    def close(self) -> None:
        self.consumer.close()

    def _owned(self) -> list[Partition]:
        return owned(self._source.topics, self.counts, self._context.index, self._context.parallelism)

    def _add(self, starts: Mapping[Partition, int]) -> None:
        """Start reading these partitions."""
        for (topic, number), offset in starts.items():
            self._index[topic, number] = len(self.readings)
            self.readings.append(PartitionReading(topic, number, offset, self._flight(offset)))
        self.consumer.incremental_assign(
            [self._kafka.TopicPartition(*each, offset) for each, offset in starts.items()]
        )
