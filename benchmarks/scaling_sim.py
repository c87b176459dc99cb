"""A topology that scales itself, simulated: the policies ``rate`` and ``failures`` compared with none, and with
interruptions as long as those of Storm's rebalance in *Lu 2020*, section 6.4. Steps, overshoot, latency and gaps;
the load grows eightfold.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.harness import Results, median, run_parts, say
from penstock.control.failure_policy import FailurePolicy
from penstock.control.scaling import Bounds, RatePolicy, ScalingPolicy
from penstock.sim.scaling import WORDS, ScalingOutcome, ScalingSetUp, run

PARTS = ("sim",)
FOLDER = Path("results")
RISE = 1
"""The phase in which the load is eight times the initial load."""
COOL_DOWN = 20.0
"""Seconds; enough to process the backlog of a replacement. For ``failures`` it is the time of its load samples."""
STORM_STOP = 22.0
"""Seconds without output at a rebalance, as measured in *Lu 2020*."""


@dataclass(frozen=True)
class Case:
    name: str
    policy: Callable[[], ScalingPolicy | None]
    set_up: ScalingSetUp = WORDS
    plotted: bool = True


def rate() -> ScalingPolicy:
    return RatePolicy(Bounds(cool_down=COOL_DOWN))


def failures() -> ScalingPolicy:
    return FailurePolicy(Bounds(cool_down=6 * WORDS.sample_interval), samples=6)


CASES: Sequence[Case] = (
    Case("off", lambda: None),
    Case("rate", rate),
    Case("rate, no lag", rate, replace(WORDS, reports_lag=False), plotted=False),
    Case("rate, no lag, held back", rate, replace(WORDS, reports_lag=False, max_pending=100), plotted=False),
    Case("failures", failures),
    Case("failures, 1,000 pending", failures, replace(WORDS, max_pending=1_000), plotted=False),
    Case("failures, held back", failures, replace(WORDS, max_pending=100), plotted=False),
    Case("rate, Storm's stop", rate, replace(WORDS, prepare=0.0, hand_over=STORM_STOP)),
)
"""Held back: few pending tuples, so that the backlog is in the source. No lag: the source does not report how many
tuples arrive."""


def main(options: argparse.Namespace) -> int:
    return run_parts("scaling_sim", {"sim": measure_scaling_sim}, options)


def measure_scaling_sim(results: Results, options: argparse.Namespace) -> None:
    """Medians over seeds; for steps also minimum and maximum, because being right on average is not enough."""
    seeds = range(1 if options.quick else 11)
    plotted = {}
    rate_steps: list[int] = []
    for case in CASES:
        outcomes = [run(case.policy(), case.set_up, seed) for seed in seeds]
        _check(outcomes)
        if case.plotted:
            plotted[case.name] = outcomes[0]
        up = [each.steps_up(RISE) for each in outcomes]
        settled = [seconds for each in outcomes if (seconds := each.settled(RISE)) is not None]
        row: dict[str, Any] = {
            "steps to enough": _range(up) if settled else "never",
            "all steps": _range([each.steps(RISE) for each in outcomes]),
            "at rest after s": round(median(settled), 1) if settled else "",
            "overshoot": median([each.overshoot(RISE) for each in outcomes]),
            "longest gap s": round(median([each.longest_gap for each in outcomes]), 2),
            "peak latency s": round(median([_peak(each) for each in outcomes]), 1),
            "time-outs": int(median([each.failed for each in outcomes])),
            "tasks at the end": int(median([sum(each.ticks[-1].parallelism.values()) for each in outcomes])),
        }
        note = f"{len(settled)} of {len(outcomes)} seeds had enough tasks at the end of the rise"
        results.row(what=f"simulated, {case.name}", **row, note=note)
        say(f"  {case.name}: {row['steps to enough']} steps; {note}")
        if case.policy is rate:
            rate_steps += [each.steps(RISE) for each in outcomes]
        elif case.name == "failures":
            results.bar("scaling.failures.steps", max(up), "steps to enough tasks, worst seed (log₂ 8 = 3)")
    results.bar("scaling.rate.steps", max(rate_steps), "steps at 8× the load until it rests, worst case and seed")
    say(f"  {_plot(plotted)}")


def _check(outcomes: Sequence[ScalingOutcome]) -> None:
    for each in outcomes:
        if each.came != each.completed + each.left:
            raise AssertionError(f"{each.came} tuples came, {each.completed} were completed, {each.left} are left")


def _peak(outcome: ScalingOutcome) -> float:
    """The mean latency of the worst second."""
    return max(tick.latency for tick in outcome.ticks if tick.latency is not None)


def _range(values: Sequence[int]) -> str:
    return f"{min(values)}" if min(values) == max(values) else f"{min(values)}–{max(values)}"


def _plot(outcomes: Mapping[str, ScalingOutcome]) -> Path:
    """Draw latency and tasks over time for the first seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, figsize=(8.0, 6.4), sharex=True, layout="constrained")
    for name, outcome in outcomes.items():
        times = [tick.time for tick in outcome.ticks]
        latencies = [float("nan") if tick.latency is None else tick.latency for tick in outcome.ticks]
        above.plot(times, latencies, label=name)
        below.step(times, [tick.parallelism["count"] for tick in outcome.ticks], label=name)
    load = " → ".join(f"{rate:g}" for _, rate in WORDS.load)
    above.set(ylabel="latency, s", yscale="log", title=f"simulated, load {load} tuples/s, seed 0")
    below.set(xlabel="s", ylabel="tasks of count")
    below.set_yscale("log", base=2)
    for axes in (above, below):
        for begin, _ in WORDS.load[1:]:
            axes.axvline(begin, color="grey", linewidth=0.8, linestyle=":")
    above.legend(loc="upper left")
    FOLDER.mkdir(exist_ok=True)
    figure.savefig(FOLDER / "scaling_sim.png", dpi=120)
    pyplot.close(figure)
    return FOLDER / "scaling_sim.png"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer seeds")
    parser.add_argument("--only", action="append", choices=PARTS, help="one part")
    parser.add_argument("--json", help="write rows and bars to this file")
    raise SystemExit(main(parser.parse_args()))
