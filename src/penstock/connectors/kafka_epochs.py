"""Where a Kafka sink notes the epochs it has published: a compacted topic of the topology's own.

The note travels in the same transaction as the rows. (The other place for it, a consumer group's offsets, is
forgotten after a week without commits; and librdkafka's ``send_offsets_to_transaction`` never returns, time-out or
not, once the group's coordinator was restarted: its issues 5456 and 5511, open in 2.16.)
"""

from __future__ import annotations

import time
from typing import Any

from penstock.connectors.kafka_client import Options, ask, client_library, no_answer
from penstock.connectors.kafka_encoding import Record

_FIRST_LOOK = 64  # offsets read back at first; the newest note is among the last few


class EpochNotes:
    """The notes of one task: a partition of the topic ``<topology>.<component>.epochs``, which only it writes.

    A note's key is the sink's identity and its value the epoch.
    """

    def __init__(self, where: str, bootstrap: str, topic: str, partition: int, options: Options) -> None:
        self._kafka = client_library()
        self._where, self._bootstrap, self._options = where, bootstrap, dict(options)
        self.topic, self.partition = topic, partition
        self._reader = self._kafka.Consumer(
            {
                **self._options,
                "group.id": topic,  # never joined, but the library wants one
                "isolation.level": "read_committed",
                "enable.auto.commit": False,
                "enable.partition.eof": True,
                "fetch.wait.max.ms": 10,  # an empty partition says so at once
                "auto.offset.reset": "earliest",
            }
        )

    def create(self, partitions: int, seconds: float) -> None:
        """Make the topic, or give it more partitions, unless it has enough already."""
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
        while not self._unless_raced(ensure, deadline):
            if time.monotonic() > deadline:
                problem = f"topic '{self.topic}' did not get a partition for each task within {seconds:.0f} s"
                raise no_answer(self._where, self._bootstrap, problem)

    def _unless_raced(self, ensure: Any, deadline: float) -> bool:
        def question(timeout: float) -> bool:
            try:
                return bool(ensure(timeout))
            except self._kafka.KafkaException as failed:
                # Another task was quicker: look again.
                if failed.args[0].name() in ("TOPIC_ALREADY_EXISTS", "INVALID_PARTITIONS"):
                    return False
                raise

        return bool(ask(self._where, self._bootstrap, question, max(0.1, deadline - time.monotonic())))

    def note(self, identity: str, epoch: int) -> Record:
        """The record to produce in the transaction that has the epoch's rows."""
        return self.topic, str(epoch), identity, self.partition

    def newest(self, identity: str, seconds: float) -> int:
        """The newest epoch noted under an identity, -1 if none. No transaction of this task may be open."""
        place = self._kafka.TopicPartition(self.topic, self.partition)
        low, high = ask(
            self._where,
            self._bootstrap,
            lambda timeout: self._reader.get_watermark_offsets(place, timeout=timeout),
            seconds,
        )
        deadline = time.monotonic() + seconds
        look, end = _FIRST_LOOK, high
        while end > low:
            start = max(low, end - look)
            found = self._read(start, end, deadline).get(identity)
            if found is not None:
                return found
            look, end = 8 * look, start
        return -1

    def _read(self, start: int, end: int, deadline: float) -> dict[str, int]:
        """Identity to its last epoch between two offsets."""
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
        problem = f"the epochs noted in topic '{self.topic}' could not be read in time"
        raise no_answer(self._where, self._bootstrap, problem)

    def close(self) -> None:
        self._reader.close()
