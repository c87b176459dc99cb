"""A real Redis for tests: one server on loopback, fetched once and started in a moment.

>>> with RedisServer() as redis:
...     ...  # redis.url is where clients connect

It can be killed and started again on its data and port, and paused: that is how outages are tested.
"""

from __future__ import annotations

from penstock.testing.servers.debian import DebianProgram
from penstock.testing.servers.jars import Progress
from penstock.testing.servers.server_process import Server

REDIS = DebianProgram("redis-server", ("redis-server", "redis-tools"))


class RedisServer(Server):
    """One Redis. What it has acknowledged is on disk, unless ``settings`` say otherwise: any of redis.conf, an
    underscore for a dash."""

    title = "Redis"

    def __init__(self, progress: Progress = lambda line: None, **settings: str) -> None:
        super().__init__()
        self._progress = progress
        self._settings = {"appendonly": "yes", "appendfsync": "always", "save": "", **settings}

    @property
    def url(self) -> str:
        return f"redis://{self.address}/0"

    def _command(self) -> list[str]:
        own = {"bind": "127.0.0.1", "port": str(self._port), "dir": str(self._process.folder)}
        settings = {**own, **self._settings}.items()
        options = [word for name, value in settings for word in (f"--{name.replace('_', '-')}", value)]
        return [*REDIS.command(self._progress), *options]

    def _answers(self) -> bool:
        # Not a stranger on this port, and not one that still loads its data: that one refuses to DBSIZE.
        said = self._ask(b"INFO server\r\nDBSIZE\r\nQUIT\r\n")
        return f"process_id:{self.pid}\r".encode() in said and b"\r\n:" in said
