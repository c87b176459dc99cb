"""What width and length cost on the same cores: 1 to 16 tasks per bolt, and 2 to 50 components in a row. CPU time
is that of all processes."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.fit_options import figures, repeats_of
from benchmarks.harness import Results, cpu_by_process, cpu_since, median, running
from benchmarks.hops import Flood, Identity
from benchmarks.plain_words import plain_word_count
from benchmarks.turns import median_ratio, spread, take_turns
from penstock import BasicBolt, Collector, Conf, Context, Delivery, Settings, Topology, TopologyBuilder, Tuple
from penstock.driver.handle import RunningTopology
from penstock.spark.session import open_session

TASKS = (1, 2, 4, 8, 16)
"""Tasks of each bolt; the spout has one."""
LENGTHS = (2, 5, 10, 20, 50)
"""Components in a row."""
PACED = 2_000  # sentences/s, of about 12 words each, at the given rate


@dataclass(frozen=True)
class Cost:
    """What a tuple costs."""

    cpu_ns: float
    """CPU time of all processes per tuple, in nanoseconds."""
    per_s: float
    workers: int
    start_s: float = 0.0
    """Seconds from the submission to the first tuple at the end."""

    def __str__(self) -> str:
        started = f", started in {self.start_s:.2f} s" if self.start_s else ""
        return f"{self.cpu_ns:,.0f} ns per tuple, {self.per_s:,.0f}/s, {self.workers} workers{started}"


Costs = Mapping[str, Sequence[Cost]]


def measure_growth(results: Results, options: argparse.Namespace) -> None:
    """Part of ``penstock bench fit``. ``--quick`` measures the ends only."""
    repeats = repeats_of(options)
    warm_up, seconds = (3.0, 4.0) if options.quick else (10.0, 10.0)
    tasks = (TASKS[0], TASKS[-1]) if options.quick else TASKS
    lengths = (LENGTHS[0], LENGTHS[-1]) if options.quick else LENGTHS
    wide = {
        what: take_turns(f"tasks per bolt, {what}", [str(each) for each in tasks], repeats, turn, str)
        for what, turn in _widths(warm_up, seconds).items()
    }
    for what, costs in wide.items():
        _report_tasks(results, what, costs)
    flat_out, paced = (_against_one(costs)[str(tasks[-1])] for costs in wide.values())
    results.bar("fit.growth.tasks16", flat_out, "× the CPU time per tuple with 1 task per bolt, flat out")
    results.bar("fit.growth.tasks16_paced", paced, f"×, at {PACED:,} sentences/s")

    def turn(length: str, number: int) -> Cost:
        return _in_a_row(int(length), warm_up, seconds)

    results.begin("growth, components in a row")
    open_session()  # otherwise the first topology would start Spark, too
    long = take_turns("components in a row", [str(each) for each in lengths], repeats, turn, str)
    _report_row(results, long)
    draw(wide, long, figures(options) / "fit-growth.png")


# ---- tasks ---------------------------------------------------------------------------------------------


def _widths(warm_up: float, seconds: float) -> dict[str, Callable[[str, int], Cost]]:
    def measure(tasks: str, rate: float | None) -> Cost:
        with tempfile.TemporaryDirectory() as folder:
            settings = Settings(delivery=Delivery("at_least_once", state_dir=folder))
            with running(plain_word_count(1, int(tasks), int(tasks), settings)) as handle:
                if rate:
                    handle.set_max_rate("sentences", rate)
                return _cost(handle, "count", warm_up, seconds)

    return {
        "flat out": lambda tasks, number: measure(tasks, None),
        f"{PACED:,} sentences/s": lambda tasks, number: measure(tasks, PACED),
    }


def _cost(handle: RunningTopology, component: str, warm_up: float, seconds: float, start_s: float = 0.0) -> Cost:
    time.sleep(warm_up)
    cpu, tuples, begun = cpu_by_process(), -handle.internals.bus.totals()[component].executed, time.monotonic()
    time.sleep(seconds)
    tuples += handle.internals.bus.totals()[component].executed
    used, elapsed = cpu_since(cpu), time.monotonic() - begun
    if not tuples:
        raise SystemExit(f"no tuple arrived at '{component}' in {elapsed:.0f} s")
    return Cost(used / tuples * 1e9, tuples / elapsed, len(handle.internals.workers), start_s)


def _against_one(costs: Costs) -> dict[str, float]:
    """The CPU time per tuple relative to the first case."""
    first = next(iter(costs.values()))
    return {case: median_ratio(found, first, _cpu_ns) for case, found in costs.items()}


def _cpu_ns(cost: Cost) -> float:
    return cost.cpu_ns


def _report_tasks(results: Results, what: str, costs: Costs) -> None:
    ratios = _against_one(costs)
    for tasks, found in costs.items():
        results.row(
            what=f"word count, acked, {what}",
            **{"tasks per bolt": int(tasks), "workers": found[0].workers},
            **{"CPU ns per word": median([each.cpu_ns for each in found]), "× 1 task": ratios[tasks]},
            **{"words/s": median([each.per_s for each in found])},
            repeats=spread([each.cpu_ns for each in found], "{:,.0f}".format),
        )


# ---- components in a row -------------------------------------------------------------------------------


def row_of(components: int) -> Topology:
    """A spout and bolts that pass on what they receive, joined by shuffle groupings."""
    builder = TopologyBuilder()
    builder.set_spout("spout", Flood())
    last = "spout"
    for number in range(1, components - 1):
        builder.set_bolt(f"bolt{number}", Identity("n", int)).shuffle_grouping(last)
        last = f"bolt{number}"
    builder.set_bolt("sink", FirstSink()).shuffle_grouping(last)
    return builder.build(f"row-of-{components}")


class FirstSink(BasicBolt):
    """Publishes that the first tuple has arrived."""

    def prepare(self, conf: Conf, context: Context) -> None:
        self._publish = context.publish
        self._told = False

    def execute(self, tup: Tuple, collector: Collector) -> None:
        if not self._told:
            self._told = True
            self._publish([["first", time.time()]])


def _in_a_row(length: int, warm_up: float, seconds: float) -> Cost:
    begun = time.monotonic()
    with running(row_of(length)) as handle:
        handle.internals.server.wait(lambda: "sink" in handle.internals.bus.published(), 60)
        start_s = time.monotonic() - begun
        return _cost(handle, "sink", warm_up, seconds, start_s)


def _report_row(results: Results, costs: Costs) -> None:
    for length, found in costs.items():
        hops = int(length) - 1
        results.row(
            what="flat out",
            components=int(length),
            workers=found[0].workers,
            **{"CPU ns per tuple and hop": median([each.cpu_ns / hops for each in found])},
            **{"tuples/s": median([each.per_s for each in found])},
            **{"start s": median([each.start_s for each in found])},
            repeats=spread([each.cpu_ns / hops for each in found], "{:,.0f}".format),
        )


# ---- figure --------------------------------------------------------------------------------------------


def draw(wide: Mapping[str, Costs], long: Costs, path: Path) -> None:
    """Draw the cost of a tuple by tasks, and cost and start time by components, with the range of the repeats."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.8), layout="constrained")
    tasks, row, start = figure.subplots(1, 3)
    for what, costs in wide.items():
        one = list(next(iter(costs.values())))
        ratios = {
            int(case): [each.cpu_ns / first.cpu_ns for each, first in zip(found, one, strict=True)]
            for case, found in costs.items()
        }
        _line(tasks, ratios, what)
    tasks.axhline(1.3, color="grey", linestyle="--", linewidth=1)
    tasks.text(1.01, 1.3, "1.3", transform=tasks.get_yaxis_transform(), va="center", color="grey", fontsize=8)
    tasks.set(title="word count, acked", xlabel="tasks per bolt", ylabel="CPU time per word, × 1 task")
    tasks.legend(loc="best", fontsize=8)
    lengths = {int(case): found for case, found in long.items()}
    _line(row, {length: [c.cpu_ns / (length - 1) for c in found] for length, found in lengths.items()}, "")
    row.set(title="row of components, flat out", xlabel="components", ylabel="CPU ns per tuple and hop")
    _line(start, {length: [c.start_s for c in found] for length, found in lengths.items()}, "")
    start.set(title="start, Spark running", xlabel="components", ylabel="s to the first tuple at the end")
    for panel in (tasks, row, start):
        panel.grid(alpha=0.3)
        panel.set_ylim(0, panel.get_ylim()[1] * 1.05)
    for panel, ticks in ((tasks, next(iter(wide.values()))), (row, long), (start, long)):
        panel.set_xscale("log")
        panel.set_xticks([int(each) for each in ticks], list(ticks))
        panel.minorticks_off()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _line(panel: Any, values: Mapping[int, Sequence[float]], label: str) -> None:
    """The medians as a line, all repeats as a band."""
    places = list(values)
    (line,) = panel.plot(places, [median(each) for each in values.values()], marker="o", label=label or None)
    low, high = ([limit(each) for each in values.values()] for limit in (min, max))
    panel.fill_between(places, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
