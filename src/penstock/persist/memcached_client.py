"""The queue on one memcached server.

memcached has no lists, but counters and two atomic operations: ``add``, which fails if there is a value, and
``cas``. A writer increments the tail, which gives it a number, and adds its entry under that number. If it dies or
stalls in between, the processor finds a hole. The processor waits for some seconds, adds a tombstone there, and
continues: a dead writer blocks nothing. A writer that resumes finds that it cannot add its entry, or that its
number was given up, and takes a new one: a stalled writer loses nothing. The entries of one writer keep their
order.

The tail counts entries in its lower bits and their bytes in its upper bits, so one operation updates both. Each
entry contains the total of bytes up to its end. The bytes that wait are those of the tail less those of the last
entry released, so the number is correct after the next release even if writers have died.

The keys of a queue contain a random id, which is itself stored under a key. If the id, the tail or the head is
missing, the queue is lost and a new one is created.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.clock import Clock, SystemClock
from penstock.persist.memcached_connection import ANSWER_SECONDS, TOMBSTONE, MemcachedConnection
from penstock.persist.memcached_registry import MemcachedRegistry
from penstock.persist.names import safe
from penstock.persist.queues import QueueClient, superseded

HOLE_SECONDS = 2.0
"""Seconds that the processor waits for an entry whose number was taken. A put takes a millisecond; a writer that
stalls for longer only has to try again."""
_READ_COUNT = 16  # entries per request: at most 8 MB
_TRIES = 20  # attempts of an operation that a lost queue or a given-up number has undone; one is rarely needed

# The tail has 64 bits and wraps around: the number of the last entry, and in the upper bits the KiB put so far.
_NUMBER_BITS = 40  # sufficient for three years at 10,000 entries per second
_NUMBERS = (1 << _NUMBER_BITS) - 1
_UNIT = 1 << 10
_UNITS = (1 << (64 - _NUMBER_BITS)) - 1  # 16 GiB
MOST_BYTES = _UNITS * _UNIT // 2

_HEADER = struct.Struct("<4sI")  # magic, total of units up to the end of the entry
_MAGIC = b"pmc1"


@dataclass(frozen=True)
class _Head:
    """The progress of the processor, stored in memcached."""

    number: int = 0
    """The number of the last entry released."""
    units: int = 0
    """The total of units up to the end of that entry."""
    deleted: int = 0
    """The number up to which entries are deleted."""
    given_up: int = 0
    """The last number that was given up: its entry is no longer waited for."""

    def encode(self) -> bytes:
        return b"%d %d %d %d" % (self.number, self.units, self.deleted, self.given_up)

    @classmethod
    def decode(cls, data: bytes) -> _Head:
        return cls(*map(int, data.split()))


class MemcachedClient(QueueClient):
    """What this client knows of the queue, and its operations on it."""

    def __init__(
        self,
        name: str,
        server: str,
        max_bytes: int,
        clock: Clock | None = None,
        *,
        kind: str = "penstock",
        answer_seconds: float = ANSWER_SECONDS,
    ) -> None:
        """``kind`` begins all keys: queues of different kinds have nothing in common."""
        where = f"queue '{name}' in memcached at {server}"
        self._connection = MemcachedConnection(where, server, max_bytes, answer_seconds)
        self._server = self._connection.server
        self._clock = clock or SystemClock()
        self._prefix = f"{kind}:{safe(name)}"
        self.registry = MemcachedRegistry(self._connection, self._prefix)
        self._losses = 0
        self._passed_before = 0  # positions up to here belong to queues that are lost
        self._gone = b""  # the id of the last lost queue
        self._begin(b"")

    def _begin(self, id: bytes) -> None:
        """Forget everything about the previous queue. ``id`` is empty until a queue is found."""
        self._id = id
        self._tail = self._head = 0  # the numbers read last
        self._cursor = 0  # the number last read or given up; 0: begin after the head
        self._holes: dict[int, float] = {}  # numbers whose entries are missing, and since when
        self._passed: dict[int, int | None] = {}  # units of entries read and not released; None: a tombstone

    def id(self) -> str:
        with self._connection.errors():
            self._open_queue()
            return self._id.decode()

    # -- methods of writers

    def register(self, writer: str) -> int:
        return self.registry.register(writer)

    def put(self, entries: Sequence[bytes], writer: str = "", incarnation: int = 0) -> None:
        """An incarnation that is registered at the same time may be missed, because memcached has no operation on
        several keys. The processor skips the entries that result from this."""
        with self._connection.errors():
            if writer and self.registry.newest(writer) > incarnation:
                raise superseded(self._connection.where, writer)
            for entry in entries:
                self._put_one(entry)

    def _put_one(self, entry: bytes) -> None:
        """Steps: (1) increment the tail; (2) add the entry under its number; (3) check that the queue still exists
        and that the number was not given up and its tombstone deleted. Otherwise the processor would not find the
        entry, and the steps are repeated."""
        units = -(-(_HEADER.size + len(entry)) // _UNIT)
        for _ in range(_TRIES):
            self._open_queue()
            self._connection.check_size(entry)
            tail = self._server.incr(self._key("tail"), (units << _NUMBER_BITS) + 1)
            if tail is None:
                self._lost()
                continue
            number = tail & _NUMBERS
            key = self._key(number)
            if not self._connection.add(key, _HEADER.pack(_MAGIC, tail >> _NUMBER_BITS) + entry):
                continue  # the processor has given up this number
            head = self._server.get(self._key("head"))
            if head is None:
                self._lost()
            else:
                self._head = _Head.decode(head).number
                if _Head.decode(head).given_up < number:
                    self._tail = number
                    return
            self._server.delete(key)  # too late: the processor will not read it
        raise self._connection.unavailable(f"an entry could not be put in {_TRIES} attempts")

    def waiting(self) -> int:
        with self._connection.errors():
            units, head = self._read_counters()
            return ((units - head.units) & _UNITS) * _UNIT if head.number < self._tail else 0

    # -- methods of the processor

    def read(self, limit: int) -> list[tuple[int, bytes]]:
        found: list[tuple[int, bytes]] = []
        with self._connection.errors():
            _, head = self._read_counters()
            if self._cursor < head.number:
                self._skip_to(head.number)
            more = True
            while more and len(found) < limit and self._cursor < self._tail:
                count = min(limit - len(found), _READ_COUNT, self._tail - self._cursor)
                more = self._read_next(count, found)
            if not found:
                self._release_tombstones(head)
        return found

    def _read_next(self, count: int, found: list[tuple[int, bytes]]) -> bool:
        """Read the next ``count`` numbers. Returns False if an entry is missing that may still arrive."""
        keys = {number: self._key(number) for number in range(self._cursor + 1, self._cursor + 1 + count)}
        values = self._server.get_many(keys.values())
        now = self._clock.monotonic()
        self._holes = {number: self._holes.get(number, now) for number, key in keys.items() if key not in values}
        for number, key in keys.items():
            if key not in values:
                if now - self._holes[number] < HOLE_SECONDS or not self._give_up(number):
                    return False
                values[key] = TOMBSTONE
            units = _units_of(values[key])
            if units is not None:
                found.append((self._passed_before + number, values[key][_HEADER.size :]))
            elif values[key] != TOMBSTONE:
                self._losses += 1  # another program has overwritten the entry
            self._cursor = number
            self._passed[number] = units
        return True

    def _give_up(self, number: int) -> bool:
        """Add a tombstone for an entry that does not arrive. Returns False if it has arrived meanwhile. Either its
        writer did not acknowledge it, or the server has dropped it; if the server drops values, it is counted as a
        loss.

        Steps: (1) record the number in the head; (2) add the tombstone. The writer thus learns of it even after
        the tombstone is deleted."""
        key = self._key("head")
        data, token = self._server.gets(key)
        if data is None:
            return False
        head = _Head.decode(data)
        changed = replace(head, given_up=max(head.given_up, number))
        if not self._server.cas(key, changed.encode(), token):
            return False
        if not self._server.add(self._key(number), TOMBSTONE):
            return False
        self._losses += bool(self._server.stats().get(b"evictions"))
        return True

    def rewind(self) -> None:
        self._skip_to(0)

    def _skip_to(self, number: int) -> None:
        self._cursor = number
        self._passed.clear()

    def release(self, position: int) -> None:
        number = position - self._passed_before
        with self._connection.errors():
            units = self._passed.get(number)
            if units is None:
                self._open_queue()
                units = _units_of(self._server.get(self._key(number)) or b"")
            if units is None:
                return  # released before, or an entry of a queue that is lost
            while number + 1 in self._passed and self._passed[number + 1] is None:
                number += 1
            self._move_head(number, units)

    def _release_tombstones(self, head: _Head) -> None:
        """Move the head past tombstones that directly follow it: no release of an entry would."""
        if self._passed and all(units is None for units in self._passed.values()):
            self._move_head(max(self._passed), head.units)

    def _move_head(self, number: int, units: int) -> None:
        """Steps: (1) move the head; (2) delete the entries before it; (3) record the deletion in the head. After a
        crash the next call completes them."""
        key = self._key("head")
        while True:
            data, token = self._server.gets(key)
            if data is None:
                self._lost()
                return
            head = _Head.decode(data)
            if head.number < number:
                self._server.cas(key, replace(head, number=number, units=units).encode(), token)
            elif head.deleted < head.number:
                gone = [self._key(each) for each in range(head.deleted + 1, head.number + 1)]
                self._server.delete_many(gone, noreply=True)
                self._server.cas(key, replace(head, deleted=head.number).encode(), token)
            else:
                break
        self._head = head.number
        self._passed = {each: units for each, units in self._passed.items() if each > number}

    # -- methods of both

    @property
    def at_end(self) -> bool:
        """True if the last ``read`` left nothing that had been put before it."""
        return self._cursor >= self._tail

    @property
    def losses(self) -> int:
        return self._losses

    def close(self) -> None:
        self._server.close()

    def _key(self, part: str | int) -> str:
        return f"{self._prefix}:{self._id.decode()}:{part}"

    def _read_counters(self) -> tuple[int, _Head]:
        """The units of the tail, and the head, of the present queue. Creates a queue if it is lost."""
        for _ in range(_TRIES):
            self._open_queue()
            found = self._server.get_many([self._key("tail"), self._key("head")])
            if len(found) == 2:
                tail, head = int(found[self._key("tail")]), _Head.decode(found[self._key("head")])
                self._tail, self._head = tail & _NUMBERS, head.number
                return tail >> _NUMBER_BITS, head
            self._lost()
        raise self._connection.unavailable("memcached dropped the tail or head of the queue repeatedly")

    def _open_queue(self) -> None:
        """Find the present queue. Create one if there is none, or if its tail or head is missing."""
        key = f"{self._prefix}:id"
        while not self._id:
            self.warning = self._connection.check_settings()
            found, token = self._server.gets(key)
            if found is not None and found != self._gone:
                self._begin(found)
                return
            self._begin(secrets.token_hex(8).encode())
            try:  # the id is set last, because it makes the queue visible to others
                self._server.set(self._key("tail"), b"0")
                self._server.set(self._key("head"), _Head().encode())
                made = self._server.cas(key, self._id, token) if found else self._server.add(key, self._id)
            except BaseException:
                self._begin(b"")
                raise
            if not made:
                self._server.delete_many([self._key("tail"), self._key("head")])
                self._begin(b"")

    def _lost(self) -> None:
        """The queue is lost. Count the entries that this client knew to be in it and had not read."""
        self._losses += max(0, self._tail - max(self._head, self._cursor))
        self._passed_before += max(self._tail, self._cursor)
        self._gone = self._id
        self._begin(b"")


def _units_of(value: bytes) -> int | None:
    """The total of units up to the end of an entry; None for a tombstone and for a value of another program."""
    if value == TOMBSTONE or len(value) < _HEADER.size or not value.startswith(_MAGIC):
        return None
    return int(_HEADER.unpack_from(value)[1])
