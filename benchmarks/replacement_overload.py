"""Replacing a topology that cannot keep up: 600 tuples per second into a bolt of which one task processes about
180. The scaling policies give it more tasks; what is measured is how long its output stops meanwhile, with both
guarantees and both policies, and whether every tuple comes out."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.book import micros
from benchmarks.harness import Results, say
from benchmarks.hops import APART
from benchmarks.persistence_topology import IntArray
from benchmarks.replacement_figures import longest_gap, lost, wrong_keys
from benchmarks.replacement_topology import (
    Arrivals,
    NoteArrivals,
    PacedNumbers,
    Schedule,
    arrivals,
    committed,
    end_input,
    total,
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
from penstock.connectors.parquet import ParquetSink
from penstock.driver.requests import Replaced
from penstock.spark.submit import submit

DELIVERIES = ("at_least_once", "exactly_once")
POLICIES = ("rate", "failures")
RATE = 600  # tuples per second
WORK = 0.005  # seconds per tuple; with what a call costs besides, a task does about 180 per second
MOST = 8  # tasks
KEYS = 10_000
_EPOCH = 2.0  # seconds between two commits
_TAIL = 2.0  # seconds after a replacement that still belong to it
_PATIENCE = 120.0  # seconds; time limit for the tuples that still wait when the input ends
_HOURS = 3 * 3600.0  # seconds of input; the runs are shorter


@dataclass(frozen=True)
class Times:
    """How long a case runs, and how fast its policy is, in seconds."""

    run: float
    interval: float
    """Length of a load sample."""
    timeout: float
    """After which a tuple has failed."""
    cool_down: float


FULL = Times(45, 4, 30, 12)
FULL_FAILURES = Times(45, 2, 10, 12)
"""With a time-out of 30 s the policy ``failures`` has nothing to decide on in the first half minute."""
QUICK = Times(12, 1, 5, 6)


def measure_overload(results: Results, options: argparse.Namespace) -> None:
    """Run each policy with each guarantee, overloaded from the beginning."""
    outcomes = []
    for policy in POLICIES:
        times = QUICK if options.quick else FULL if policy == "rate" else FULL_FAILURES
        for delivery in DELIVERIES:
            say(f"  {policy}, {delivery}: {times.run:g} s")
            with tempfile.TemporaryDirectory(prefix="penstock-replacement-") as root:
                outcome = _overloaded(Path(root), delivery, policy, times)
            _report(results, delivery, policy, outcome)
            outcomes.append(outcome)
    for name, values, unit in (
        ("silent_s", [each.silent for each in outcomes], "s in which no spout emitted, longest"),
        ("gap_s", [each.gap for each in outcomes], "s without output of the last bolt, longest"),
        ("prepare_s", [each.prepared for each in outcomes], "s from the decision to the switch, longest"),
        ("commit_gap_s", [each.commit_gap for each in outcomes], "s without a commit, longest, exactly once"),
        ("wrong", [each.missing + each.wrong for each in outcomes], "tuples lost, or keys with wrong results"),
        ("idle", [not each.replaced for each in outcomes], f"of {len(outcomes)} cases without a replacement"),
    ):
        value = sum(values) if name in ("wrong", "idle") else max(values)
        results.bar(f"replace.overload.{name}", float(value), unit)


def overloaded_topology(folder: Path, delivery: str, policy: str, times: Times) -> Topology:
    """Numbers → work, with one task that is too slow → a bolt that records arrivals in ``folder``. Exactly once,
    results also go to Parquet files, visible epoch by epoch."""
    builder = TopologyBuilder()
    builder.set_spout("numbers", PacedNumbers(Schedule(((_HOURS, RATE),)), KEYS, 0))
    builder.set_bolt("work", Work(WORK)).fields_grouping("numbers", "word")
    builder.set_bolt("arrivals", NoteArrivals()).global_grouping("work")
    if delivery == "exactly_once":
        builder.set_bolt("committed", ParquetSink(folder / "committed")).global_grouping("work")
    settings = Settings(workers=APART, conf={"folder": str(folder)}).with_values(
        {
            "delivery": delivery,
            "delivery.state_dir": str(folder / "state"),
            "delivery.epoch_interval": _EPOCH,
            "delivery.message_timeout": times.timeout,
            "scaling": policy,
            "scaling.interval": times.interval,
            "scaling.cool_down": times.cool_down,
            "scaling.most": MOST,
            "workers.refit": "off",
        }
    )
    return builder.build(f"overload-{folder.name}", settings)


class Work(BasicBolt):
    """Counts in the task's state, and takes some time for each tuple."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def declare_output_fields(self, declarer: OutputDeclarer) -> None:
        declarer.declare(("number", int), ("count", int), ("since", int))

    def prepare(self, conf: Conf, context: Context) -> None:
        self._counts = context.state.map("counts", default=0)

    def execute(self, tup: Tuple, collector: Collector) -> None:
        time.sleep(self._seconds)
        number, word, since = tup
        count = self._counts[word] = self._counts[word] + 1
        collector.emit([number, count, since])


# ---- one case ------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What one case did. Times in seconds."""

    replaced: list[Replaced]
    gaps: list[float]
    """The longest time without output in each replacement, from the decision until shortly after it."""
    gap: float
    """The longest in the whole run, from the first output to the end of the input."""
    commit_gap: float
    """The longest time without a commit; 0 at least once."""
    inputs: int
    missing: int
    doubled: int
    wrong: int
    """Keys with another count than in a sequential run; 0 at least once, where counts may be higher."""
    timed_out: int
    series: list[dict[str, float]]
    """By second: results, and the median of their latency."""

    @property
    def silent(self) -> float:
        return max((each.gap for each in self.replaced), default=0.0)

    @property
    def prepared(self) -> float:
        return max((each.seconds - each.gap for each in self.replaced), default=0.0)


def _overloaded(folder: Path, delivery: str, policy: str, times: Times) -> Outcome:
    exact = delivery == "exactly_once"
    handle: Any = submit(overloaded_topology(folder, delivery, policy, times))
    shown = 0

    def came() -> IntArray:
        return committed(folder)[0] if exact else arrivals(folder).number

    def show() -> None:
        nonlocal shown
        for each in handle.internals.replacements[shown:]:
            shown += 1
            tasks = each.parallelism["work"]
            say(f"    {tasks} tasks; spouts silent {each.gap:.3f} s, took {each.seconds:.1f} s: {each.reason}")

    try:
        ends = time.monotonic() + times.run
        while time.monotonic() < ends:
            show()
            time.sleep(0.1)
        ended = micros()
        end_input(folder)
        deadline = time.monotonic() + _PATIENCE
        while time.monotonic() < deadline and (total(folder) is None or lost(came(), total(folder) or 0)):
            show()
            time.sleep(0.3)
        replaced = list(handle.internals.replacements)
        timed_out = handle.internals.bus.totals()["numbers"].timed_out
        handle.kill()
    finally:
        handle.kill(drain=False)
    inputs = total(folder) or 0
    seen = arrivals(folder)
    offset = micros() - time.monotonic() * 1e6
    windows = [
        (int((each.time - each.seconds) * 1e6 + offset), int((each.time + _TAIL) * 1e6 + offset))
        for each in replaced
    ]
    numbers, counts = committed(folder) if exact else (seen.number, seen.count)
    missing = lost(numbers, inputs)
    return Outcome(
        replaced,
        [longest_gap(seen.came, begin, min(end, ended)) for begin, end in windows if begin < ended],
        longest_gap(seen.came, int(seen.came.min()), ended) if len(seen) else times.run,
        _longest_commit_gap(folder, ended) if exact else 0.0,
        inputs,
        missing,
        len(numbers) - (inputs - missing),
        wrong_keys(numbers, counts, inputs, KEYS) if exact else 0,
        timed_out,
        _by_second(seen),
    )


def _longest_commit_gap(folder: Path, ended: int) -> float:
    """A commit renames files, which sets their ctime. From the first commit to the end of the input."""
    times = np.array(sorted(path.stat().st_ctime_ns // 1000 for path in (folder / "committed").glob("*.parquet")))
    return longest_gap(times, int(times[0]), ended) if len(times) else 0.0


def _by_second(seen: Arrivals) -> list[dict[str, float]]:
    if not len(seen):
        return []
    begun = int(seen.since.min())
    seconds = (seen.came - begun) // 1_000_000
    found = []
    for second in range(int(seconds.max()) + 1):
        late = (seen.came - seen.since)[seconds == second]
        found.append(
            {
                "second": second,
                "results": len(late),
                **({"p50 s": round(float(np.median(late)) / 1e6, 3)} if len(late) else {}),
            }
        )
    return found


def _report(results: Results, delivery: str, policy: str, outcome: Outcome) -> None:
    def listed(values: Sequence[float]) -> str:
        return " ".join(f"{value:.2f}" for value in values)

    row: dict[str, Any] = {
        "what": f"{RATE} tuples/s, {WORK * 1000:g} ms each",
        "policy": policy,
        "case": delivery.replace("_", " "),
        "tasks": " ".join(["1", *(str(each.parallelism["work"]) for each in outcome.replaced)]),
        "silent s": listed([each.gap for each in outcome.replaced]),
        "prepare s": listed([each.seconds - each.gap for each in outcome.replaced]),
        "gap s": listed(outcome.gaps),
        "longest gap s": outcome.gap,
        "commit gap s": outcome.commit_gap,
        "inputs": outcome.inputs,
        "missing": outcome.missing,
        "doubled": outcome.doubled,
        "keys wrong": outcome.wrong,
        "timed out": outcome.timed_out,
    }
    results.row(**row, series=outcome.series, steps=[dict(each.steps) for each in outcome.replaced])
