"""A real Kafka for tests and trials: one KRaft broker on loopback, fetched once and started in seconds.

>>> with KafkaServer() as kafka:
...     kafka.create_topic("lines", partitions=4)
...     ...  # kafka.bootstrap is where clients connect

``python -m penstock.testing.kafka`` starts one from the command line. It can be killed and started again on its
data and port, which is how broker outages are tested.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
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
from penstock.spark.java import ensure_java
from penstock.testing.jars import JavaProduct, Progress
from penstock.testing.server_process import ServerProcess, free_ports

VERSION = "4.3.1"
KAFKA = JavaProduct(
    "Kafka",
    VERSION,
    (f"org.apache.kafka:kafka_2.13:{VERSION}", "org.apache.logging.log4j:log4j-slf4j-impl:2.25.3"),
)

# One node: every internal topic has one replica, and few partitions, which makes a start quicker. A killed broker
# may come back only when its session has ended, hence a session of 3 s and not 9.
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
_START_SECONDS = 60.0  # up in about 3 s; a loaded two-core machine has needed 20


class KafkaServer:
    """One broker. ``start`` returns when it answers. ``with`` starts it, and at the end stops it and removes
    its data; without ``with``, call ``close``. A broker never outlives the Python process that started it."""

    def __init__(self, folder: str | Path | None = None, progress: Progress = lambda line: None) -> None:
        """``folder`` keeps the data after ``close``; without it the data lives in a temporary folder."""
        self._process = ServerProcess("kafka", folder)
        self._folder = self._process.folder
        self._progress = progress
        self._port, self._controller = free_ports(2)
        self._admin: Any = None

    def __enter__(self) -> KafkaServer:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def bootstrap(self) -> str:
        """Where clients connect; the same for the server's whole life."""
        return f"127.0.0.1:{self._port}"

    @property
    def pid(self) -> int:
        """The broker's process. Only while it runs."""
        return self._running().pid

    @property
    def log(self) -> Path:
        """What the broker said: warnings and errors."""
        return self._process.log

    @property
    def _meta(self) -> Path:
        return self._folder / "data" / "meta.properties"

    def start(self) -> None:
        """Start the broker, on the data and port it had before if it ran already, and wait until it answers."""
        if self._process.started:
            return
        admin_client = _admin_client()
        java = str(Path(ensure_java()) / "bin" / "java")
        command = [java, "-Xmx512m", "-cp", f"{KAFKA.jars(self._progress)}/*"]
        settings = self._prepare(command)
        self._progress(f"starting Kafka {VERSION} at {self.bootstrap} ...")
        logging = f"-Dlog4j2.configurationFile={self._folder / 'log4j2.properties'}"
        self._process.launch([*command[:1], logging, *command[1:], "kafka.Kafka", str(settings)])
        self._admin = admin_client({"bootstrap.servers": self.bootstrap, "log_level": 0})
        self._wait_until_up()

    def stop(self) -> None:
        """End the broker cleanly; ``start`` starts it again. Without one running, nothing."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End the broker as a power cut would (SIGKILL)."""
        self._end(signal.SIGKILL)

    def close(self) -> None:
        """Stop, and remove the data unless it is in a folder of the caller's."""
        self._admin = None
        self._process.close()

    def create_topic(self, name: str, partitions: int = 1) -> None:
        """Create a topic and wait until clients can use it."""
        from confluent_kafka.admin import NewTopic

        self._running()
        self._admin.create_topics([NewTopic(name, partitions, 1)])[name].result(_START_SECONDS)
        self._wait_for_partitions(name, partitions)

    def add_partitions(self, name: str, total: int) -> None:
        """Give a topic more partitions and wait until clients can use them."""
        from confluent_kafka.admin import NewPartitions

        self._running()
        self._admin.create_partitions([NewPartitions(name, total)])[name].result(_START_SECONDS)
        self._wait_for_partitions(name, total)

    def _wait_for_partitions(self, name: str, partitions: int) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while True:
            found = self._admin.list_topics(name, timeout=5).topics[name].partitions.values()
            if len(found) >= partitions and all(partition.leader >= 0 for partition in found):
                return
            if time.monotonic() > deadline:
                raise self._fault(f"topic '{name}' gets a leader for each of its partitions", "not all have one")
            time.sleep(0.01)

    def _prepare(self, java: list[str]) -> Path:
        """Write the settings, each time anew: a folder of the caller's may have had other ports. Prepare the
        data folder if it is new."""
        settings = self._folder / "server.properties"
        self._folder.mkdir(parents=True, exist_ok=True)
        settings.write_text(
            _PROPERTIES.format(port=self._port, controller=self._controller, folder=self._folder.resolve())
        )
        (self._folder / "log4j2.properties").write_text(_LOGGING)
        if self._meta.exists():
            return settings
        cluster = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        done = subprocess.run(
            [*java, "kafka.tools.StorageTool", "format", "-t", cluster, "-c", str(settings)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise EnvironmentFault(
                f"Kafka in {self._folder}",
                "its data folder is prepared before the first start",
                (done.stderr or done.stdout).strip()[-500:],
                "Give it an empty folder with some space.",
            )
        return settings

    def _wait_until_up(self) -> None:
        from confluent_kafka import KafkaException

        deadline = time.monotonic() + _START_SECONDS
        cluster = re.findall(r"cluster\.id=(.+)", self._meta.read_text())[0]
        while self._process.alive and time.monotonic() < deadline:
            with contextlib.suppress(KafkaException):
                answer = self._admin.list_topics(timeout=0.5)
                if answer.brokers and answer.cluster_id == cluster:  # and not a stranger's on this port
                    return
        self.kill()
        raise self._fault("the broker answers soon after its start", f"no answer within {_START_SECONDS:.0f} s")

    def _fault(self, rule: str, got: str) -> EnvironmentFault:
        reason = self._process.first_error() or got
        return EnvironmentFault(f"Kafka at {self.bootstrap}", rule, reason, "Its log says more while it runs.")

    def _running(self) -> ServerProcess:
        if not self._process.started:
            raise EnvironmentFault(
                f"Kafka at {self.bootstrap}", "the broker must run for this", "none", "Call start()."
            )
        return self._process

    def _end(self, signum: signal.Signals) -> None:
        self._admin = None
        self._process.end(signum)


def _admin_client() -> Callable[[dict[str, Any]], Any]:
    try:
        from confluent_kafka.admin import AdminClient
    except ImportError:
        raise EnvironmentFault(
            "Kafka for tests",
            "the package confluent-kafka talks to Kafka",
            "it is not installed",
            'Install it with: pip install "penstock[kafka]".',
        ) from None
    client: Callable[[dict[str, Any]], Any] = AdminClient
    return client


def main() -> int:
    parser = argparse.ArgumentParser(prog="penstock.testing.kafka", description="Run a Kafka broker on loopback.")
    parser.add_argument("--folder", help="keep the data here; else it goes with the broker")
    parser.add_argument("--topic", action="append", default=[], metavar="NAME[:PARTITIONS]", help="create it")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    live = sys.stderr.isatty()

    def show(line: str) -> None:
        if live:
            print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
        elif not line.endswith("files"):  # counting is for terminals only
            print(line, file=sys.stderr, flush=True)

    try:
        with KafkaServer(arguments.folder, show) as server:
            for topic in arguments.topic:
                name, _, partitions = topic.partition(":")
                server.create_topic(name, int(partitions or 1))
            if live:
                show("")
            print(f"Kafka {VERSION} at {server.bootstrap}, process {server.pid}; Ctrl-C ends it.", flush=True)
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
