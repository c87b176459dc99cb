"""A queue on Redis, for workers on several machines. Needs Redis 6.2 and ``pip install "penstock[redis]"``.

Entries survive a kill of the server if it runs with ``appendonly yes`` and ``appendfsync always`` and evicts
nothing. The client checks these settings, and ``warning`` contains what is weaker. A failover to a replica loses
entries that had not reached it.

A queue is a stream. Every operation is one script, so it is atomic. Entries are numbered by the server's clock in
microseconds, each at least one more than the one before. A server that has lost its newest entries, or all of
them, never assigns a number twice, so a new entry is never mistaken for one that was read.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

from penstock.credentials import has_references, resolved_url
from penstock.errors import EnvironmentFault, TopologyError
from penstock.persist.names import safe
from penstock.persist.queues import PersistentQueue, QueueClient, QueueUnavailable, superseded
from penstock.redaction import described, hide, redacted

_ANSWER_SECONDS = 3.0  # seconds; an fsync on a busy disk sometimes takes a second
_READ_COUNT = 32  # entries per request: at most 16 MB

# KEYS: the stream, its counts, the last incarnations; ARGV: the writer, its incarnation, the entries. Each entry
# stores the sum of all bytes put up to its end.
_PUT = """
if ARGV[1] ~= '' and tonumber(redis.call('HGET', KEYS[3], ARGV[1]) or 0) > tonumber(ARGV[2]) then
    return 0
end
local counts = redis.call('HMGET', KEYS[2], 'tail', 'tail_bytes')
local time = redis.call('TIME')
local number = math.max(tonumber(counts[1] or 0), time[1] * 1000000 + time[2])
local bytes = tonumber(counts[2] or 0)
for place = 3, #ARGV do
    local entry = ARGV[place]
    number = number + 1
    bytes = bytes + #entry
    redis.call('XADD', KEYS[1], string.format('%.0f-0', number), 'e', entry, 'b', string.format('%.0f', bytes))
end
redis.call('HSET', KEYS[2], 'tail', string.format('%.0f', number), 'tail_bytes', string.format('%.0f', bytes))
return 1
"""
# KEYS: as above; ARGV: the position. An entry that no longer exists was released before. XTRIM comes first,
# because a server without free memory rejects a script that begins with HSET.
_RELEASE = """
local last = redis.call('XREVRANGE', KEYS[1], ARGV[1] .. '-0', '-', 'COUNT', 1)[1]
if last then
    redis.call('XTRIM', KEYS[1], 'MINID', '=', string.format('%.0f-0', ARGV[1] + 1))
    redis.call('HSET', KEYS[2], 'head_bytes', last[2][4])
end
"""
# KEYS: the stream, the queue's id; ARGV: the entry to read after, the count. The id is read in the same step,
# because a server that was emptied has another id. Not a transaction: a server without free memory rejects those,
# even to read.
_READ = """
return {redis.call('GET', KEYS[2]), redis.call('XRANGE', KEYS[1], ARGV[1], '+', 'COUNT', ARGV[2])}
"""
# KEYS: the last incarnations of all writers; ARGV: the writer, the minimum of the new incarnation.
_REGISTER = """
local incarnation = math.max((redis.call('HGET', KEYS[1], ARGV[1]) or 0) + 1, ARGV[2])
redis.call('HSET', KEYS[1], ARGV[1], string.format('%.0f', incarnation))
return incarnation
"""


class RedisQueue(PersistentQueue):
    """A stream in the database at ``url``: ``redis://[[user]:password@]host[:port][/database]``, ``rediss://`` for
    TLS, ``unix://`` for a socket. The password may be a reference: ``${NAME}``, ``${file:PATH}``. Up to
    ``max_bytes`` of results may wait, for which the server needs memory."""

    def __init__(self, url: str = "redis://127.0.0.1:6379/0", max_bytes: int = 256 << 20) -> None:
        self.url = url
        self.max_bytes = max_bytes

    def check(self, where: str, folder: str) -> None:
        library = _library(where)
        try:
            if not has_references(self.url):
                library.connection.parse_url(self.url)
        except ValueError:
            raise TopologyError(
                where,
                f"the URL {redacted(self.url)} is not a Redis URL",
                "Write RedisQueue('redis://host:6379/0'). In a password, @, / and : are encoded: %40, %2F, %3A.",
            ) from None

    def open(self, name: str, folder: str) -> RedisClient:
        return RedisClient(name, self.url, str(self))

    def __str__(self) -> str:
        parts = urlsplit(redacted(self.url))
        return f"on Redis at {parts.netloc.rpartition('@')[2]}{parts.path}"


class RedisClient(QueueClient):
    """One connection to Redis. Keys contain the queue's name in braces, so that a cluster keeps them on one
    node."""

    def __init__(self, name: str, url: str, place: str) -> None:
        library = _library(f"queue '{name}'")
        self._where = f"queue '{name}' {place}"
        self._error: type[Exception] = library.RedisError
        self._refused: type[Exception] = library.ResponseError
        # A connection that a restart has closed is reopened at once; a request that times out is not repeated.
        once = library.retry.Retry(library.backoff.NoBackoff(), 1, (library.ConnectionError,))
        self._redis: Any = library.Redis.from_url(
            _with_secrets(library, url, self._where),
            socket_timeout=_ANSWER_SECONDS,
            socket_connect_timeout=_ANSWER_SECONDS,
            retry=once,
        )
        prefix = f"penstock:{{{safe(name)}}}"
        self._stream, self._counts, self._incarnations = (
            f"{prefix}:stream",
            f"{prefix}:counts",
            f"{prefix}:incarnations",
        )
        self._id = f"{prefix}:id"
        self._known_id = b""  # the id of the queue that was read from last; empty: read it again
        self._put, self._release, self._register, self._read_script = map(
            self._redis.register_script, (_PUT, _RELEASE, _REGISTER, _READ)
        )
        self._cursor = 0  # the position of the last entry read
        self._checked = False

    def id(self) -> str:
        if not self._known_id:
            self._call(self._redis.set, self._id, secrets.token_hex(8), nx=True)
            self._known_id = self._call(self._redis.get, self._id) or b""
        return self._known_id.decode()

    def register(self, writer: str) -> int:
        arguments = [writer, int(time.time() * 1000)]
        return int(self._call(self._register, [self._incarnations], arguments))

    def put(self, entries: Sequence[bytes], writer: str = "", incarnation: int = 0) -> None:
        keys = [self._stream, self._counts, self._incarnations]
        if not self._call(self._put, keys, [writer, incarnation, *entries]):
            raise superseded(self._where, writer)

    def waiting(self) -> int:
        tail, head = self._call(self._redis.hmget, self._counts, "tail_bytes", "head_bytes")
        return int(tail or 0) - int(head or 0)

    def read(self, limit: int) -> list[tuple[int, bytes]]:
        found: list[tuple[int, bytes]] = []
        while len(found) < limit:
            count = min(limit - len(found), _READ_COUNT)
            after = f"({self._cursor}-0" if self._cursor else "-"
            id, more = self._call(self._read_script, [self._stream, self._id], [after, count])
            if more and (id or b"") != self._known_id:
                if found:
                    break  # the entries found are of the previous queue: the next call returns the others
                self._known_id = id or b""
            found += [(int(number.partition(b"-")[0]), fields[1]) for number, fields in more]
            if found:
                self._cursor = found[-1][0]
            if len(more) < count:
                break
        return found

    def rewind(self) -> None:
        self._cursor, self._known_id = 0, b""

    def release(self, position: int) -> None:
        self._call(self._release, [self._stream, self._counts], [position])

    @property
    def losses(self) -> int:
        return 0

    def close(self) -> None:
        self._redis.close()

    def _call(self, ask: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
        """Send a request to Redis. Every error becomes ``QueueUnavailable``: a server that is loading its data,
        has no memory, is currently a replica, or rejects the password may accept the same request later."""
        try:
            if not self._checked:
                self.warning = self._weakness()
                self._checked = True
            return ask(*arguments, **more)
        except self._error as error:
            self._checked = False  # the next answer may come from another server
            raise QueueUnavailable(
                self._where,
                f"Redis did not carry out a request within {_ANSWER_SECONDS:g} s "
                f"({type(error).__name__}: {error})",
                "The queue continues once Redis answers. If Redis runs, check its memory, disk and permissions.",
            ) from error

    def _weakness(self) -> str:
        """The setting of the server that makes the queue less durable, as a warning; empty if there is none."""
        try:
            found = {**self._redis.config_get("append*"), **self._redis.config_get("maxmemory*")}
        except self._refused as error:
            return (
                f"{self._where}: could not check whether appendonly is yes and appendfsync is always "
                f"({described(error)}). Without these settings a crash of Redis loses results."
            )
        weak = [
            f"{name} {found[name]}" for name, wanted in _DURABLE.items() if name in found and found[name] != wanted
        ]
        if weak:
            return (
                f"{self._where}: a crash of Redis loses results, because it runs with {' and '.join(weak)}. "
                "Set appendonly yes and appendfsync always."
            )
        if found.get("maxmemory", "0") != "0" and found.get("maxmemory-policy", "").startswith("allkeys"):
            return (
                f"{self._where}: Redis deletes results when its memory is full, because its maxmemory-policy is "
                f"{found['maxmemory-policy']}. Set it to noeviction."
            )
        return ""


def _with_secrets(library: Any, url: str, where: str) -> str:
    """The URL with its references resolved. The password is hidden from errors and logs from now on."""
    url = resolved_url(url, where)
    try:
        password = library.connection.parse_url(url).get("password")
    except ValueError:
        raise EnvironmentFault(where, "the Redis URL cannot be parsed") from None
    if password:
        hide(password)
    return url


_DURABLE = {"appendonly": "yes", "appendfsync": "always"}


def _library(where: str) -> Any:
    """The module ``redis``. Loaded on first use, so that building a topology does not need it."""
    try:
        import redis
        import redis.backoff
        import redis.connection
        import redis.retry
    except ImportError:
        raise EnvironmentFault(
            where, "the package redis is not installed", 'Install it with: pip install "penstock[redis]".'
        ) from None
    return redis
