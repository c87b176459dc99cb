"""Packing a running topology anew, exactly once and under load: ten times by hand, and by the policy, as one bolt
after the other becomes slow because its calls wait. Every input must be counted exactly once, and results must
keep coming.

The policy repacks by load at most every five minutes, but gives each bolt that waits a worker of its own at once.
"""

from __future__ import annotations

import argparse
import math
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
    BasicBolt,
    BatchBolt,
    BatchCollector,
    Collector,
    Conf,
    Context,
    OutputDeclarer,
    Settings,
    Source,
    Topology,
    TopologyBuilder,
    Tuple,
)
from penstock.connectors.parquet import ParquetSink
from penstock.driver.handle import RunningTopology
from penstock.driver.requests import Replaced

WORKERS = (1, 2, 15, 3)
"""Numbers of workers by turns; with 15 each executor has its own."""
LOOKUPS = 10  # bolts that look up some of the tuples
EVERY = 15  # one in so many tuples is looked up
WAIT = 0.0025  # seconds of a look-up, once it has become slow: half of a lookup bolt's time
PERIOD = 10.0  # seconds after which the next bolt becomes slow
REFIT_AFTER = 6.0  # seconds; a sample of the policy then takes 1 s, and a bolt must wait in two of them
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
    by_hand, by_policy = (3, 2) if options.quick else (options.repeats or 10, LOOKUPS)
    found = {"by hand": _run(by_hand, policy=False), "by policy": _run(by_policy, policy=True)}
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
    results.bar("fit.changes", len(gaps), f"changes of the packing, of {by_hand + by_policy} wanted")
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


def _run(changes: int, policy: bool) -> Run:
    seen: list[Change] = []
    with tempfile.TemporaryDirectory(prefix="penstock-repack-") as root:
        folder = Path(root)

        def change(handle: RunningTopology) -> None:
            seen.extend(_by_policy(handle, changes) if policy else _by_hand(handle, changes))

        topology = counted_and_looked_up(folder, changes if policy else 0)
        numbers, counts, inputs = changed_to_the_end(topology, folder, change)
        came = arrivals(folder).came
    gaps = [longest_gap(came, each.begin, each.end + int(_LATE * 1e6)) for each in seen]
    wrong = wrong_keys(numbers, counts, inputs, FEW_KEYS)
    return Run(inputs, lost(numbers, inputs), wrong, gaps, [each.silent for each in seen])


def _by_hand(handle: RunningTopology, changes: int) -> list[Change]:
    found = []
    for number in range(changes):
        replaced = handle.refit(workers=WORKERS[number % len(WORKERS)])
        assert replaced is not None, "each time it is another number"
        found.append(_noted(replaced))
        time.sleep(2 * _LATE)
    return found


def _by_policy(handle: RunningTopology, changes: int) -> list[Change]:
    """Wait for as many changes, at most for twice the usual time."""
    found: list[Change] = []
    deadline = time.monotonic() + 2 * changes * PERIOD
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


def counted_and_looked_up(folder: Path, slow: int) -> Topology:
    """Numbers → count by key → Parquet files, and a bolt that records arrivals. Some of the numbers go to bolts
    that look them up, of which ``slow`` become slow, one per period; without any, nothing is packed anew by
    itself."""
    builder = TopologyBuilder()
    builder.set_spout("numbers", PacedNumbers(Schedule(((HOURS, RATE),)), FEW_KEYS, 0))
    builder.set_bolt("count", CountNumbers()).fields_grouping("numbers", "word")
    builder.set_bolt("committed", ParquetSink(folder / "committed")).global_grouping("count")
    builder.set_bolt("arrivals", NoteArrivals()).global_grouping("count")
    builder.set_bolt("some", Some()).shuffle_grouping("numbers")
    for number in range(1, LOOKUPS + 1):
        lookup = Lookup(PERIOD * number if number <= slow else math.inf)
        builder.set_bolt(f"lookup{number}", lookup).shuffle_grouping("some")
    settings = Settings(conf={"folder": str(folder), "begun": time.time()}).with_values(
        {
            "delivery": "exactly_once",
            "delivery.epoch_interval": 2.0,
            "delivery.state_dir": str(folder / "state"),
            "workers": 2,
            "workers.refit": "once" if slow else "off",
            "workers.refit_after": REFIT_AFTER,
        }
    )
    return builder.build(f"repack-{folder.name}", settings)


class Some(BatchBolt):
    """Passes on one in ``EVERY`` numbers."""

    def declare_output_fields(self, declarer: OutputDeclarer) -> None:
        declarer.declare(("number", int))

    def execute_batch(self, batch: pa.RecordBatch, source: Source, collector: BatchCollector) -> None:
        numbers = batch.column("number").to_numpy()
        chosen = numbers[numbers % EVERY == 0]
        if len(chosen):
            collector.emit_batch([pa.array(chosen)])


class Lookup(BasicBolt):
    """Looks tuples up. After a time each look-up takes long."""

    def __init__(self, slow_after: float) -> None:
        """``slow_after``: seconds from the start of the topology."""
        self._slow_after = slow_after

    def prepare(self, conf: Conf, context: Context) -> None:
        self._slow_at = float(conf["begun"]) + self._slow_after

    def execute(self, tup: Tuple, collector: Collector) -> None:
        if time.time() >= self._slow_at:
            time.sleep(WAIT)
