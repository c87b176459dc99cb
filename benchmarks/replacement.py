"""Replacing a running topology: the interruption of its output with 100,000 and a million keys, the correctness of
results, and the scaling experiment of *Lu 2020* (section 6.4) compared with Storm's rebalance, and simulated."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.book import micros
from benchmarks.harness import Results, median, run_parts, say
from benchmarks.persistence_topology import IntArray
from benchmarks.replacement_fig17 import measure_fig17
from benchmarks.replacement_figures import Turn, lost, wrong_keys
from benchmarks.replacement_overload import measure_overload
from benchmarks.replacement_scaling import measure_scaling
from benchmarks.replacement_topology import (
    Arrivals,
    Schedule,
    arrivals,
    committed,
    end_input,
    total,
    word_count,
)
from benchmarks.scaling_sim import measure_scaling_sim
from penstock import Topology
from penstock.driver.handle import RunningTopology
from penstock.spark.submit import submit

PARTS = ("gap", "gap-1m", "correct", "scaling", "sim", "overload", "fig17")
DELIVERIES = ("exactly_once", "at_least_once")
RATE = 3_000  # tuples per second: a frame every few ms, so that gaps show; leaves CPU to start a query
KEYS, MANY_KEYS, FEW_KEYS = 100_000, 1_000_000, 10_000
HOURS = 3 * 3600.0  # seconds of input; the runs are shorter
STEPS = (2, 4, 2, 1)
"""Numbers of tasks of ``count``, in turn, for the replacements whose results are compared."""
_CATCH_UP = 1.0  # seconds after a replacement that still belong to it: backlog, cold code
_REST = 1.0  # seconds between a replacement and the undisturbed time it is compared with
_PATIENCE = 180.0  # seconds; time limit for everything that should take seconds
_LATE = 60.0  # seconds for the last results; longer than the message timeout, after which lost ones come again


def main(options: argparse.Namespace) -> int:
    """``penstock bench replacement``"""
    measures = (
        measure_gap,
        measure_gap_1m,
        measure_correct,
        measure_scaling,
        measure_scaling_sim,
        measure_overload,
        measure_fig17,
    )
    return run_parts("replacement", dict(zip(PARTS, measures, strict=True)), options)


# ---- how long nothing comes out ------------------------------------------------------------------------


def measure_gap(results: Results, options: argparse.Namespace) -> None:
    """Double and halve the tasks by turns under a steady load, with all keys loaded."""
    worst = _gaps(results, options, KEYS)
    results.bar("replace.longest_gap_s", worst["exactly_once"], f"s without output, {KEYS:,} keys, exactly once")
    results.bar("replace.longest_gap_acked_s", worst["at_least_once"], "s, at least once")


def measure_gap_1m(results: Results, options: argparse.Namespace) -> None:
    """The same with ten times as many keys."""
    worst = _gaps(results, options, MANY_KEYS)
    results.bar(
        "replace.gap_1m_keys_s", worst["exactly_once"], f"s without output, {MANY_KEYS:,} keys, exactly once"
    )


def _gaps(results: Results, options: argparse.Namespace, keys: int) -> dict[str, float]:
    """The longest gap of all replacements, by delivery guarantee."""
    turns = options.repeats or (2 if options.quick else 8)
    settle = 3.0 if options.quick else 12.0  # seconds; the longer one includes a snapshot of all keys
    worst = {}
    for delivery in DELIVERIES:
        with tempfile.TemporaryDirectory(prefix="penstock-replacement-") as root:
            seen, arrived = _loaded_and_replaced(Path(root), delivery, keys, turns, settle)
        gaps = [turn.gap(arrived.came) for turn in seen]
        ordinary = [turn.ordinary_gap(arrived.came) for turn in seen]
        worst[delivery] = max(gaps)
        results.row(
            what=f"{keys:,} keys, {RATE:,}/s",
            case=delivery.replace("_", " "),
            **{
                "replacements": turns,
                "gap s": median(gaps),
                "worst gap s": max(gaps),
                "ordinary s": median(ordinary),
                "worst ordinary s": max(ordinary),
                "spouts silent s": median([turn.silent for turn in seen]),
                "takes s": median([turn.seconds for turn in seen]),
                "doubled": len(arrived) - len(set(arrived.number.tolist())),
            },
            turns=" ".join(f"{gap:.3f}" for gap in gaps),
        )
        say(f"  {keys:,} keys, {delivery}: median gap {median(gaps):.3f} s, worst {max(gaps):.3f} s")
    return worst


def _loaded_and_replaced(
    folder: Path, delivery: str, keys: int, turns: int, settle: float
) -> tuple[list[Turn], Arrivals]:
    schedule = Schedule(((HOURS, RATE),))
    handle: Any = submit(word_count(folder, delivery, keys, schedule))
    seen = []
    try:
        _await(f"{keys:,} keys must be loaded", lambda: handle.internals.bus.totals()["arrivals"].executed > keys)
        time.sleep(settle)
        for number in range(turns):
            seen.append(_turn(handle, 1 if number % 2 else 2))
            say(f"    {number + 1} of {turns}: {seen[-1].seconds:.1f} s, spouts paused {seen[-1].silent:.3f} s")
    finally:
        handle.kill(drain=False)
    return seen, arrivals(folder)


def _turn(handle: Any, tasks: int) -> Turn:
    """Replace the topology, then observe it as long without a replacement."""
    begin = micros()
    replaced = handle.scale({"count": tasks})
    time.sleep(_CATCH_UP)
    end = micros()
    time.sleep(_REST)
    quiet = micros()
    time.sleep((end - begin) / 1e6)
    return Turn(begin, end, quiet, tasks, replaced.gap, replaced.seconds)


# ---- whether results stay right ------------------------------------------------------------------------


def measure_correct(results: Results, options: argparse.Namespace) -> None:
    """Replace the topology repeatedly under load; then the input ends and all results are compared."""
    replacements = 4 if options.quick else 10
    for delivery in DELIVERIES:
        exact = delivery == "exactly_once"
        with tempfile.TemporaryDirectory(prefix="penstock-replacement-") as root:
            numbers, counts, inputs = _replaced_to_the_end(Path(root), delivery, replacements)
        missing = lost(numbers, inputs)
        wrong = wrong_keys(numbers, counts, inputs, FEW_KEYS)
        results.row(
            what=f"{replacements} replacements",
            case=delivery.replace("_", " "),
            inputs=inputs,
            missing=missing,
            doubled=len(numbers) - (inputs - missing),
            **{"keys wrong": wrong},
        )
        if exact:
            results.bar(
                "replace.wrong", wrong, f"keys of {FEW_KEYS:,} with a count that differs from a sequential run"
            )
        else:
            results.bar("replace.lost", missing, f"of {inputs:,} inputs, at least once")


def _replaced_to_the_end(folder: Path, delivery: str, replacements: int) -> tuple[IntArray, IntArray, int]:
    """The results, and the number of inputs."""
    exact = delivery == "exactly_once"
    schedule = Schedule(((HOURS, RATE),))

    def replace(handle: RunningTopology) -> None:
        for number in range(replacements):
            replaced = handle.scale({"count": STEPS[number % len(STEPS)]})
            say(f"    {delivery}, {number + 1} of {replacements}: {replaced.gap:.3f} s silent")
            time.sleep(1)

    topology = word_count(folder, delivery, FEW_KEYS, schedule, load=False, commits=exact)
    return changed_to_the_end(topology, folder, replace)


def changed_to_the_end(
    topology: Topology, folder: Path, change: Callable[[RunningTopology], None]
) -> tuple[IntArray, IntArray, int]:
    """Run a topology with a ``PacedNumbers`` spout, change it under load, end the input, and wait for all results.
    Returns numbers and counts that came out (exactly once: that were committed), and the number of inputs."""
    exact = topology.settings.delivery.guarantee == "exactly_once"

    def came() -> tuple[IntArray, IntArray]:
        if exact:
            return committed(folder)
        noted = arrivals(folder)
        return noted.number, noted.count

    handle = submit(topology)
    try:
        time.sleep(3)
        change(handle)
        end_input(folder)
        _await("the source should end", lambda: total(folder) is not None)
        inputs = total(folder) or 0
        try:
            _await("all must arrive", lambda: not lost(came()[0], inputs), _LATE)
        except SystemExit as late:
            say(f"    {late}")  # no error: missing results are what is measured
        handle.kill()
    finally:
        handle.kill(drain=False)
    return *came(), inputs


def _await(rule: str, condition: Callable[[], bool], patience: float = _PATIENCE) -> None:
    deadline = time.monotonic() + patience
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"{rule}, but did not within {patience:g} s")
        time.sleep(0.2)
