"""Reads records of a partition that were read before: with a consumer of its own, so that the one that goes
forward is not disturbed."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import numpy as np

from penstock.acking.lineage import I64
from penstock.connectors.kafka_client import ANSWER_SECONDS, Options, ask, client_library, no_answer, refused

SECOND_CONSUMER: Options = MappingProxyType(
    {
        "auto.offset.reset": "error",  # a record that Kafka has deleted is reported, not skipped
        "enable.partition.eof": True,
        "reconnect.backoff.max.ms": 1000,  # the default is 10 s; a restarted broker is back after about 3 s
        "fetch.wait.max.ms": 10,
        "fetch.queue.backoff.ms": 5,
        "queued.max.messages.kbytes": 4096,  # beyond what was asked for, Kafka sends up to this
    }
)
"""Options of the consumer."""

_AGAIN_BYTES = 8 << 20  # bytes read again at a time: little memory
_UNKNOWN_BYTES = 1 << 16  # bytes that a record is taken for until the first one has arrived
_BATCH = 500  # records per call of the consumer
_POLL_SECONDS = 0.05  # a call waits that long for a full batch; offsets of transactions make it less than full
_NEAR = 200  # offsets; reading past so many records takes less time than a new request


class KafkaSecondReader:
    """For use by one thread, except ``close``. The consumer is created by the first ``read``, because usually
    nothing fails."""

    def __init__(self, where: str, bootstrap: str, consumer: Callable[[], Any]) -> None:
        """``consumer`` creates a consumer with the options ``SECOND_CONSUMER``."""
        self._kafka = client_library()
        self._where, self._bootstrap, self._new_consumer = where, bootstrap, consumer
        self._consumer: Any = None

    def read(self, topic: str, partition: int, offsets: I64) -> list[Any]:
        """The messages at these offsets, in ascending order: at least one, then as many as about
        ``_AGAIN_BYTES`` hold. A text instead of a message says why it is no longer there. Raises
        ``PenstockError`` if Kafka does not answer or refuses."""
        if self._consumer is None:
            self._consumer = self._new_consumer()
        reading = _SecondReading(self._kafka, self._consumer, topic, partition, offsets)
        silent_since = time.monotonic()
        try:
            reading.go_to_next()
            while not reading.finished:
                messages = self._consumer.consume(reading.expected(), _POLL_SECONDS)
                if messages:
                    silent_since = time.monotonic()
                elif time.monotonic() - silent_since > ANSWER_SECONDS:
                    raise self._silent(f"no records of {topic} from offset {reading.wanted} on arrived")
                for message in messages:
                    if reading.finished:  # there was no room for the rest, which is asked for next
                        break
                    error = message.error()
                    if error is None:
                        reading.add(message)
                    elif error.name() == "_PARTITION_EOF":
                        self._miss_at_end(reading, message.offset())
                    elif error.name() == "_AUTO_OFFSET_RESET":
                        self._skip_deleted(reading)
                        break
                    elif error.retriable() or error.name() in ("_TRANSPORT", "_ALL_BROKERS_DOWN"):
                        raise self._silent(str(error.str()))
                    else:
                        raise refused(self._where, self._bootstrap, error)
                if not reading.finished and reading.is_far:
                    reading.go_to_next()
        finally:
            self._consumer.unassign()  # no more records are sent
        return reading.found

    def close(self) -> None:
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None

    def _miss_at_end(self, reading: _SecondReading, end: int) -> None:
        """Kafka has no more records before this offset, at which the partition seems to end. A new leader says so
        for a moment, until it knows how far its predecessor was: then the call is repeated."""
        _, known = self._watermarks(reading)
        if end < known:
            raise self._silent(f"{reading.topic} seems to end at offset {end}, but it ends at {known}")
        reading.miss_until(None, "the topic is shorter than before")

    def _watermarks(self, reading: _SecondReading) -> tuple[int, int]:
        place = self._kafka.TopicPartition(reading.topic, reading.partition)
        found: tuple[int, int] = ask(
            self._where,
            self._bootstrap,
            lambda timeout: self._consumer.get_watermark_offsets(place, timeout),
        )
        return found

    def _skip_deleted(self, reading: _SecondReading) -> None:
        """Kafka has no record at the wanted offset: find out where the partition begins and ends now."""
        first, end = self._watermarks(reading)
        if reading.wanted >= end:
            reading.miss_until(None, "the topic is shorter than before")
        else:
            reading.miss_until(first, "Kafka has deleted it (retention)")
        if not reading.finished:
            reading.go_to_next()

    def _silent(self, problem: str) -> Exception:
        return no_answer(self._where, self._bootstrap, problem)


class _SecondReading:
    """What one call has found so far."""

    def __init__(self, kafka: Any, consumer: Any, topic: str, partition: int, offsets: I64) -> None:
        self._kafka, self._consumer = kafka, consumer
        self.topic, self.partition = topic, partition
        self._offsets: list[int] = offsets.tolist()
        ends = np.flatnonzero(np.diff(offsets) > _NEAR)
        self._run_ends: list[int] = [*offsets[ends].tolist(), int(offsets[-1])]
        self.found: list[Any] = []
        self._bytes = self._arrived = 0
        self._cursor = 0
        """The offset after the last record that arrived."""

    @property
    def finished(self) -> bool:
        return len(self.found) == len(self._offsets) or self._bytes >= _AGAIN_BYTES

    @property
    def wanted(self) -> int:
        """The next offset to be found."""
        return self._offsets[len(self.found)]

    @property
    def is_far(self) -> bool:
        """True if a new request is faster than reading on."""
        return self.wanted - self._cursor > _NEAR

    def go_to_next(self) -> None:
        self._cursor = self.wanted
        self._consumer.assign([self._kafka.TopicPartition(self.topic, self.partition, self.wanted)])

    def expected(self) -> int:
        """How many messages to ask for: those up to the next gap, but not many more bytes than there is room
        for."""
        end = self._run_ends[bisect_left(self._run_ends, self.wanted)] + 1
        size = self._bytes // self._arrived if self._arrived else _UNKNOWN_BYTES
        room = (_AGAIN_BYTES - self._bytes) // max(size, 1) + 1
        return max(1, min(end - self._cursor, room, _BATCH))

    def add(self, message: Any) -> None:
        offset = message.offset()
        if self.finished or offset < self._cursor:  # what was on its way before the last go_to_next
            return
        self._cursor = offset + 1
        self.miss_until(offset, "Kafka has deleted it (compaction)")
        if not self.finished and self.wanted == offset:
            self.found.append(message)
            self._bytes += len(message)
            self._arrived += 1

    def miss_until(self, offset: int | None, reason: str) -> None:
        """There are no records at the wanted offsets before this one; None: at none of them."""
        while len(self.found) < len(self._offsets) and (offset is None or self.wanted < offset):
            self.found.append(reason)
