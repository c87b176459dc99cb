"""Where the chaos tests' topologies read from and write to: each is filled before the start, and read back at the
end, by clients of the harness's own."""

from __future__ import annotations

import glob

import pyarrow.dataset as ds

from tests.fault.oracle import ORIGINS, key_of


def lines(origin, count):
    return (f"{origin} {n} {key_of(n)}" for n in range(count))


def write_files(folder, count):
    """A file of records for each origin."""
    folder.mkdir()
    for origin in ORIGINS:
        (folder / f"origin-{origin}.txt").write_text("".join(f"{line}\n" for line in lines(origin, count)))


def write_topic(bootstrap, topic, count):
    """All records, in a topic."""
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": bootstrap, "enable.idempotence": True, "log_level": 0})
    for origin in ORIGINS:
        for number, line in enumerate(lines(origin, count)):
            producer.produce(topic, line)
            if number % 10_000 == 0:
                producer.flush(60)
    assert producer.flush(60) == 0, "Kafka has all input"


class ParquetOutput:
    """A folder of Parquet files."""

    def __init__(self, folder):
        self._folder = folder

    def rows(self):
        files = glob.glob(f"{self._folder}/*.parquet")
        if not files:
            return []
        table = ds.dataset(files, format="parquet").to_table(columns=["origin", "n", "key", "seen"])
        return list(zip(*(column.to_pylist() for column in table.columns), strict=True))

    def close(self):
        pass


class PostgresOutput:
    """A table, which the sink makes."""

    def __init__(self, dsn, table):
        self._dsn, self._table = dsn, table

    def rows(self):
        import psycopg

        with psycopg.connect(self._dsn, autocommit=True) as connection:
            (there,) = connection.execute("SELECT to_regclass(%s)", (self._table,)).fetchone()
            return connection.execute(f"SELECT origin, n, key, seen FROM {there}").fetchall() if there else []

    def close(self):
        pass


class KafkaOutput:
    """A topic; what transactions have not committed is left out. It is read on from call to call."""

    def __init__(self, bootstrap, topic):
        from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition

        self._consumer = Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": f"judge-{topic}",
                "enable.auto.commit": False,
                "isolation.level": "read_committed",
                "log_level": 0,
            }
        )
        partitions = self._consumer.list_topics(topic, 30).topics[topic].partitions
        self._consumer.assign([TopicPartition(topic, each, OFFSET_BEGINNING) for each in partitions])
        self._rows = []

    def rows(self):
        while messages := self._consumer.consume(10_000, 2.0):
            for message in messages:
                if message.error() is None:
                    origin, n, key, seen = message.value().decode().split()
                    self._rows.append((int(origin), int(n), key, int(seen)))
        return self._rows

    def close(self):
        self._consumer.close()
