"""A queue in the memory of this machine: the fastest one, without a server and without a disk.

Entries are files in ``/dev/shm``, which is outside of all processes: a kill of a worker or of the processor loses
nothing. A crash or restart of the machine, or the end of its container, loses what waits. So this queue is refused
with exactly-once delivery. For one machine: workers on another one accept no tuples, because no processor would
read what they put.
"""

from __future__ import annotations

import hashlib
import os
import platform
import time
from pathlib import Path

from penstock.errors import EnvironmentFault
from penstock.persist.embedded import EmbeddedClient, EmbeddedQueue
from penstock.persist.queues import PersistentQueue, QueueUnavailable
from penstock.state.store import StateStore

_MEMORY = Path("/dev/shm")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_CLAIM = "memory-of"  # file in the shared folder with the machine whose processor reads the queue
_LOOK_SECONDS = 1.0  # seconds between two looks at that file, which may be remote


class MemoryQueue(PersistentQueue):
    """A log in the machine's memory. Up to ``max_bytes`` of results may wait."""

    exactly_once = False

    def __init__(self, max_bytes: int = 64 << 20) -> None:
        self.max_bytes = max_bytes

    @property
    def volatile(self) -> str:
        return "if the machine crashes or restarts, what waits in its memory is lost"

    def check(self, where: str, folder: str) -> None:
        if not os.access(_MEMORY, os.W_OK):
            raise EnvironmentFault(
                where,
                f"MemoryQueue needs {_MEMORY}, which this process cannot write to",
                "Use EmbeddedQueue, which needs a disk.",
            )

    def open(self, name: str, folder: str) -> MemoryClient:
        place = hashlib.blake2b(f"{folder}\n{name}".encode(), digest_size=8).hexdigest()
        queue = EmbeddedQueue(str(_MEMORY / f"penstock-{os.geteuid()}" / place), self.max_bytes)
        return MemoryClient(queue.open(name, ""), StateStore(folder) if folder else None)

    def __str__(self) -> str:
        return "in the memory of the machine"


class MemoryClient(EmbeddedClient):
    """The log, and the claim of the machine whose processor reads it."""

    def __init__(self, log: EmbeddedClient, shared: StateStore | None) -> None:
        self.__dict__.update(log.__dict__)
        self._shared, self._machine = shared, _machine()
        self._looked = float("-inf")

    def id(self) -> str:
        """Claims the queue for this machine."""
        found = super().id()
        if self._shared is not None and (before := self._claim()) != self._machine:
            if before:
                there, here = before.partition(" ")[0], self._machine.partition(" ")[0]
                self.warning = (
                    f"queue '{self._name}': it is in the memory of {here} now and was in that of {there}, or the "
                    "machine has restarted. What waited there is lost."
                )
            self._shared.write(_CLAIM, self._machine.encode())
        return found

    def register(self, writer: str) -> int:
        self._look()
        return super().register(writer)

    def waiting(self) -> int:
        if time.monotonic() - self._looked > _LOOK_SECONDS:
            self._look()
        return super().waiting()

    def _look(self) -> None:
        """Raise ``QueueUnavailable`` if the processor reads the memory of another machine."""
        claim = self._claim()
        if claim and claim.partition(" ")[0] != self._machine.partition(" ")[0]:
            raise QueueUnavailable(
                f"queue '{self._name}'",
                f"it is in the memory of {claim.partition(' ')[0]}, and this worker runs on "
                f"{self._machine.partition(' ')[0]}",
                "Use EmbeddedQueue, RedisQueue or MemcachedQueue for several machines.",
            )
        self._looked = time.monotonic()

    def _claim(self) -> str:
        if self._shared is None or _CLAIM not in self._shared.list():
            return ""
        return self._shared.read(_CLAIM).decode()


def _machine() -> str:
    """The machine's name, and what changes when it restarts."""
    return f"{platform.node()} {_BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ''}"
