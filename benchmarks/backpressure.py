"""Flow control under overload: ``step`` compared with ``none``, ``spout`` and ``credit``; its cost without
overload; memory over ten minutes; and the experiments of *Lu 2020* compared with Storm."""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from benchmarks.alice import measure_alice
from benchmarks.fast_words import measure_fast_word_count
from benchmarks.harness import Results, median, processes, run_parts, running, say
from benchmarks.hops import APART
from benchmarks.on_off import measure_figure_13, measure_figure_15
from benchmarks.overload import one_branch, two_branches
from benchmarks.series import Series, plot
from benchmarks.words import fast_word_count
from penstock import Delivery, Flow, Settings
from penstock.driver.handle import RunningTopology
from penstock.spark.submit import submit

PARTS = ("uneven", "burst", "overhead", "memory", "words", "alice", "fig13", "fig15")
MODES = ("step", "none", "spout", "credit")
RESULTS = Path("results")

RATE = 20_000  # tuples per second of each branch; far below the machine's limit, so that only the slow bolt limits
SLOW = 1 / 2_000  # seconds per tuple of the slow bolt, which can process a tenth of its input
WORK = 1 / 20_000  # seconds per tuple of the bolt in the burst experiment: 20,000 per second
BASE = 0.8 * 20_000  # tuples per second before and after the burst; twice as many during it


def main(options: argparse.Namespace) -> int:
    """``penstock bench backpressure``"""
    measures = (
        measure_uneven,
        measure_burst,
        measure_overhead,
        measure_memory,
        measure_fast_word_count,
        measure_alice,
        measure_figure_13,
        measure_figure_15,
    )
    return run_parts("backpressure", dict(zip(PARTS, measures, strict=True)), options)


# ---- a slow bolt in one of two branches ------------------------------------------------------------------


def measure_uneven(results: Results, options: argparse.Namespace) -> None:
    """Two branches on separate streams of one spout. The bolt of one can process a tenth of its input."""
    warm_up, seconds = (4, 8) if options.quick else (10, 30)
    rates: dict[str, dict[str, list[float]]] = {}
    series = {}
    for number in range(options.repeats or (1 if options.quick else 3)):
        for case in ("undisturbed", *MODES):
            slow = 0.0 if case == "undisturbed" else SLOW
            settings = Settings(flow=Flow("step" if case == "undisturbed" else case), workers=APART)
            with running(two_branches(slow, RATE, settings)) as handle, Series(handle) as seen:
                time.sleep(warm_up + seconds)
            series[case] = seen.points
            for branch in ("healthy", "slow"):
                rate = seen.mean_rate(branch, warm_up, warm_up + seconds)
                rates.setdefault(case, {}).setdefault(branch, []).append(rate)
            say(f"  repeat {number + 1}: {case} healthy {rates[case]['healthy'][-1]:,.0f}/s")
    whole = median(rates["undisturbed"]["healthy"])
    for case, branches in rates.items():
        healthy, slow_rate = median(branches["healthy"]), median(branches["slow"])
        results.row(
            what="slow bolt in one of two branches",
            case=case,
            **{"healthy/s": healthy, "slow/s": slow_rate, "healthy share": healthy / whole},
        )
    healthy_under = {case: median(rates[case]["healthy"]) / whole for case in MODES}
    total = {case: median(rates[case]["healthy"]) + median(rates[case]["slow"]) for case in MODES}
    results.bar("step.healthy_branch", healthy_under["step"], "of its undisturbed rate")
    results.bar("spout.healthy_branch", healthy_under["spout"], "of its undisturbed rate")
    results.bar("step.vs_spout.throughput", total["step"] / total["spout"], "× spout")
    plot(RESULTS / "backpressure-uneven.png", "a slow bolt in one of two branches", series, ("healthy", "slow"))


# ---- a burst -----------------------------------------------------------------------------------------------


def measure_burst(results: Results, options: argparse.Namespace) -> None:
    """Double the rate for a while, and measure the latency from the spout's emit and the throughput in that
    time."""
    begin, length = (5.0, 8.0) if options.quick else (10.0, 30.0)
    series: dict[str, Sequence[dict[str, Any]]] = {}
    p99s: dict[str, list[float]] = {}
    done: dict[str, list[float]] = {}
    repeats = options.repeats or (1 if options.quick else 3)
    for number in range(repeats):
        for mode in MODES:
            topology = one_branch(
                WORK, BASE, (2.0, begin, begin + length), Settings(flow=Flow(mode), workers=APART)
            )
            with running(topology) as handle, Series(handle) as seen:
                time.sleep(begin)
                before = handle.internals.bus.totals()["work"]
                time.sleep(length)
                after = handle.internals.bus.totals()["work"]
                time.sleep(5)
            latency = after.latency.minus(before.latency)
            p99s.setdefault(mode, []).append(latency.percentile(0.99) or 0.0)
            done.setdefault(mode, []).append((after.executed - before.executed) / length)
            series[mode] = seen.points
            say(f"  repeat {number + 1}: {mode} p99 {p99s[mode][-1] * 1000:,.0f} ms, {done[mode][-1]:,.0f}/s")
    for mode in MODES:
        results.row(
            what=f"2× burst of {length:g} s",
            case=mode,
            **{"p99 ms": median(p99s[mode]) * 1000, "tuples/s": median(done[mode])},
        )
    ratio = median([ours / none for ours, none in zip(p99s["step"], p99s["none"], strict=True)])
    results.bar("step.vs_none.p99", ratio, "× none")
    rate = median([ours / none for ours, none in zip(done["step"], done["none"], strict=True)])
    results.bar("step.vs_none.throughput", rate, "× none")
    plot(RESULTS / "backpressure-burst.png", f"a 2× burst of {length:g} s", series, ("source", "work"))


# ---- when nothing is overloaded ----------------------------------------------------------------------------


def measure_overhead(results: Results, options: argparse.Namespace) -> None:
    """Run the acked word count with and without flow control in one session, taking turns, so that disturbances of
    the machine affect both."""
    turns, seconds = (6, 2.0) if options.quick else (40, 3.0)
    with tempfile.TemporaryDirectory() as folder:
        handles = {flow: _acked_words(flow, folder) for flow in ("none", "step")}
        rates = _by_turns(handles, turns, seconds)
    cost = 1 - median([on / off for on, off in zip(rates["step"], rates["none"], strict=True)])
    for flow, values in rates.items():
        results.row(what="acked word count, nothing overloaded", case=flow, **{"words/s": median(values)})
    results.bar("flow.overhead", cost * 100, "% of throughput")


def _by_turns(handles: Mapping[str, RunningTopology], turns: int, seconds: float) -> dict[str, list[float]]:
    rates: dict[str, list[float]] = {flow: [] for flow in handles}
    try:
        for handle in handles.values():
            handle.deactivate()
        for turn in range(turns + 4):
            order = list(handles) if turn % 2 else list(reversed(list(handles)))
            for flow in order:
                rate = _turn(handles[flow], seconds)
                if turn >= 4:  # during the first turns the JVM still compiles
                    rates[flow].append(rate)
        slowed = [
            stats.limit for stats in handles["step"].internals.bus.tasks().values() if stats.limit != math.inf
        ]
        say(f"  {turns} turns of {seconds:g} s each; {len(slowed)} tasks slowed at the end")
    finally:
        for handle in handles.values():
            handle.kill(drain=False)
    return rates


def _acked_words(flow: str, folder: str) -> RunningTopology:
    settings = Settings(
        flow=Flow(flow),
        workers=APART,  # flow control acts between workers
        delivery=Delivery("at_least_once", max_spout_pending=5_000, state_dir=folder),
        conf={"batch": 1_000},
    )
    topology = fast_word_count(1, 1, 1, True, settings)
    return submit(replace(topology, name=f"{topology.name}-{flow}"))


def _turn(handle: RunningTopology, seconds: float) -> float:
    handle.activate()
    time.sleep(0.5)
    before, begun = handle.internals.bus.totals()["count"].executed, time.monotonic()
    time.sleep(seconds)
    rate = (handle.internals.bus.totals()["count"].executed - before) / (time.monotonic() - begun)
    handle.deactivate()
    handle.drain(5)
    return rate


# ---- memory ------------------------------------------------------------------------------------------------


def measure_memory(results: Results, options: argparse.Namespace) -> None:
    """Resident memory of the driver, the JVM and the workers while one branch is overloaded tenfold."""
    minutes = 0.5 if options.quick else 10.0
    sizes: list[tuple[float, float]] = []
    with running(two_branches(SLOW, RATE, Settings(workers=APART))) as handle:
        watched = list(processes(handle).values())
        begun = time.monotonic()
        while (elapsed := time.monotonic() - begun) < minutes * 60:
            sizes.append((elapsed, sum(_resident(process) for process in watched) / 2**20))
            time.sleep(1)
    tenth = minutes * 6
    early = median([size for at, size in sizes if tenth * 2 <= at < tenth * 3])
    late = median([size for at, size in sizes if at >= tenth * 9])
    results.row(what=f"{minutes:g} minutes of overload", case="step", **{"MB early": early, "MB late": late})
    results.bar("overload.rss_growth_mb", late - early, "MB")


def _resident(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.NoSuchProcess:
        return 0
