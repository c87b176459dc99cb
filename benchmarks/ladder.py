"""Microbenchmarks that add one cost at a time, from a single spout to a word count; then latency, start time, idle
CPU and overload."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.harness import (
    Results,
    console,
    cpu_by_process,
    cpu_since,
    median,
    processes,
    rate_of,
    run_json,
    run_parts,
    running,
    say,
)
from benchmarks.hops import APART, BatchFlood, Flood, Identity, Silent, SlowSink, flood, paced
from benchmarks.words import fast_word_count
from penstock import Settings, Topology, TopologyBuilder
from penstock.spark.session import open_session

Times = npt.NDArray[np.float64]
PARTS = ("rates", "hops3", "single", "start", "idle", "overload")


def main(options: argparse.Namespace) -> int:
    """``penstock bench ladder``"""
    measures = (measure_rates, measure_hops3, measure_single, measure_start, measure_idle, measure_overload)
    return run_parts("ladder", dict(zip(PARTS, measures, strict=True)), options)


def measure_rates(results: Results, options: argparse.Namespace) -> None:
    """Tuples per second at full speed; each step adds one cost."""
    repeats = options.repeats or (1 if options.quick else 3)
    warm_up, seconds = (1.5, 2.0) if options.quick else (5.0, 5.0)
    plain = Settings()
    rungs: list[tuple[str, str, list[Topology]]] = [
        ("spout alone", "spout", [_alone(False), _alone(True)]),
        ("null bolt, fused", "sink", [flood(False, 1, False, plain), flood(True, 1, False, plain)]),
        ("identity bolt, fused", "sink", [flood(False, 2, False, plain), flood(True, 2, False, plain)]),
        ("one hop", "sink", [flood(False, 1, True, plain), flood(True, 1, True, plain)]),
        ("three hops", "sink", [flood(False, 3, True, plain), flood(True, 3, True, plain)]),
        (
            "word count 1/1/1 (words)",
            "count",
            [fast_word_count(1, 1, 1, False, plain), fast_word_count(1, 1, 1, True, plain)],
        ),
    ]
    for name, component, forms in rungs:
        row: dict[str, float | str] = {"what": name}
        for form, topology in zip(("tuple/s", "tuple/s, batch form"), forms, strict=True):
            rates = []
            for _ in range(repeats):
                with running(topology) as handle:
                    rates.append(rate_of(handle, component, warm_up, seconds))
            row[form] = round(median(rates))
            say(f"  {name}, {form}: {row[form]:,}")
        results.row(**row)


def measure_hops3(results: Results, options: argparse.Namespace) -> None:
    """Latency of three hops at 1,000 tuples/s, and the longest gap in the output."""
    seconds = 6.0 if options.quick else 300.0
    settle = 3.0 if options.quick else 15.0
    due, came = _timed(1000.0, 3, settle + seconds)
    steady = due >= due[0] + settle
    latency = (came - due)[steady] * 1e3
    gap = float(np.diff(came[steady]).max())
    p50, p99 = np.percentile(latency, [50, 99])
    results.row(what="three hops at 1,000/s", p50_ms=p50, p99_ms=p99, longest_gap_s=gap, seconds=seconds)
    results.bar("hops3.p50_ms", p50, "ms")
    results.bar("hops3.p99_ms", p99, "ms")
    results.bar("hops3.longest_gap_s", gap, "s")


def measure_single(results: Results, options: argparse.Namespace) -> None:
    """Latency of a single tuple in an idle topology: one every half second over three hops; the slowest counts."""
    due, came = _timed(2.0, 3, 12.0 if options.quick else 40.0)
    latency = np.sort((came - due)[4:]) * 1e3
    results.row(what="single tuple, idle topology", p50_ms=float(np.median(latency)), max_ms=float(latency[-1]))
    results.bar("idle.single_tuple_ms", float(latency[-1]), "ms")


def measure_start(results: Results, options: argparse.Namespace) -> None:
    """Time to the first result of a topology of 4 workers, from nothing and with Spark already running."""
    repeats = options.repeats or (1 if options.quick else 3)
    cold = []
    for _ in range(repeats):
        begun = time.monotonic()
        run_json([sys.executable, "-m", "benchmarks.first_result"], cwd=Path(__file__).resolve().parents[1])
        cold.append(time.monotonic() - begun)
        say(f"  cold: {cold[-1]:.1f} s")
    open_session()
    warm = []
    for _ in range(repeats + 1):
        begun = time.monotonic()
        with tempfile.TemporaryDirectory() as folder, running(paced(100, 3, f"{folder}/x.npy")) as handle:
            handle.internals.server.wait(lambda: "sink" in handle.internals.bus.published(), 30)
            warm.append(time.monotonic() - begun)
        say(f"  warm: {warm[-1]:.2f} s")
    results.row(what="start to first result, 4 workers", cold_s=median(cold), warm_s=median(warm[1:]))
    results.bar("start.warm_s", median(warm[1:]), "s")
    results.bar("start.cold_s", median(cold), "s")


def measure_idle(results: Results, options: argparse.Namespace) -> None:
    """CPU of all processes while a topology of 4 workers has no input."""
    builder = TopologyBuilder()
    builder.set_spout("spout", Silent())
    for name, source in (("a", "spout"), ("b", "a0"), ("c", "b0")):
        builder.set_bolt(f"{name}0", Identity("n", int)).shuffle_grouping(source)
    share, _ = idle_share(builder.build("idle", Settings(workers=APART)), options.quick)
    results.row(what="idle, 4 workers", core_share=share)
    results.bar("idle.core_share", share, "of one core")


def idle_share(topology: Topology, quick: bool) -> tuple[float, int]:
    """The share of a core that all processes of a topology without input use, and the number of its workers."""
    with running(topology) as handle:
        time.sleep(2 if quick else 5)
        before, begun = cpu_by_process(), time.monotonic()
        time.sleep(3 if quick else 30)
        return cpu_since(before) / (time.monotonic() - begun), len(handle.internals.workers)


def measure_overload(results: Results, options: argparse.Namespace) -> None:
    """Memory and queues with a flooding spout and a sink that processes 1,000 tuples/s."""
    seconds = 15 if options.quick else 120
    builder = TopologyBuilder()
    builder.set_spout("spout", Flood())
    builder.set_bolt("null", Identity("n", int)).shuffle_grouping("spout")
    builder.set_bolt("sink", SlowSink()).shuffle_grouping("null")
    with running(builder.build("overload", Settings(workers=APART))) as handle:
        time.sleep(max(8.0, seconds / 10))  # until the buffers are full and the JVM is warm
        chosen = processes(handle)
        first = {name: process.memory_info().rss for name, process in chosen.items()}
        with console.status("overloading …"):
            time.sleep(seconds)
        last = {name: process.memory_info().rss for name, process in chosen.items()}
        queued = {view.component: view.queued for view in handle.internals.bus.view()}
    growth = {name: (last[name] - first[name]) / 1e6 for name in first}
    for name in first:
        results.row(what=f"overload: {name}", rss_mb=round(last[name] / 1e6), growth_mb=round(growth[name], 1))
    results.row(what="overload: queued at the sink", queued=queued["sink"], seconds=seconds)
    results.bar("overload.rss_growth_mb", max(growth.values()), "MB, of the process that grew most")


def _timed(rate: float, hops: int, seconds: float) -> tuple[Times, Times]:
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/latency.npy"
        with running(paced(rate, hops, path)) as handle, console.status(f"{seconds:.0f} s at {rate:g}/s …"):
            time.sleep(seconds)
            handle.kill()
        due, came = np.load(path)
    return due, came


def _alone(batch: bool) -> Topology:
    builder = TopologyBuilder()
    builder.set_spout("spout", BatchFlood() if batch else Flood())
    return builder.build("alone")
