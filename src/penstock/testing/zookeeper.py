"""A real ZooKeeper for tests: one server on loopback, fetched once and started in a second or two.

>>> with ZooKeeperServer() as zookeeper:
...     ...  # zookeeper.address is where clients connect

It can be killed and started again on its data and port, and paused: that is how outages are tested.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from pathlib import Path

from penstock.errors import EnvironmentFault
from penstock.spark.java import ensure_java
from penstock.testing.jars import JavaProduct, Progress
from penstock.testing.server_process import ServerProcess, free_ports

VERSION = "3.9.5"
ZOOKEEPER = JavaProduct(
    "ZooKeeper",
    VERSION,
    (
        f"org.apache.zookeeper:zookeeper:{VERSION}",
        "io.dropwizard.metrics:metrics-core:4.2.30",  # ZooKeeper calls these two "provided", and needs them
        "org.xerial.snappy:snappy-java:1.1.10.7",
        "org.slf4j:slf4j-simple:2.0.13",
    ),
)
# A tick of 0.2 s lets tests have sessions that end within a second; the longest is as for ticks of 2 s.
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
_START_SECONDS = 60.0  # up in about 1 s; for a loaded machine
_POLL = 0.05  # seconds between two looks at a server that starts


class ZooKeeperServer:
    """One server. ``start`` returns when it answers. ``with`` starts it, and at the end stops it and removes
    its data; without ``with``, call ``close``. It never outlives the Python process that started it."""

    def __init__(self, progress: Progress = lambda line: None) -> None:
        self._process = ServerProcess("zookeeper")
        self._progress = progress
        (self._port,) = free_ports(1)

    def __enter__(self) -> ZooKeeperServer:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def address(self) -> str:
        """Where clients connect; the same for the server's whole life."""
        return f"127.0.0.1:{self._port}"

    @property
    def pid(self) -> int:
        """The server's process. Only while it runs."""
        return self._process.pid

    def start(self) -> None:
        """Start the server, on the data and port it had before if it ran already, and wait until it answers."""
        if self._process.started:
            return
        settings = self._process.folder / "zoo.cfg"
        settings.write_text(_SETTINGS.format(folder=self._process.folder.resolve(), port=self._port))
        java = str(Path(ensure_java()) / "bin" / "java")
        self._process.launch([java, *_JAVA, "-cp", f"{ZOOKEEPER.jars(self._progress)}/*", _MAIN, str(settings)])
        self._wait_until_up()

    def stop(self) -> None:
        """End the server cleanly; ``start`` starts it again. Without one running, nothing."""
        self._process.end(signal.SIGTERM)

    def kill(self) -> None:
        """End the server as a power cut would (SIGKILL)."""
        self._process.end(signal.SIGKILL)

    def pause(self) -> None:
        """Let it answer nobody, its connections still open, until ``resume``."""
        self._process.send(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send(signal.SIGCONT)

    def close(self) -> None:
        """Stop, and remove the data."""
        self._process.close()

    def _wait_until_up(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while self._process.alive and time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port), 1.0) as link:
                link.sendall(b"conf")
                if str(self._process.folder.resolve()).encode() in link.makefile("rb").read():
                    return  # and it is not a stranger's on this port
            time.sleep(_POLL)
        self.kill()
        raise EnvironmentFault(
            f"ZooKeeper at {self.address}",
            "the server answers soon after its start",
            self._process.first_error() or f"no answer within {_START_SECONDS:.0f} s",
            "The port must be free, and the temporary folder have some space.",
        )
