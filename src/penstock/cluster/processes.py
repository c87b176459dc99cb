"""Starts, finds and stops the cluster's processes. They outlive the command that starts them. Later commands
identify them by process id, start time and user, and by a variable in their environment, which their children
inherit.

Signals are sent through a pidfd. The process is checked after the descriptor is open, so that the checked process
gets the signal even if its id is reused in between."""

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
_POLL_INTERVAL = 0.05  # seconds between two checks of processes that should end
_MARK_TIMEOUT = 2.0  # seconds until the kernel shows a new process's environment; for some processes it never does
_MARK_INTERVAL = 0.001  # seconds between two checks for it; usually it appears within a millisecond
_PROC = Path("/proc")


@dataclass(frozen=True)
class Process:
    """A process of the cluster."""

    pid: int
    started: int
    """Start time in clock ticks since boot. No other process has the same ``pid`` and start time."""

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
    """Start a command that outlives this process, in its own session. Its output is appended to ``log``."""
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
    assert seen is not None, "a child exists, at least as a zombie, until it is waited for"
    started = Process(process.pid, seen.started)
    deadline = time.monotonic() + _MARK_TIMEOUT
    while started.alive and _node(started.pid, key) is None and time.monotonic() < deadline:
        time.sleep(_MARK_INTERVAL)
    return started


def marked(key: str, node: str | None = None) -> list[Process]:
    """All live processes of a cluster, or of one of its nodes, including their children."""
    found = []
    for entry in _PROC.iterdir():
        if entry.name.isdecimal():
            of = _node(int(entry.name), key)
            seen = _stat(int(entry.name)) if of is not None and node in (None, of) else None
            if seen is not None and seen.state not in "ZX" and seen.user == os.getuid():
                found.append(Process(int(entry.name), seen.started))
    return found


def node_of(pid: int, key: str) -> str | None:
    """The node of a cluster that a process runs on; None if it does not belong to the cluster."""
    return _node(pid, key)


def end(processes: Iterable[Process], patience: float) -> list[Process]:
    """Stop the processes: with SIGTERM, and after ``patience`` seconds with SIGKILL. Returns those that are still
    alive, which happens only if they are blocked in the kernel."""
    left = [process for process in processes if process.alive]
    for signum, seconds in ((signal.SIGTERM, patience), (signal.SIGKILL, patience)):
        for process in left:
            send(process, signum)
            send(process, signal.SIGCONT)  # a stopped process would not handle the first signal
        deadline = time.monotonic() + seconds
        while left and time.monotonic() < deadline:
            reap(left)
            left = [process for process in left if process.alive]
            time.sleep(_POLL_INTERVAL if left else 0)
    return left


def send(process: Process, signum: signal.Signals) -> None:
    """Send a signal if the process is still alive and belongs to this user."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except (ProcessLookupError, ValueError):  # no process has this id, or it is not a valid id
        return
    try:
        if process.alive:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, signum)
    finally:
        os.close(descriptor)


def reap(processes: Iterable[Process]) -> None:
    """Wait for those that are children of this process and have ended; otherwise they would stay as zombies."""
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
        return None  # it has ended, or belongs to another user
    mark = f"{_MARK}={key}/".encode()
    for entry in environment.split(b"\0"):
        if entry.startswith(mark):
            return entry[len(mark) :].decode()
    return None
