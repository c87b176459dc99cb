"""The order of entries that several servers hold: pure decisions, without servers and clocks.

A client numbers the entries that it puts. It may put one twice, on two servers, and after an error it does not
know on which it is. A reader gets what each server has, in the order in which that server got it, and puts it
together:

- Entries are passed on in the order of their times. A client chooses a time after all that it finds on the
  servers, so what was put before an entry, by any client, is passed on before it.
- An entry that was passed on is dropped when it comes again; so is one of a writer's earlier incarnation.
- If the entries before the next one of a client are missing, the reader waits. When it has read all that the
  servers have, and the servers that do not answer are given up, what is still missing is lost, and is counted.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections import deque
from dataclasses import dataclass

from penstock.persist.entries import EntryDamaged
from penstock.texts import parse_json

_FORMAT = struct.Struct("<4sQQQQIQ")
_MAGIC = b"pss1"
_SESSIONS = 256  # that a note names; beyond it the ones that have put nothing for longest are left out


@dataclass(frozen=True)
class Stamp:
    """The name of an entry."""

    session: int
    """The client that put it; a random number."""
    ordinal: int
    """The number of entries of this client that were acknowledged before it, plus 1."""
    attempt: int
    """Counts attempts that the client had to report as failed. An entry may be in the queue nevertheless."""
    writer: int = 0
    """The digest of the writer's name; 0 if there is none."""
    incarnation: int = 0
    time: int = 0
    """Greater than those of all entries that were put before."""

    def on(self, entry: bytes) -> bytes:
        """The entry with this stamp."""
        head = _FORMAT.pack(
            _MAGIC, self.session, self.writer, self.incarnation, self.ordinal, self.attempt, self.time
        )
        return head + entry


def unstamped(data: bytes) -> tuple[Stamp, bytes]:
    """The stamp and the entry that ``Stamp.on`` joined."""
    if len(data) < _FORMAT.size or data[:4] != _MAGIC:
        raise EntryDamaged(
            "the delayed persistent queue",
            f"an entry has no stamp: {len(data)} bytes that begin with {data[:8]!r}",
            "No other program may write to the queue.",
        )
    _, session, writer, incarnation, ordinal, attempt, time = _FORMAT.unpack_from(data)
    return Stamp(session, ordinal, attempt, writer, incarnation, time), data[_FORMAT.size :]


def digest_of(writer: str) -> int:
    return int.from_bytes(hashlib.blake2b(writer.encode(), digest_size=8).digest()) or 1 if writer else 0


@dataclass
class StampedEntry:
    """An entry as one server has it."""

    server: int
    position: int
    """Its position on that server."""
    stamp: Stamp
    entry: bytes
    round: int = 0
    """The round in which it was read."""


class Passed:
    """Up to which entries were passed on."""

    def __init__(self) -> None:
        self.sessions: dict[int, tuple[int, int]] = {}
        """The last ⟨ordinal, attempt⟩ of each session; the session that was passed on last is at the end."""
        self.writers: dict[int, int] = {}
        """The newest incarnation of each writer."""

    def add(self, stamp: Stamp) -> None:
        last = max(self.sessions.pop(stamp.session, (0, 0)), (stamp.ordinal, stamp.attempt))
        self.sessions[stamp.session] = last
        if stamp.writer:
            self.writers[stamp.writer] = max(self.writers.get(stamp.writer, 0), stamp.incarnation)

    def merge(self, other: Passed) -> bool:
        """Add what the other has. Returns whether anything was new."""
        new = False
        for session, last in other.sessions.items():
            if last > self.sessions.get(session, (-1, 0)):
                self.sessions.pop(session, None)  # so that it is among the newest ones
                self.sessions[session], new = last, True
        for writer, incarnation in other.writers.items():
            if incarnation > self.writers.get(writer, 0):
                self.writers[writer], new = incarnation, True
        return new

    def begin(self, session: int) -> None:
        """Nothing of this session was passed on so far."""
        self.sessions.setdefault(session, (0, 0))

    def copy(self) -> Passed:
        other = Passed()
        other.merge(self)
        return other

    def encode(self) -> bytes:
        sessions = [[session, *last] for session, last in list(self.sessions.items())[-_SESSIONS:]]
        return json.dumps([sessions, list(self.writers.items())]).encode()

    @classmethod
    def decode(cls, data: bytes) -> Passed:
        """What ``encode`` encoded; nothing for an empty text."""
        passed = cls()
        if data:
            sessions, writers = parse_json(data)
            passed.sessions = {session: (ordinal, attempt) for session, ordinal, attempt in sessions}
            passed.writers = dict(map(tuple, writers))
        return passed


class StampedOrder:
    """Puts together what several servers have: ``add`` what was read, in the order of each server, and ``take``
    what can be passed on.

    Reading goes by rounds, in each of which every server that answers is read to its end. An entry is passed on
    after the round that follows: until then an earlier one may be on a server that was read before."""

    def __init__(self, servers: int) -> None:
        self.passed = Passed()
        self.lost = 0
        """Entries that were acknowledged and never passed on, as far as is known."""
        self._rounds = 0  # that have ended
        self._whole = -1  # entries of this round and of earlier ones need not wait for missing ones
        self._read: list[deque[StampedEntry]] = [deque() for _ in range(servers)]
        self._counted: dict[
            int, int
        ] = {}  # for each session with losses, the ordinal up to which they are counted

    @property
    def waiting(self) -> bool:
        """True if something was added and not taken."""
        return any(self._read)

    def begin(self, passed: Passed) -> None:
        """Forget what was added. It is added again, after the entries that were ``passed``."""
        self.passed = passed.copy()
        for read in self._read:
            read.clear()

    def add(self, entry: StampedEntry) -> None:
        entry.round = self._rounds
        self._read[entry.server].append(entry)

    def end_round(self) -> None:
        self._rounds += 1

    def give_up(self) -> None:
        """Everything that was put before the entries added so far was added too, or will never be."""
        self._whole = self._rounds - 1

    def take(self, only_drop: bool = False) -> tuple[StampedEntry, bool] | None:
        """The next entry if it need not wait, and whether it is passed on; otherwise it is dropped."""
        for read in sorted(filter(None, self._read), key=lambda read: (read[0].stamp.time, read[0].stamp.session)):
            stamp, round = read[0].stamp, read[0].round
            if round + 1 >= self._rounds:
                return None
            verdict = self._verdict(stamp)
            if verdict is None and self._has_predecessor(stamp):
                continue  # its server was away when the client chose a time
            if verdict is None and round <= self._whole:
                verdict = True
            if verdict is None or (verdict and only_drop):
                return None
            self._count_missing(stamp, verdict)
            self.passed.add(stamp)
            return read.popleft(), verdict
        return None

    def _count_missing(self, stamp: Stamp, verdict: bool) -> None:
        last = self.passed.sessions.get(stamp.session)
        if not verdict:
            if self._is_new(stamp):  # of an earlier incarnation: its server had been given up
                self._count(stamp.session, stamp.ordinal - 1, stamp.ordinal)
        elif last is not None:  # else all servers have lost what they knew of it, and it may have been written
            self._count(stamp.session, last[0], stamp.ordinal - 1)

    def _has_predecessor(self, stamp: Stamp) -> bool:
        """Whether an entry that was added has to be passed on before this one."""
        return any(
            each.stamp.session == stamp.session and each.stamp.ordinal < stamp.ordinal and self._is_new(each.stamp)
            for read in self._read
            for each in read
        )

    def _is_new(self, stamp: Stamp) -> bool:
        return (stamp.ordinal, stamp.attempt) > self.passed.sessions.get(stamp.session, (0, 0))

    def _verdict(self, stamp: Stamp) -> bool | None:
        """True: pass it on; False: drop it; None: entries before it may be missing."""
        newest = self.passed.writers.get(stamp.writer)
        if not self._is_new(stamp) or (newest is not None and stamp.incarnation < newest):
            return False
        last, _ = self.passed.sessions.get(stamp.session, (0, 0))
        return True if stamp.ordinal <= last + 1 else None

    def _count(self, session: int, after: int, until: int) -> None:
        """Count the entries of a session after one ordinal and until another as lost, each once."""
        counted = max(after, self._counted.get(session, 0))
        if until > counted:
            self.lost += until - counted
            self._counted[session] = until
