"""A queue in memcached, the choice of *Lu 2020* (section 4.4), on one server or several. It can lose results.

**What is lost.** memcached keeps everything in memory. When a server crashes, is restarted or flushed, all results
that were acknowledged, were waiting in it and had not been read by the processor are lost. Their tuples are not
replayed, because they were acked. Writers and the processor detect this, continue with an empty queue, and count
the entries that they knew to be in it (``losses``). A kill of a worker or of the processor loses nothing. Without
``-M``, memcached also drops values silently when its memory is full: start it with ``-M``, and with ``-m`` of at
least twice ``max_bytes``; ``warning`` tells if it was not. Use ``RedisQueue`` or ``EmbeddedQueue`` if no result
may be lost.

**Several servers.** Entries are spread over the servers; if one dies, the others go on, and a server that comes
back is used again. With ``copies=2`` every entry is on two servers, so the death of one loses nothing. How this
works is told in ``memcached_spread.py``, and the queue on one server in ``memcached_client.py``.

Needs ``pip install "penstock[memcached]"``.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.errors import TopologyError
from penstock.persist.memcached_client import MOST_BYTES, MemcachedClient
from penstock.persist.memcached_connection import memcached_library
from penstock.persist.memcached_spread import SpreadClient
from penstock.persist.queues import PersistentQueue, QueueClient


class MemcachedQueue(PersistentQueue):
    """A queue in memcached at ``servers``: ``host:port``, or a sequence of them. Up to ``max_bytes`` of results
    may wait. With several servers, each entry is written to ``copies`` of them before it is acknowledged, or to as
    many as answer; ``warning`` tells if these are fewer."""

    def __init__(
        self, servers: str | Sequence[str] = "127.0.0.1:11211", max_bytes: int = 32 << 20, *, copies: int = 1
    ) -> None:
        self.servers = (servers,) if isinstance(servers, str) else tuple(servers)
        self.max_bytes = max_bytes
        self.copies = copies
        self._check_numbers()

    def _check_numbers(self) -> None:
        if not self.servers or len(set(self.servers)) < len(self.servers):
            raise TopologyError(
                "MemcachedQueue",
                f"servers is {self.servers!r}, not one or several different addresses",
                "Write MemcachedQueue(['a:11211', 'b:11211']).",
            )
        if not isinstance(self.copies, int) or not 1 <= self.copies <= len(self.servers):
            one = len(self.servers) == 1
            raise TopologyError(
                "MemcachedQueue",
                f"copies is {self.copies!r}, not a number from 1 to {len(self.servers)}, the number of its "
                f"server{'' if one else 's'}",
                "Write MemcachedQueue(['a:11211', 'b:11211'], copies=2): each copy is on a server of its own.",
            )

    def check(self, where: str, folder: str) -> None:
        normalize = memcached_library(where).client.base.normalize_server_spec
        for server in self.servers:
            try:
                normalize(server)
            except ValueError as error:
                raise TopologyError(
                    where,
                    f"server is not a host and port of memcached ({error})",
                    "Write MemcachedQueue('host:11211').",
                ) from None
        if self.max_bytes > MOST_BYTES:
            raise TopologyError(
                where,
                f"max_bytes of MemcachedQueue is {self.max_bytes}, which is more than {MOST_BYTES}",
                "Use RedisQueue or EmbeddedQueue for more.",
            )

    def open(self, name: str, folder: str) -> QueueClient:
        if len(self.servers) == 1:
            return MemcachedClient(name, self.servers[0], self.max_bytes)
        return SpreadClient(name, self.servers, self.max_bytes, self.copies)

    @property
    def volatile(self) -> str:
        if self.copies > 1:
            return f"if {self.copies} servers of memcached die at the same time, what waits in them is lost"
        return "if a server of memcached dies, what waits in it is lost"

    def __str__(self) -> str:
        copies = f", {self.copies} copies of each entry" if self.copies > 1 else ""
        return f"in memcached at {', '.join(self.servers)}{copies}"
