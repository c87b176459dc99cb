"""Whether the driver that owns a state directory is alive: a second start of a running topology is refused.

A driver writes into the file of its generation which process it is, and writes the file again every ``BEAT``
seconds. Who wants to start asks here:

- The owner has ended and said so: the directory is free.
- The owner is a process of this machine: the kernel knows whether it is alive.
- The owner is elsewhere: its file is watched for ``LEASE`` seconds. If it changes, the owner is alive. No clock of
  another machine is looked at.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from penstock.errors import AlreadyRunning
from penstock.state.generations import GenerationRecord, newest_generation, read_record
from penstock.state.store import StateStore

BEAT = 3.0  # seconds between two signs of life: one small write each
LEASE = 15.0  # seconds without one after which a driver on another machine counts as dead: five beats
_LOOK = 1.0  # seconds between two looks at a file that is watched


class Verdict(Enum):
    """About the owner of a state directory."""

    FREE = "free"
    HELD = "held"
    WATCH = "watch"
    """Only time can tell."""


def this_process() -> dict[str, Any]:
    """Describes this process so that others on the same machine can tell whether it is alive."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "boot": _read("/proc/sys/kernel/random/boot_id"),
        "pids": _link("/proc/self/ns/pid"),
        "started": process_started(os.getpid()),
    }


def process_started(pid: int) -> str:
    """When a process was started, in the kernel's ticks since boot; empty: there is no such process, or it has
    ended and nobody has asked for its exit code yet."""
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return "" if len(fields) < 20 or fields[0] in ("Z", "X") else fields[19]


def judge(
    record: GenerationRecord | None,
    here: Mapping[str, Any],
    started: Callable[[int], str] = process_started,
    holds: Callable[[str], bool] = lambda token: True,
) -> Verdict:
    """``holds``: whether a driver of this very process, by its token, still runs."""
    if record is None or record.ended or not record.process:
        return Verdict.FREE
    process = record.process
    if not here["boot"] or any(process.get(key) != here[key] for key in ("boot", "pids")):
        return Verdict.WATCH  # another machine, or another container: its process ids mean nothing here
    if started(int(process["pid"])) != process["started"]:
        return Verdict.FREE
    if process["pid"] == here["pid"] and not holds(record.token):
        return Verdict.FREE
    return Verdict.HELD


def check_free(
    store: StateStore,
    topology: str,
    holds: Callable[[str], bool],
    say: Callable[[str], None],
    sleep: Callable[[float], object] = time.sleep,
    here: Mapping[str, Any] | None = None,
) -> None:
    """Raises ``AlreadyRunning`` if a driver that is alive owns the directory; may take up to ``LEASE`` seconds.
    ``say`` is told when it does."""
    number = newest_generation(store)
    record = read_record(store, number) if number else None
    verdict = judge(record, here or this_process(), holds=holds)
    if verdict is Verdict.WATCH:
        assert record is not None
        say(
            f"topology '{topology}' was last run by {_who(record)}, which did not end it; waiting up to "
            f"{LEASE:g} s to see whether it is alive"
        )
        verdict = _watch(store, number, record, sleep)
    if verdict is Verdict.HELD:
        assert record is not None
        raise AlreadyRunning(
            f"topology '{topology}'",
            f"{_who(record)} already runs it on the state directory {store.url}",
            "End that driver (penstock kill), or use --take-over (take_over=True in submit) "
            "to end it by this start. To run both, give them different names or "
            "delivery.state_dir settings.",
        )


class LeaseHolder:
    """The driver that owns a state directory, seen from another process that waits for it."""

    def __init__(
        self, store: StateStore, clock: Callable[[], float], here: Mapping[str, Any] | None = None
    ) -> None:
        self._store, self._clock, self._here = store, clock, here or this_process()
        self._seen: tuple[str, int] | None = None
        self._since = 0.0

    def may_live(self) -> bool:
        """False: it has ended or died. One on another machine counts as alive until it has given no sign of life
        for ``LEASE`` seconds, counted from the first call."""
        number = newest_generation(self._store)
        record = read_record(self._store, number) if number else None
        verdict = judge(record, self._here)
        if verdict is not Verdict.WATCH:
            return verdict is Verdict.HELD
        assert record is not None
        if (record.token, record.beat) != self._seen:
            self._seen, self._since = (record.token, record.beat), self._clock()
        return self._clock() - self._since < LEASE


def _watch(store: StateStore, number: int, record: GenerationRecord, sleep: Callable[[float], object]) -> Verdict:
    waited = 0.0
    while waited < LEASE:
        sleep(_LOOK)
        waited += _LOOK
        newest = newest_generation(store)
        if newest != number:
            return Verdict.HELD
        now = read_record(store, newest)
        if now is None or now.ended:
            return Verdict.FREE
        if (now.token, now.beat) != (record.token, record.beat):
            return Verdict.HELD
    return Verdict.FREE


def _who(record: GenerationRecord) -> str:
    process = record.process
    return f"process {process['pid']} on {process['host']}" if "pid" in process else "an unknown process"


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
