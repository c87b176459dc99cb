"""Finds the running topologies of this user on this machine by name, for ``penstock status`` and other commands.

Each driver writes a file with the coordinator's address and the run's secret to a folder of this user. Every
access checks that nobody else can write there (``penstock.private_folder``): a forged file would make commands
connect to another program.
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

_ANSWER_TIMEOUT = 30.0
"""Seconds to wait for an answer by default. A driver on an overloaded machine may need seconds; a longer silence
means that it hangs."""


@dataclass(frozen=True)
class DriverEntry:
    """One running topology, as its file describes it."""

    topology: str
    host: str
    port: int
    secret: str = field(repr=False)
    """In hexadecimal."""
    pid: int
    started: int
    """Start time of the process, in clock ticks since boot. It distinguishes the process from a later one with the
    same id."""

    @classmethod
    def here(cls, topology: str, address: tuple[str, int], secret: bytes) -> DriverEntry:
        """Describe a topology that runs in this process."""
        return cls(topology, *address, secret.hex(), os.getpid(), start_time(os.getpid()) or 0)

    @property
    def file(self) -> str:
        """Name of the file in the folder."""
        return f"{self.pid}-{self.port}.json"

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return start_time(self.pid) == self.started

    def announce(self) -> None:
        """Write the file. If the folder is not safe or cannot be written, this only logs a warning."""
        try:
            with PrivateFolder.open(folder(), make=True) as place:
                place.write(self.file, json.dumps(asdict(self)).encode())
        except (EnvironmentFault, OSError) as error:
            log.warning("penstock status and other commands will not find this topology: %s", error)

    def withdraw(self) -> None:
        """Remove the file. If the folder is not safe, this only logs a warning."""
        try:
            with if_present(folder()) as place:
                if place is not None:
                    place.remove(self.file)
        except EnvironmentFault as error:
            log.warning("cannot remove the file of this run: %s", error)

    def ask(self, command: OperatorRequest, timeout: float | None = _ANSWER_TIMEOUT) -> str:
        """Send a command to the topology and return its answer. Control characters are removed from the answer,
        also inside JSON, because it contains texts of users and is printed to a terminal.

        Raises the topology's error if it refuses the command or fails, and ``ControlRefused`` if it cannot be
        reached or does not answer within ``timeout`` seconds.
        """
        try:
            answer = ask((self.host, self.port), bytes.fromhex(self.secret), command, timeout)
        except OSError as error:
            raise self._no_answer(str(error)) from error
        if answer is None:
            raise self._no_answer()
        if answer.error:
            raise _error_class(answer.kind)(*(printable(part, multiline=True) for part in answer.error))
        return _printable(answer.text)

    def _no_answer(self, reason: str = "") -> ControlRefused:
        return ControlRefused(
            f"topology '{self.topology}'",
            f"it does not answer at {self.host}:{self.port}" + (f": {reason}" if reason else ""),
            "It may just have ended. Check the output of penstock run.",
        )


def folder() -> Path:
    """The folder of the files."""
    return runtime_folder()


def running() -> list[DriverEntry]:
    """Return all running topologies, and remove the files of processes that no longer run. A file that is not this
    user's alone is logged and ignored. Raises ``EnvironmentFault`` if the folder is not this user's alone."""
    with if_present(folder()) as place:
        if place is None:
            return []
        found = [run for name in place.names() if name.endswith(".json") and (run := _read(place, name))]
        for run in found:
            if not run.alive:
                place.remove(run.file)
    return [run for run in found if run.alive]


def find(topology: str) -> DriverEntry:
    """Return the running topology of that name. Raises ``NotRunning`` if there is none or more than one."""
    runs = running()
    matching = [run for run in runs if run.topology == topology]
    if len(matching) == 1:
        return matching[0]
    names = ", ".join(f"'{run.topology}' (process {run.pid})" for run in matching or runs)
    raise NotRunning(
        f"topology '{topology}'",
        f"{len(matching)} topologies of that name are running for this user on this machine"
        if matching
        else "no topology of that name is running for this user on this machine",
        f"Running: {names}. End all but one."
        if matching
        else (
            f"{f'Running: {names}' if names else 'No topology is running'}. Check the name, or "
            "use the command on the machine where penstock run was started."
        ),
    )


def start_time(pid: int) -> int | None:
    """Return the start time of a process in clock ticks since boot. None if the process does not exist or its
    entry in /proc cannot be read."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[19]) if len(fields) > 19 and fields[0] not in "ZX" else None


def _read(place: PrivateFolder, name: str) -> DriverEntry | None:
    try:
        run = _run(parse_json(place.read(name)))
    except EnvironmentFault as error:
        log.warning("a file of a running topology is ignored: %s", error)
        return None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None  # it was just removed, or another version of Penstock wrote it
    return run if run.file == name else None


def _run(fields: dict[str, Any]) -> DriverEntry:
    """Raises ``TypeError``, ``ValueError`` or ``KeyError`` if a field is missing or invalid."""
    run = DriverEntry(**fields)
    texts, numbers = (run.topology, run.host, run.secret), (run.port, run.pid, run.started)
    if not all(type(text) is str for text in texts) or not all(type(number) is int for number in numbers):
        raise TypeError("a field has the wrong type")
    bytes.fromhex(run.secret)
    if not 0 < run.port < 65536 or run.pid <= 1:
        raise ValueError("the port or process id is out of range")
    return run


def _printable(text: str) -> str:
    try:
        value = parse_json(text)
    except ValueError:
        return printable(text, multiline=True)
    return json.dumps(printable_values(value)) if isinstance(value, dict | list) else text


def _error_class(name: str) -> type[PenstockError]:
    kind = getattr(errors, name, PenstockError)
    return kind if isinstance(kind, type) and issubclass(kind, PenstockError) else PenstockError
