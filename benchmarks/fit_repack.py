"""Packing a running topology anew, exactly once and under load: ten times by hand, and by the policy, while the
load moves from one bolt to another. Every input must be counted exactly once, and results must keep coming."""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from benchmarks.book import micros
from benchmarks.harness import Results, median, say
from benchmarks.replacement import FEW_KEYS, HOURS, RATE, changed_to_the_end
from benchmarks.replacement_figures import longest_gap, lost, wrong_keys
from benchmarks.replacement_topology import CountNumbers, NoteArrivals, PacedNumbers, Schedule, arrivals
from benchmarks.turns import spread
from penstock import (
    BatchBolt,
    BatchCollector,
    Conf,
    Context,
    OutputDeclarer,
    Settings,
    Source,
    Topology,
    TopologyBuilder,
)
from penstock.connectors.parquet import ParquetSink
from penstock.driver.handle import RunningTopology
from penstock.driver.requests import Replaced

WORKERS = (1, 2, 7, 2)
"""Numbers of workers by turns; with 7 each executor has its own."""
LIGHT, HEAVY = 60e-6, 130e-6  # CPU seconds per tuple: 18 and 39 % of a core
PERIOD = 20.0  # seconds after which the load moves
NOTICED = 6.0  # seconds for which the policy must see the same load
_LATE = 1.0  # seconds after a change that still belong to it: backlog, cold code
_POLL_INTERVAL = 0.05  # seconds


@dataclass(frozen=True)
class Change:
    """One change of the packing, in microseconds since 1970."""

    begin: int
    end: int
    """When the spouts of the new form were activated."""
    silent: float
    """Seconds in which no spout was active, as the replacement reports it."""


def measure_repack(results: Results, options: argparse.Namespace) -> None:
    """Part of ``penstock bench fit``."""
    changes = options.repeats or (3 if options.quick else 10)
    found = {case: _run(case, changes) for case in ("by hand", "by policy")}
    for case, run in found.items():
        results.row(
            what="packed anew, exactly once",
            case=case,
            changes=len(run.gaps),
            inputs=run.inputs,
            missing=run.missing,
            **{
                "keys wrong": run.wrong,
                "gap s": median(run.gaps or [0.0]),
                "longest gap s": max(run.gaps, default=0.0),
                "spouts silent s": median(run.silent or [0.0]),
            },
            gaps=spread(run.gaps, "{:.3f}".format),
        )
    wrong = sum(run.missing + run.wrong for run in found.values())
    results.bar("fit.wrong", wrong, "missing inputs and keys with a wrong count")
    gaps = [gap for run in found.values() for gap in run.gaps]
    results.bar("fit.gap_s", max(gaps, default=0.0), "s without output at a change, longest")


@dataclass(frozen=True)
class Run:
    """What came out of one run."""

    inputs: int
    missing: int
    wrong: int
    gaps: list[float]
    """The longest time without output around each change."""
    silent: list[float]


def _run(case: str, changes: int) -> Run:
    seen: list[Change] = []
    with tempfile.TemporaryDirectory(prefix="penstock-repack-") as root:
        folder = Path(root)

        def change(handle: RunningTopology) -> None:
            seen.extend(_by_hand(handle, changes) if case == "by hand" else _by_policy(handle, changes))

        topology = moving_work(folder, policy=case == "by policy")
        numbers, counts, inputs = changed_to_the_end(topology, folder, change)
        came = arrivals(folder).came
    gaps = [longest_gap(came, each.begin, each.end + int(_LATE * 1e6)) for each in seen]
    wrong = wrong_keys(numbers, counts, inputs, FEW_KEYS)
    return Run(inputs, lost(numbers, inputs), wrong, gaps, [each.silent for each in seen])


def _by_hand(handle: RunningTopology, changes: int) -> list[Change]:
    found = []
    for number in range(changes):
        found.append(_noted(handle.refit(workers=WORKERS[number % len(WORKERS)])))
        time.sleep(2 * _LATE)
    return found


def _by_policy(handle: RunningTopology, changes: int) -> list[Change]:
    """Wait for as many changes, at most for two more moves of the load."""
    found: list[Change] = []
    deadline = time.monotonic() + (changes + 2) * PERIOD
    while len(found) < changes and time.monotonic() < deadline:
        for replaced in handle.internals.replacements[len(found) :]:
            found.append(_noted(replaced))
        time.sleep(_POLL_INTERVAL)
    time.sleep(2 * _LATE)
    return found


def _noted(replaced: Replaced) -> Change:
    say(f"    {replaced}")
    end = micros() - int((time.monotonic() - replaced.time) * 1e6)
    return Change(end - int(replaced.seconds * 1e6), end, replaced.gap)


# ---- topology ------------------------------------------------------------------------------------------


def moving_work(folder: Path, policy: bool) -> Topology:
    """Numbers → early → middle → count by key → late → Parquet files, and a bolt that records arrivals. The work
    moves from ``early`` to ``late`` and back, so that ``middle`` belongs to the workers of one, then of the
    other."""
    builder = TopologyBuilder()
    builder.set_spout("numbers", PacedNumbers(Schedule(((HOURS, RATE),)), FEW_KEYS, 0))
    builder.set_bolt("early", Work(("word", str), (HEAVY, LIGHT))).shuffle_grouping("numbers")
    builder.set_bolt("middle", Work(("word", str), (LIGHT, LIGHT))).shuffle_grouping("early")
    builder.set_bolt("count", CountNumbers()).fields_grouping("middle", "word")
    builder.set_bolt("late", Work(("count", int), (LIGHT, HEAVY))).shuffle_grouping("count")
    builder.set_bolt("committed", ParquetSink(folder / "committed")).global_grouping("late")
    builder.set_bolt("arrivals", NoteArrivals()).global_grouping("late")
    settings = Settings(conf={"folder": str(folder), "begun": time.time()}).with_values(
        {
            "delivery": "exactly_once",
            "delivery.epoch_interval": 2.0,
            "delivery.state_dir": str(folder / "state"),
            "workers": 2,
            "workers.refit": "always" if policy else "off",
            "workers.refit_after": NOTICED,
        }
    )
    return builder.build(f"repack-{folder.name}", settings)


class Work(BatchBolt):
    """Passes tuples on after using CPU time for each, as much as the phase of the load says."""

    def __init__(self, second: tuple[str, type], seconds: tuple[float, float]) -> None:
        """``second``: the field between ``number`` and ``since``. ``seconds``: per tuple, in each phase."""
        self._second, self._seconds = second, seconds

    def declare_output_fields(self, declarer: OutputDeclarer) -> None:
        declarer.declare(("number", int), self._second, ("since", int))

    def prepare(self, conf: Conf, context: Context) -> None:
        self._begun = float(conf["begun"])

    def execute_batch(self, batch: pa.RecordBatch, source: Source, collector: BatchCollector) -> None:
        end = time.thread_time() + self._seconds[phase(time.time() - self._begun)] * batch.num_rows
        while time.thread_time() < end:
            pass
        collector.emit_batch(batch)


def phase(elapsed: float) -> int:
    """Which bolt has the work: 0 is ``early``, 1 is ``late``."""
    return int(elapsed / PERIOD) % 2
