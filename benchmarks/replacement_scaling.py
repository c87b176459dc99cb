"""The scaling experiment of *Lu 2020*, section 6.4: slowed split and count with one task each, and a load that
rises in steps and falls again. Penstock scales itself, by timeouts or by rates; Storm is rebalanced by a script
that knows the load."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.book import micros
from benchmarks.harness import Results, median, say
from benchmarks.peers.bench import build_storm, run_storm_rebalance
from benchmarks.replacement_figures import Course, draw, right_changes, rises
from benchmarks.replacement_topology import COUNT, SPLIT, WORDS, Schedule, arrivals, slow_word_count
from benchmarks.scaling_sim import COOL_DOWN
from penstock.control.scaling import Scale
from penstock.sim.scaling import WORDS as SIMULATED
from penstock.sim.scaling import ScalingChange
from penstock.spark.session import close_session
from penstock.spark.submit import submit

LOAD = Schedule(((30, 65), (60, 130), (60, 260), (60, 130), (60, 65)))
"""Lines per second. One task processes 100, so 1, 2, 4, 2, 1 tasks are enough, each busy about 65 % of its
time."""
QUICK_LOAD = Schedule(((10, 65), (30, 130), (20, 65)))
POLICIES = ("failures", "rate")
STORM: dict[str, int | None] = {"storm, wait 1 s": 1, "storm, default wait": None}
"""Seconds that a rebalance waits before the stop. Storm's default is the message timeout, 30 s; *Lu 2020* measured
stops of 22 s."""
NOTICED = 5.0  # seconds after a change of the load until Storm is rebalanced: about when ``rate`` decides
MOST = 8  # tasks of a bolt
TIME_OUT = 5.0  # seconds, as in the simulation
PENDING = 2_000  # lines, as in the simulation: they wait 20 s for one task, so with too few tasks lines time out
_TAIL = 2.0  # seconds after a replacement that still belong to it
_STORM_TAIL = 20.0  # seconds, the same after Storm's wait: the workers stop and start
_TIME_OUT_STORM = 30.0  # seconds, Storm's default
_LATE = 10  # seconds after the end of the input for late results
_POLL_INTERVAL = 0.1  # seconds


def measure_scaling(results: Results, options: argparse.Namespace) -> None:
    """Run each policy and each way to rebalance once, over time."""
    load = QUICK_LOAD if options.quick else LOAD
    folder = Path(options.json).parent if options.json else Path("results")
    courses: dict[str, Course] = {}
    for policy in POLICIES:
        say(f"  {policy}: {load.ends[-1]:g} s")
        with tempfile.TemporaryDirectory(prefix="penstock-replacement-") as root:
            courses[policy] = _scales_itself(Path(root), load, policy)
        _report(results, policy, courses[policy])
    close_session()  # no JVM of Penstock may run while Storm is measured
    build_storm()
    for case, wait in list(STORM.items())[: 1 if options.quick else None]:
        say(f"  {case}: {load.ends[-1]:g} s")
        with tempfile.TemporaryDirectory(prefix="penstock-replacement-") as root:
            courses[case] = rebalanced(Path(root) / "arrivals", load, wait)
        _report_storm(results, case, courses[case], _STORM_TAIL + (_TIME_OUT_STORM if wait is None else wait))
    draw(courses, folder / "replacement-scaling.png")
    series = {case: course.as_json() for case, course in courses.items()}
    (folder / "replacement-scaling.json").write_text(json.dumps(series))


# ---- Penstock ------------------------------------------------------------------------------------------


def settings_of(policy: str) -> dict[str, Any]:
    """The policy with the values of the simulation, so that both can be compared."""
    interval = SIMULATED.sample_interval
    return {
        "scaling": policy,
        "scaling.interval": interval,
        "scaling.cool_down": COOL_DOWN
        if policy == "rate"
        else 6 * interval,  # ``failures`` looks at six load samples
        "scaling.most": MOST,
        "delivery.message_timeout": TIME_OUT,
        "delivery.max_spout_pending": PENDING,
    }


def _scales_itself(folder: Path, load: Schedule, policy: str) -> Course:
    handle: Any = submit(slow_word_count(folder, load, settings_of(policy)))
    failures = _Failures()
    replaced: list[tuple[int, Any]] = []
    ends = time.monotonic() + float(load.ends[-1]) + _LATE
    try:
        while time.monotonic() < ends:
            for each in handle.internals.replacements[len(replaced) :]:
                replaced.append((micros(), each))
                tasks = ", ".join(f"{name} {count}" for name, count in each.parallelism.items())
                say(f"    {tasks}; spouts silent {each.gap:.3f} s, took {each.seconds:.1f} s: {each.reason}")
            failures.update(handle.internals.bus)
            time.sleep(_POLL_INTERVAL)
    finally:
        handle.kill(drain=False)
    course = Course(load, arrivals(folder), failed=failures.total)
    course.changes = changes_of(replaced, course.begun)
    return course


def changes_of(replaced: Sequence[tuple[int, Any]], begun: int) -> list[ScalingChange]:
    """The replacements in seconds since the load began."""
    found = []
    for seen, each in replaced:
        done = (seen - begun) / 1e6
        found.append(ScalingChange(done - each.seconds, done, Scale(each.parallelism, each.reason)))
    return found


class _Failures:
    """Timeouts counted by all buses of a topology: each replacement creates a new bus."""

    def __init__(self) -> None:
        self._before, self._now = 0, 0
        self._bus: Any = None

    def update(self, bus: Any) -> None:
        if bus is not self._bus:
            self._before, self._now, self._bus = self.total, 0, bus
        spout = bus.totals().get("numbers")
        if spout is not None:
            self._now = max(self._now, spout.failed)

    @property
    def total(self) -> int:
        return self._before + self._now


def _report(results: Results, policy: str, course: Course) -> None:
    gaps, outcome, phases = course.gaps(_TAIL), course.outcome, range(len(course.schedule.steps))
    up = rises(course.schedule)
    overshoot = max(outcome.overshoot(phase) for phase in up)
    settled = [outcome.settled(phase) for phase in up]
    results.row(
        what="slow split and count",
        case=policy,
        **_latencies(course),
        **{
            "longest gap at a replacement s": max(gaps, default=0.0),
            "longest gap s": course.longest_gap(),
            "steps by phase": " ".join(str(outcome.steps(phase)) for phase in phases),
            "overshoot": overshoot,
            "at rest after s": " ".join("never" if each is None else f"{each:.0f}" for each in settled),
            "time-outs": course.failed,
        },
    )
    most = max(outcome.steps(phase) for phase in up)
    results.bar(f"replace.{policy}.steps", most, "replacements after one increase of the load, at most")
    results.bar(f"replace.{policy}.overshoot", overshoot, "× the tasks needed")
    results.bar(f"replace.{policy}.gap_s", max(gaps, default=0.0), "s without output at a replacement, longest")


# ---- Storm ---------------------------------------------------------------------------------------------


def rebalanced(out: Path, load: Schedule, wait: int | None) -> Course:
    wanted = right_changes(load, NOTICED)
    text = ",".join(f"{change.decided:g}:{max(change.scale.parallelism.values())}" for change in wanted)
    more = {"words": WORDS, "split-ms": SPLIT * 1000, "count-ms": COUNT * 1000, "tasks": MOST, "tail": _LATE}
    told = run_storm_rebalance(load.text, text, out, wait, **{"max-pending": PENDING, **more})
    course = Course(load, arrivals(out), failed=told["failed"])
    for change, done in zip(wanted, told["changes"], strict=True):
        at = (done["at"] - course.begun) / 1e6
        waited = _TIME_OUT_STORM if wait is None else float(wait)
        course.changes.append(replace(change, decided=at, done=at + waited))
    return course


def _report_storm(results: Results, case: str, course: Course, tail: float) -> None:
    gaps = course.gaps(tail)
    results.row(
        what="slow split and count",
        case=case,
        **_latencies(course),
        **{"longest gap at a replacement s": max(gaps), "longest gap s": course.longest_gap()},
        turns=" ".join(f"{gap:.1f}" for gap in gaps),
        **{"time-outs": course.failed},
    )
    name = "replace.storm_default_gap_s" if "default" in case else "replace.storm_gap_s"
    results.bar(name, max(gaps), "s without output at a rebalance, longest")


def _latencies(course: Course) -> dict[str, float]:
    p50, p95 = (values[values == values] for values in course.latency(50, 95))  # without the nan
    return {"p50 ms": median(list(p50)), "p95 ms": median(list(p95)), "peak p95 s": float(p95.max()) / 1000}
