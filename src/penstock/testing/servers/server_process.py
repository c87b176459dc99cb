"""Shared parts of the servers for tests: a process, its working folder, and how servers start and stop. Everything
ends with the Python process that started it."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import weakref
from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar, Self

from penstock.errors import EnvironmentFault

_START_SECONDS = 60.0  # time limit: the slowest server starts in about 3 s, on a loaded two-core machine in 20 s
_POLL_INTERVAL = 0.02  # seconds between two checks of a server that starts
_STOP_SECONDS = 20.0  # time limit for a clean stop, which takes about 1 s; then the process is killed


class ServerProcess:
    """Starts a command, stops it, and can start it again in the same folder. Call ``close`` at the end. If that is
    omitted or Python is killed, the process and a temporary folder are removed anyway."""

    def __init__(self, name: str, folder: str | Path | None = None) -> None:
        """``folder`` is kept after ``close``; without it a temporary folder is used."""
        self._temporary = folder is None
        self.folder = Path(folder) if folder else Path(tempfile.mkdtemp(prefix=f"penstock-{name}-"))
        self._process: subprocess.Popen[bytes] | None = None
        self._watcher: subprocess.Popen[bytes] | None = None
        self._finalizer = weakref.finalize(self, _remove, self._own_folder)

    @property
    def started(self) -> bool:
        """Whether ``launch`` was called and ``end`` was not, even if the process ended by itself."""
        return self._process is not None

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def log(self) -> Path:
        """The file with the output of the process."""
        return self.folder / "server.log"

    def first_error(self) -> str:
        """The first error in the log with the line below it, where Java names the exception. If there is none and
        the process has ended: the last line. Otherwise empty."""
        output = self.log.read_text(errors="replace").strip().splitlines() if self.log.exists() else []
        errors = [place for place, line in enumerate(output) if " ERROR " in line or " FATAL " in line]
        if errors:
            return " ".join(output[errors[0] : errors[0] + 2])
        return output[-1] if output and not self.alive else ""

    def launch(self, command: list[str]) -> None:
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # so that Ctrl-C reaches only this process, which then stops the server
            )
        self._watcher = _watch(self._process.pid, self._own_folder)
        self._renew_finalizer()

    def wait(self) -> int:
        """Wait until the process ends, and return its exit code."""
        assert self._process is not None
        return self._process.wait()

    def send(self, signum: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(signum)

    def end(self, signum: signal.Signals) -> None:
        """Stop the process, paused or not, and wait until it has ended. Does nothing if there is no process."""
        if self._process is None:
            return
        _end_process(self._watcher, signal.SIGKILL)
        _end_process(self._process, signum)
        self._process = self._watcher = None
        self._renew_finalizer()

    def close(self) -> None:
        """Stop the process cleanly and remove a temporary folder."""
        self.end(signal.SIGTERM)
        self._finalizer()

    @property
    def _own_folder(self) -> Path | None:
        return self.folder if self._temporary else None

    def _renew_finalizer(self) -> None:
        """Register the cleanup for the case that Python ends or this object is deleted without ``close``."""
        self._finalizer.detach()
        self._finalizer = weakref.finalize(self, _remove, self._own_folder, self._watcher, self._process)


class Server(ABC):
    """A server on loopback. ``start`` returns when the server answers. ``with`` starts it, and at the end stops it
    and removes its data; without ``with``, call ``close``. It never outlives the Python process that started
    it."""

    title: ClassVar[str]
    noun: ClassVar[str] = "server"
    ports: ClassVar[int] = 1
    start_seconds: ClassVar[float] = _START_SECONDS

    def __init__(self, folder: str | Path | None = None) -> None:
        """``folder`` keeps the data after ``close``; without it the data is in a temporary folder."""
        self._process = ServerProcess(self.title.lower(), folder)
        self._port, *self._more_ports = free_ports(self.ports)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def address(self) -> str:
        """The address for clients; it never changes."""
        return f"127.0.0.1:{self._port}"

    @property
    def pid(self) -> int:
        """The server's process id. Available only while it runs."""
        return self._running().pid

    @property
    def log(self) -> Path:
        """The file with the server's output."""
        return self._process.log

    def start(self) -> None:
        """Start the server, with the data and port of its previous run if any, and wait until it answers."""
        if self._process.started:
            return
        self._process.launch(self._command())
        deadline = time.monotonic() + self.start_seconds
        while self._process.alive and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                if self._answers():
                    return
            time.sleep(_POLL_INTERVAL)
        reason = self._process.first_error() or f"no answer within {self.start_seconds:.0f} s"
        self.kill()
        raise self._fault(
            f"the {self.noun} did not start: {reason}",
            "The port must be free, and the temporary folder must have some space.",
        )

    def stop(self) -> None:
        """Stop the server cleanly; ``start`` starts it again. Does nothing if it is not running."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the server (SIGKILL), like a power failure."""
        self._end(signal.SIGKILL)

    def pause(self) -> None:
        """Stop the server from answering, with its connections open, until ``resume``."""
        self._running().send(signal.SIGSTOP)
        deadline = time.monotonic() + _STOP_SECONDS
        while not _is_stopped(self.pid) and time.monotonic() < deadline:
            time.sleep(_POLL_INTERVAL)  # threads that run on another core may answer until they are interrupted

    def resume(self) -> None:
        self._running().send(signal.SIGCONT)

    def close(self) -> None:
        """Stop the server, and remove the data unless it is in the caller's folder."""
        self._end(signal.SIGTERM)
        self._process.close()

    @abstractmethod
    def _command(self) -> list[str]:
        """Prepare the folder and return the command line that starts the server."""

    @abstractmethod
    def _answers(self) -> bool:
        """Whether the server is ready, and it is this process that listens on the port. May raise ``OSError``
        while the server starts."""

    def _end(self, signum: signal.Signals) -> None:
        self._process.end(signum)

    def _running(self) -> ServerProcess:
        if not self._process.started:
            raise self._fault(f"the {self.noun} is not running", "Call start().")
        return self._process

    def _fault(self, problem: str, hint: str) -> EnvironmentFault:
        return EnvironmentFault(f"{self.title} at {self.address}", problem, hint)

    def _ask(self, question: bytes) -> bytes:
        """Send bytes and return everything received until the server closes the connection, which it must do."""
        with socket.create_connection(("127.0.0.1", self._port), 1.0) as link:
            link.sendall(question)
            return link.makefile("rb").read()

    def _exchange(self, question: bytes, size: int) -> bytes:
        """Send bytes and return the first ``size`` bytes of the answer."""
        with socket.create_connection(("127.0.0.1", self._port), 1.0) as link:
            link.sendall(question)
            return link.makefile("rb").read(size)


def free_ports(count: int) -> list[int]:
    """Ports of the loopback address that are free now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]


def _remove(folder: Path | None, *processes: subprocess.Popen[bytes] | None) -> None:
    for process in processes:
        _end_process(process, signal.SIGKILL)
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def _is_stopped(pid: int) -> bool:
    """Whether no thread of the process runs."""
    with contextlib.suppress(OSError):  # a thread, or the process, has just ended
        states = (stat.read_text().rpartition(") ")[2][:1] for stat in Path(f"/proc/{pid}/task").glob("*/stat"))
        return all(state in "TtZX" for state in states)
    return False


def _watch(pid: int, folder: Path | None) -> subprocess.Popen[bytes]:
    """Start a process that kills the server and removes its data when this process ends for any reason: then the
    pipe closes."""
    script = f"read line; kill -9 {pid}" + (f"; rm -rf {shlex.quote(str(folder))}" if folder else "")
    return subprocess.Popen(["/bin/sh", "-c", script], stdin=subprocess.PIPE, start_new_session=True)


def _end_process(process: subprocess.Popen[bytes] | None, signum: signal.Signals) -> None:
    if process is None:
        return
    process.send_signal(signum)
    process.send_signal(signal.SIGCONT)  # a paused process would not handle the first signal
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
