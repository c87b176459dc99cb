"""The delayed persistent queue: latency and memory with a slow store (*Lu 2020*, section 6.3), losses at a kill,
rows per second into each store, and throughput of the queues."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import psutil

from benchmarks.book import micros
from benchmarks.harness import Results, median, run_parts, say
from benchmarks.persistence_bulk import measure_queues, measure_stores, queue_servers
from benchmarks.persistence_topology import (
    WORDS,
    IntArray,
    acked,
    rows_stored,
    stored,
    times,
    times_stored,
    words_to_store,
)
from penstock.clock import SystemClock
from penstock.driver.handle import RunningTopology
from penstock.persist.processor import drained
from penstock.persist.queues import PersistentQueue
from penstock.persist.spec import find
from penstock.spark.submit import submit

PARTS = ("sleep", "memory", "kill", "stores", "queues")
RATE = 2_000  # results per second
MEMORY_RATE = 20_000  # results per second, so that memory runs out within a minute
_MAIN = ("delayed", "instant", "direct", "inner")
"""Those of the figure. Queues in other stores run for a shorter time."""
_OTHER_SECONDS = 12
HOPELESS = ("direct", "inner")
"""Cases whose results would take an hour to reach the store."""
_PATIENCE = 60.0  # seconds; time limit for everything that should take a moment
_SPEAK = 30  # seconds between two lines of progress

Floats = npt.NDArray[np.float64]


def main(options: argparse.Namespace) -> int:
    """``penstock bench persistence``"""
    measures = (measure_sleep, measure_memory, measure_kill, measure_stores, measure_queues)
    return run_parts("persistence", dict(zip(PARTS, measures, strict=True)), options)


# ---- a store that sleeps -------------------------------------------------------------------------------


@dataclass
class Course:
    """Measurements of one case over time."""

    seconds: Floats = field(default_factory=lambda: np.empty(0))
    """Seconds since the measurement began in which results were persisted."""
    p50: Floats = field(default_factory=lambda: np.empty(0))
    """ms from when a result's line was due until it was persisted, for the results of that second."""
    p95: Floats = field(default_factory=lambda: np.empty(0))
    in_store: Floats = field(default_factory=lambda: np.empty(0))
    """ms until a result was in the store: p95 of those that arrived there in a second."""
    points: list[dict[str, float]] = field(default_factory=list)
    """About once a second: seconds, MB of the worker and of the processor, rows that are not in the store."""

    def series(self, name: str) -> tuple[Floats, Floats]:
        return np.array([point["seconds"] for point in self.points]), np.array([p[name] for p in self.points])


def measure_sleep(results: Results, options: argparse.Namespace) -> None:
    """2,000 results per second into a store that takes 50 ms per write. ``delayed`` and ``instant`` take turns,
    for their ratio; then every case alone, over time."""
    warm_up, seconds = (3, 12) if options.quick else (6, 40)
    with tempfile.TemporaryDirectory(prefix="penstock-persistence-") as root:
        p95s = _by_turns(Path(root), options)
        courses: dict[str, Course] = {}
        with contextlib.ExitStack() as servers:
            others = {} if options.quick else servers.enter_context(queue_servers())
            queues: dict[str, PersistentQueue | None] = dict.fromkeys(_MAIN)
            queues |= {f"delayed {name.lower()}": queue for name, queue in others.items()}
            for case, mrwq in queues.items():
                folder = Path(root) / case.replace(" ", "-")
                lasts = seconds if case in _MAIN else min(seconds, _OTHER_SECONDS)
                courses[case], wrong = _alone(case, folder, mrwq, warm_up, lasts)
                _row(results, case, courses[case], wrong)
                results.curve(f"{case}.p50", courses[case].seconds, courses[case].p50)
                results.curve(f"{case}.p95", courses[case].seconds, courses[case].p95)
                results.curve(f"{case}.waiting", *courses[case].series("waiting"))
                results.curve(f"{case}.worker MB", *courses[case].series("worker MB"))
                if case == "delayed":
                    results.bar(
                        "delayed.rows_wrong", wrong, "results missing or duplicated in the store at the end"
                    )
    ratio = median([ours / theirs for ours, theirs in zip(p95s["delayed"], p95s["instant"], strict=True)])
    turns = {case: " ".join(f"{value:.1f}" for value in values) for case, values in p95s.items()}
    results.row(
        what="by turns", case="delayed", **{"p95 ms": median(p95s["delayed"]), "×": ratio}, turns=turns["delayed"]
    )
    results.row(what="by turns", case="instant", **{"p95 ms": median(p95s["instant"])}, turns=turns["instant"])
    results.bar("delayed.p95_vs_instant", ratio, "× the p95 with a fast store")
    for case in ("delayed", "direct"):
        results.bar(f"{case}.p95_slope", rise(courses[case]), "% a minute")
    for bar, case in (("lu16.flat", "delayed"), ("lu16.direct", "direct")):
        results.bar(bar, last_to_first(courses[case].p50), f"× p50 of the last third to the first, {case}")
    results.bar("direct.p95_growth", growth(courses["direct"].p95), "× the first p95, at the end")
    for case in ("delayed", "inner"):
        results.bar(f"{case}.worker_growth", slope(*courses[case].series("worker MB")) * 60, "MB a minute")
    draw(courses, Path(options.json).parent if options.json else Path("results"))


def _by_turns(root: Path, options: argparse.Namespace) -> dict[str, list[float]]:
    """p95 of each turn in ms. Both topologies run all the time and one is active, so that disturbances of the
    machine affect both."""
    settle, seconds = (1.0, 5.0) if options.quick else (2.0, 10.0)
    turns = options.repeats or (2 if options.quick else 12)
    p95s: dict[str, list[float]] = {"delayed": [], "instant": []}
    folders = {case: _made(root / f"turns-{case}") for case in p95s}
    handles: dict[str, RunningTopology] = {}
    try:
        for case, folder in folders.items():
            handles[case] = submit(words_to_store(case, folder, RATE))
            handles[case].deactivate()
        for turn in range(turns + 1):
            for case in list(p95s) if turn % 2 else reversed(list(p95s)):
                value = _turn(handles[case], folders[case], settle, seconds)
                if turn:  # during the first turn the JVM still compiles
                    p95s[case].append(value)
            if turn:
                say(f"  turn {turn} of {turns}: " + ", ".join(f"{c} p95 {v[-1]:.1f} ms" for c, v in p95s.items()))
    finally:
        for handle in handles.values():
            handle.kill(drain=False)
    return p95s


def _turn(handle: RunningTopology, folder: Path, settle: float, seconds: float) -> float:
    handle.activate()
    time.sleep(settle)
    begun = micros()
    time.sleep(seconds)
    ended = micros()
    handle.deactivate()
    handle.drain(_PATIENCE)
    since, came = times(folder)
    chosen = (came >= begun) & (came < ended)
    return float(np.percentile((came - since)[chosen], 95)) / 1000


def _alone(
    case: str, folder: Path, mrwq: PersistentQueue | None, warm_up: float, seconds: float
) -> tuple[Course, int]:
    """Run a case. Returns its course, and how many acked results are missing from the store or duplicated
    there."""
    course = Course()
    say(f"  {case}: {warm_up + seconds:g} s")
    handle = submit(words_to_store(case, _made(folder), RATE, mrwq))
    try:
        time.sleep(warm_up)
        begun, start = micros(), time.monotonic()
        while (elapsed := time.monotonic() - start) < seconds:
            course.points.append({"seconds": elapsed, **_look(handle, folder)})
            if len(course.points) % _SPEAK == 0:
                say(
                    f"    {elapsed:.0f} s: " + ", ".join(f"{k} {v:,.0f}" for k, v in _look(handle, folder).items())
                )
            time.sleep(max(0.0, start + len(course.points) - time.monotonic()))
        ended = micros()
        if case not in HOPELESS:
            handle.deactivate()
            handle.drain(_PATIENCE)
    finally:
        handle.kill(drain=False)
    _empty_queue(handle, folder)
    course.seconds, (course.p50, course.p95) = by_second(*times(folder), begun, ended, (50, 95))
    _, (course.in_store,) = by_second(*times_stored(folder), begun, ended, (95,))
    return course, wrong_results(acked(folder), stored(folder))


def _look(handle: RunningTopology, folder: Path) -> dict[str, float]:
    worker = psutil.Process(_persist_pid(handle))
    found = {"worker MB": worker.memory_info().rss / 2**20, "processor MB": 0.0}
    for child in worker.children():
        with contextlib.suppress(psutil.Error):  # the process may just have ended
            if "penstock.persist.process" in child.cmdline():
                found["processor MB"] = child.memory_info().rss / 2**20
    emitted = handle.internals.bus.totals()["count"].emitted  # as last reported: the store may be ahead of it
    found["waiting"] = float(max(0, emitted - rows_stored(folder)))
    return found


def _persist_pid(handle: RunningTopology) -> int:
    (task,) = handle.internals.plan.tasks_of["persist"]
    return int(handle.internals.workers[handle.internals.plan.routes.worker_of[task]].hello.pid)


def _row(results: Results, case: str, course: Course, wrong: int) -> None:
    results.row(
        what=f"{RATE:,} results/s",
        case=case,
        **{
            "p50 ms": median(list(course.p50)),
            "p95 ms": median(list(course.p95)),
            "p95 %/min": rise(course),
            "in store p95 ms": median(list(course.in_store)),
            "MB": course.points[-1]["worker MB"],
            "MB/min": slope(*course.series("worker MB")) * 60,
            "waiting": int(course.points[-1]["waiting"]),
        },
        **({} if case in HOPELESS else {"wrong": wrong}),
    )


# ---- memory --------------------------------------------------------------------------------------------


@dataclass
class Pressed:
    """A case whose process may not use much memory, over time."""

    seconds: Floats
    megabytes: Floats
    """Of the worker with the persist bolt; 0 while there is none."""
    deaths: int
    acked: int
    """Results that were acked: before the last death if there was one, else in all."""
    lost: int
    """Those of them that are not in the store at the end."""


def measure_memory(results: Results, options: argparse.Namespace) -> None:
    """20,000 results per second into the same store, and little memory for the process of the persist bolt
    (*Lu 2020*, figure 10): it is killed when it exceeds that."""
    room, seconds = (50, 25) if options.quick else (80, 40)
    found: dict[str, Pressed] = {}
    for case in ("inner", "delayed"):
        with tempfile.TemporaryDirectory(prefix="penstock-persistence-") as root:
            found[case] = pressed = _pressed(case, Path(root), seconds, room)
        peak = float(pressed.megabytes.max())
        results.row(
            what=f"{MEMORY_RATE:,} results/s",
            case=case,
            **{"peak MB": peak, "deaths": pressed.deaths, "acked": pressed.acked, "lost": pressed.lost},
        )
        results.curve(f"memory.{case}.worker MB", pressed.seconds, pressed.megabytes)
        results.bar(
            f"lu10.{case}.lost", pressed.lost, f"of {pressed.acked:,} acked results, {pressed.deaths} deaths"
        )
    peaks = {case: float(pressed.megabytes.max()) for case, pressed in found.items()}
    text = f"× the most memory of the delayed queue's worker; {room} MB of growth end a process"
    results.bar("lu10.memory_ratio", peaks["inner"] / peaks["delayed"], text)


def _pressed(case: str, folder: Path, seconds: float, room: float) -> Pressed:
    say(f"  {case}: {seconds:g} s with {room:g} MB of room")
    handle = submit(words_to_store(case, _made(folder / case), MEMORY_RATE, room_mb=room))
    folder = folder / case
    points: list[tuple[float, float]] = []
    first = deaths = handle.internals.restarts
    before = known = acked(folder)
    begun = time.monotonic()
    try:
        while (elapsed := time.monotonic() - begun) < seconds:
            megabytes = 0.0
            with contextlib.suppress(KeyError, psutil.Error):  # the worker is being replaced
                megabytes = psutil.Process(_persist_pid(handle)).memory_info().rss / 2**20
            points.append((elapsed, megabytes))
            if handle.internals.restarts > deaths:
                deaths, before = handle.internals.restarts, known
            known = acked(folder)
            time.sleep(max(0.0, begun + len(points) * 0.5 - time.monotonic()))
        if deaths == first:
            handle.deactivate()
            handle.drain(_PATIENCE)
            before = acked(folder)
    finally:
        handle.kill(drain=False)
    if case not in HOPELESS:
        _empty_queue(handle, folder)
    wanted = results_of(before)
    at, megabytes_at = (np.array(values) for values in zip(*points, strict=True))
    return Pressed(at, megabytes_at, deaths - first, len(wanted), len(np.setdiff1d(wanted, stored(folder))))


# ---- kill -9 -------------------------------------------------------------------------------------------


def measure_kill(results: Results, options: argparse.Namespace) -> None:
    """Kill the worker with the persist bolt under load, and count acked results that never reach the store."""
    seconds = 5 if options.quick else 20
    kills = options.repeats or (1 if options.quick else 3)
    for case in ("delayed", "inner"):
        before, lost = 0, 0
        for number in range(kills):
            with tempfile.TemporaryDirectory(prefix="penstock-persistence-") as root:
                mine, gone = _killed(case, Path(root), seconds)
            say(f"  kill {number + 1}: {case} lost {gone:,} of {mine:,} acked results")
            before, lost = before + mine, lost + gone
        results.row(what=f"{kills} × kill -9", case=case, acked=before, lost=lost)
        results.bar(f"{case}.lost", lost, f"of {before:,} results acked before {kills} kills")


def _killed(case: str, folder: Path, seconds: float) -> tuple[int, int]:
    """Results acked before the kill, and those of them that are not in the store at the end."""
    handle = submit(words_to_store(case, folder, RATE))
    try:
        time.sleep(seconds)
        before = acked(folder)
        restarts = handle.internals.restarts
        os.kill(_persist_pid(handle), signal.SIGKILL)
        up = handle.internals.server.wait(
            lambda: handle.internals.restarts > restarts and handle.state == "active", _PATIENCE
        )
        if not up:
            raise SystemExit(f"{case}: the topology did not restart within {_PATIENCE:g} s")
        time.sleep(seconds / 2)
        handle.deactivate()
        handle.drain(_PATIENCE)
    finally:
        handle.kill(drain=False)
    _empty_queue(handle, folder)
    wanted = results_of(before)
    return len(wanted), len(np.setdiff1d(wanted, stored(folder)))


# ---- figures out of numbers ----------------------------------------------------------------------------


def by_second(
    since: IntArray, came: IntArray, begun: int, ended: int, percents: tuple[int, ...]
) -> tuple[Floats, list[Floats]]:
    """Percentiles in ms of what arrived in each whole second from ``begun`` to ``ended``, without empty
    seconds."""
    chosen = (came >= begun) & (came < ended)
    seconds, waited = (came[chosen] - begun) // 1_000_000, (came - since)[chosen] / 1000
    kept = [second for second in range((ended - begun) // 1_000_000) if (seconds == second).any()]
    found = [np.array([np.percentile(waited[seconds == second], p) for second in kept]) for p in percents]
    return np.array(kept, float), found


def slope(x: Floats, y: Floats) -> float:
    """Slope of y over x: the median over all pairs (Theil-Sen), which outliers do not affect."""
    i, j = np.triu_indices(len(x), 1)
    return float(np.median((y[j] - y[i]) / (x[j] - x[i]))) if len(i) else 0.0


def rise(course: Course) -> float:
    """Growth of the p95 per minute, in % of its median."""
    return slope(course.seconds, course.p95) * 60 / median(list(course.p95)) * 100


def last_to_first(values: Floats) -> float:
    """Ratio of the median of the last third to that of the first."""
    third = max(1, len(values) // 3)
    return float(np.median(values[-third:]) / np.median(values[:third]))


def growth(values: Floats) -> float:
    """Ratio of the last tenth to the first."""
    tenth = max(1, len(values) // 10)
    return float(np.median(values[-tenth:]) / np.median(values[:tenth]))


def results_of(lines: IntArray) -> IntArray:
    """The numbers of the results of these lines."""
    return (np.unique(lines)[:, None] * WORDS + np.arange(WORDS)).ravel()


def wrong_results(lines: IntArray, rows: IntArray) -> int:
    """Number of results of these lines that the rows lack, and of rows that are duplicates."""
    wanted = results_of(lines)
    return len(np.setdiff1d(wanted, rows)) + len(rows) - len(np.intersect1d(wanted, rows))


def draw(courses: Mapping[str, Course], folder: Path) -> None:
    """Draw latency over time (*Lu 2020*, figure 16), memory and backlog."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    panel = figure.subplots()
    for case, course in courses.items():
        (line,) = panel.plot(course.seconds, course.p95, label=f"{case}, p95")
        panel.plot(course.seconds, course.p50, color=line.get_color(), alpha=0.4, linestyle=":")
    panel.set(yscale="log", xlabel="s", ylabel="ms until persisted (dotted: p50)")
    panel.set_title(f"{RATE:,} results/s into a store that takes 50 ms for a write")
    panel.grid(alpha=0.3)
    panel.legend()
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / "persistence-latency.png", dpi=120)

    figure = Figure(figsize=(12, 4), layout="constrained")
    names = {"worker MB": "worker, MB", "processor MB": "processor, MB", "waiting": "results not in the store"}
    for panel, (name, title) in zip(figure.subplots(1, 3), names.items(), strict=True):
        for case, course in courses.items():
            if name != "processor MB" or course.series(name)[1].any():
                panel.plot(*course.series(name), label=case)
        panel.set(xlabel="s", title=title, ylim=(0, None))
        panel.grid(alpha=0.3)
        if panel.lines:
            panel.legend()
    figure.savefig(folder / "persistence-memory.png", dpi=120)


def _empty_queue(handle: RunningTopology, folder: Path) -> None:
    """Do what ``penstock drain`` does, because on a busy machine the topology may end before its queue is
    empty."""
    clock = SystemClock()
    for spec in find(str(folder / "state"), handle.internals.topology.name):
        processor = spec.processor(clock)
        if not drained(processor, clock.monotonic() + _PATIENCE, clock, time.sleep):
            raise SystemExit(f"results remain in the queue: {processor.status.trouble}")
        processor.close()


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder
