"""Generations: they decide which driver may write to a state directory.

Every query run claims the next generation by creating ``generations/NUMBER`` exclusively. The highest number owns
the directory. The names of manifests and snapshots contain the generation of their writer, so a driver that was
superseded and does not know it yet overwrites nothing. It learns this from ``Ownership.check``, and from then on
deletes and claims nothing: the newest query run always wins.

The file of a generation names the process that holds it and is rewritten periodically (``beat``), so that others
can see whether the owner is alive (``penstock.state.lease``).
"""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.errors import StateError, StateRemoved, Superseded
from penstock.state.store import StateStore, is_missing

FOLDER = "generations"


@dataclass(frozen=True)
class GenerationRecord:
    """The content of the file of a generation."""

    token: str
    """Identifies one driver uniquely."""
    process: Mapping[str, Any]
    """The process of the driver, as ``penstock.state.lease.this_process`` describes it. Empty if no process
    continues to hold the generation."""
    beat: int = 0
    """Incremented while the driver is alive."""
    ended: bool = False
    """True: the driver has released the directory."""

    def encode(self) -> bytes:
        return json.dumps({**vars(self), "process": dict(self.process)}).encode()

    @classmethod
    def decode(cls, data: bytes) -> GenerationRecord:
        """Decode a record. Data that is not a record, such as a partially written file, counts as that of an
        unknown driver."""
        try:
            fields = json.loads(data)
            return cls(str(fields["token"]), dict(fields["process"]), int(fields["beat"]), bool(fields["ended"]))
        except (ValueError, LookupError, TypeError):
            return cls("", {"unknown": True})


class Ownership:
    """A driver's right to write to one state directory. All query runs of the driver share one object: a restart
    or a replacement claims the next generation only if the last generation of this driver is still the newest.
    Thread-safe."""

    def __init__(self, topology: str, process: Mapping[str, Any] | None = None) -> None:
        self.generation = 0
        """The generation claimed last; 0: none."""
        self.token = secrets.token_hex(8)
        self._topology, self._process = topology, process or {}
        self._beat = 0
        self._lock = threading.RLock()

    def claim(self, store: StateStore) -> int:
        """Claim a generation higher than all before, and return it. Raises ``Superseded`` or ``StateRemoved`` if
        this driver has owned the directory and lost it."""
        with self._lock:
            while True:
                found = generations(store)
                newest = max(found, default=0)
                if self.generation and newest != self.generation:
                    if not self._is_own(store, newest):
                        raise self._lost(store, newest)
                    number = newest  # created by an attempt that received no answer
                else:
                    number = newest + 1
                    if not store.create(_file(number), self._record()):
                        if self.generation:
                            continue  # taken by another driver, or by our own attempt that received no answer
                        number = 0
                if number and max(generations(store), default=0) == number and self._is_own(store, number):
                    break
                # Another driver claimed a generation at the same time. A new driver tries again.
            self.generation = number
        for older in found:
            if older < number:
                store.remove(_file(older))
        return number

    def check(self, store: StateStore) -> None:
        """Check the ownership. Raises ``Superseded`` if another driver has claimed the directory, and
        ``StateRemoved`` if it was deleted. Called before and after a manifest is written, so a driver that claims
        the directory later finds what was committed."""
        with self._lock:  # otherwise it could read a partially written heartbeat
            newest = newest_generation(store)
            if newest == self.generation and (store.exclusive or self._is_own(store, newest)):
                return
            if newest > self.generation and self._is_own(store, newest):
                return  # created by an attempt to claim that received no answer
            raise self._lost(store, newest)

    def beat(self, store: StateStore) -> None:
        """Rewrite the file of the generation to show that the driver is alive. Raises the errors of ``check``."""
        with self._lock:
            self.check(store)
            self._beat += 1
            store.write(_file(self.generation), self._record())

    def release(self, store: StateStore) -> None:
        """Record that the driver has ended. Does nothing if it is not the owner."""
        with self._lock:
            own = self.generation
            if own and newest_generation(store) == own and self._is_own(store, own):
                store.write(_file(own), self._record(ended=True))

    def _record(self, ended: bool = False) -> bytes:
        return GenerationRecord(self.token, self._process, self._beat, ended).encode()

    def _is_own(self, store: StateStore, number: int) -> bool:
        found = read_record(store, number) if number else None
        if found is None:
            return False
        # A file without a token in a generation of this driver is its own heartbeat, partially written.
        return found.token == self.token or (not found.token and number == self.generation)

    def _lost(self, store: StateStore, newest: int) -> StateError:
        where = f"topology '{self._topology}'"
        if newest < self.generation:
            what = "was removed" if newest == 0 else "was reset to an earlier copy"
            return StateRemoved(
                where,
                f"its state directory {store.url} {what} while the topology ran: it contains "
                f"{f'generation {newest}' if newest else 'no generation'}, and this driver has "
                f"generation {self.generation}",
                "Restore it from a backup or start from a savepoint. Otherwise the next start continues from "
                "its present content.",
            )
        record = read_record(store, newest)
        process = {} if record is None else record.process
        who = f" (process {process['pid']} on {process['host']})" if "pid" in process else ""
        return Superseded(
            where,
            f"another driver has taken over its state directory {store.url}: generation "
            f"{newest}{who}, and this driver has generation {self.generation}",
            "This driver stops and writes nothing more. To run both, give them different "
            "names or delivery.state_dir settings.",
        )


def generations(store: StateStore) -> list[int]:
    """The generations that have a file."""
    names = (name.rpartition("/")[2] for name in store.list(f"{FOLDER}/"))
    return [int(name) for name in names if name.isdecimal()]


def newest_generation(store: StateStore) -> int:
    """The highest generation; 0 if there is none."""
    return max(generations(store), default=0)


def read_record(store: StateStore, number: int) -> GenerationRecord | None:
    """The record of a generation. None if the file does not exist."""
    try:
        return GenerationRecord.decode(store.read(_file(number)))
    except StateError as error:
        if is_missing(error):
            return None
        raise


def _file(number: int) -> str:
    return f"{FOLDER}/{number:08d}"
