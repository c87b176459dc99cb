"""Generations: which driver may write to a state directory.

Every start of a topology claims the next generation by creating ``generations/NUMBER`` exclusively. The highest
number owns the directory. Manifests and snapshots carry the generation of their writer in their names, so a driver
that was superseded and does not know it yet overwrites nothing. It finds out by ``Ownership.check``, and then it
neither deletes nor claims anything: the newest start always wins.

The file of a generation says which process holds it, and is written again from time to time (``beat``), so that
another start can see whether its owner is alive (``penstock.state.lease``).
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
    """What the file of a generation says."""

    token: str
    """Of one driver; no other has it."""
    process: Mapping[str, Any]
    """Which process that is, as ``penstock.state.lease.this_process`` describes it; empty: none that lives on."""
    beat: int = 0
    """Grows while the driver is alive."""
    ended: bool = False
    """The driver has ended, and said so."""

    def encode(self) -> bytes:
        return json.dumps({**vars(self), "process": dict(self.process)}).encode()

    @classmethod
    def decode(cls, data: bytes) -> GenerationRecord:
        """A file that is no record, such as one half written, is that of an unknown driver."""
        try:
            fields = json.loads(data)
            return cls(str(fields["token"]), dict(fields["process"]), int(fields["beat"]), bool(fields["ended"]))
        except (ValueError, LookupError, TypeError):
            return cls("", {"unknown": True})


class Ownership:
    """A driver's right to write to one state directory. All starts within the driver share one object: a restart
    or a replacement claims the next generation only if the last one of this driver is still the newest. May be
    used from several threads."""

    def __init__(self, topology: str, process: Mapping[str, Any] | None = None) -> None:
        self.generation = 0
        """The generation claimed last; 0: none so far."""
        self.token = secrets.token_hex(8)
        self._topology, self._process = topology, process or {}
        self._beat = 0
        self._lock = threading.RLock()

    def claim(self, store: StateStore) -> int:
        """Become the owner: returns a generation higher than any before. Raises ``Superseded`` or ``StateRemoved``
        if this driver has owned the directory before and does not any more."""
        with self._lock:
            while True:
                found = generations(store)
                newest = max(found, default=0)
                if self.generation and newest != self.generation:
                    if not self._is_own(store, newest):
                        raise self._lost(store, newest)
                    number = newest  # created by an attempt that got no answer
                else:
                    number = newest + 1
                    if not store.create(_file(number), self._record()):
                        if self.generation:
                            continue  # taken by another, or by an attempt of ours that got no answer
                        number = 0
                if number and max(generations(store), default=0) == number and self._is_own(store, number):
                    break
                # Another driver claimed at the same moment. A new driver tries again.
            self.generation = number
        for older in found:
            if older < number:
                store.remove(_file(older))
        return number

    def check(self, store: StateStore) -> None:
        """Raises ``Superseded`` if another driver has claimed the directory since, ``StateRemoved`` if the
        directory is gone. Called after each commit: who claims it later finds what was committed."""
        with self._lock:  # else it may read a sign of life that is half written
            newest = newest_generation(store)
            if newest == self.generation and (store.exclusive or self._is_own(store, newest)):
                return
            if newest > self.generation and self._is_own(store, newest):
                return  # created by an attempt to claim that got no answer
            raise self._lost(store, newest)

    def beat(self, store: StateStore) -> None:
        """Show that the driver is alive. Raises as ``check`` does."""
        with self._lock:
            self.check(store)
            self._beat += 1
            store.write(_file(self.generation), self._record())

    def release(self, store: StateStore) -> None:
        """Say that the driver has ended. Does nothing if it is not the owner."""
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
        # A file without a token that this driver claimed before is a sign of life of its own that was cut off.
        return found.token == self.token or (not found.token and number == self.generation)

    def _lost(self, store: StateStore, newest: int) -> StateError:
        where = f"topology '{self._topology}'"
        if newest < self.generation:
            what = "was removed" if newest == 0 else "was put back to an earlier copy"
            return StateRemoved(
                where,
                f"its state directory {store.url} {what} while it ran: it holds "
                f"{f'generation {newest}' if newest else 'no generation'}, and this driver has "
                f"generation {self.generation}",
                "Restore it from a backup or start from a savepoint; an ordinary start begins with what is there.",
            )
        record = read_record(store, newest)
        process = {} if record is None else record.process
        who = f" (process {process['pid']} on {process['host']})" if "pid" in process else ""
        return Superseded(
            where,
            f"another driver has taken over its state directory {store.url}: generation "
            f"{newest}{who}, and this driver has generation {self.generation}",
            "This driver has ended and wrote nothing since. To run both, give them different "
            "names or delivery.state_dir settings.",
        )


def generations(store: StateStore) -> list[int]:
    """The generations whose files are there."""
    names = (name.rpartition("/")[2] for name in store.list(f"{FOLDER}/"))
    return [int(name) for name in names if name.isdecimal()]


def newest_generation(store: StateStore) -> int:
    """0: there is none."""
    return max(generations(store), default=0)


def read_record(store: StateStore, number: int) -> GenerationRecord | None:
    """What the file of a generation says; None: it is not there (any more)."""
    try:
        return GenerationRecord.decode(store.read(_file(number)))
    except StateError as error:
        if is_missing(error):
            return None
        raise


def _file(number: int) -> str:
    return f"{FOLDER}/{number:08d}"
