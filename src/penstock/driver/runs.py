"""Running topologies of this user on this machine: a file each, so that ``penstock status`` and others find
them by name.

The file has the coordinator's address and the run's secret. It lies in a folder of this user's alone, which is
checked at every use (``penstock.private_folder``): a file that somebody else has written would make
commands connect to a stranger.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from penstock import errors
from penstock.errors import ControlRefused, EnvironmentFault, NotRunning, PenstockError
from penstock.private_folder import PrivateFolder, if_present, runtime_folder
from penstock.protocol.client import ask
from penstock.protocol.requests import OperatorRequest
from penstock.redaction import printable, printable_values
from penstock.texts import parse_json

log = logging.getLogger("penstock.driver")

_ANSWER_TIMEOUT = 30.0  # seconds


@dataclass(frozen=True)
class Run:
    """One running topology."""

    topology: str
    host: str
    port: int
    secret: str = field(repr=False)
    """In hexadecimal."""
    pid: int
    started: int
    """When the process started, in ticks since the machine's start: tells it from a later one with its id."""

    @classmethod
    def here(cls, topology: str, address: tuple[str, int], secret: bytes) -> Run:
        """A topology that runs in this process."""
        return cls(topology, *address, secret.hex(), os.getpid(), start_time(os.getpid()) or 0)

    @property
    def file(self) -> str:
        return f"{self.pid}-{self.port}.json"

    @property
    def alive(self) -> bool:
        return start_time(self.pid) == self.started

    def announce(self) -> None:
        """Let it be found, until ``withdraw``. Where the folder is not safe, a warning says so instead."""
        try:
            with PrivateFolder.open(folder(), make=True) as place:
                place.write(self.file, json.dumps(asdict(self)).encode())
        except (EnvironmentFault, OSError) as error:
            log.warning("penstock status and other commands will not find this topology: %s", error)

    def withdraw(self) -> None:
        try:
            with if_present(folder()) as place:
                if place is not None:
                    place.remove(self.file)
        except EnvironmentFault as error:
            log.warning("cannot remove the file of this run: %s", error)

    def ask(self, command: OperatorRequest, timeout: float | None = _ANSWER_TIMEOUT) -> str:
        """Have the topology carry out a command; returns what it says, without control characters, also inside
        JSON: it holds users' texts, and commands display it. Raises its error where it refuses it or
        fails, ``ControlRefused`` where it cannot be reached or says nothing for ``timeout`` seconds."""
        try:
            answer = ask((self.host, self.port), bytes.fromhex(self.secret), command, timeout)
        except OSError as error:
            raise self._silent(str(error)) from error
        if answer is None:
            raise self._silent()
        if answer.error:
            raise _kind(answer.kind)(*(printable(part, multiline=True) for part in answer.error))
        return _printable(answer.text)

    def _silent(self, what: str = "") -> ControlRefused:
        return ControlRefused(
            f"topology '{self.topology}'",
            f"it does not answer at {self.host}:{self.port}" + (f": {what}" if what else ""),
            "It may just have ended: look at what penstock run prints.",
        )


def folder() -> Path:
    return runtime_folder()


def running() -> list[Run]:
    """All that run; files of those that have died are removed. Raises ``EnvironmentFault`` where the folder is not
    this user's alone; a file in it that is not is reported and left alone."""
    with if_present(folder()) as place:
        if place is None:
            return []
        found = [run for name in place.names() if name.endswith(".json") and (run := _read(place, name))]
        for run in found:
            if not run.alive:
                place.remove(run.file)
    return [run for run in found if run.alive]


def find(topology: str) -> Run:
    """The running topology of that name. Raises ``NotRunning`` where there is none, or more than one."""
    every = running()
    fitting = [run for run in every if run.topology == topology]
    if len(fitting) == 1:
        return fitting[0]
    names = ", ".join(f"'{run.topology}' (process {run.pid})" for run in fitting or every)
    raise NotRunning(
        f"topology '{topology}'",
        f"{len(fitting)} topologies of that name run here (this machine, this user)"
        if fitting
        else "no topology of that name runs here (this machine, this user)",
        f"These run: {names}. End all but one."
        if fitting
        else (
            f"{f'These run: {names}' if names else 'None runs at all'}. Check the name, or "
            "give the command where penstock run was started."
        ),
    )


def start_time(pid: int) -> int | None:
    """When a process started, in ticks since the machine's start; None where there is none, or its entry in /proc
    cannot be read."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[19]) if len(fields) > 19 and fields[0] not in "ZX" else None


def _read(place: PrivateFolder, name: str) -> Run | None:
    try:
        run = _run(parse_json(place.read(name)))
    except EnvironmentFault as error:
        log.warning("ignored: %s", error)
        return None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None  # just gone, or of another version
    return run if run.file == name else None


def _run(fields: dict[str, Any]) -> Run:
    """Raises ``TypeError``, ``ValueError`` or ``KeyError`` where a field is missing or not what it must be."""
    run = Run(**fields)
    texts, numbers = (run.topology, run.host, run.secret), (run.port, run.pid, run.started)
    if not all(type(text) is str for text in texts) or not all(type(number) is int for number in numbers):
        raise TypeError("a field of another type")
    bytes.fromhex(run.secret)
    if not 0 < run.port < 65536 or run.pid <= 1:
        raise ValueError("no port or process")
    return run


def _printable(text: str) -> str:
    try:
        value = parse_json(text)
    except ValueError:
        return printable(text, multiline=True)
    return json.dumps(printable_values(value)) if isinstance(value, dict | list) else text


def _kind(name: str) -> type[PenstockError]:
    kind = getattr(errors, name, PenstockError)
    return kind if isinstance(kind, type) and issubclass(kind, PenstockError) else PenstockError
