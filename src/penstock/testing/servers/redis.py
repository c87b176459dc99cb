"""A real Redis for tests: one server on loopback, fetched once.

>>> with RedisServer() as redis:
...     ...  # redis.url is where clients connect

To simulate outages, it can be paused, or killed and started again with the same data and port.
"""

from __future__ import annotations

from penstock.testing.servers.debian import DebianProgram
from penstock.testing.servers.jars import Progress
from penstock.testing.servers.server_process import Server

REDIS = DebianProgram("redis-server", ("redis-server", "redis-tools"))


class RedisServer(Server):
    """A Redis server. Acknowledged writes are on disk, unless ``settings`` change that. Settings are those of
    redis.conf, with underscores instead of dashes."""

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
        # Must be this process, not another server on the port, and its data must be loaded: until then DBSIZE
        # fails.
        answer = self._ask(b"INFO server\r\nDBSIZE\r\nQUIT\r\n")
        return f"process_id:{self.pid}\r".encode() in answer and b"\r\n:" in answer
