"""Kafka to Kafka while the broker is killed: nothing is lost, and exactly once nothing is duplicated."""

import contextlib
import threading
import time
from collections import Counter

import pytest

from penstock.errors import EnvironmentFault
from penstock.testing.servers.kafka import KafkaServer
from tests.fault.harness import Run

confluent_kafka = pytest.importorskip("confluent_kafka")


@pytest.fixture
def kafka():
    try:
        server = KafkaServer()
        server.start()
    except EnvironmentFault as missing:
        pytest.skip(str(missing))
    with contextlib.closing(server):
        server.create_topic("in", partitions=4)
        server.create_topic("out", partitions=2)
        yield server


class KafkaRun(Run):
    """The fault topology between two topics; a thread feeds the first at a steady rate."""

    def __init__(self, kafka, *args, rate=2_000, **more):
        super().__init__(*args, **more)
        self.kafka, self.rate = kafka, rate
        self.config["kafka"] = kafka.bootstrap
        self.lines = Counter()
        self.feeder = threading.Thread(target=self.feed, daemon=True)
        self.consumer = confluent_kafka.Consumer(
            {
                "bootstrap.servers": kafka.bootstrap,
                "group.id": "judge",
                "auto.offset.reset": "earliest",
                "isolation.level": "read_committed",
                "log_level": 0,
            }
        )

    def start(self):
        self.feeder.start()
        super().start()
        self.consumer.subscribe(["out"])

    def close(self):
        super().close()
        self.consumer.close()

    def feed(self):
        producer = confluent_kafka.Producer(
            {"bootstrap.servers": self.kafka.bootstrap, "enable.idempotence": True, "log_level": 0}
        )
        began = time.monotonic()
        for n in range(self.count):
            for origin in (0, 1):
                producer.produce("in", f"{origin} {n} key-{n % 50}")
            if n % 100 == 0:
                producer.poll(0)
                time.sleep(max(0.0, began + n / self.rate - time.monotonic()))
        producer.flush(120)

    def rows(self):
        while message := self.consumer.poll(0.2):
            if message.error() is None:
                origin, n, _ = message.value().decode().split()
                self.lines[int(origin), int(n)] += 1
        return self.lines

    def kill_broker(self):
        before = self.status()["executed"]
        self.kafka.kill()
        struck = time.time()
        self.kafka.start()
        # Lines wait at the feeder meanwhile; where all of them had come before, there is nothing left to see.
        done = min(before + 1, 2 * self.count)
        self.await_("output after the broker's restart", lambda: self.status().get("executed", 0) >= done)
        self.faults.append(("broker", round(time.time() - struck, 2)))


@pytest.mark.parametrize("delivery", ["at_least_once", "exactly_once"])
@pytest.mark.seeds(0, 1)
def test_brokers_killed(tmp_path, campaign, kafka, delivery, seed):
    with KafkaRun(kafka, tmp_path, 800 + seed, delivery, count=40_000, message_timeout=30.0) as run:
        run.wait_a_while()
        run.kill_worker()
        for _ in range(2):
            run.wait_a_while()
            run.kill_broker()
        run.finish()
    campaign(run)
