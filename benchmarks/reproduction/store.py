"""Results of the experiments, one file for each experiment. A finished repeat is in the file before the next one
begins; a file is replaced as a whole, so that a kill leaves the old or the new one."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.reproduction.model import Experiment
from penstock.errors import EnvironmentFault

MOST_POINTS = 300
"""Points of a stored curve; a picture shows no more."""


@dataclass(frozen=True)
class Repeat:
    """What one repeat measured."""

    number: int
    quick: bool
    command: str
    version: int
    date: str
    seconds: float
    machine: Mapping[str, Any]
    values: Mapping[str, float]
    curves: Mapping[str, Sequence[Sequence[float]]] = field(default_factory=dict)
    """⟨x, y⟩ by name."""

    def fits(self, experiment: Experiment, quick: bool, text: bool) -> bool:
        """Whether the experiment would run the same today."""
        return (self.quick, self.command, self.version) == (
            quick,
            experiment.command(quick, text),
            experiment.version,
        )


class Store:
    """A folder of results."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def repeats(self, experiment: Experiment) -> list[Repeat]:
        """All repeats that were stored, also stale ones."""
        path = self._path(experiment)
        if not path.exists():
            return []
        return [Repeat(**each) for each in json.loads(path.read_text())["repeats"]]

    def current(self, experiment: Experiment, quick: bool, text: bool) -> list[Repeat]:
        """The repeats that need not be run again, by number."""
        found = {each.number: each for each in self.repeats(experiment) if each.fits(experiment, quick, text)}
        return [found[number] for number in sorted(found)]

    def best(self, experiment: Experiment) -> list[Repeat]:
        """The repeats to show: in full rather than quick, with the book rather than with generated lines."""
        for quick in (False, True):
            for text in (True, False) if experiment.takes_text else (False,):
                if found := self.current(experiment, quick, text):
                    return found
        return []

    def add(self, experiment: Experiment, repeat: Repeat) -> None:
        """Store a repeat. It replaces the one with its number; stale ones with its flag are removed."""
        text = "--text" in repeat.command
        kept = [
            each
            for each in self.repeats(experiment)
            if any(each.fits(experiment, quick, book) for quick in (False, True) for book in (False, True))
            and not (each.number == repeat.number and each.fits(experiment, repeat.quick, text))
        ]
        kept.append(repeat)
        kept.sort(key=lambda each: (each.quick, each.command, each.number))
        self._write(experiment, kept)

    def forget(self, experiment: Experiment, quick: bool, text: bool) -> None:
        """Remove the repeats that ``current`` returns."""
        self._write(
            experiment, [each for each in self.repeats(experiment) if not each.fits(experiment, quick, text)]
        )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from running experiments into the same folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / ".lock", "w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise EnvironmentFault(
                    "penstock reproduce",
                    f"another process runs experiments into {self.folder}",
                    "Wait until it has ended.",
                ) from None
            yield

    def _path(self, experiment: Experiment) -> Path:
        return self.folder / f"{experiment.id}.json"

    def _write(self, experiment: Experiment, repeats: Sequence[Repeat]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self._path(experiment)
        content = {"experiment": experiment.id, "repeats": [asdict(each) for each in repeats]}
        new = path.with_suffix(".new")
        with open(new, "w") as file:
            json.dump(content, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)


def thinned(curve: Sequence[Sequence[float]]) -> list[list[float]]:
    """A curve with at most ``MOST_POINTS`` points."""
    x, y = curve
    step = max(1, -(-len(x) // MOST_POINTS))
    return [[round(float(value), 4) for value in values[::step]] for values in (x, y)]
