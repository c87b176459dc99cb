"""The queue on several memcached servers.

Each server has a queue of its own (``memcached_client.py``). A writer puts its entries by turns into these queues,
or each of them into ``copies`` of them, with a stamp that says what it put before (``stamps.py``). The processor
reads all servers and restores the order from the stamps, so results of one key keep their order whichever servers
they are on.

Writers leave out a server that does not answer; it is asked again after growing pauses, and used again once it
answers. With one copy of each entry the processor waits for that server, so that nothing overtakes what is on it.
If it has not answered for ``DEAD_SECONDS``, or answers and has lost its queue, the processor goes on without the
entries that were only there, and counts them (``losses``): the stamps of later entries tell how many they are.
Should a server come back with entries that were given up, they are dropped: newer ones may be in the store.

The processor stores on every server up to which entries all was released, so its successor can tell what is lost
from what was written before.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Sequence
from hashlib import blake2b

from penstock.clock import Clock, SystemClock
from penstock.persist.memcached_client import MemcachedClient
from penstock.persist.memcached_group import QueueServer, ServerGroup
from penstock.persist.memcached_registry import later
from penstock.persist.queues import QueueClient, QueueUnavailable, superseded
from penstock.persist.stamps import Passed, Stamp, StampedEntry, StampedOrder, digest_of, unstamped

_ANSWER_SECONDS = 1.0  # shorter than with one server, because the others can serve meanwhile
_READ_COUNT = 16  # entries per request


class SpreadClient(QueueClient):
    """What this client knows of the queue, and its operations on it."""

    def __init__(
        self, name: str, servers: Sequence[str], max_bytes: int, copies: int, clock: Clock | None = None
    ) -> None:
        self._where = f"queue '{name}' in memcached at {', '.join(servers)}"
        self._clock = clock or SystemClock()
        self._copies = copies
        # The servers keep their order also where a user lists them in another one: it is part of the id.
        self._id = blake2b("\n".join([name, *sorted(servers)]).encode(), digest_size=8).hexdigest()
        self._servers = [
            QueueServer(
                index,
                address,
                MemcachedClient(
                    name,
                    address,
                    max_bytes,
                    self._clock,
                    kind=f"penstock{len(servers)}",
                    answer_seconds=_ANSWER_SECONDS,
                ),
            )
            for index, address in enumerate(servers)
        ]
        self._group = ServerGroup(self._where, self._servers, copies, self._clock, self._warn)
        self._session = secrets.randbits(63)
        self._acknowledged = self._attempt = 0
        self._time = 0  # of the last entry put
        self._turn = secrets.randbelow(len(servers))  # clients begin with different servers
        self._order = StampedOrder(len(servers))
        self._released = Passed()
        self._begun = self._is_reader = False
        self._position = self._released_position = 0
        self._taken: deque[tuple[int, StampedEntry]] = deque()
        """What was taken and not released, with the position of the last entry passed on."""

    def id(self) -> str:
        """Not stored, because there is no server that must not die. It need not change with a loss: incarnations
        and stamps of new entries are greater than all before."""
        return self._id

    # -- methods of writers

    def register(self, writer: str) -> int:
        while True:
            found = self._group.ask_all(lambda server: server.client.registry.newest(writer))
            incarnation = later(max(found.values()))
            if all(self._register_at(server, writer, incarnation, last) for server, last in found.items()):
                return incarnation

    def _register_at(self, server: int, writer: str, incarnation: int, last: int) -> bool:
        """Returns False if another process has registered meanwhile. A server that is away is left out."""
        answer = self._group.ask(
            self._servers[server], lambda asked: asked.client.registry.try_register(writer, incarnation, last)
        )
        return answer is not False

    def put(self, entries: Sequence[bytes], writer: str = "", incarnation: int = 0) -> None:
        found = self._group.ask_all(lambda server: server.client.registry.newest_and_clock(writer))
        newest = max(known for known, _ in found.values())
        if newest > incarnation:
            raise superseded(self._where, writer)
        for server, (known, _) in found.items():
            if known < newest:  # it has lost its memory
                self._register_at(server, writer, newest, known)
        if not self._acknowledged:  # so that the processor will miss the first entry if it gets lost
            self._group.ask_all(self._announce)
        clocks = {server: shown for server, (_, shown) in found.items()}
        for entry in entries:
            self._time = max(self._time + 1, max(clocks.values()) + 1, int(time.time() * 1000))
            stamp = Stamp(
                self._session,
                self._acknowledged + 1,
                self._attempt,
                digest_of(writer),
                incarnation if writer else 0,
                self._time,
            )
            self._put_one(entry, stamp, clocks)

    def _put_one(self, entry: bytes, stamp: Stamp, clocks: dict[int, int]) -> None:
        self._attempt += 1  # if this raises, servers may have the entry, and another one may follow
        data, written = stamp.on(entry), 0

        def put(server: QueueServer) -> bool:
            server.client.registry.advance(stamp.time, clocks.get(server.index, 0))
            clocks[server.index] = stamp.time
            server.client.put([data])
            return True

        servers = self._servers[self._turn :] + self._servers[: self._turn]
        self._turn = (self._turn + 1) % len(servers)
        for server in servers:
            if self._group.ask(server, put):
                written += 1
                if written == self._copies:
                    break
        if not written:
            raise self._group.unavailable()
        self._acknowledged, self._attempt = stamp.ordinal, 0

    def _announce(self, server: QueueServer) -> bool:
        def with_session(note: bytes) -> bytes:
            passed = Passed.decode(note)
            passed.begin(self._session)
            return passed.encode()

        server.client.registry.change_note(with_session)
        return True

    def waiting(self) -> int:
        """A server that is away counts with what waited there, at least one byte, until it is given up."""
        found = self._group.ask_all(lambda server: server.client.waiting())
        for index, waiting in found.items():
            self._servers[index].waiting = waiting
        held = [
            server.waiting for server in self._servers if server.index in found or not self._group.is_dead(server)
        ]
        return max(sum(held) // min(self._copies, len(held)), self._group.may_hold_entries)

    # -- methods of the processor

    def read(self, limit: int) -> list[tuple[int, bytes]]:
        found: list[tuple[int, bytes]] = []
        self._is_reader = True
        if not self._begun:
            self._learn()
            self._order.begin(self._released)
            self._begun = True
        try:
            self._take(limit, found)
            while len(found) < limit:
                came = self._fill()
                if not (self._take(limit, found) or came or self._pass_over_missing()):
                    break
        except QueueUnavailable:
            if not found:  # else the next call raises it: what was taken must not get lost
                raise
        if not found:
            self._release_at_servers(noted=False)
        return found

    def _take(self, limit: int, found: list[tuple[int, bytes]]) -> bool:
        """Take what can be taken, until ``limit`` entries are found, and drop what follows them and was taken
        before. Returns whether there was anything."""
        any_taken = False
        while not self._must_wait() and (taken := self._order.take(only_drop=len(found) >= limit)) is not None:
            entry, is_passed = taken
            if is_passed:
                self._position += 1
                found.append((self._position, entry.entry))
            self._taken.append((self._position, entry))
            any_taken = True
        return any_taken

    def _must_wait(self) -> bool:
        """True while entries that come first may be behind a hole, or on servers that are away and on no other."""
        if self._group.may_hold_entries:
            return True
        return any(
            server.away_since is None and not (server.is_read and server.client.at_end) for server in self._servers
        )

    def _fill(self) -> bool:
        """A round of reading. Returns whether there was anything new."""
        came = self._group.ask_all(self._read_from)
        self._order.end_round()
        return any(came.values())

    def _read_from(self, server: QueueServer) -> bool:
        """Read all that is there now."""
        came = False
        while found := server.client.read(_READ_COUNT):
            came = True
            for position, data in found:
                stamp, entry = unstamped(data)
                self._order.add(StampedEntry(server.index, position, stamp, entry))
        server.is_read = True
        return came

    def _pass_over_missing(self) -> bool:
        """If entries wait for others that no server has, go on without these. Returns whether this may help."""
        away = self._group.away
        if not self._order.waiting or self._must_wait() or not all(map(self._group.is_dead, away)):
            return False
        self._learn()
        self._order.give_up()
        return True

    def _learn(self) -> None:
        """Find out what was released, also by another processor."""
        for note in self._group.ask_all(lambda server: server.client.registry.note()).values():
            self._released.merge(Passed.decode(note))
        self._order.passed.merge(self._released)

    def rewind(self) -> None:
        for server in self._servers:
            server.client.rewind()
        self._taken.clear()
        self._position = self._released_position
        self._begun = False

    def release(self, position: int) -> None:
        self._released_position = max(self._released_position, min(position, self._position))
        self._release_at_servers(noted=True)

    def _release_at_servers(self, noted: bool) -> None:
        """Steps, at each server: (1) note what is in the store; (2) release it. ``noted``: step 1 is due although
        nothing may have to be released here."""
        while self._taken and self._taken[0][0] <= self._released_position:
            _, entry = self._taken.popleft()
            self._released.add(entry.stamp)
            server = self._servers[entry.server]
            server.to_release = max(server.to_release, entry.position)
        if noted or any(server.to_release > server.released for server in self._servers):
            self._group.ask_all(self._release_at)

    def _release_at(self, server: QueueServer) -> bool:
        server.client.registry.change_note(self._with_released)
        if server.to_release > server.released:
            server.client.release(server.to_release)
            server.released = server.to_release
        return True

    def _with_released(self, note: bytes) -> bytes:
        passed = Passed.decode(note)
        passed.merge(self._released)
        return passed.encode()

    # -- methods of both

    @property
    def losses(self) -> int:
        """What is missing in the order of each client. With one copy of each entry also what was known to be on a
        server that lost it: the last entries of a client have no later ones that tell. A writer knows of none."""
        tells = self._copies == 1 and self._is_reader
        return max(self._order.lost, sum(server.client.losses for server in self._servers) if tells else 0)

    def _warn(self, text: str) -> None:
        self.warning = text

    def close(self) -> None:
        for server in self._servers:
            server.client.close()
