"""Replay queues stored in Kafka topics: they survive the loss of a machine, and tasks reach them from any node.

The topics of a source are ``<topology>.<topic>.from``, ``.to`` and ``.dead``. They are created on the first run
with a partition for each task of the spout and without a limit of age or size, so that Kafka does not delete
unread records. Progress and the pointer are stored as offsets of consumer groups; read positions are part of the
task's state.

Kafka does not exclude a second process of a task, as a lock on a local disk does. While an old process runs beside
a new one, tuples may be emitted twice. None is lost, since neither process stores a position or deletes a record
before it has processed it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from penstock.acking.lineage import I64
from penstock.connectors.kafka_client import (
    ANSWER_SECONDS,
    Options,
    ask,
    client_library,
    connecting,
    no_answer,
    refused,
    where,
)
from penstock.connectors.kafka_second_reader import SECOND_CONSUMER, KafkaSecondReader
from penstock.errors import EnvironmentFault
from penstock.replay.dead_letters import DeadLetter, DeadLetterStore, removed_ids
from penstock.replay.progress import Positions, ReadProgress
from penstock.replay.queues import Pointer, Queues, ReplayQueue, ReplayStore
from penstock.replay.records import ReplayRecord, decode, decode_dead_letter, encode, encode_dead_letter, lost
from penstock.topology.components import Context

_DEAD_LETTER, _REMOVED = b"L", b"S"
_FETCH_SECONDS = 10.0  # seconds; a record that exists arrives sooner unless the broker is down
_RECORD_BYTES = 64 << 20
"""Bytes that a record of a replay topic may have. The default of Kafka is 1 MB, but JSON makes up to six bytes of
one, and the history of failures comes on top. A request may have 100 MB."""
_OVERHEAD = 1024  # bytes; more than Kafka adds to a record
_TOPIC_SETTINGS = {
    "retention.ms": "-1",
    "retention.bytes": "-1",
    "cleanup.policy": "delete",
    "max.message.bytes": str(_RECORD_BYTES),
}
_KINDS = ("from", "to", "dead")


class Broker:
    """The Kafka clients that the queues of one task share. Used by the threads of its ``Replayer``."""

    def __init__(self, where: str, bootstrap: str, options: Options) -> None:
        self.kafka = client_library()
        self.where, self.bootstrap = where, bootstrap
        self._common = {
            "bootstrap.servers": bootstrap,
            "log_level": 2,
            "error_cb": _ignore,
            "reconnect.backoff.max.ms": 1000,  # the default is 10 s; a restarted broker is back after about 3 s
            **connecting(options),
        }

    @functools.cached_property
    def admin(self) -> Any:
        return self.kafka.admin.AdminClient(self._common)

    @functools.cached_property
    def producer(self) -> Any:
        return self.kafka.Producer(
            {
                **self._common,
                "enable.idempotence": True,  # a retry inside the client creates no duplicate
                "linger.ms": 0,
                "delivery.timeout.ms": int(ANSWER_SECONDS * 1000),
                "message.max.bytes": _RECORD_BYTES,
            }
        )

    def consumer(self, group: str, options: Options = MappingProxyType({})) -> Any:
        return self.kafka.Consumer(
            {
                **self._common,
                "group.id": group,
                "enable.auto.commit": False,
                "enable.auto.offset.store": False,
                "auto.offset.reset": "earliest",  # deleted records had been processed
                "fetch.wait.max.ms": 10,
                "fetch.queue.backoff.ms": 5,
                **options,
            }
        )

    def ask(self, question: Any) -> Any:
        """Call ``question(timeout)`` until Kafka answers; see ``kafka_client.ask``."""
        return ask(self.where, self.bootstrap, question)

    def produce(self, topic: str, partition: int, values: Sequence[bytes]) -> None:
        """Write values in order. When the call returns, all replicas have them."""
        failed: list[Any] = []

        def delivered(error: Any, message: Any) -> None:
            if error is not None:
                failed.append(error)

        for value in values:
            sent = False
            while not sent:
                try:
                    self.producer.produce(topic, value, partition=partition, on_delivery=delivered)
                    sent = True
                except BufferError:  # the client's queue is full: wait until it has sent some
                    self.producer.poll(0.1)
                except self.kafka.KafkaException as error:
                    raise refused(self.where, self.bootstrap, error.args[0]) from error
        left = self.producer.flush(ANSWER_SECONDS + 5)
        if failed or left:
            del self.producer  # a producer that gave up a record must not continue with the next one
        if failed and failed[0].name() != "_MSG_TIMED_OUT":
            raise refused(self.where, self.bootstrap, failed[0])
        if failed or left:
            problem = (
                f"{len(failed) + left} of {len(values)} records were not accepted within {ANSWER_SECONDS:.0f} s"
            )
            raise no_answer(self.where, self.bootstrap, problem)

    def ends(self, consumer: Any, topic: str, partition: int) -> tuple[int, int]:
        """The offset of the oldest record and the offset of the next record to be written."""
        place = self.kafka.TopicPartition(topic, partition)
        found: tuple[int, int] = self.ask(lambda timeout: consumer.get_watermark_offsets(place, timeout))
        return found

    def delete_before(self, topic: str, partition: int, offset: int) -> None:
        place = self.kafka.TopicPartition(topic, partition, offset)

        def question(timeout: float) -> None:
            for future in self.admin.delete_records([place], request_timeout=timeout).values():
                future.result(timeout)

        self.ask(question)

    def close(self) -> None:
        if "producer" in vars(self):
            self.producer.flush(1.0)


class KafkaQueue(ReplayQueue):
    """A partition as a queue. Records below the group's offset are released."""

    def __init__(self, broker: Broker, topic: str, partition: int, group: str) -> None:
        self._broker, self._topic, self._partition = broker, topic, partition
        self._consumer = broker.consumer(group)
        asked = [broker.kafka.TopicPartition(topic, partition)]
        [stored] = broker.ask(lambda timeout: self._consumer.committed(asked, timeout))
        first, self._end = broker.ends(self._consumer, topic, partition)
        self._released = self._cursor = int(max(first, stored.offset))
        self._start(self._cursor)
        self._again = KafkaSecondReader(
            broker.where, broker.bootstrap, functools.partial(broker.consumer, group, SECOND_CONSUMER)
        )

    def append(self, records: Sequence[ReplayRecord]) -> None:
        if records:
            values = [_fitting(record, encode(record), encode) for record in records]
            self._broker.produce(self._topic, self._partition, values)

    def read(self, limit: int) -> list[tuple[int, ReplayRecord]]:
        if self.empty:
            return []
        messages = self._consumer.consume(min(limit, self._end - self._cursor), _FETCH_SECONDS)
        errors = [message.error() for message in messages if message.error() is not None]
        try:
            found = [
                (message.offset(), decode(message.value()))
                for message in messages
                if message.error() is None and message.offset() >= self._cursor
            ]
        except EnvironmentFault:
            self._consumer.seek(self._broker.kafka.TopicPartition(self._topic, self._partition, self._cursor))
            raise
        if found:
            self._cursor = found[-1][0] + 1
            self._progress.read([offset for offset, _ in found], self._cursor)
        elif errors:
            raise refused(self._broker.where, self._broker.bootstrap, errors[0])
        else:
            raise no_answer(
                self._broker.where,
                self._broker.bootstrap,
                f"no records of {self._topic} from offset {self._cursor} on arrived within {_FETCH_SECONDS:.0f} s",
            )
        return found

    def read_again(self, positions: I64) -> list[ReplayRecord]:
        where = f"{self._topic} partition {self._partition} offset"
        return [
            lost(f"{where} {position}", found) if isinstance(found, str) else decode(found.value())
            for position, found in zip(
                positions.tolist(), self._again.read(self._topic, self._partition, positions), strict=False
            )
        ]

    def seek(self, position: int) -> None:
        _, self._end = self._broker.ends(self._consumer, self._topic, self._partition)
        self._start(max(self._released, min(position, self._end)))

    def done(self, positions: Positions) -> None:
        self._progress.done(positions)

    @property
    def position(self) -> int:
        return self._progress.position

    @property
    def empty(self) -> bool:
        if self._cursor >= self._end:
            first, self._end = self._broker.ends(self._consumer, self._topic, self._partition)
            if first > self._cursor:  # an older process of this task has processed and deleted them
                self._cursor = first
                self._progress.read([], first)
        return self._cursor >= self._end

    def release(self, position: int) -> None:
        place = self._broker.kafka.TopicPartition(self._topic, self._partition, max(position, self._released))
        # Committed even if unchanged: Kafka forgets offsets that were not committed for a week.
        self._broker.ask(lambda timeout: self._consumer.commit(offsets=[place], asynchronous=False))
        if position > self._released:
            self._broker.delete_before(self._topic, self._partition, position)
            self._released = position

    def close(self) -> None:
        self._consumer.close()
        self._again.close()

    def _start(self, position: int) -> None:
        self._cursor = position
        self._progress: ReadProgress = ReadProgress(position)
        self._consumer.assign([self._broker.kafka.TopicPartition(self._topic, self._partition, position)])


class KafkaPointer(Pointer):
    """The pointer as the offset of a separate consumer group: 1 if From and To are exchanged."""

    def __init__(self, broker: Broker, topic: str, partition: int, group: str) -> None:
        self._broker = broker
        self._place = functools.partial(broker.kafka.TopicPartition, topic, partition)
        self._consumer = broker.consumer(group)

    def load(self) -> bool:
        [found] = self._broker.ask(lambda timeout: self._consumer.committed([self._place()], timeout))
        exchanged: bool = found.offset == 1
        return exchanged

    def store(self, exchanged: bool) -> None:
        place = self._place(int(exchanged))
        self._broker.ask(lambda timeout: self._consumer.commit(offsets=[place], asynchronous=False))

    def close(self) -> None:
        self._consumer.close()


class KafkaDeadLetterStore(DeadLetterStore):
    """Dead letters in a partition. The id of a dead letter is its offset; a removal is a separate record."""

    def __init__(self, broker: Broker, topic: str, partition: int, group: str) -> None:
        self._broker, self._topic, self._partition = broker, topic, partition
        self._consumer = broker.consumer(group)

    def add(self, records: Sequence[ReplayRecord]) -> None:
        if records:
            values = [
                _DEAD_LETTER + _fitting(record, encode_dead_letter(record), encode_dead_letter)
                for record in records
            ]
            self._broker.produce(self._topic, self._partition, values)

    def read_all(self) -> list[DeadLetter]:
        return [DeadLetter(offset, decode_dead_letter(value)) for offset, value in self._stored().items()]

    def remove(self, ids: Collection[int]) -> None:
        """Steps: (1) write a record that marks them as removed; (2) delete the records before the oldest remaining
        dead letter."""
        if ids:
            removed = _REMOVED + json.dumps(sorted(ids)).encode()
            self._broker.produce(self._topic, self._partition, [removed])
            left = self._stored()
            if left:
                self._broker.delete_before(self._topic, self._partition, min(left))

    def close(self) -> None:
        self._consumer.close()

    def _stored(self) -> dict[int, bytes | None]:
        first, end = self._broker.ends(self._consumer, self._topic, self._partition)
        self._consumer.assign([self._broker.kafka.TopicPartition(self._topic, self._partition, first)])
        found: dict[int, bytes | None] = {}
        offset = first
        while offset < end:
            messages = self._consumer.consume(min(1000, end - offset), _FETCH_SECONDS)
            if not messages or messages[-1].error() is not None:
                raise no_answer(
                    self._broker.where,
                    self._broker.bootstrap,
                    f"no records of {self._topic} from offset {offset} on arrived "
                    + (f"({messages[-1].error()})" if messages else f"within {_FETCH_SECONDS:.0f} s"),
                )
            for message in messages:
                value = message.value()
                if value is not None and value[:1] == _REMOVED:
                    for id in removed_ids(value[1:]):
                        found.pop(id, None)
                else:  # a dead letter, or a record of another program, which is shown as a damaged dead letter
                    found[message.offset()] = value[1:] if value and value[:1] == _DEAD_LETTER else value
            offset = messages[-1].offset() + 1
        self._consumer.unassign()
        return found


class KafkaStore(ReplayStore):
    """Keeps the queues of each task of a spout in separate partitions."""

    def __init__(
        self,
        bootstrap: str,
        name: str | None = None,
        *,
        replication: int = -1,
        options: Options = MappingProxyType({}),
    ) -> None:
        """``name`` is the middle part of the topic names: the name of the source topic, or the id of the spout if
        it is None. ``replication`` is the number of replicas; -1 stands for the broker's default."""
        self._bootstrap, self._name = bootstrap, name
        self._replication, self._options = replication, dict(options)

    def check(self, context: Context) -> None:
        client_library()

    def open(self, context: Context) -> Queues:
        broker = Broker(where(context.component, context.task), self._bootstrap, self._options)
        topics = self.topics(context.topology, context.component)
        self._create(broker, topics, context.parallelism)
        return open_queues(broker, topics, context.index)

    def topics(self, topology: str, component: str) -> dict[str, str]:
        """The names of the topics that are initially From, To and the dead letters."""
        return {kind: f"{topology}.{self._name or component}.{kind}" for kind in _KINDS}

    def _create(self, broker: Broker, topics: Mapping[str, str], partitions: int) -> None:
        """Create the topics on the first run, and add partitions if the spout has more tasks than before."""
        admin = broker.kafka.admin
        known = broker.ask(lambda timeout: broker.admin.list_topics(timeout=timeout)).topics
        new = [
            admin.NewTopic(topic, partitions, self._replication, config=_TOPIC_SETTINGS)
            for topic in topics.values()
            if topic not in known
        ]
        grown = [
            admin.NewPartitions(topic, partitions)
            for topic in topics.values()
            if topic in known and len(known[topic].partitions) < partitions
        ]
        made = broker.admin.create_topics(new) if new else {}
        more = broker.admin.create_partitions(grown) if grown else {}
        for future in (*made.values(), *more.values()):
            _wait(broker, future)

        def all_there(timeout: float) -> None:
            found = broker.admin.list_topics(timeout=timeout).topics
            for topic in topics.values():
                if topic not in found or len(found[topic].partitions) < partitions:
                    raise TimeoutError

        broker.ask(all_there)


def stores_of(bootstrap: str, topology: str, source: str | None = None) -> Iterator[tuple[str, int, Queues]]:
    """For tools: the queues of all tasks of a topology, or of one of its sources, each with the middle part of its
    topic names and the index of the task. Callers may append to the queues and read or remove dead letters; they
    must not read the queues."""
    broker = Broker(f"topology '{topology}'", bootstrap, {})
    known = broker.ask(lambda timeout: broker.admin.list_topics(timeout=timeout)).topics
    for dead in sorted(known):
        name = dead.removeprefix(f"{topology}.").removesuffix(".dead")
        topics = {kind: f"{topology}.{name}.{kind}" for kind in _KINDS}
        if topics["dead"] == dead and source in (None, name) and all(topic in known for topic in topics.values()):
            for partition in sorted(known[dead].partitions):
                yield name, partition, open_queues(broker, topics, partition)


def open_queues(broker: Broker, topics: Mapping[str, str], partition: int) -> Queues:
    """The queues of one task. The consumer group is named after the From topic: one group per topology and
    source."""
    group = topics["from"].removesuffix(".from")
    pointer = KafkaPointer(broker, topics["from"], partition, f"{group}.pointer")

    def release() -> None:
        pointer.close()
        broker.close()

    return Queues(
        KafkaQueue(broker, topics["from"], partition, group),
        KafkaQueue(broker, topics["to"], partition, group),
        KafkaDeadLetterStore(broker, topics["dead"], partition, group),
        pointer,
        release,
    )


def _fitting(record: ReplayRecord, value: bytes, encoding: Callable[[ReplayRecord], bytes]) -> bytes:
    """The encoded record or, if a topic does not take it, a damaged record that says so. Kafka would refuse it
    again and again, and the task's other failed records would wait behind it."""
    if len(value) <= _RECORD_BYTES - _OVERHEAD:
        return value
    text = f"a record of more than {_RECORD_BYTES} bytes, which a replay topic does not take"
    return encoding(record._replace(payload=(text.encode(),), error=record.error or text, damaged=True))


def _wait(broker: Broker, future: Any) -> None:
    """Wait until a topic has been created; another task may have created it meanwhile."""
    try:
        future.result(ANSWER_SECONDS)
    except broker.kafka.KafkaException as failed:
        if failed.args[0].name() not in ("TOPIC_ALREADY_EXISTS", "INVALID_PARTITIONS"):
            raise refused(broker.where, broker.bootstrap, failed.args[0]) from failed


def _ignore(error: Any) -> None:
    """Errors are ignored here: the calls that need a broker raise them."""
