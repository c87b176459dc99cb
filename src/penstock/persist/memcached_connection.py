"""One connection to memcached, its settings, and its errors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from penstock.errors import ComponentError, EnvironmentFault
from penstock.persist.queues import QueueUnavailable

ANSWER_SECONDS = 3.0  # seconds that memcached may take to answer; it usually takes less than a millisecond
TOMBSTONE = b"pmc1 given up"
_OVERHEAD = 512  # bytes; upper bound of a value's key and memcached's header, which count as its size


class MemcachedConnection:
    """One connection to memcached, its settings, and its errors."""

    def __init__(self, where: str, address: str, max_bytes: int, answer_seconds: float = ANSWER_SECONDS) -> None:
        library = memcached_library(where)
        self.where, self._max_bytes, self._answer_seconds = where, max_bytes, answer_seconds
        self._errors = library.exceptions
        self.server: Any = library.Client(
            address, connect_timeout=answer_seconds, timeout=answer_seconds, no_delay=True, default_noreply=False
        )
        self._item_bytes = 0  # the maximum size of a value; 0 if unknown

    def add(self, key: str, value: bytes) -> bool:
        """Add a value under a new key. If memcached has no memory, a tombstone is added instead, so that the
        processor need not wait for the entry, and the error is raised."""
        try:
            return bool(self.server.add(key, value))
        except self._errors.MemcacheUnexpectedCloseError:
            raise
        except self._errors.MemcacheServerError:
            with contextlib.suppress(self._errors.MemcacheServerError):
                self.server.add(key, TOMBSTONE)
            raise

    def check_settings(self) -> str:
        """Read the settings of the server. Returns a warning if they may lose results; otherwise an empty text."""
        try:
            found = self.server.stats("settings")
        except self._errors.MemcacheClientError:  # some proxies do not support this command
            found = {}
        self._item_bytes = found.get(b"item_size_max", 0)
        memory = found.get(b"maxbytes", 0)
        if not memory:
            weakness = "could not check whether it drops results when its memory is full. Start it with -M"
        elif found.get(b"evictions") != b"off":
            weakness = "it drops results when its memory is full. Start it with -M"
        elif memory < 2 * self._max_bytes:
            weakness = f"its memory of {memory >> 20} MiB is less than twice max_bytes. Start it with a greater -m"
        else:
            weakness = ""
        return f"{self.where}: {weakness}." if weakness else ""

    def check_size(self, entry: bytes) -> None:
        """Raise ``ComponentError`` if memcached does not accept values of this size."""
        if self._item_bytes and len(entry) + _OVERHEAD > self._item_bytes:
            raise ComponentError(
                self.where,
                f"an entry has {len(entry)} bytes, but memcached accepts at most {self._item_bytes}",
                "Start it with a larger -I, or use RedisQueue or EmbeddedQueue.",
            )

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """Turn an error of memcached or of the network into ``QueueUnavailable`` and close the connection."""
        try:
            yield
        except (OSError, self._errors.MemcacheError) as error:
            self.server.close()
            raise self.unavailable(
                f"memcached did not carry out a request within {self._answer_seconds:g} s ("
                + f"{type(error).__name__}: {error}".removesuffix(": ")
                + ")"
            ) from error

    def unavailable(self, problem: str) -> QueueUnavailable:
        return QueueUnavailable(
            self.where, problem, "The queue continues by itself once memcached runs and has memory."
        )


def memcached_library(where: str) -> Any:
    """The module ``pymemcache``. Loaded on first use, so that building a topology does not need it."""
    try:
        import pymemcache
        import pymemcache.client.base
        import pymemcache.exceptions
    except ImportError:
        raise EnvironmentFault(
            where, "the package pymemcache is not installed", 'Install it with: pip install "penstock[memcached]".'
        ) from None
    return pymemcache
