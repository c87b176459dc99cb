"""Running topologies of this user on this machine: a file each, so that ``penstock status`` and others find
them by name.

The file has the coordinator's address and the run's secret, and is readable by its owner alone.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
import threading
from dataclasses import asdict, dataclass
from pathlib import Path

from penstock import errors
from penstock.coordinator.client import ControlClient
from penstock.coordinator.messages import Answer, Command
from penstock.errors import ControlRefused, NotRunning, PenstockError

log = logging.getLogger("penstock.coordinator")

_ANSWER_TIMEOUT = 30.0  # seconds


@dataclass(frozen=True)
class Run:
    """One running topology."""

    topology: str
    host: str
    port: int
    secret: str
    """In hexadecimal."""
    pid: int

    @property
    def path(self) -> Path:
        return folder() / f"{self.pid}-{self.port}.json"

    def announce(self) -> None:
        """Let it be found, until ``withdraw``."""
        place = folder()
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        seen = place.lstat()
        if seen.st_uid != os.getuid() or seen.st_mode & 0o077:
            log.warning("%s is not this user's alone: penstock status and others will not find this run", place)
            return
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        with open(os.open(self.path, flags, 0o600), "w") as file:
            json.dump(asdict(self), file)

    def withdraw(self) -> None:
        self.path.unlink(missing_ok=True)

    def ask(self, command: Command, timeout: float | None = _ANSWER_TIMEOUT) -> str:
        """Have the topology carry out a command; returns what it says. Raises its error where it refuses it or
        fails, ``ControlRefused`` where it cannot be reached or says nothing for ``timeout`` seconds."""
        answered = threading.Event()
        try:
            client = ControlClient((self.host, self.port), bytes.fromhex(self.secret), answered.set)
        except OSError as error:
            raise self._silent(str(error)) from error
        try:
            client.send(command)
            answered.wait(timeout)
            if not client.inbox:
                raise self._silent("no answer")
            answer = client.inbox.popleft()
        finally:
            client.close()
        assert isinstance(answer, Answer)
        if answer.error:
            kind: type[PenstockError] = getattr(errors, answer.kind, PenstockError)
            raise kind(*answer.error)
        return answer.text

    def _silent(self, what: str) -> ControlRefused:
        return ControlRefused(
            f"topology '{self.topology}'",
            f"must answer at {self.host}:{self.port}",
            what,
            "It may just have ended: look at what penstock run says.",
        )


def folder() -> Path:
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base) / "penstock" if base else Path(tempfile.gettempdir()) / f"penstock-{os.getuid()}"


def running() -> list[Run]:
    """All that run; files of those that have died are removed."""
    found = []
    for path in sorted(folder().glob("*.json")):
        try:
            run = Run(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            continue  # just being written, or just gone
        if _alive(run.pid):
            found.append(run)
        else:
            path.unlink(missing_ok=True)
    return found


def find(topology: str) -> Run:
    """The running topology of that name. Raises ``NotRunning`` where there is none, or more than one."""
    every = running()
    fitting = [run for run in every if run.topology == topology]
    if len(fitting) == 1:
        return fitting[0]
    names = ", ".join(f"'{run.topology}' (process {run.pid})" for run in fitting or every)
    raise NotRunning(
        f"topology '{topology}'",
        "must run once, on this machine and as this user",
        f"running: {names or 'none'}",
        "Check the name, or run the command where penstock run was started.",
    )


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
