"""A real HBase for tests: a master with a ZooKeeper of its own and data on local disk, and a Thrift server.

>>> with HBaseServer() as hbase:
...     ...  # hbase.address is where clients connect: the Thrift server

To simulate outages, both can be paused, or killed and started again with the same data and ports. They need half
a minute to start, so they are not used by ``make test`` but by ``make stores``.
"""

from __future__ import annotations

import signal
import socket
from pathlib import Path

from penstock.spark.java import ensure_java
from penstock.testing.servers.jars import JavaProduct, Progress
from penstock.testing.servers.server_process import Server

VERSION = "2.6.4-hadoop3"
HBASE = JavaProduct(
    "HBase",
    VERSION,
    (
        f"org.apache.hbase:hbase-server:{VERSION}",
        "org.apache.hbase:hbase-thrift:2.6.1",  # the newest one on Maven Central
        "org.apache.thrift:libthrift:0.14.1",
    ),
)
_SETTINGS = {
    "hbase.rootdir": "file://{folder}/data",
    "hbase.tmp.dir": "{folder}/tmp",
    "hbase.cluster.distributed": "false",
    "hbase.unsafe.stream.capability.enforce": "false",  # a local file system cannot promise what HDFS does
    "hbase.zookeeper.quorum": "127.0.0.1",
    "hbase.zookeeper.property.clientPort": "{zookeeper}",
    "hbase.zookeeper.property.dataDir": "{folder}/zookeeper",
    "hbase.master.hostname": "localhost",
    "hbase.regionserver.hostname": "localhost",
    "hbase.master.ipc.address": "127.0.0.1",
    "hbase.regionserver.ipc.address": "127.0.0.1",
    "hbase.master.port": "{master}",
    "hbase.regionserver.port": "{region}",
    "hbase.master.info.port": "-1",
    "hbase.regionserver.info.port": "-1",
    "hbase.thrift.info.port": "-1",
    "hbase.client.retries.number": "8",
    "hbase.regionserver.handler.count": "6",
    "hbase.master.wait.on.regionservers.maxtostart": "1",
}
_LOGGING = """
log4j.rootLogger=WARN,out
log4j.appender.out=org.apache.log4j.ConsoleAppender
log4j.appender.out.layout=org.apache.log4j.PatternLayout
log4j.appender.out.layout.ConversionPattern=%d %p %c: %m%n
"""


class HBaseMaster(Server):
    """The master, which is also the region server and has a ZooKeeper."""

    title = "HBase"
    noun = "master"
    ports = 3
    start_seconds = 120.0

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self._progress = progress

    def java(self, *words: str) -> list[str]:
        """A command that runs a class of HBase with the settings of this server."""
        folder = self._process.folder.resolve()
        java = str(Path(ensure_java()) / "bin" / "java")
        jars = HBASE.jars(self._progress)
        opened = [
            f"--add-opens=java.base/{name}=ALL-UNNAMED" for name in ("java.lang", "java.nio", "jdk.internal.misc")
        ]
        opened.append("--add-exports=java.base/jdk.internal.misc=ALL-UNNAMED")
        return [java, "-Xmx512m", "-XX:+UseSerialGC", *opened, "-cp", f"{folder}/conf:{jars}/*", *words]

    def _command(self) -> list[str]:
        folder = self._process.folder.resolve()
        region, zookeeper = self._more_ports
        ports = {"master": self._port, "region": region, "zookeeper": zookeeper}
        (folder / "conf").mkdir(exist_ok=True)
        properties = "".join(
            f"<property><name>{name}</name><value>{value.format(folder=folder, **ports)}</value></property>"
            for name, value in _SETTINGS.items()
        )
        (folder / "conf" / "hbase-site.xml").write_text(f"<configuration>{properties}</configuration>")
        (folder / "conf" / "log4j.properties").write_text(_LOGGING)
        return self.java("org.apache.hadoop.hbase.master.HMaster", "start")

    def _answers(self) -> bool:
        with socket.create_connection(("127.0.0.1", self._more_ports[0]), 1.0):
            return True


class HBaseServer(Server):
    """The Thrift server, and the master that it belongs to."""

    title = "HBase"
    noun = "Thrift server"
    start_seconds = 120.0

    def __init__(self, progress: Progress = lambda line: None) -> None:
        super().__init__()
        self.master = HBaseMaster(progress)

    def start(self) -> None:
        self.master.start()
        super().start()

    def pause(self) -> None:
        super().pause()
        self.master.pause()

    def resume(self) -> None:
        self.master.resume()
        super().resume()

    def close(self) -> None:
        super().close()
        self.master.close()

    def _command(self) -> list[str]:
        return self.master.java(
            "org.apache.hadoop.hbase.thrift.ThriftServer", "-b", "127.0.0.1", "-p", str(self._port), "start"
        )

    def _answers(self) -> bool:
        """It lists its tables once the master has started."""
        import happybase

        try:
            connection = happybase.Connection("127.0.0.1", self._port, timeout=5000)
            connection.tables()
            connection.close()
        except Exception:  # what Thrift says while the server starts
            return False
        return True

    def _end(self, signum: signal.Signals) -> None:
        super()._end(signum)
        self.master._end(signum)
