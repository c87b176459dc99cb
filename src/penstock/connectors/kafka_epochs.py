"""Records the epochs that a Kafka sink has published, in a compacted topic that belongs to the topology.

The record is written in the same transaction as the rows. The alternative, offsets of a consumer group, has two
drawbacks: Kafka forgets them after a week without commits, and librdkafka's ``send_offsets_to_transaction`` never
returns after a restart of the group's coordinator (its issues 5456 and 5511, open in 2.16).
"""

from __future__ import annotations

import time
from typing import Any

from penstock.connectors.kafka_client import Options, ask, client_library, no_answer
from penstock.connectors.kafka_encoding import Record

_FIRST_READ = 64  # offsets read back at first; the newest record of an identity is usually among the last few


class EpochRecords:
    """The epoch records of one task: a partition of the topic ``<topology>.<component>.epochs`` that only this
    task writes. The key of a record is the sink's identity, the value is the epoch. Used by one thread at a
    time."""

    def __init__(self, where: str, bootstrap: str, topic: str, partition: int, options: Options) -> None:
        self._kafka = client_library()
        self._where, self._bootstrap, self._options = where, bootstrap, dict(options)
        self.topic, self.partition = topic, partition
        self._reader = self._kafka.Consumer(
            {
                **self._options,
                "group.id": topic,  # never joined, but the library requires one
                "isolation.level": "read_committed",
                "enable.auto.commit": False,
                "enable.partition.eof": True,
                "fetch.wait.max.ms": 10,  # milliseconds; the end of an empty partition is reported quickly
                "auto.offset.reset": "earliest",
            }
        )

    def create(self, partitions: int, seconds: float) -> None:
        """Create the topic, or add partitions to it, unless it has at least ``partitions``. Raises ``SystemAway``
        if that fails within ``seconds``."""
        admin_module = self._kafka.admin
        admin = admin_module.AdminClient(self._options)
        new = admin_module.NewTopic(self.topic, partitions, -1, config={"cleanup.policy": "compact"})

        def ensure(timeout: float) -> bool:
            found = admin.list_topics(timeout=timeout).topics.get(self.topic)
            if found is None or found.error is not None:
                admin.create_topics([new], request_timeout=timeout)[self.topic].result(timeout)
            elif len(found.partitions) < partitions:
                more = admin_module.NewPartitions(self.topic, partitions)
                admin.create_partitions([more], request_timeout=timeout)[self.topic].result(timeout)
            else:
                return True
            return False

        deadline = time.monotonic() + seconds
        while not self._or_raced(ensure, deadline):
            if time.monotonic() > deadline:
                problem = f"topic '{self.topic}' did not get a partition for each task within {seconds:.0f} s"
                raise no_answer(self._where, self._bootstrap, problem)

    def _or_raced(self, ensure: Any, deadline: float) -> bool:
        def question(timeout: float) -> bool:
            try:
                return bool(ensure(timeout))
            except self._kafka.KafkaException as failed:
                # Another task has changed the topic at the same time: check again.
                if failed.args[0].name() in ("TOPIC_ALREADY_EXISTS", "INVALID_PARTITIONS"):
                    return False
                raise

        return bool(ask(self._where, self._bootstrap, question, max(0.1, deadline - time.monotonic())))

    def record(self, identity: str, epoch: int) -> Record:
        """The record to produce in the transaction that contains the rows of the epoch."""
        return self.topic, str(epoch), identity, self.partition

    def newest(self, identity: str, seconds: float) -> int:
        """The newest epoch recorded under an identity, or -1. No transaction of this task may be open."""
        place = self._kafka.TopicPartition(self.topic, self.partition)
        low, high = ask(
            self._where,
            self._bootstrap,
            lambda timeout: self._reader.get_watermark_offsets(place, timeout=timeout),
            seconds,
        )
        deadline = time.monotonic() + seconds
        count, end = _FIRST_READ, high
        while end > low:
            start = max(low, end - count)
            found = self._read(start, end, deadline).get(identity)
            if found is not None:
                return found
            count, end = 8 * count, start
        return -1

    def _read(self, start: int, end: int, deadline: float) -> dict[str, int]:
        """The last epoch of each identity between two offsets."""
        self._reader.assign([self._kafka.TopicPartition(self.topic, self.partition, start)])
        found: dict[str, int] = {}
        while time.monotonic() < deadline:
            for message in self._reader.consume(1000, 0.1):
                error = message.error()
                if error is None and message.offset() < end:
                    found[message.key().decode()] = int(message.value())
                elif error is None or error.name() == "_PARTITION_EOF":
                    self._reader.unassign()
                    return found
        problem = f"the epochs recorded in topic '{self.topic}' could not be read in time"
        raise no_answer(self._where, self._bootstrap, problem)

    def close(self) -> None:
        self._reader.close()
