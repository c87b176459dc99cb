"""A real memcached for tests: one server on loopback, fetched once and started in a moment.

>>> with MemcachedServer() as memcached:
...     ...  # memcached.address is where clients connect

It can be killed and started again on its port, then empty, and paused: that is how outages are tested.
"""

from __future__ import annotations

import os

from penstock.testing.servers.debian import DebianProgram
from penstock.testing.servers.jars import Progress
from penstock.testing.servers.server_process import Server

MEMCACHED = DebianProgram("memcached", ("memcached",))


class MemcachedServer(Server):
    """One memcached. It refuses what it has no memory for, as a queue wants it (``-M``), unless ``evict``."""

    title = "memcached"

    def __init__(self, progress: Progress = lambda line: None, megabytes: int = 128, evict: bool = False) -> None:
        super().__init__()
        self._progress = progress
        self._options = ["-m", str(megabytes), *([] if evict else ["-M"])]

    def _command(self) -> list[str]:
        account = ["-u", "nobody"] if os.geteuid() == 0 else []  # as root it runs only under another account
        place = ["-l", "127.0.0.1", "-p", str(self._port), "-U", "0"]
        return [*MEMCACHED.command(self._progress), *place, *account, *self._options]

    def _answers(self) -> bool:
        return f"STAT pid {self.pid}\r".encode() in self._ask(b"stats\r\nquit\r\n")
