"""Functions that write and read topics, and a spout driven without an executor."""

import time

import numpy as np
from confluent_kafka import Consumer, Producer, TopicPartition

from penstock.connectors.kafka import KafkaSpout
from penstock.state.values import TaskState
from penstock.topology.components import Context, Source

SOURCE = Source("up", "default", 1)
PATIENCE = 60.0  # seconds; a broker that was killed is back within 6 s


def write(kafka, topic, values, partition=0, keys=None):
    producer = Producer({"bootstrap.servers": kafka.bootstrap, "log_level": 2})
    for row, value in enumerate(values):
        producer.produce(topic, value, keys[row] if keys else None, partition)
    assert producer.flush(PATIENCE) == 0


def read(kafka, topic, isolation="read_committed", under_way=False):
    """All present records as ⟨key, value⟩, in order of partition and offset. Kafka acknowledges a commit before
    its markers are in the partitions; this function waits for them, unless a transaction is ``under_way``."""
    consumer = Consumer(
        {
            "bootstrap.servers": kafka.bootstrap,
            "group.id": "reader",
            "isolation.level": isolation,
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 10,
            "auto.offset.reset": "earliest",
            "log_level": 2,
        }
    )
    numbers = list(consumer.list_topics(topic, timeout=PATIENCE).topics[topic].partitions)
    partitions = [TopicPartition(topic, number, 0) for number in numbers]
    if isolation == "read_committed" and not under_way:
        _await_markers(kafka, consumer, partitions)
    consumer.assign(partitions)
    rows, ended = [], set()
    while len(ended) < len(numbers):
        for message in consumer.consume(1000, 0.02):
            if message.error() is None:
                rows.append((message.partition(), message.offset(), message.key(), message.value()))
            elif message.error().name() == "_PARTITION_EOF":
                ended.add(message.partition())
    consumer.close()
    return [(key, value) for _, _, key, value in sorted(rows, key=lambda row: row[:2])]


def _await_markers(kafka, consumer, partitions):
    everything = Consumer(
        {
            "bootstrap.servers": kafka.bootstrap,
            "group.id": "end",
            "isolation.level": "read_uncommitted",
            "log_level": 2,
        }
    )
    deadline = time.monotonic() + PATIENCE
    for partition in partitions:
        _, end = everything.get_watermark_offsets(partition, PATIENCE)
        while consumer.get_watermark_offsets(partition, PATIENCE)[1] < end:  # the last stable offset
            assert time.monotonic() < deadline, f"a transaction is still open in {partition}"
            time.sleep(0.005)
    everything.close()


def context(delivery="at_most_once", index=0, parallelism=1, state=None, component="kafka", **more):
    tasks = {component: tuple(range(10, 10 + parallelism))}
    state = TaskState() if state is None else state  # an empty state is falsy
    return Context("topology", component, 10 + index, index, tasks, delivery=delivery, state=state, **more)


def restarted(state):
    """A task's state as a later process finds it."""
    later = TaskState()
    later.restore({name: [data] for name, (_, _, data) in state.snapshot(full=True).encode().items()})
    return later


class Catch:
    """A collector that keeps what is emitted."""

    def __init__(self):
        self.batches = []
        self.rows = []
        self.ids = []

    def emit_batch(self, columns, stream="default", msg_ids=None):
        self.batches.append(columns)
        self.rows += [tuple(row.values()) for row in columns.to_pylist()]
        if msg_ids is not None:
            assert isinstance(msg_ids, np.ndarray)
            assert len(msg_ids) == columns.num_rows
            self.ids += msg_ids.tolist()

    @property
    def lines(self):
        return [row[0] for row in self.rows]


class Driven:
    """A spout opened as a task would open it; ``until`` calls it as the executor does."""

    def __init__(
        self, kafka, topics, delivery="at_least_once", index=0, parallelism=1, state=None, folder="", **options
    ):
        self.state = TaskState() if state is None else state
        self.caught = Catch()
        self.spout = KafkaSpout(kafka.bootstrap, topics, **options)
        self.spout.open({}, context(delivery, index, parallelism, self.state, folder=str(folder)), self.caught)

    def until(self, condition):
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, f"only {len(self.caught.rows)} rows came"
            before = len(self.caught.rows)
            self.spout.next_batch()
            if len(self.caught.rows) == before:
                time.sleep(0.001)  # as the executor pauses
        return self

    def until_rows(self, count):
        self.until(lambda: len(self.caught.rows) >= count)
        assert len(self.caught.rows) == count
        return self

    def snapshot(self):
        """The state that a restart would find."""
        self.spout.before_snapshot()
        return restarted(self.state)

    def idle(self, calls=200):
        """Calls the spout for a fifth of a second; it must emit nothing."""
        before = len(self.caught.rows)
        for _ in range(calls):
            self.spout.next_batch()
            time.sleep(0.001)
        assert self.caught.rows[before:] == []

    def close(self):
        if self.spout is not None:
            self.spout.close()
            self.spout = None
