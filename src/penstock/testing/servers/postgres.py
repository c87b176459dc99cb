"""A real PostgreSQL for tests, on a free loopback port and in a temporary folder that is removed at the end."""

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
_START_TIMEOUT = 60.0  # seconds; a start takes about 1 s, recovery after a kill a little more
_POLL_INTERVAL = 0.05  # seconds between two checks of a server that starts


class PostgresServer:
    """A PostgreSQL server, started by ``with``. Every user of this machine may log in, so it is for tests only.

    Raises ``EnvironmentFault`` if PostgreSQL is not installed; tests then skip with its message.
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
        """Start the server and wait until it accepts connections."""
        listen = f"listen_addresses=127.0.0.1 port={self._port} unix_socket_directories={self._folder}"
        self._server = self._launch("postgres", *(part for item in listen.split() for part in ("-c", item)))
        ready = [str(self._bin / "pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(self._port)]
        for _ in range(int(_START_TIMEOUT / _POLL_INTERVAL)):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._check("postgres", self._server.wait(_POLL_INTERVAL) or 1)
            if subprocess.run(ready).returncode == 0:
                return
        self.kill()
        self._check("postgres", 1)

    def kill(self) -> None:
        """Kill all server processes with SIGKILL, like a power failure: clients are not notified, nothing is
        flushed."""
        if self._server is None:
            return
        # Busy children of the postmaster would outlive it and prevent a new one from starting.
        children = _children(self._server.pid)
        self._server.kill()
        for pid in children:
            _kill(pid)
        self._server.wait()
        self._server = None

    def restart(self) -> None:
        """Start the server again on the same port and data. PostgreSQL recovers from its write-ahead log."""
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
    """The folder of ``initdb``: from the PATH, or the newest version in Debian's folder."""
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
    """The account to run as. PostgreSQL refuses to run as root, so root uses the account that its package
    created."""
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
            # The process name in parentheses may contain anything; the state and the parent's id follow it.
            if int(path.read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(path.parent.name))
    return found


def _kill(pid: int) -> None:
    """Kill a process that is not a child of this one, and wait until it has ended."""
    with contextlib.suppress(ProcessLookupError):
        watched = os.pidfd_open(pid)
        try:
            signal.pidfd_send_signal(watched, signal.SIGKILL)
            select.select([watched], [], [])
        finally:
            os.close(watched)
