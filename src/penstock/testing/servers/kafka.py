"""A real Kafka for tests and experiments: one KRaft broker on loopback, fetched once.

>>> with KafkaServer() as kafka:
...     kafka.create_topic("lines", partitions=4)
...     ...  # kafka.bootstrap is where clients connect

``python -m penstock.testing.servers.kafka`` starts one from the command line. To simulate outages, the broker can
be killed and started again with the same data and port.
"""

from __future__ import annotations

import argparse
import base64
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.errors import EnvironmentFault
from penstock.interrupts import raise_on_signals
from penstock.spark.java import ensure_java
from penstock.testing.servers.jars import JavaProduct, Progress
from penstock.testing.servers.server_process import Server

VERSION = "4.3.1"
KAFKA = JavaProduct(
    "Kafka",
    VERSION,
    (f"org.apache.kafka:kafka_2.13:{VERSION}", "org.apache.logging.log4j:log4j-slf4j-impl:2.25.3"),
)

# With a single node every internal topic has one replica, and few partitions for a faster start. A killed broker
# can rejoin only after its session has expired, hence a session timeout of 3 s instead of 9 s.
_PROPERTIES = """
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}
controller.listener.names=CONTROLLER
inter.broker.listener.name=PLAINTEXT
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT
log.dirs={folder}/data
auto.create.topics.enable=false
group.initial.rebalance.delay.ms=0
offsets.topic.replication.factor=1
offsets.topic.num.partitions=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=1
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
share.coordinator.state.topic.num.partitions=1
broker.session.timeout.ms=3000
broker.heartbeat.interval.ms=500
num.network.threads=2
num.io.threads=2
"""
_LOGGING = """
rootLogger.level=warn
rootLogger.appenderRef.out.ref=out
appender.out.type=Console
appender.out.name=out
appender.out.layout.type=PatternLayout
appender.out.layout.pattern=%d %p %c: %m%n
"""
_TOPIC_SECONDS = 60.0  # time limit for creating a topic; usually milliseconds, but longer on a loaded machine


def new_cluster_id() -> str:
    """A UUID in Kafka's notation. It does not begin with a dash, which Kafka's tools would take for an option."""
    while (found := base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")).startswith("-"):
        pass
    return found


class KafkaServer(Server):
    """A Kafka broker."""

    title = "Kafka"
    noun = "broker"
    ports = 2

    def __init__(self, folder: str | Path | None = None, progress: Progress = lambda line: None) -> None:
        super().__init__(folder)
        self._folder = self._process.folder
        self._progress = progress
        (self._controller,) = self._more_ports
        self._admin: Any = None

    @property
    def bootstrap(self) -> str:
        """The address for clients; it never changes."""
        return self.address

    @property
    def _meta(self) -> Path:
        return self._folder / "data" / "meta.properties"

    def create_topic(self, name: str, partitions: int = 1) -> None:
        """Create a topic and wait until clients can use it."""
        from confluent_kafka.admin import NewTopic

        self._running()
        self._admin.create_topics([NewTopic(name, partitions, 1)])[name].result(_TOPIC_SECONDS)
        self._wait_for_partitions(name, partitions)

    def add_partitions(self, name: str, total: int) -> None:
        """Give a topic more partitions and wait until clients can use them."""
        from confluent_kafka.admin import NewPartitions

        self._running()
        self._admin.create_partitions([NewPartitions(name, total)])[name].result(_TOPIC_SECONDS)
        self._wait_for_partitions(name, total)

    def _wait_for_partitions(self, name: str, partitions: int) -> None:
        deadline = time.monotonic() + _TOPIC_SECONDS
        while True:
            found = self._admin.list_topics(name, timeout=5).topics[name].partitions.values()
            if len(found) >= partitions and all(partition.leader >= 0 for partition in found):
                return
            if time.monotonic() > deadline:
                raise self._fault(
                    f"topic '{name}' did not get a leader for each of its partitions"
                    + (f" ({error})" if (error := self._process.first_error()) else ""),
                    "See the broker's log.",
                )
            time.sleep(0.01)

    def _prepare(self, java: list[str]) -> Path:
        """Write the settings on every start, because the caller's folder may have been used with other ports.
        Format the data folder if it is new."""
        settings = self._folder / "server.properties"
        self._folder.mkdir(parents=True, exist_ok=True)
        settings.write_text(
            _PROPERTIES.format(port=self._port, controller=self._controller, folder=self._folder.resolve())
        )
        (self._folder / "log4j2.properties").write_text(_LOGGING)
        if self._meta.exists():
            return settings
        done = subprocess.run(
            [*java, "kafka.tools.StorageTool", "format", "-t", new_cluster_id(), "-c", str(settings)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise EnvironmentFault(
                f"Kafka in {self._folder}",
                f"its data folder cannot be prepared ({(done.stderr or done.stdout).strip()[-500:]})",
                "Use an empty folder with free space.",
            )
        return settings

    def _command(self) -> list[str]:
        admin_client = _admin_client()
        java = str(Path(ensure_java()) / "bin" / "java")
        command = [java, "-Xmx512m", "-cp", f"{KAFKA.jars(self._progress)}/*"]
        settings = self._prepare(command)
        self._progress(f"starting Kafka {VERSION} at {self.bootstrap} ...")
        self._admin = admin_client({"bootstrap.servers": self.bootstrap, "log_level": 0})
        logging = f"-Dlog4j2.configurationFile={self._folder / 'log4j2.properties'}"
        return [*command[:1], logging, *command[1:], "kafka.Kafka", str(settings)]

    def _answers(self) -> bool:
        from confluent_kafka import KafkaException

        (cluster,) = re.findall(r"cluster\.id=(.+)", self._meta.read_text())
        try:
            answer = self._admin.list_topics(timeout=0.5)
        except KafkaException:
            return False
        return bool(answer.brokers) and answer.cluster_id == cluster

    def _end(self, signum: signal.Signals) -> None:
        self._admin = None
        super()._end(signum)


def _admin_client() -> Callable[[dict[str, Any]], Any]:
    try:
        from confluent_kafka.admin import AdminClient
    except ImportError:
        raise EnvironmentFault(
            "Kafka for tests",
            "the package confluent-kafka is not installed",
            'Install it with: pip install "penstock[kafka]".',
        ) from None
    client: Callable[[dict[str, Any]], Any] = AdminClient
    return client


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="penstock.testing.servers.kafka", description="Run a Kafka broker on loopback."
    )
    parser.add_argument("--folder", help="keep the data here (default: a temporary folder)")
    parser.add_argument("--topic", action="append", default=[], metavar="NAME[:PARTITIONS]", help="create a topic")
    arguments = parser.parse_args()
    raise_on_signals()
    live = sys.stderr.isatty()

    def show(line: str) -> None:
        if live:
            print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
        elif not line.endswith("files"):  # the counting lines are for terminals only
            print(line, file=sys.stderr, flush=True)

    try:
        with KafkaServer(arguments.folder, show) as server:
            for topic in arguments.topic:
                name, _, partitions = topic.partition(":")
                server.create_topic(name, int(partitions or 1))
            if live:
                show("")
            print(
                f"Kafka {VERSION} at {server.bootstrap}, process {server.pid}. Press Ctrl-C to stop it.",
                flush=True,
            )
            code = server._running().wait()
            print(f"Kafka ended with exit code {code}.", file=sys.stderr)
            return 1
    except KeyboardInterrupt:
        print("\nKafka stopped.", file=sys.stderr)
        return 0
    except EnvironmentFault as fault:
        print(f"\n{fault}" if live else fault, file=sys.stderr)
        return fault.exit_code


if __name__ == "__main__":
    sys.exit(main())
