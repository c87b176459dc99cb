"""A queue in memcached: the choice of A, and one that can lose results.

**What is lost.** memcached keeps everything in memory. When it crashes, is restarted or flushed, all results that
were acknowledged, waited in it and had not been read by the processor are lost; the tuples they come from are not
replayed, for they were acked. Writers and processor notice, go on with an empty queue, and count what they knew to
be in it (``losses``). A kill of a worker or of the processor loses nothing. Without ``-M`` memcached also drops
values when its memory is full, silently: start it with ``-M``, and with ``-m`` of at least twice ``max_bytes``;
``warning`` says if it was not. Where no result may be lost take ``RedisQueue`` or ``EmbeddedQueue``.

**How it works.** memcached has no lists, but counters and two atomic steps: ``add``, which fails where there is a
value, and ``cas``. A writer counts up the tail, which gives it a number, and then adds its entry under that. If it
dies or stalls in between, the processor finds a hole. It waits for some seconds, then adds a tombstone in its
place and reads on: a dead writer blocks nothing. A writer that wakes up finds that it cannot add, or that its
number was given up, and takes a new one: a stalled one loses nothing. Entries of one writer keep their order.

The tail counts entries in its lower bits and their bytes in its upper ones, so one step does both, and each entry
carries the bytes up to its end. What waits is the tail's bytes less those of the last entry released: however many
writers have died, it is right again with the next release.

The keys of a queue have a random id in them, which itself is under a key: where it, or the tail, or the head is
missing, the queue is gone and a new one is made. Needs ``pip install "penstock[memcached]"``.
"""

from __future__ import annotations

import contextlib
import secrets
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.clock import Clock, SystemClock
from penstock.errors import ComponentError, EnvironmentFault, TopologyError
from penstock.persist.names import safe
from penstock.persist.queues import PersistentQueue, QueueClient, QueueUnavailable, superseded

HOLE_SECONDS = 2.0
"""How long the processor waits for an entry whose number was taken. A put takes a millisecond; a writer that
stalls for longer than this only has to try again."""
_ANSWER_SECONDS = 3.0
_READ_COUNT = 16  # entries asked for at a time: at most 8 MB
_OVERHEAD = 512  # bytes of a value's key and of memcached's own header, which count as its size
_TRIES = 20  # of what a lost queue or a number given up has undone: once is rare

# The tail, 64 bits that wrap around: the number of the last entry, and above it the bytes put so far in KiB.
_NUMBER_BITS = 40  # at 10,000 entries a second, three years
_NUMBERS = (1 << _NUMBER_BITS) - 1
_UNIT = 1 << 10
_UNITS = (1 << (64 - _NUMBER_BITS)) - 1  # 16 GiB
_MOST_BYTES = _UNITS * _UNIT // 2

_HEADER = struct.Struct("<4sI")  # magic, the tail's bytes (in units) up to the entry's end
_MAGIC = b"pmc1"
_TOMBSTONE = b"pmc1 given up"


@dataclass(frozen=True)
class _Head:
    number: int = 0
    """Of the last entry released."""
    units: int = 0
    """The tail's bytes up to its end."""
    deleted: int = 0
    """The last number that is surely deleted."""
    given_up: int = 0
    """The last number whose entry is not waited for any more."""

    def encode(self) -> bytes:
        return b"%d %d %d %d" % (self.number, self.units, self.deleted, self.given_up)

    @classmethod
    def decode(cls, data: bytes) -> _Head:
        return cls(*map(int, data.split()))


class MemcachedQueue(PersistentQueue):
    """A queue in the memcached at ``server`` (``host:port``). Up to ``max_bytes`` of results wait."""

    def __init__(self, server: str = "127.0.0.1:11211", max_bytes: int = 32 << 20) -> None:
        self.server = server
        self.max_bytes = max_bytes

    def check(self, where: str, folder: str) -> None:
        library = _library(where)
        try:
            library.client.base.normalize_server_spec(self.server)
        except ValueError as error:
            raise TopologyError(
                where,
                f"server is not a memcached's host and port ({error})",
                "Write MemcachedQueue('host:11211').",
            ) from None
        if self.max_bytes > _MOST_BYTES:
            raise TopologyError(
                where,
                f"max_bytes of MemcachedQueue is {self.max_bytes}, which is more than {_MOST_BYTES}",
                "Use RedisQueue or EmbeddedQueue for more.",
            )

    def open(self, name: str, folder: str) -> MemcachedClient:
        return MemcachedClient(name, self.server, self.max_bytes)

    def __str__(self) -> str:
        return f"in memcached at {self.server}"


class MemcachedClient(QueueClient):
    """One connection to memcached, and what this client knows of the queue there."""

    def __init__(self, name: str, server: str, max_bytes: int, clock: Clock | None = None) -> None:
        library = _library(f"queue '{name}'")
        self._where = f"queue '{name}' in memcached at {server}"
        self._errors = library.exceptions
        self._server: Any = library.Client(
            server, connect_timeout=_ANSWER_SECONDS, timeout=_ANSWER_SECONDS, no_delay=True, default_noreply=False
        )
        self._max_bytes = max_bytes
        self._clock = clock or SystemClock()
        self._prefix = f"penstock:{safe(name)}"
        self._item_bytes = 0  # the most a value may have; 0 where it is not known
        self._losses = 0
        self._passed_before = 0  # positions up to here are of queues that are gone
        self._gone = b""  # the id of the last one
        self._begin(b"")

    def _begin(self, id: bytes) -> None:
        """Know nothing yet of the queue of that id, or of none."""
        self._id = id
        self._tail = self._head = 0  # numbers last seen
        self._cursor = 0  # the number last read or given up; 0: begin behind the head
        self._holes: dict[int, float] = {}  # numbers whose entries are missing, and since when
        self._passed: dict[int, int | None] = {}  # units of what was read and not released; None: a tombstone

    def id(self) -> str:
        with self._io_errors():
            self._open_queue()
            return self._id.decode()

    # ---- writers -------------------------------------------------------------------------------------------

    def register(self, writer: str) -> int:
        key = self._incarnation_key(writer)
        with self._io_errors():
            while True:
                last, token = self._server.gets(key)
                incarnation = max(int(last or 0) + 1, int(time.time() * 1000))
                value = b"%d" % incarnation
                if self._server.add(key, value) if last is None else self._server.cas(key, value, token):
                    return incarnation

    def put(self, entries: Sequence[bytes], writer: str = "", incarnation: int = 0) -> None:
        """A later incarnation that is registered at this very moment may be missed: memcached looks at one key at
        a time. The processor passes over what comes of that."""
        with self._io_errors():
            newest = self._server.get(self._incarnation_key(writer)) if writer else None
            if newest is not None and int(newest) > incarnation:
                raise superseded(self._where, writer)
            for entry in entries:
                self._put_one(entry)

    def _incarnation_key(self, writer: str) -> str:
        return f"{self._prefix}:incarnation:{safe(writer)}"

    def _put_one(self, entry: bytes) -> None:
        """(1) count up the tail; (2) add the entry under its number; (3) look whether the queue is still there and
        that number was not given up, the tombstone deleted since. Only then the processor will find it."""
        units = -(-(_HEADER.size + len(entry)) // _UNIT)
        for _ in range(_TRIES):
            self._open_queue()
            self._check_size(entry)
            tail = self._server.incr(self._key("tail"), (units << _NUMBER_BITS) + 1)
            if tail is None:
                self._lost()
                continue
            number = tail & _NUMBERS
            key = self._key(number)
            if not self._add(key, _HEADER.pack(_MAGIC, tail >> _NUMBER_BITS) + entry):
                continue  # given up by the processor
            head = self._server.get(self._key("head"))
            if head is None:
                self._lost()
            else:
                self._head = _Head.decode(head).number
                if _Head.decode(head).given_up < number:
                    self._tail = number
                    return
            self._server.delete(key)  # too late: nobody would look for it
        raise self._fault(f"an entry did not stay in the queue in {_TRIES} tries")

    def _add(self, key: str, value: bytes) -> bool:
        try:
            return bool(self._server.add(key, value))
        except self._errors.MemcacheUnexpectedCloseError:
            raise
        except self._errors.MemcacheServerError:  # no memory: the number is given back, not left to the processor
            with contextlib.suppress(self._errors.MemcacheServerError):
                self._server.add(key, _TOMBSTONE)
            raise

    def waiting(self) -> int:
        with self._io_errors():
            units, head = self._read_counters()
            return ((units - head.units) & _UNITS) * _UNIT if head.number < self._tail else 0

    # ---- the processor -------------------------------------------------------------------------------------

    def read(self, limit: int) -> list[tuple[int, bytes]]:
        found: list[tuple[int, bytes]] = []
        with self._io_errors():
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
        """Read the next numbers; False if an entry is missing that may still come."""
        keys = {number: self._key(number) for number in range(self._cursor + 1, self._cursor + 1 + count)}
        values = self._server.get_many(keys.values())
        now = self._clock.monotonic()
        self._holes = {number: self._holes.get(number, now) for number, key in keys.items() if key not in values}
        for number, key in keys.items():
            if key not in values:
                if now - self._holes[number] < HOLE_SECONDS or not self._give_up(number):
                    return False
                values[key] = _TOMBSTONE
            units = _units_of(values[key])
            if units is not None:
                found.append((self._passed_before + number, values[key][_HEADER.size :]))
            elif values[key] != _TOMBSTONE:
                self._losses += 1  # a stranger's value in the place of ours
            self._cursor = number
            self._passed[number] = units
        return True

    def _give_up(self, number: int) -> bool:
        """Put a tombstone in the place of an entry that does not come; False if it came at this moment. Its writer
        did not acknowledge it; or the server has dropped it, if it drops any: then this may be a loss.

        (1) note it in the head; (2) add the tombstone: so when that is deleted the writer still hears of it."""
        key = self._key("head")
        data, token = self._server.gets(key)
        if data is None:
            return False
        head = _Head.decode(data)
        noted = replace(head, given_up=max(head.given_up, number))
        if not self._server.cas(key, noted.encode(), token) or not self._server.add(self._key(number), _TOMBSTONE):
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
        with self._io_errors():
            units = self._passed.get(number)
            if units is None:
                self._open_queue()
                units = _units_of(self._server.get(self._key(number)) or b"")
            if units is None:
                return  # released before, or of a queue that is gone
            while number + 1 in self._passed and self._passed[number + 1] is None:
                number += 1
            self._move_head(number, units)

    def _release_tombstones(self, head: _Head) -> None:
        """Pass what was given up right behind the head: there is no entry whose release would."""
        if self._passed and all(units is None for units in self._passed.values()):
            self._move_head(max(self._passed), head.units)

    def _move_head(self, number: int, units: int) -> None:
        """(1) move the head; (2) delete what it has passed; (3) note that this is done: a crash before leaves it
        to the next one."""
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

    # ---- both ----------------------------------------------------------------------------------------------

    @property
    def losses(self) -> int:
        return self._losses

    def close(self) -> None:
        self._server.close()

    def _key(self, part: str | int) -> str:
        return f"{self._prefix}:{self._id.decode()}:{part}"

    def _read_counters(self) -> tuple[int, _Head]:
        """The tail's units, and the head, of the queue there is now."""
        for _ in range(_TRIES):
            self._open_queue()
            found = self._server.get_many([self._key("tail"), self._key("head")])
            if len(found) == 2:
                tail, head = int(found[self._key("tail")]), _Head.decode(found[self._key("head")])
                self._tail, self._head = tail & _NUMBERS, head.number
                return tail >> _NUMBER_BITS, head
            self._lost()
        raise self._fault("memcached dropped the queue's tail and head again and again")

    def _open_queue(self) -> None:
        """Find the queue there is now; make one where there is none, or one without its tail or head."""
        key = f"{self._prefix}:id"
        while not self._id:
            self._check_settings()
            found, token = self._server.gets(key)
            if found is not None and found != self._gone:
                self._begin(found)
                return
            self._begin(secrets.token_hex(8).encode())
            try:  # it is there for others once its id is: the rest comes first
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
        """The queue this client knew is gone, with all it knew to be there and has not read."""
        self._losses += max(0, self._tail - max(self._head, self._cursor))
        self._passed_before += max(self._tail, self._cursor)
        self._gone = self._id
        self._begin(b"")

    def _check_settings(self) -> None:
        try:
            found = self._server.stats("settings")
        except self._errors.MemcacheClientError:  # some proxies do not know it
            found = {}
        self._item_bytes = found.get(b"item_size_max", 0)
        memory = found.get(b"maxbytes", 0)
        if not memory:
            weakness = "could not look whether it drops results when its memory is full. Start it with -M"
        elif found.get(b"evictions") != b"off":
            weakness = "it drops results when its memory is full. Start it with -M"
        elif memory < 2 * self._max_bytes:
            weakness = f"its memory of {memory >> 20} MiB is less than twice max_bytes. Start it with a greater -m"
        else:
            weakness = ""
        self.warning = f"{self._where}: {weakness}." if weakness else ""

    def _check_size(self, entry: bytes) -> None:
        if self._item_bytes and len(entry) + _OVERHEAD > self._item_bytes:
            raise ComponentError(
                self._where,
                f"an entry of {len(entry)} bytes is larger than memcached takes, {self._item_bytes} bytes",
                "Start it with a larger -I, or use RedisQueue or EmbeddedQueue.",
            )

    @contextlib.contextmanager
    def _io_errors(self) -> Iterator[None]:
        try:
            yield
        except (OSError, self._errors.MemcacheError) as error:
            self._server.close()
            raise self._fault(
                f"memcached did not do what it was asked within {_ANSWER_SECONDS:g} s ("
                + f"{type(error).__name__}: {error}".removesuffix(": ")
                + ")"
            ) from error

    def _fault(self, problem: str) -> QueueUnavailable:
        return QueueUnavailable(self._where, problem, "It goes on by itself once memcached runs and has memory.")


def _units_of(value: bytes) -> int | None:
    """The bytes up to an entry's end; None of a tombstone, and of what no writer of ours has put."""
    if value == _TOMBSTONE or len(value) < _HEADER.size or not value.startswith(_MAGIC):
        return None
    return int(_HEADER.unpack_from(value)[1])


def _library(where: str) -> Any:
    """The module ``pymemcache``: loaded where it is used, so that building a topology does not need it."""
    try:
        import pymemcache
        import pymemcache.client.base
        import pymemcache.exceptions
    except ImportError:
        raise EnvironmentFault(
            where, "the package pymemcache is not installed", 'Install it with: pip install "penstock[memcached]".'
        ) from None
    return pymemcache
