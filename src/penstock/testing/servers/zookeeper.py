"""A real ZooKeeper for tests: one server on loopback, fetched once.

>>> with ZooKeeperServer() as zookeeper:
...     ...  # zookeeper.address is where clients connect

To simulate outages, it can be paused, or killed and started again with the same data and port.
"""

from __future__ import annotations

from pathlib import Path

from penstock.spark.java import ensure_java
from penstock.testing.servers.jars import JavaProduct, Progress
from penstock.testing.servers.server_process import Server

VERSION = "3.9.5"
ZOOKEEPER = JavaProduct(
    "ZooKeeper",
    VERSION,
    (
        f"org.apache.zookeeper:zookeeper:{VERSION}",
        "io.dropwizard.metrics:metrics-core:4.2.30",  # ZooKeeper needs these two, but declares them as "provided"
        "org.xerial.snappy:snappy-java:1.1.10.7",
        "org.slf4j:slf4j-simple:2.0.13",
    ),
)
# With a tick of 0.2 s, sessions in tests can expire within a second. The longest session is the default of 40 s.
_SETTINGS = """
tickTime=200
minSessionTimeout=400
maxSessionTimeout=40000
dataDir={folder}/data
clientPort={port}
clientPortAddress=127.0.0.1
maxClientCnxns=0
admin.enableServer=false
4lw.commands.whitelist=conf
"""
_JAVA = ("-Xmx256m", "-XX:+UseSerialGC", "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn")
_MAIN = "org.apache.zookeeper.server.quorum.QuorumPeerMain"


class ZooKeeperServer(Server):
    """A ZooKeeper server."""

    title = "ZooKeeper"

    def __init__(self, progress: Progress = lambda line: None) -> None:
        super().__init__()
        self._progress = progress

    def _command(self) -> list[str]:
        settings = self._process.folder / "zoo.cfg"
        settings.write_text(_SETTINGS.format(folder=self._process.folder.resolve(), port=self._port))
        java = str(Path(ensure_java()) / "bin" / "java")
        return [java, *_JAVA, "-cp", f"{ZOOKEEPER.jars(self._progress)}/*", _MAIN, str(settings)]

    def _answers(self) -> bool:
        return str(self._process.folder.resolve()).encode() in self._ask(b"conf")
