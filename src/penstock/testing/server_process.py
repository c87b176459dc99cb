"""A server process for tests, and the folder it works in. Both end with the Python process that started them."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import weakref
from pathlib import Path

_STOP_SECONDS = 20.0  # a clean end takes about 1 s; after this it is killed


class ServerProcess:
    """Starts a command, ends it, and starts it again in the same folder. At the end call ``close``; if that is
    forgotten, or Python is killed, the process and a temporary folder go all the same."""

    def __init__(self, name: str, folder: str | Path | None = None) -> None:
        """``folder`` is kept after ``close``; without it there is a temporary one."""
        self._temporary = folder is None
        self.folder = Path(folder) if folder else Path(tempfile.mkdtemp(prefix=f"penstock-{name}-"))
        self._process: subprocess.Popen[bytes] | None = None
        self._watcher: subprocess.Popen[bytes] | None = None
        self._finalizer = weakref.finalize(self, _remove, self._own_folder)

    @property
    def started(self) -> bool:
        """Between ``launch`` and ``end``, even if the process ended by itself."""
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
        """What the process said."""
        return self.folder / "server.log"

    def first_error(self) -> str:
        """The first error in its log and the line below, where Java names the exception; empty without one."""
        said = self.log.read_text(errors="replace").strip().splitlines() if self.log.exists() else []
        errors = [place for place, line in enumerate(said) if " ERROR " in line or " FATAL " in line]
        return " ".join(said[errors[0] : errors[0] + 2]) if errors else ""

    def launch(self, command: list[str]) -> None:
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for us: we end the server ourselves
            )
        self._watcher = _watch(self._process.pid, self._own_folder)
        self._renew_finalizer()

    def wait(self) -> int:
        """Wait until the process ends; its exit code."""
        assert self._process is not None
        return self._process.wait()

    def send(self, signum: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(signum)

    def end(self, signum: signal.Signals) -> None:
        """End the process, paused or not, and wait until it is gone. Without one, nothing."""
        if self._process is None:
            return
        _end_process(self._watcher, signal.SIGKILL)
        _end_process(self._process, signum)
        self._process = self._watcher = None
        self._renew_finalizer()

    def close(self) -> None:
        """End it cleanly and remove a temporary folder."""
        self.end(signal.SIGTERM)
        self._finalizer()

    @property
    def _own_folder(self) -> Path | None:
        return self.folder if self._temporary else None

    def _renew_finalizer(self) -> None:
        """What is left to do if Python ends, or this object goes, without ``close``."""
        self._finalizer.detach()
        self._finalizer = weakref.finalize(self, _remove, self._own_folder, self._watcher, self._process)


def free_ports(count: int) -> list[int]:
    """Ports of the loopback address that nobody uses now."""
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


def _watch(pid: int, folder: Path | None) -> subprocess.Popen[bytes]:
    """A process that ends the server and removes its data when this one is gone, however it went: then its end of
    the pipe closes."""
    script = f"read line; kill -9 {pid}" + (f"; rm -rf {shlex.quote(str(folder))}" if folder else "")
    return subprocess.Popen(["/bin/sh", "-c", script], stdin=subprocess.PIPE, start_new_session=True)


def _end_process(process: subprocess.Popen[bytes] | None, signum: signal.Signals) -> None:
    if process is None:
        return
    process.send_signal(signum)
    process.send_signal(signal.SIGCONT)  # a paused one would not hear the other
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
