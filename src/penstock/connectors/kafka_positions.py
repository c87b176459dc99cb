"""Which partitions a spout task reads, and from where."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from datetime import datetime
from typing import Any, TypeAlias

from penstock.connectors.kafka_client import ANSWER_SECONDS, Options, ask, client_library, connecting
from penstock.errors import ComponentError, TopologyError

Partition: TypeAlias = tuple[str, int]
Start: TypeAlias = str | datetime | Mapping[Partition, int]
"""``"earliest"``, ``"latest"``, the first record at or after a time, or an offset for each ⟨topic, partition⟩ (one
that is not named starts at its earliest record)."""


def check_start(start: Start) -> None:
    if not (start in ("earliest", "latest") or isinstance(start, datetime | Mapping)):
        raise TopologyError(
            "KafkaSpout",
            f'start is {start!r}, which is neither "earliest", "latest", a datetime nor '
            f"{{(topic, partition): offset}}",
            'For a time give start=datetime(2026, 1, 31, tzinfo=UTC); "earliest" reads everything.',
        )


def owned(topics: Sequence[str], counts: Mapping[str, int], index: int, parallelism: int) -> list[Partition]:
    """The partitions of the task at ``index``: the i-th topic's partition p is read by task i + p, counted round.

    So the partitions are spread evenly, every task knows its own without asking, and a partition stays where it
    is when topics get more partitions, or when topics are added at the end of the list.
    """
    return [
        (topic, number)
        for position, topic in enumerate(topics)
        for number in range(counts.get(topic, 0))
        if (position + number) % parallelism == index
    ]


class Directory:
    """Asks Kafka about topics. ``counts`` and ``offsets`` wait for the answer; ``news`` never does."""

    def __init__(
        self, where: str, bootstrap: str, topics: Sequence[str], interval: float, options: Options
    ) -> None:
        self._where, self._bootstrap, self._topics, self._interval = where, bootstrap, list(topics), interval
        self._kafka = client_library()
        self._admin = self._kafka.admin.AdminClient(
            {"bootstrap.servers": bootstrap, "log_level": 2, "error_cb": _ignore, **connecting(options)}
        )
        self._asked: list[Future[Any]] = []
        self._due = time.monotonic() + interval

    def counts(self) -> dict[str, int]:
        """The number of partitions of each topic. Raises where a topic does not exist."""

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

    def news(self) -> dict[str, int]:
        """Once per interval: the number of partitions of each topic that could be asked about; else nothing."""
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
        """The offset each partition starts at by the rule ``start``."""
        if not partitions:
            return {}
        if isinstance(start, Mapping):
            rest = self.offsets([each for each in partitions if each not in start], "earliest")
            return {each: start[each] if each in start else rest[each] for each in partitions}
        spec = self._kafka.admin.OffsetSpec
        if isinstance(start, datetime):
            found = self._list_offsets(partitions, spec.for_timestamp(int(start.timestamp() * 1000)))
            later = [each for each, offset in found.items() if offset < 0]  # nothing that new yet
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


def _ignore(error: Any) -> None:
    """The spout's consumer reports the same errors."""
