"""What a reproduction consists of, as data: tables, figures and algorithms of the papers (*exhibits*), the
experiments that measure them, and the values that are compared."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Better = Literal["higher", "lower", "same"]
Content = Mapping[str, Any]
"""What a benchmark writes with ``--json``."""
SEED, TEXT = "{seed}", "{text}"
FULL_REPEATS = 5
"""Repeats of an experiment in full."""
EQUAL_WITHIN = 0.05
"""Relative difference to the paper's value up to which a value counts as equal, unless it says otherwise."""


def bars(content: Content) -> dict[str, float]:
    """The values of a benchmark's bars, by name."""
    return {bar["name"]: float(bar["value"]) for bar in content["bars"]}


@dataclass(frozen=True)
class Experiment:
    """One program that is run several times. A repeat is one process, so that an interruption costs one repeat."""

    id: str
    title: str
    program: tuple[str, ...]
    """``penstock …`` or ``python -m …``. ``{seed}`` is replaced by the seed of the repeat."""
    quick_seconds: float
    full_seconds: float
    """How long a repeat takes, until one has been measured."""
    duration: str
    """What a repeat in full runs and for how long, and how that was scaled from the paper's duration."""
    differences: tuple[str, ...] = ()
    """Between the paper's set-up and ours."""
    needs: tuple[str, ...] = ()
    spark: bool = True
    first_seed: int = 1
    varies: bool = True
    """Whether two repeats may differ. If not, one is enough."""
    takes_text: bool = False
    """Whether the program reads a book given with ``--text``."""
    version: int = 1
    """Increase it when results measured before are no longer comparable: they are then measured again."""
    extract: Callable[[Content], Mapping[str, float]] = bars

    def command(self, quick: bool, text: bool = False) -> str:
        """The command of a repeat, with placeholders: two repeats with the same command are comparable."""
        words = [*self.program]
        if self.takes_text and text:
            words += ["--text", TEXT]
        return " ".join([*words, *(["--quick"] if quick else [])])

    def arguments(self, quick: bool, repeat: int, text: str | None = None) -> list[str]:
        """The words of the command of a repeat, counted from 1."""
        words = shlex.split(self.command(quick, text is not None))
        filled = {SEED: str(self.first_seed + repeat - 1), TEXT: text or ""}
        return [filled.get(word, word) for word in words]

    def repeats(self, quick: bool, wanted: int | None = None) -> int:
        """How often it is to be run."""
        return 1 if not self.varies else wanted or (1 if quick else FULL_REPEATS)

    def seconds(self, quick: bool) -> float:
        return self.quick_seconds if quick else self.full_seconds


@dataclass(frozen=True)
class Value:
    """One value that is compared."""

    experiment: str
    name: str
    """Of the value in the results of the experiment."""
    label: str
    unit: str
    paper: float | tuple[float, float] | None = None
    """The paper's value, or the range it states; None: the paper states none."""
    better: Better = "higher"
    equal: float = EQUAL_WITHIN
    """Relative difference to the paper's value up to which a value counts as equal."""
    slack: float = 0.0
    """The same in the value's unit, for values that may be 0."""
    bar: float | None = None
    """The value that this project wants to reach, in the direction of ``better``."""
    differs: str = ""
    """Why the comparison with the paper's value is not applicable; "": it is applicable."""


@dataclass(frozen=True)
class Curve:
    """A curve of a picture, from the results of an experiment."""

    experiment: str
    name: str
    label: str


@dataclass(frozen=True)
class Picture:
    """Ours and the paper's: curves with dashed lines for the paper's values, or bars side by side."""

    x: str = ""
    y: str = ""
    curves: tuple[Curve, ...] = ()
    lines: tuple[tuple[str, float], ...] = ()
    """⟨label, y⟩ of the paper's values."""
    points: tuple[tuple[str, tuple[float, ...], tuple[float, ...]], ...] = ()
    """⟨label, x, y⟩ of the paper's values over x."""
    logarithmic: bool = False
    repeats: Literal["all", "first", "median"] = "all"
    """Of a curve: all repeats on top of each other, the first one (curves that vary a lot), or their median."""
    unit: str = ""
    """Bars: only of values with this unit."""


@dataclass(frozen=True)
class Exhibit:
    """A table, figure, algorithm or group of equations of a paper."""

    id: str
    paper: str
    number: str
    """As in the paper: ``figure 13``."""
    title: str
    values: tuple[Value, ...] = ()
    code: tuple[str, ...] = ()
    """Files that hold the mechanism, relative to the root of the repository."""
    tests: tuple[str, ...] = ()
    """Files that check it."""
    note: str = ""
    picture: Picture | None = None

    @property
    def experiments(self) -> tuple[str, ...]:
        """The experiments that measure it, each once."""
        return tuple(dict.fromkeys(value.experiment for value in self.values))
