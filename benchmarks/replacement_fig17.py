"""Lu 2020, figure 17: slowed split and count with one task each, replaced twice while the load rises. The paper's
topology was replaced at 40 s and 80 s; here the load rises about 10 s before, and the policies find that out."""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Results, say
from benchmarks.hops import APART
from benchmarks.peers.bench import build_storm
from benchmarks.persistence_topology import IntArray
from benchmarks.replacement_figures import Course, lost
from benchmarks.replacement_scaling import changes_of, rebalanced, settings_of
from benchmarks.replacement_topology import (
    COUNT,
    SLOW_KEYS,
    SPLIT,
    WORDS,
    NoteArrivals,
    PacedNumbers,
    Schedule,
    arrivals,
    key_of,
)
from penstock import (
    BasicBolt,
    Collector,
    Conf,
    Context,
    OutputDeclarer,
    Settings,
    Topology,
    TopologyBuilder,
    Tuple,
)
from penstock.spark.session import close_session
from penstock.spark.submit import submit

LOAD = Schedule(((30, 65), (40, 130), (45, 260)))
"""Lines per second. A task processes about 95, so 1, 2, 4 tasks are enough; a policy needs some 10 s. Storm is
rebalanced 10 s after a rise, at 40 and 80 s. It waits 30 s for that; a second rebalance meanwhile never ends."""
QUICK_LOAD = Schedule(((5, 65), (12, 130)))
POLICIES = ("failures", "rate")
_TAIL = 2.0  # seconds after a replacement that still belong to it
_PATIENCE = 60.0  # seconds for what still waits when the input ends
_POLL_INTERVAL = 0.1  # seconds


def measure_fig17(results: Results, options: argparse.Namespace) -> None:
    """Run each policy once, over time; in full, Storm beside it, rebalanced by a script that knows the load."""
    load = QUICK_LOAD if options.quick else LOAD
    gaps, missing, idle = [0.0], 0, 0
    for policy in POLICIES:
        say(f"  {policy}: {load.ends[-1]:g} s")
        with tempfile.TemporaryDirectory(prefix="penstock-replacement-") as root:
            course = _scales_itself(Path(root), load, policy)
        each = course.gaps(_TAIL)
        lines = round(float(load.totals[-1]))
        absent = lost(course.arrived.number, lines * WORDS)
        _report(results, policy, course, each, absent)
        gaps += each
        missing += absent
        idle += not each
    results.bar("lu17.gap_s", max(gaps), "s without output at a replacement, longest of both policies")
    results.bar("lu17.lost", missing, "words that did not arrive")
    results.bar("lu17.idle", idle, f"of {len(POLICIES)} policies without a replacement")
    if options.quick:
        return
    close_session()  # no JVM of Penstock may run while Storm is measured
    build_storm()
    with tempfile.TemporaryDirectory(prefix="penstock-replacement-") as root:
        course = rebalanced(Path(root) / "arrivals", load, None)
    each = course.gaps(40.0)
    _report(results, "storm, rebalance", course, each, lost(course.arrived.number, int(load.totals[-1]) * WORDS))
    results.bar("lu17.storm_gap_s", max(each), "s without output at a rebalance of Storm, longest")
    results.bar("lu17.vs_storm", max(gaps) / max(each), "× the longest gap of Storm")


def figure17_topology(folder: Path, load: Schedule, policy: str) -> Topology:
    """Lines → split → count → arrivals, tuple by tuple."""
    builder = TopologyBuilder()
    builder.set_spout("numbers", PacedNumbers(load, SLOW_KEYS, 0))
    builder.set_bolt("split", SlowSplit()).shuffle_grouping("numbers")
    builder.set_bolt("count", SlowCount()).fields_grouping("split", "word")
    builder.set_bolt("arrivals", NoteArrivals()).global_grouping("count")
    values: dict[str, Any] = {
        "delivery": "at_least_once",
        "delivery.state_dir": str(folder / "state"),
        "workers.refit": "off",
        **settings_of(policy),
    }
    settings = Settings(workers=APART, conf={"folder": str(folder)}).with_values(values)
    return builder.build(f"figure17-{folder.name}", settings)


class SlowSplit(BasicBolt):
    """Splits a line into ``WORDS`` words. A word's number is its line's number times that plus its position."""

    def declare_output_fields(self, declarer: OutputDeclarer) -> None:
        declarer.declare(("number", int), ("word", str), ("since", int))

    def execute(self, tup: Tuple, collector: Collector) -> None:
        time.sleep(SPLIT)
        line, _, since = tup
        numbers: IntArray = line * WORDS + np.arange(WORDS)
        for number, key in zip(numbers.tolist(), key_of(numbers, SLOW_KEYS).tolist(), strict=True):
            collector.emit([number, str(key), since])


class SlowCount(BasicBolt):
    """Counts in the task's state."""

    def declare_output_fields(self, declarer: OutputDeclarer) -> None:
        declarer.declare(("number", int), ("count", int), ("since", int))

    def prepare(self, conf: Conf, context: Context) -> None:
        self._counts = context.state.map("counts", default=0)

    def execute(self, tup: Tuple, collector: Collector) -> None:
        time.sleep(COUNT)
        number, word, since = tup
        count = self._counts[word] = self._counts[word] + 1
        collector.emit([number, count, since])


def _scales_itself(folder: Path, load: Schedule, policy: str) -> Course:
    handle: Any = submit(figure17_topology(folder, load, policy))
    replaced: list[tuple[int, Any]] = []
    words = round(float(load.totals[-1])) * WORDS
    begun, ends = time.monotonic(), float(load.ends[-1])
    failed = 0
    try:
        while True:
            for each in handle.internals.replacements[len(replaced) :]:
                replaced.append((time.time_ns() // 1000, each))
                tasks = ", ".join(f"{name} {count}" for name, count in each.parallelism.items())
                say(f"    {tasks}; spouts silent {each.gap:.3f} s, took {each.seconds:.1f} s: {each.reason}")
            passed = time.monotonic() - begun
            spout = handle.internals.bus.totals().get("numbers")
            failed = max(failed, 0 if spout is None else spout.timed_out)
            if passed > ends and (passed > ends + _PATIENCE or not lost(arrivals(folder).number, words)):
                break
            time.sleep(_POLL_INTERVAL if passed < ends else 1.0)
    finally:
        handle.kill(drain=False)
    course = Course(load, arrivals(folder), failed=failed)
    course.changes = changes_of(replaced, course.begun)
    return course


def _report(results: Results, case: str, course: Course, gaps: list[float], missing: int) -> None:
    p50, p95 = course.latency(50, 95)
    series = course.as_json()
    known = p50[~np.isnan(p50)]
    arrived = np.flatnonzero(~np.isnan(p50))
    results.curve(f"lu17.{case.partition(',')[0]}", arrived, p50[arrived])
    results.row(
        what="slow split and count",
        case=case,
        **{
            "replaced at s": " ".join(f"{change.done:.0f}" for change in course.changes),
            "tasks of split": " ".join(
                ["1", *(str(change.scale.parallelism.get("split", "")) for change in course.changes)]
            ),
            "gaps s": " ".join(f"{gap:.2f}" for gap in gaps),
            "p50 ms": float(np.median(known)) if len(known) else 0.0,
            "peak p95 s": float(np.nanmax(p95)) / 1000 if not np.isnan(p95).all() else 0.0,
            "missing": missing,
            "time-outs": course.failed,
        },
        series=series,
    )
