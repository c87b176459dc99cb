"""A real memcached for tests: one server on loopback, fetched once.

>>> with MemcachedServer() as memcached:
...     ...  # memcached.address is where clients connect

To simulate outages, it can be paused, or killed and started again on the same port; then it is empty.
"""

from __future__ import annotations

import os

from penstock.testing.servers.debian import DebianProgram
from penstock.testing.servers.jars import Progress
from penstock.testing.servers.server_process import Server

MEMCACHED = DebianProgram("memcached", ("memcached",))


class MemcachedServer(Server):
    """A memcached server. When its memory is full it rejects writes (``-M``), as a queue requires, unless
    ``evict``."""

    title = "memcached"

    def __init__(self, progress: Progress = lambda line: None, megabytes: int = 128, evict: bool = False) -> None:
        super().__init__()
        self._progress = progress
        self._options = ["-m", str(megabytes), *([] if evict else ["-M"])]

    def _command(self) -> list[str]:
        account = ["-u", "nobody"] if os.geteuid() == 0 else []  # memcached refuses to run as root
        place = ["-l", "127.0.0.1", "-p", str(self._port), "-U", "0"]
        return [*MEMCACHED.command(self._progress), *place, *account, *self._options]

    def _answers(self) -> bool:
        return f"STAT pid {self.pid}\r".encode() in self._ask(b"stats\r\nquit\r\n")
