"""The memcached servers of one queue: which of them answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from penstock.clock import Clock
from penstock.persist.memcached_client import MemcachedClient
from penstock.persist.policy import Patience
from penstock.persist.queues import QueueUnavailable

DEAD_SECONDS = 5.0
"""Seconds without an answer after which what is on a server is given up. One that hangs for less loses nothing."""
# Seconds until a server that did not answer is asked again. If its host is gone, asking takes a second.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 15.0

_T = TypeVar("_T")


@dataclass
class QueueServer:
    """One of the servers, and whether it answers."""

    index: int
    address: str
    client: MemcachedClient
    patience: Patience = field(default_factory=lambda: Patience(first=_FIRST_PAUSE, longest=_LONGEST_PAUSE))
    away_since: float | None = None
    """None while it answers."""
    is_read: bool = False
    """Whether it was read since it was away."""
    waiting: int = 0
    """Bytes that waited there when it answered last."""
    to_release: int = 0
    """The position up to which it has to release entries."""
    released: int = 0


class ServerGroup:
    """Asks the servers that answer. ``warn`` is called with what is wrong at present, empty if nothing is."""

    def __init__(
        self, where: str, servers: Sequence[QueueServer], copies: int, clock: Clock, warn: Callable[[str], None]
    ) -> None:
        self.servers = list(servers)
        self._where, self._copies, self._clock, self._warn = where, copies, clock, warn
        self._problem = ""

    @property
    def away(self) -> list[QueueServer]:
        return [server for server in self.servers if server.away_since is not None]

    @property
    def may_hold_entries(self) -> bool:
        """True while there may be entries on servers that are away and on no other."""
        away = self.away
        return len(away) >= self._copies and not all(map(self.is_dead, away))

    def is_dead(self, server: QueueServer) -> bool:
        since = server.away_since
        return since is not None and self._clock.monotonic() - since >= DEAD_SECONDS

    def ask_all(self, call: Callable[[QueueServer], _T]) -> dict[int, _T]:
        """The answers of the servers that answer, by index. Raises ``QueueUnavailable`` if none does."""
        answers = {}
        for server in self.servers:
            answer = self.ask(server, call)
            if answer is not None:
                answers[server.index] = answer
        if not answers:
            raise self.unavailable()
        return answers

    def ask(self, server: QueueServer, call: Callable[[QueueServer], _T]) -> _T | None:
        """The answer of a server; None if it does not answer, or should not be asked yet."""
        now = self._clock.monotonic()
        if server.patience.wait(now):
            return None
        try:
            answer = call(server)
        except QueueUnavailable as error:
            now = self._clock.monotonic()
            server.patience.failed(now)
            server.is_read = False
            server.away_since = now if server.away_since is None else server.away_since
            self._problem = error.problem
            self._tell()
            return None
        server.patience.succeeded()
        server.away_since = None
        self._tell()
        return answer

    def _tell(self) -> None:
        """Say what is wrong at present."""
        away = [server.address for server in self.servers if server.away_since is not None]
        warnings = [server.client.warning for server in self.servers if server.client.warning]
        if away:
            text = f"{self._where}: {', '.join(away)} {'does' if len(away) == 1 else 'do'} not answer"
            if len(self.servers) - len(away) < self._copies:
                text += f", so new entries have fewer than {self._copies} copies"
            warnings.insert(0, f"{text}. The queue continues on the other servers.")
        self._warn(" ".join(warnings))

    def unavailable(self) -> QueueUnavailable:
        return QueueUnavailable(
            self._where,
            f"none of the servers answers ({self._problem or 'they are asked again in a moment'})",
            "The queue continues by itself once one of them runs and has memory.",
        )
