"""Determines which partitions a spout task reads, and from which offsets."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeAlias

from penstock.connectors.kafka_client import ANSWER_SECONDS, Options, ask, client_library, connecting
from penstock.errors import ComponentError, TopologyError
from penstock.storage.start_record import StartRecord
from penstock.topology.components import Context

Partition: TypeAlias = tuple[str, int]
Start: TypeAlias = str | datetime | Mapping[Partition, int]
"""``"earliest"``, ``"latest"``, the first record at or after a time, or an offset for each ⟨topic, partition⟩ (a
partition that is not in the mapping starts at its earliest record)."""


def check_start(start: Start) -> None:
    if not (start in ("earliest", "latest") or isinstance(start, datetime | Mapping)):
        raise TopologyError(
            "KafkaSpout",
            f'start is {start!r}, which is neither "earliest", "latest", a datetime nor '
            f"{{(topic, partition): offset}}",
            'For a time give start=datetime(2026, 1, 31, tzinfo=UTC); "earliest" reads everything.',
        )


def owned(topics: Sequence[str], counts: Mapping[str, int], index: int, parallelism: int) -> list[Partition]:
    """The partitions of the task at ``index``: partition p of the i-th topic is read by task (i + p) mod
    parallelism.

    The partitions are distributed evenly, and each task determines its own without communication. A partition
    stays with its task when topics get more partitions, and when topics are added at the end of the list.
    """
    return [
        (topic, number)
        for position, topic in enumerate(topics)
        for number in range(counts.get(topic, 0))
        if (position + number) % parallelism == index
    ]


@dataclass(frozen=True)
class KafkaSource:
    """What a spout reads: the arguments of ``KafkaSpout`` that concern the connection and the positions."""

    bootstrap: str
    topics: tuple[str, ...]
    start: Start
    group: str | None
    discover_interval: float
    """Seconds between two checks for new partitions."""
    options: Options


class Directory:
    """Queries Kafka about topics. ``counts`` and ``offsets`` block until the answer arrives; ``poll_counts`` does
    not."""

    def __init__(self, source: KafkaSource, where: str) -> None:
        self._where, self._bootstrap = where, source.bootstrap
        self._topics, self._interval = list(source.topics), source.discover_interval
        self._kafka = client_library()
        self._admin = self._kafka.admin.AdminClient(
            {
                "bootstrap.servers": source.bootstrap,
                "log_level": 2,
                "error_cb": _ignore,
                **connecting(source.options),
            }
        )
        self._asked: list[Future[Any]] = []
        self._due = time.monotonic() + self._interval

    def counts(self) -> dict[str, int]:
        """The number of partitions of each topic. Raises ``ComponentError`` if a topic does not exist."""

        def question(timeout: float) -> dict[str, int]:
            return {topic: self._count(future, timeout) for topic, future in self._describe().items()}

        found: dict[str, int] = ask(self._where, self._bootstrap, question)
        missing = [topic for topic, count in found.items() if not count]
        if missing:
            raise ComponentError(
                f"{self._where}, Kafka at {self._bootstrap}",
                "it reads from a topic that does not exist: " + ", ".join(f"'{topic}'" for topic in missing),
                "Create it, or correct its name.",
            )
        return found

    def poll_counts(self) -> dict[str, int]:
        """Once per interval, the number of partitions of each topic that Kafka answered for; otherwise empty.
        Called often; never blocks."""
        now = time.monotonic()
        if not self._asked:
            if now >= self._due:
                self._asked = list(self._describe().values())
            return {}
        if not all(future.done() for future in self._asked):
            return {}
        answers = [future.result() for future in self._asked if future.exception() is None]
        self._asked, self._due = [], now + self._interval
        return {answer.name: len(answer.partitions) for answer in answers}

    def offsets(self, partitions: Sequence[Partition], start: Start) -> dict[Partition, int]:
        """The offset at which each partition starts according to ``start``."""
        if not partitions:
            return {}
        if isinstance(start, Mapping):
            rest = self.offsets([each for each in partitions if each not in start], "earliest")
            return {each: start[each] if each in start else rest[each] for each in partitions}
        spec = self._kafka.admin.OffsetSpec
        if isinstance(start, datetime):
            found = self._list_offsets(partitions, spec.for_timestamp(int(start.timestamp() * 1000)))
            later = [each for each, offset in found.items() if offset < 0]  # no record is that new
            return {**found, **self.offsets(later, "latest")}
        return self._list_offsets(partitions, spec.latest() if start == "latest" else spec.earliest())

    def _list_offsets(self, partitions: Sequence[Partition], spec: Any) -> dict[Partition, int]:
        def question(timeout: float) -> dict[Partition, int]:
            asked = {self._kafka.TopicPartition(*partition): spec for partition in partitions}
            futures = self._admin.list_offsets(asked, request_timeout=timeout)
            return {(key.topic, key.partition): future.result(timeout).offset for key, future in futures.items()}

        found: dict[Partition, int] = ask(self._where, self._bootstrap, question)
        return found

    def _describe(self) -> dict[str, Future[Any]]:
        futures: dict[str, Future[Any]] = self._admin.describe_topics(
            self._kafka.TopicCollection(self._topics), request_timeout=ANSWER_SECONDS
        )
        return futures

    def _count(self, answer: Future[Any], timeout: float) -> int:
        try:
            return len(answer.result(timeout).partitions)
        except self._kafka.KafkaException as failed:
            if failed.args[0].name() == "UNKNOWN_TOPIC_OR_PART":
                return 0
            raise


class StartOffsets:
    """Finds the offset at which each partition of a task starts, by the rules of ``KafkaSpout``."""

    def __init__(
        self, source: KafkaSource, context: Context, where: str, directory: Directory, consumer: Any
    ) -> None:
        self._source, self._context, self._where = source, context, where
        self._directory, self._consumer = directory, consumer
        self._record = StartRecord(context)

    def find(self, partitions: list[Partition], counts: Mapping[str, int]) -> dict[Partition, int]:
        """``counts`` is the number of partitions of each topic. Called once, when the task opens; blocks."""
        stored = self._context.delivery != "at_most_once"
        saved = dict(self._context.state.map("offsets").items()) if stored else {}
        known = dict(self._context.state.map("partitions").items()) if stored else {}
        if not self._is_relative or (known and all(text_of(each) in saved for each in partitions)):
            return self._look_up(partitions, saved, known)
        kept = self._record.load()
        saved = {**kept.get("offsets", {}), **saved}
        known = {**kept.get("partitions", {}), **known}
        starts = self._look_up(partitions, saved, known)
        found = {
            "offsets": {text_of(each): offset for each, offset in starts.items()},
            "partitions": {**counts, **known},
        }
        if found != kept:
            self._record.keep(found)
        return starts

    def on_committed(self) -> None:
        """Called after each commit of a snapshot of the task."""
        self._record.on_committed()

    @property
    def _is_relative(self) -> bool:
        """True if ``start`` resolves to different offsets each time Kafka is asked."""
        return self._source.start == "latest" or isinstance(self._source.start, datetime)

    def _look_up(
        self, partitions: list[Partition], saved: Mapping[str, int], known: Mapping[str, int]
    ) -> dict[Partition, int]:
        starts = {each: saved[text_of(each)] for each in partitions if text_of(each) in saved}
        rest = [each for each in partitions if each not in starts]
        if self._source.group and rest and self._context.delivery != "exactly_once":
            starts.update(self._committed(rest))
        new = [each for each in partitions if each not in starts and each[1] >= known.get(each[0], each[1] + 1)]
        starts.update(self._directory.offsets(new, "earliest"))
        rest = [each for each in partitions if each not in starts]
        starts.update(self._directory.offsets(rest, self._source.start))
        return starts

    def _committed(self, partitions: list[Partition]) -> dict[Partition, int]:
        """The offsets committed under the consumer group."""
        asked = [client_library().TopicPartition(*each) for each in partitions]
        found = ask(self._where, self._source.bootstrap, lambda timeout: self._consumer.committed(asked, timeout))
        return {(each.topic, each.partition): each.offset for each in found if each.offset >= 0}


def text_of(partition: Partition) -> str:
    """The key of a partition in the task's state and in metrics."""
    return f"{partition[0]}/{partition[1]}"


def _ignore(error: Any) -> None:
    """Errors are ignored here: the spout's consumer reports them too."""
