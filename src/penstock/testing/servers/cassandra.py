"""A real Cassandra for tests: one node on loopback, fetched once.

>>> with CassandraServer() as cassandra:
...     ...  # cassandra.address is where clients connect

To simulate outages, it can be paused, or killed and started again with the same data and port. It needs about
a gigabyte of memory and ten seconds to start, so it is not used by ``make test`` but by ``make stores``.
"""

from __future__ import annotations

import struct
from pathlib import Path

from penstock.spark.java import ensure_java
from penstock.testing.servers.jars import JavaProduct, Progress
from penstock.testing.servers.server_process import Server

VERSION = "5.0.9"
CASSANDRA = JavaProduct("Cassandra", VERSION, (f"org.apache.cassandra:cassandra-all:{VERSION}",))
# Group: a write is acknowledged when it is on disk.
_SETTINGS = """
cluster_name: tests
num_tokens: 1
partitioner: org.apache.cassandra.dht.Murmur3Partitioner
endpoint_snitch: SimpleSnitch
seed_provider:
  - class_name: org.apache.cassandra.locator.SimpleSeedProvider
    parameters:
      - seeds: "127.0.0.1:{storage}"
listen_address: 127.0.0.1
rpc_address: 127.0.0.1
native_transport_port: {port}
storage_port: {storage}
commitlog_sync: group
commitlog_sync_group_window: 2ms
commitlog_directory: {folder}/commitlog
data_file_directories: ["{folder}/data"]
saved_caches_directory: {folder}/saved_caches
hints_directory: {folder}/hints
cdc_enabled: false
auto_snapshot: false
"""
_LOGGING = """<configuration><appender name="OUT" class="ch.qos.logback.core.ConsoleAppender"><encoder>
<pattern>%d %level %logger: %msg%n</pattern></encoder></appender>
<root level="WARN"><appender-ref ref="OUT"/></root></configuration>"""
_OPENED = (
    "java.base/java.io",
    "java.base/java.lang",
    "java.base/java.lang.module",
    "java.base/java.lang.reflect",
    "java.base/java.net",
    "java.base/java.nio",
    "java.base/java.util",
    "java.base/java.util.concurrent",
    "java.base/java.util.concurrent.atomic",
    "java.base/jdk.internal.loader",
    "java.base/jdk.internal.math",
    "java.base/jdk.internal.misc",
    "java.base/jdk.internal.module",
    "java.base/jdk.internal.ref",
    "java.base/jdk.internal.reflect",
    "java.base/jdk.internal.util.jar",
    "java.base/jdk.internal.vm",
    "java.base/sun.nio.ch",
    "java.management.rmi/com.sun.jmx.remote.internal.rmi",
    "java.rmi/sun.rmi.registry",
    "java.rmi/sun.rmi.server",
    "java.rmi/sun.rmi.transport.tcp",
    "java.sql/java.sql",
    "jdk.management/com.sun.management.internal",
)
_OPTIONS_REQUEST = struct.pack(">BBhBI", 4, 0, 0, 5, 0)  # of the native protocol, version 4


class CassandraServer(Server):
    """A Cassandra node."""

    title = "Cassandra"
    noun = "node"
    ports = 2
    start_seconds = 120.0

    def __init__(self, progress: Progress = lambda line: None) -> None:
        super().__init__()
        self._progress = progress

    def _command(self) -> list[str]:
        folder = self._process.folder.resolve()
        (storage,) = self._more_ports
        (folder / "cassandra.yaml").write_text(_SETTINGS.format(port=self._port, storage=storage, folder=folder))
        (folder / "logback.xml").write_text(_LOGGING)
        jars = CASSANDRA.jars(self._progress)
        (agent,) = jars.glob("jamm-*.jar")
        return [
            str(Path(ensure_java()) / "bin" / "java"),
            *("-Xms512m", "-Xmx512m", f"-javaagent:{agent}", "-Xss512k"),
            *(word for name in _OPENED for word in ("--add-opens", f"{name}=ALL-UNNAMED")),
            *(word for name in _OPENED for word in ("--add-exports", f"{name}=ALL-UNNAMED")),
            f"-Dcassandra.config=file://{folder}/cassandra.yaml",
            f"-Dcassandra.storagedir={folder}",
            f"-Dlogback.configurationFile={folder}/logback.xml",
            *("-Dcassandra.skip_wait_for_gossip_to_settle=0", "-Dcassandra.ring_delay_ms=1"),
            "-Dcassandra-foreground=yes",
            *("-cp", f"{jars}/*", "org.apache.cassandra.service.CassandraDaemon"),
        ]

    def _answers(self) -> bool:
        return self._exchange(_OPTIONS_REQUEST, 5)[4:5] == b"\x06"  # SUPPORTED
