"""Task state: the cost of an incremental snapshot compared with a full one, and of a map compared with a dict."""

from __future__ import annotations

import argparse
import gc
import random
import tempfile
import time
from collections.abc import MutableMapping, Sequence
from typing import Any

import pyarrow as pa

from benchmarks.harness import Results, machine, median, say
from penstock.state.snapshots import SnapshotWriter, read_parts, snapshot_name
from penstock.state.store import StateStore
from penstock.state.values import TaskState

PARTS = ("incremental", "increment")
TASK = "count/0"


def main(options: argparse.Namespace) -> int:
    """``penstock bench state``"""
    results = Results("state")
    chosen = options.only or PARTS
    machine()
    for part in PARTS:
        if part in chosen:
            say(f"[{part}]")
            globals()[f"measure_{part}"](results, options)
    return results.finish(options)


def measure_incremental(results: Results, options: argparse.Namespace) -> None:
    """A full snapshot of a million counts on local disk compared with one of the 1 % that changed."""
    keys = 1_000_000
    repeats = options.repeats or (3 if options.quick else 7)
    state, chance = TaskState(), random.Random(1)
    counts = state.map("counts", default=0)
    words = [f"word-{number}" for number in range(keys)]
    counts.update(dict.fromkeys(words, 1))
    full, delta = [], []
    with tempfile.TemporaryDirectory() as folder:
        store = StateStore(folder)
        writer = SnapshotWriter(store)
        for repeat in range(repeats):
            full.append(_snapshot(state, writer, 2 * repeat, full=True))
            for word in chance.sample(words, keys // 100):
                counts[word] += 1
            delta.append(_snapshot(state, writer, 2 * repeat + 1, full=False))
            say(f"  full {full[-1]['seconds']:.3f} s, 1 % {delta[-1]['seconds']:.4f} s")
        chains = writer.write("nothing new", {TASK: state.snapshot()})
        begun = time.perf_counter()
        again = TaskState()
        again.restore(read_parts(store, chains)[TASK])
        restored = again.map("counts")
        restore = time.perf_counter() - begun
    if restored != counts:
        raise SystemExit("the restored state differs from the original")
    medians = {}
    for what, runs in (("full", full), ("1 % changed", delta)):
        medians[what] = {name: median([run[name] for run in runs]) for name in runs[0]}
        results.row(
            what=f"snapshot of {keys:,} keys, {what}",
            mb=medians[what]["bytes"] / 1e6,
            seconds=medians[what]["seconds"],
            pause_ms=medians[what]["pause"] * 1e3,
            repeats=repeats,
        )
    results.row(what=f"restore of {keys:,} keys, full and 1 %", seconds=restore)
    for name in ("bytes", "seconds"):
        ratio = medians["1 % changed"][name] / medians["full"][name]
        results.bar(f"state.incremental.{name}_ratio", ratio, "of a full snapshot")


def measure_increment(results: Results, options: argparse.Namespace) -> None:
    """Nanoseconds per ``counts[word] += 1``, with a snapshot after each pass, so that changes are tracked."""
    repeats = options.repeats or (5 if options.quick else 15)
    chance = random.Random(1)
    words = [f"word-{number}" for number in range(10_000)]
    # As in a text, few words make up most of it.
    stream = [words[min(int(chance.paretovariate(0.6)) - 1, len(words) - 1)] for _ in range(300_000)]
    state, plain = TaskState(), dict.fromkeys(words, 0)
    counts, columns = state.map("counts", default=0), state.map("columns", default=0)
    counts.update(plain)
    columns.update(plain)
    batches = [pa.array(stream[start : start + 4096]) for start in range(0, len(stream), 4096)]
    times: dict[str, list[float]] = {"dict": [], "MapState": [], "add_columns, batches of 4,096": []}
    for _ in range(repeats):
        times["dict"].append(_increment(plain, stream))
        times["MapState"].append(_increment(counts, stream))
        begun = time.perf_counter()
        for batch in batches:
            columns.add_columns(batch)
        times["add_columns, batches of 4,096"].append((time.perf_counter() - begun) / len(stream))
        state.snapshot()
    if not (dict(counts) == plain == dict(columns)):
        raise SystemExit("the three counts differ")
    base = median(times["dict"])
    for what, seconds in times.items():
        nanoseconds = median(seconds) * 1e9
        results.row(what=f"one count up, {what}", ns=nanoseconds, against_dict=median(seconds) / base)


def _snapshot(state: TaskState, writer: SnapshotWriter, epoch: int, full: bool) -> dict[str, float]:
    gc.collect()
    begun = time.perf_counter()
    snapshot = state.snapshot(full)
    paused = time.perf_counter()
    chains = writer.write(snapshot_name(epoch, 1, 0, 0), {TASK: snapshot})
    ended = time.perf_counter()
    part = chains[TASK]["counts"][-1]
    if part.kind != ("full" if full else "delta"):
        raise SystemExit(f"a {part.kind} part was written")
    return {"bytes": part.length, "seconds": ended - begun, "pause": paused - begun}


def _increment(counts: MutableMapping[Any, int], stream: Sequence[str]) -> float:
    begun = time.perf_counter()
    for word in stream:
        counts[word] += 1
    return (time.perf_counter() - begun) / len(stream)
