"""Decides whether the driver that owns a state directory is alive, so that a running topology cannot be started
twice.

A driver writes its process into the file of its generation and rewrites the file every ``BEAT`` seconds. Before a
topology starts, the file of the newest generation is checked:

- If the owner has released the directory, it is free.
- If the owner is a process of this machine, the kernel knows whether it is alive.
- Otherwise the file is watched for ``LEASE`` seconds. If it changes, the owner is alive. Clocks of other machines
  are not used.
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

BEAT = 3.0  # seconds between two heartbeats, each of which is one small write
LEASE = 15.0  # seconds without a heartbeat after which a driver on another machine counts as dead: five beats
_POLL = 1.0  # seconds between two reads of a watched file


class Verdict(Enum):
    """The state of the owner of a state directory."""

    FREE = "free"
    HELD = "held"
    WATCH = "watch"
    """Unknown; the file must be watched."""


def this_process() -> dict[str, Any]:
    """Describe this process so that others on the same machine can tell whether it is alive."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "boot": _read("/proc/sys/kernel/random/boot_id"),
        "pids": _link("/proc/self/ns/pid"),
        "started": process_started(os.getpid()),
    }


def process_started(pid: int) -> str:
    """The start time of a process in kernel ticks since boot. Empty if there is no such process or it is a
    zombie."""
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return "" if len(fields) < 20 or fields[0] in ("Z", "X") else fields[19]


def judge(
    record: GenerationRecord | None,
    here: Mapping[str, Any],
    started: Callable[[int], str] = process_started,
    holds: Callable[[str], bool] = lambda token: True,
) -> Verdict:
    """Decide from a record whether its owner is alive. ``holds`` tells, by token, whether a driver in this very
    process still runs."""
    if record is None or record.ended or not record.process:
        return Verdict.FREE
    process = record.process
    if not here["boot"] or any(process.get(key) != here[key] for key in ("boot", "pids")):
        return Verdict.WATCH  # another machine or container, whose process ids mean nothing here
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
    """Raise ``AlreadyRunning`` if a live driver owns the directory. Blocks for up to ``LEASE`` seconds, and calls
    ``say`` with a text in that case."""
    number = newest_generation(store)
    record = read_record(store, number) if number else None
    verdict = judge(record, here or this_process(), holds=holds)
    if verdict is Verdict.WATCH:
        assert record is not None
        say(
            f"topology '{topology}' was last run by {_who(record)}, which did not release its state "
            f"directory; waiting up to {LEASE:g} s to see whether it is alive"
        )
        verdict = _watch(store, number, record, sleep)
    if verdict is Verdict.HELD:
        assert record is not None
        raise AlreadyRunning(
            f"topology '{topology}'",
            f"{_who(record)} already runs it with the state directory {store.url}",
            "End that driver with penstock kill, or replace it with --take-over (take_over=True in submit). "
            "To run both, give them different names or delivery.state_dir settings.",
        )


class LeaseHolder:
    """The driver that owns a state directory, as seen by a process that waits for its end."""

    def __init__(
        self, store: StateStore, clock: Callable[[], float], here: Mapping[str, Any] | None = None
    ) -> None:
        self._store, self._clock, self._here = store, clock, here or this_process()
        self._seen: tuple[str, int] | None = None
        self._since = 0.0

    def may_live(self) -> bool:
        """False if the driver has ended or died. A driver on another machine counts as alive until it has sent no
        heartbeat for ``LEASE`` seconds, counted from the first call."""
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
        sleep(_POLL)
        waited += _POLL
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
