"""The cost of a lost worker: one process is killed under a steady load, and the restart is timed step by step,
until results come out again."""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.book import micros
from benchmarks.harness import Results, median, run_parts, say
from benchmarks.replacement_topology import Schedule, arrivals, word_count
from penstock.driver.steps import Change
from penstock.spark.submit import submit

PARTS = ("small", "large")
RATE = 3_000  # tuples per second
FEW_KEYS, MANY_KEYS = 10_000, 1_000_000
HOURS = 3 * 3600.0  # seconds of input; the runs are shorter
_SETTLE = 2.0  # seconds between a commit and a kill: what the commit left to do is over
_PATIENCE = 120.0  # seconds; time limit for everything that should take seconds
_FOUND = "noticed"
"""What precedes the first step of a restart: Spark ends the query, and the driver notices."""
_OUTPUT = "first output"


@dataclass(frozen=True)
class Loss:
    """One lost worker. ``steps``: seconds that each step took, in order, from the kill to the first output."""

    steps: Mapping[str, float]

    @property
    def seconds(self) -> float:
        return sum(self.steps.values())


def main(options: argparse.Namespace) -> int:
    """``penstock bench restart``"""
    return run_parts("restart", dict(zip(PARTS, (measure_small, measure_large), strict=True)), options)


def measure_small(results: Results, options: argparse.Namespace) -> None:
    """A few keys: what remains is the cost of a new query."""
    _measure(results, options, FEW_KEYS, "restart.small_s")


def measure_large(results: Results, options: argparse.Namespace) -> None:
    """A million keys, which have to be read and decoded."""
    _measure(results, options, MANY_KEYS, "restart.large_s")


def _measure(results: Results, options: argparse.Namespace, keys: int, bar: str) -> None:
    turns = options.repeats or (3 if options.quick else 10)
    with tempfile.TemporaryDirectory(prefix="penstock-restart-") as root:
        losses, megabytes = lose_workers(Path(root), keys, turns)
    steps = {step: median([loss.steps.get(step, 0.0) for loss in losses]) for step in losses[0].steps}
    totals = sorted(loss.seconds for loss in losses)
    for step, seconds in steps.items():
        results.row(state=f"{keys:,} keys", mb=megabytes, step=step, seconds=seconds, repeats=turns)
    results.row(
        state=f"{keys:,} keys",
        mb=megabytes,
        step="kill to first output",
        seconds=median(totals),
        repeats=turns,
        spread=f"{totals[0]:.2f}–{totals[-1]:.2f}",
    )
    results.bar(bar, median(totals), f"s from the kill of a worker to the next result, {keys:,} keys")


def lose_workers(folder: Path, keys: int, turns: int) -> tuple[list[Loss], float]:
    """Kill the worker that counts, ``turns`` times. Returns what each loss cost, and the size of the state."""
    handle: Any = submit(word_count(folder, "exactly_once", keys, Schedule(((HOURS, RATE),))))
    losses = []
    try:
        _await("all keys must be loaded", lambda: handle.internals.bus.totals()["arrivals"].executed > keys)
        for number in range(turns):
            handle.commit()
            time.sleep(_SETTLE)
            losses.append(_lose(handle, folder))
            say(f"    {number + 1} of {turns}: {losses[-1].seconds:.2f} s")
        size = sum(file.stat().st_size for file in (folder / "state").rglob("*") if file.is_file()) / 1e6
    finally:
        handle.kill(drain=False)
    return losses, round(size, 1)


def _lose(handle: Any, folder: Path) -> Loss:
    reached: list[tuple[str, int]] = []
    runner = handle.internals.supervisor.runner
    before = runner.reached

    def note(change: Change, step: str) -> None:
        reached.append((step, micros()))
        before(change, step)

    count = handle.internals.plan.tasks_of["count"][0]
    worker = handle.internals.plan.routes.worker_of[count]
    restarts, runner.reached = handle.internals.restarts, note
    killed = micros()
    begun = handle.internals.supervisor.runs.current
    os.kill(handle.internals.workers[worker].hello.pid, signal.SIGKILL)
    _await("a restart must begin", lambda: handle.internals.restarts > restarts)
    noticed = micros()
    _await("the restart must end", lambda: handle.internals.supervisor.runs.current is not begun)
    _await("spouts must emit", lambda: any(step == "activated" for step, _ in reached))
    runner.reached = before
    activated = reached[-1][1]
    _await("results must come out again", lambda: bool((arrivals(folder).came > activated).any()))
    came = arrivals(folder).came
    times = [(_FOUND, noticed), *reached, (_OUTPUT, int(came[came > activated][0]))]
    steps, last = {}, killed
    for step, at in times:
        steps[step], last = (at - last) / 1e6, at
    return Loss(steps)


def _await(what: str, condition: Any) -> None:
    deadline = time.monotonic() + _PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"within {_PATIENCE:.0f} s {what}")
        time.sleep(0.002)
