"""The cluster's processes. They outlive the command that starts them, so they must be told from others' later: by
process id, start time and user, and by a mark in their environment, which all they start inherits.

A signal goes through a pidfd: the process is looked at after the descriptor is open, so the one that was looked
at is the one that gets the signal, even if its id is given to another process in between."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_MARK = "PENSTOCK_CLUSTER_NODE"
_POLL = 0.05  # seconds between two looks at processes that are to end
_SHOWN = 2.0  # seconds for the kernel to show the mark, a moment after the exec; of some processes it never does
_MOMENT = 0.001  # seconds between two looks for it
_PROC = Path("/proc")


@dataclass(frozen=True)
class Process:
    """One that was started here."""

    pid: int
    started: int
    """In ticks since the machine's start: together with ``pid`` no other process has it."""

    @property
    def alive(self) -> bool:
        seen = _stat(self.pid)
        return (
            seen is not None
            and (seen.started, seen.user) == (self.started, os.getuid())
            and seen.state not in "ZX"
        )


@dataclass(frozen=True)
class _Stat:
    state: str
    started: int
    user: int


def launch(command: Sequence[str], environment: Mapping[str, str], key: str, node: str, log: Path) -> Process:
    """Start a command that outlives us, in a session of its own; what it says goes to ``log``."""
    with open(log, "ab") as output:
        process = subprocess.Popen(
            command,
            env={**environment, _MARK: f"{key}/{node}"},
            cwd=log.parent,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    seen = _stat(process.pid)
    assert seen is not None, "a child is there, at least as a zombie, until it is waited for"
    started = Process(process.pid, seen.started)
    deadline = time.monotonic() + _SHOWN
    while started.alive and _node(started.pid, key) is None and time.monotonic() < deadline:
        time.sleep(_MOMENT)
    return started


def marked(key: str, node: str | None = None) -> list[Process]:
    """All living processes of a cluster, or of one of its nodes, with whatever they have started."""
    found = []
    for entry in _PROC.iterdir():
        if entry.name.isdecimal():
            of = _node(int(entry.name), key)
            seen = _stat(int(entry.name)) if of is not None and node in (None, of) else None
            if seen is not None and seen.state not in "ZX" and seen.user == os.getuid():
                found.append(Process(int(entry.name), seen.started))
    return found


def node_of(pid: int, key: str) -> str | None:
    """The node of a cluster that a process is on; None where it is no process of that cluster."""
    return _node(pid, key)


def end(processes: Iterable[Process], patience: float) -> list[Process]:
    """End them: asked at first, after ``patience`` seconds without asking. Returns those that still live, which
    only the kernel can be the reason of."""
    left = [process for process in processes if process.alive]
    for signum, seconds in ((signal.SIGTERM, patience), (signal.SIGKILL, patience)):
        for process in left:
            send(process, signum)
            send(process, signal.SIGCONT)  # a paused one would not hear the other
        deadline = time.monotonic() + seconds
        while left and time.monotonic() < deadline:
            reap(left)
            left = [process for process in left if process.alive]
            time.sleep(_POLL if left else 0)
    return left


def send(process: Process, signum: signal.Signals) -> None:
    """A signal, if it still lives and is a process of this user."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except (ProcessLookupError, ValueError):  # none has the id, or none ever has
        return
    try:
        if process.alive:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, signum)
    finally:
        os.close(descriptor)


def reap(processes: Iterable[Process]) -> None:
    """Take notice of the end of those that are our own children; else they stay as zombies."""
    for process in processes:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(process.pid, os.WNOHANG)


def _stat(pid: int) -> _Stat | None:
    try:
        entry = _PROC / str(pid)
        user = entry.stat().st_uid
        fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return _Stat(fields[0], int(fields[19]), user) if len(fields) > 19 else None


def _node(pid: int, key: str) -> str | None:
    try:
        environment = (_PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return None  # gone, or somebody else's
    mark = f"{_MARK}={key}/".encode()
    for entry in environment.split(b"\0"):
        if entry.startswith(mark):
            return entry[len(mark) :].decode()
    return None
