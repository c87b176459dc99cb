"""A real PostgreSQL for tests: on a free loopback port, in a temporary folder, gone at the end."""

from __future__ import annotations

import contextlib
import os
import pwd
import select
import shutil
import signal
import socket
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType

from penstock.errors import EnvironmentFault

_SUPERUSER = "postgres"
_START_TIMEOUT = 60.0  # s; a start takes about 1 s, recovery after a kill a little more
_POLL = 0.05  # s between two looks at a server that starts


class PostgresServer:
    """A server of its own, started by ``with``. Everyone on this machine may log in: for tests only.

    Raises ``EnvironmentFault`` where PostgreSQL is not installed; tests skip with its message.
    """

    def __init__(self) -> None:
        self._bin = _find_binaries()
        self._account = _account()
        self._folder = Path(tempfile.mkdtemp(prefix="penstock-postgres-"))
        self._port = _free_port()
        self._server: subprocess.Popen[bytes] | None = None

    @property
    def dsn(self) -> str:
        return f"host=127.0.0.1 port={self._port} user={_SUPERUSER} dbname=postgres connect_timeout=5"

    def __enter__(self) -> PostgresServer:
        try:
            if self._account is not None:
                shutil.chown(self._folder, self._account, pwd.getpwnam(self._account).pw_gid)
            self._check("initdb", self._launch("initdb", "-A", "trust", "-U", _SUPERUSER, "-E", "UTF8").wait())
            self.start()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def start(self) -> None:
        """Start it and wait until it takes connections."""
        listen = f"listen_addresses=127.0.0.1 port={self._port} unix_socket_directories={self._folder}"
        self._server = self._launch("postgres", *(part for item in listen.split() for part in ("-c", item)))
        ready = [str(self._bin / "pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(self._port)]
        for _ in range(int(_START_TIMEOUT / _POLL)):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._check("postgres", self._server.wait(_POLL) or 1)
            if subprocess.run(ready).returncode == 0:
                return
        self.kill()
        self._check("postgres", 1)

    def kill(self) -> None:
        """End all its processes at once, as a power cut would: -9, no farewell to clients, nothing flushed."""
        if self._server is None:
            return
        # The postmaster's children would outlive it while they are busy, and keep a new one from starting.
        children = _children(self._server.pid)
        self._server.kill()
        for pid in children:
            _kill(pid)
        self._server.wait()
        self._server = None

    def restart(self) -> None:
        """Start it again after ``kill``, on the same port and data: PostgreSQL recovers from its log."""
        self.kill()
        self.start()

    def _launch(self, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        command = [str(self._bin / program), "-D", str(self._folder / "data"), *arguments]
        with open(self._folder / "log", "ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, cwd=self._folder, user=self._account)

    def _check(self, program: str, code: int) -> None:
        if code:
            raise EnvironmentFault(
                "PostgreSQL for tests",
                f"'{program}' failed with exit code {code}: "
                f"{(self._folder / 'log').read_text(errors='replace').strip()[-2000:]}",
                "Every folder above the temporary folder must be traversable for the account 'postgres'.",
            )


def _find_binaries() -> Path:
    """The folder of ``initdb``: on the path, or where Debian keeps it; the newest version there."""
    if found := shutil.which("initdb"):
        return Path(found).resolve().parent
    installed = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    if not installed:
        raise EnvironmentFault(
            "PostgreSQL for tests",
            "it is not installed: there is no 'initdb' on the path or under /usr/lib/postgresql",
            "Install it, for example with: apt install postgresql.",
        )
    return installed[-1].parent


def _account() -> str | None:
    """Whom to run as: PostgreSQL refuses root, so for root the account its package made."""
    if os.geteuid() != 0:
        return None
    with contextlib.suppress(KeyError):
        return pwd.getpwnam(_SUPERUSER).pw_name
    raise EnvironmentFault(
        "PostgreSQL for tests",
        "PostgreSQL does not run as root, and there is no account 'postgres' to run it under",
        "Run as another user, or install PostgreSQL from a package.",
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _children(parent: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The name, in brackets, may hold anything; the state and the parent's id follow it.
            if int(path.read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(path.parent.name))
    return found


def _kill(pid: int) -> None:
    """Kill a process that is no child of ours, and return once it is gone."""
    with contextlib.suppress(ProcessLookupError):
        watched = os.pidfd_open(pid)
        try:
            signal.pidfd_send_signal(watched, signal.SIGKILL)
            select.select([watched], [], [])
        finally:
            os.close(watched)
