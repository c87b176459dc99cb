"""What a memcached server stores beside a queue: the incarnations of its writers, a clock, and a note."""

from __future__ import annotations

import time
from collections.abc import Callable

from penstock.persist.memcached_connection import MemcachedConnection
from penstock.persist.names import safe


class MemcachedRegistry:
    """The keys of one queue, which begin with ``prefix``. All methods may raise ``QueueUnavailable``."""

    def __init__(self, connection: MemcachedConnection, prefix: str) -> None:
        self._connection, self._server, self._prefix = connection, connection.server, prefix

    def register(self, writer: str) -> int:
        """Begin a new incarnation of a writer and return its number."""
        while True:
            last = self.newest(writer)
            incarnation = later(last)
            if self.try_register(writer, incarnation, last):
                return incarnation

    def newest(self, writer: str) -> int:
        """The newest incarnation of a writer; 0 if none is registered."""
        return self.newest_and_clock(writer)[0]

    def newest_and_clock(self, writer: str) -> tuple[int, int]:
        """The newest incarnation of a writer, and the clock."""
        keys = [self._incarnation(writer), self._clock] if writer else [self._clock]
        with self._connection.errors():
            found = self._server.get_many(keys)
            return int(found.get(keys[0], 0)) if writer else 0, int(found.get(self._clock, 0))

    def try_register(self, writer: str, incarnation: int, last: int) -> bool:
        """Replace the newest incarnation ``last`` by a later one. Returns False if another one is registered."""
        with self._connection.errors():
            found, token = self._server.gets(self._incarnation(writer))
            if int(found or 0) != last:
                return False
            return self._replace(self._incarnation(writer), found, b"%d" % incarnation, token)

    def advance(self, to: int, last: int) -> None:
        """Advance the clock to a time or beyond. ``last`` is what it showed, or less."""
        with self._connection.errors():
            if to > last and self._server.incr(self._clock, to - last) is None:
                self._server.add(self._clock, b"%d" % to)

    def note(self) -> bytes:
        """The text that ``change_note`` stored; empty if there is none."""
        with self._connection.errors():
            return self._server.get(f"{self._prefix}:note") or b""

    def change_note(self, change: Callable[[bytes], bytes]) -> None:
        """Replace the note by a function of it, atomically."""
        key = f"{self._prefix}:note"
        with self._connection.errors():
            while True:
                found, token = self._server.gets(key)
                if self._replace(key, found, change(found or b""), token):
                    return

    def _replace(self, key: str, found: bytes | None, value: bytes, token: bytes | None) -> bool:
        return bool(self._server.add(key, value) if found is None else self._server.cas(key, value, token))

    def _incarnation(self, writer: str) -> str:
        return f"{self._prefix}:incarnation:{safe(writer)}"

    @property
    def _clock(self) -> str:
        return f"{self._prefix}:clock"


def later(incarnation: int) -> int:
    """An incarnation after this one, and after all that were registered before now."""
    return max(incarnation + 1, int(time.time() * 1000))
