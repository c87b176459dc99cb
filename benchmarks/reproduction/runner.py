"""Runs repeats of experiments, each in a process of its own, and stores what they measured."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import say
from benchmarks.reproduction.model import Experiment
from benchmarks.reproduction.store import Repeat, Store, thinned
from penstock.interrupts import Interrupted, StopSignals

ROOT = Path(__file__).resolve().parents[2]
_LEAST_LIMIT = 600.0  # seconds; a repeat may take this long or five times its estimate
_LIMIT = 5.0
_CLEAN_UP = 30.0  # seconds that an interrupted repeat has to stop Spark and its servers
_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl
_COMMAND = "from penstock_command import main; raise SystemExit(main())"


@dataclass(frozen=True)
class Work:
    """A repeat that is to be run."""

    experiment: Experiment
    number: int
    of: int
    """Repeats of the experiment."""


class RepeatFailed(Exception):
    """A repeat ended without results."""


def outstanding(
    store: Store, experiments: Sequence[Experiment], quick: bool, wanted: int | None, text: bool
) -> list[Work]:
    """The repeats that are not stored yet. The first repeats of all experiments come before the second ones, so
    that an interrupted run has measured something of everything."""
    missing = []
    for experiment in experiments:
        done = {each.number for each in store.current(experiment, quick, text)}
        repeats = experiment.repeats(quick, wanted)
        missing += [Work(experiment, number, repeats) for number in range(1, repeats + 1) if number not in done]
    return sorted(missing, key=lambda work: work.number)


def estimate(store: Store, experiment: Experiment, quick: bool) -> float:
    """Seconds of a repeat: the median of those that were measured, otherwise what the experiment declares."""
    took = [each.seconds for each in store.repeats(experiment) if each.quick == quick]
    return statistics.median(took) if took else experiment.seconds(quick)


def run_all(store: Store, work: Sequence[Work], quick: bool, text: str | None) -> list[Work]:
    """Run the repeats in order and store each as soon as it has ended. Returns those that failed."""
    failed = []
    for place, each in enumerate(work):
        left = sum(estimate(store, later.experiment, quick) for later in work[place:])
        say(
            f"[{place + 1} of {len(work)}] {each.experiment.id}, repeat {each.number} of {each.of}: "
            f"about {duration(estimate(store, each.experiment, quick))}; all that is left about {duration(left)}, "
            f"until {time.strftime('%H:%M', time.localtime(time.time() + left))}"
        )
        try:
            repeat = run_one(each.experiment, each.number, quick, text, estimate(store, each.experiment, quick))
        except RepeatFailed as error:
            say(f"  {each.experiment.id}, repeat {each.number} failed: {error}")
            failed.append(each)
            continue
        store.add(each.experiment, repeat)
        say(f"  {each.experiment.id}, repeat {each.number}: {duration(repeat.seconds)}")
    return failed


def run_one(experiment: Experiment, number: int, quick: bool, text: str | None, estimated: float) -> Repeat:
    """Run one repeat."""
    with tempfile.TemporaryDirectory(prefix="penstock-reproduce-") as folder:
        path = Path(folder) / "results.json"
        program, *words = experiment.arguments(quick, number, text)
        command = [
            sys.executable,
            *(["-c", _COMMAND] if program == "penstock" else []),
            *words,
            "--json",
            str(path),
        ]
        if program == "penstock" and "--repeats" not in words:
            command += ["--repeats", "1"]
        begun = time.monotonic()
        code = _run(command, max(_LEAST_LIMIT, _LIMIT * estimated))
        took = time.monotonic() - begun
        if code or not path.exists():
            raise RepeatFailed(f"exit code {code}")
        content = json.loads(path.read_text())
    values = dict(experiment.extract(content))
    if not values:
        raise RepeatFailed(f"'{experiment.command(quick)}' measured nothing")
    return Repeat(
        number,
        quick,
        experiment.command(quick, experiment.takes_text and text is not None),
        experiment.version,
        time.strftime("%Y-%m-%d"),
        round(took, 1),
        content["machine"],
        values,
        {name: thinned(curve) for name, curve in content.get("curves", {}).items()},
    )


def _run(command: Sequence[str], limit: float) -> int:
    """Run a program in a process group of its own, and end it if this process is interrupted or killed."""
    with StopSignals() as stopped:  # an exception in the middle of a fork would be lost
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.DEVNULL, start_new_session=True, preexec_fn=_end_with_parent
        )
    try:
        if stopped.count:
            raise Interrupted(stopped.number)
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        raise RepeatFailed(f"it did not end within {duration(limit)}") from None
    finally:
        _end(process)


def _end_with_parent() -> None:
    """In the child: SIGTERM when the parent ends in whatever way."""
    ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGTERM)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the program; whatever is left of its process group is killed."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_CLEAN_UP)
        except subprocess.TimeoutExpired:
            say("  the interrupted repeat did not end and is killed")
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def duration(seconds: float) -> str:
    """A time for people: 40 s, 12 min, 2 h 05 min."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02d} min"
