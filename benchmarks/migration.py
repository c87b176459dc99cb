"""Data migration compared with credits and a static allocation (*Sun 2022*, section 3): three branches of
different speed, bursty and skewed packets; on Spark and in the simulator."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.branches import expected, three_branches
from benchmarks.harness import Results, median, run_parts, running, say
from benchmarks.keyed_migration import complete_keyed
from benchmarks.keyed_migration import expected as expected_keyed
from benchmarks.migration_sim import measure_sim, measure_sim_grid

PARTS = ("spark", "spark-grid", "keyed", "sim", "sim-grid")
STRATEGIES = ("credit", "static", "migration")
SIZES = {"500MB": 500, "1GB": 1_024, "2GB": 2_048, "5GB": 5_120}
"""Packets, as many as in the simulator. Those of *Sun 2022* have 1 MB; these are a hundredth of that, and the
branches ten times as fast in packets."""
PUBLISHED_GAIN = {"500MB": 5.1, "1GB": 13.6, "2GB": 16.0, "5GB": 15.3}
"""Percent by which migration is better than credits in *Sun 2022*."""
ALPHAS, BETAS = (0.1, 0.3, 0.5, 0.7, 0.9), (0.3, 0.5, 0.7, 1.0, 2.0)
KEYED_LINES = 30_000
KEYED_FIRST_SEED = 100
"""Not among the seeds with which the set-up was chosen."""
RESULTS = Path("results")
_PATIENCE = 600.0  # seconds; far more than any run needs

Curve = list[tuple[float, float]]
"""⟨seconds, completed share⟩"""


def main(options: argparse.Namespace) -> int:
    """``penstock bench migration``"""
    measures = (measure_spark, measure_spark_grid, measure_keyed, measure_sim, measure_sim_grid)
    return run_parts("migration", dict(zip(PARTS, measures, strict=True)), options)


def measure_spark(results: Results, options: argparse.Namespace) -> None:
    """All sizes; the strategies take turns, each with the same packets. Static shares, which are not in *Sun
    2022*, table 2, only up to 1 GB."""
    sizes = {"500MB": 500} if options.quick else SIZES
    repeats, first = options.repeats or (1 if options.quick else 3), options.seed or 0
    for size, count in sizes.items():
        strategies = [each for each in STRATEGIES if each != "static" or count <= SIZES["1GB"]]
        times: dict[str, list[float]] = {strategy: [] for strategy in strategies}
        curves: dict[str, Curve] = {}
        for seed in range(first, first + repeats):
            for strategy in strategies:
                seconds, curves[strategy] = complete(count, seed, strategy)
                times[strategy].append(seconds)
            say(f"  {size}, seed {seed}: " + ", ".join(f"{s} {t[-1]:.1f} s" for s, t in times.items()))
        better = [1 - ours / theirs for ours, theirs in zip(times["migration"], times["credit"], strict=True)]
        results.row(
            where="spark",
            size=size,
            **{f"{strategy} s": median(values) for strategy, values in times.items()},
            **{"better than credit %": median(better) * 100, "Sun 2022 %": PUBLISHED_GAIN[size]},
        )
        draw(RESULTS / f"migration-spark-{size}.png", size, curves)
        results.bar(f"migration.vs_credit.{size}", median(better) * 100, "% less time")
    results.bar("migration.vs_credit", median(better) * 100, f"% less time at {size}")


def measure_spark_grid(results: Results, options: argparse.Namespace) -> None:
    """The weights α and β, at 1 GB."""
    alphas, betas = ((0.3,), (0.5, 2.0)) if options.quick else (ALPHAS, BETAS)
    count = 300 if options.quick else SIZES["1GB"]
    for alpha in alphas:
        for beta in betas:
            seconds, _ = complete(count, 0, "migration", {"migration.alpha": alpha, "migration.beta": beta})
            results.row(where="spark", size=f"{count} packets", alpha=alpha, beta=beta, **{"migration s": seconds})


def measure_keyed(results: Results, options: argparse.Namespace) -> None:
    """A keyed, skewed aggregate with real work: migration against credits on the same input. The set-up (work,
    skew, inboxes, interval) was chosen on the seeds from 0 to 9."""
    count = KEYED_LINES // 3 if options.quick else KEYED_LINES
    wrong, better = 0, []
    first = KEYED_FIRST_SEED if options.seed is None else options.seed
    for seed in range(first, first + (options.repeats or (1 if options.quick else 5))):
        truth = expected_keyed(count, seed)
        seconds, moved = {}, 0
        for strategy in ("credit", "migration") if seed % 2 else ("migration", "credit"):
            seconds[strategy], found, migrations = complete_keyed(count, seed, strategy, _PATIENCE)
            wrong += sum(found.get(key) != truth[key] for key in truth) + len(found.keys() - truth.keys())
            moved += migrations
        better.append(100 * (1 - seconds["migration"] / seconds["credit"]))
        results.row(
            where="spark, keyed",
            lines=count,
            seed=seed,
            **{f"{strategy} s": round(seconds[strategy], 2) for strategy in ("credit", "migration")},
            migrations=moved,
            **{"better than credit %": better[-1]},
        )
        say(f"  seed {seed}: {seconds['credit']:.1f} s, {seconds['migration']:.1f} s with {moved} migrations")
    results.bar("migration.keyed.vs_credit", median(better), "% less time")
    results.bar("migration.keyed.wrong", wrong, "keys with another result than a sequential run")


def complete(count: int, seed: int, strategy: str, conf: Mapping[str, Any] | None = None) -> tuple[float, Curve]:
    """Seconds until the sink has merged every packet, and the completed share over time."""
    curve: Curve = []
    with running(three_branches(count, seed, strategy, dict(conf or {}))) as handle:
        begun = time.monotonic()
        while (elapsed := time.monotonic() - begun) < _PATIENCE:
            merged = handle.internals.bus.published().get("merge", [[0, 0]])[0]
            curve.append((elapsed, merged[0] / count))
            if merged[0] >= count:
                assert merged == list(expected(count, seed)), f"{merged} instead of {expected(count, seed)}"
                return elapsed, curve
            handle.wait(0.05)
    raise TimeoutError(f"{strategy}: {merged[0]} of {count} packets after {_PATIENCE:g} s")


def draw(path: Path, size: str, curves: Mapping[str, Sequence[tuple[float, float]]]) -> None:
    """Draw the completed share over time."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4))
    for strategy, curve in curves.items():
        axes.plot([at for at, _ in curve], [100 * share for _, share in curve], label=strategy)
    axes.set_xlabel("s")
    axes.set_ylabel("% completed")
    axes.set_title(f"three branches on Spark, {size} in packets of 1 MB, scaled down")
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    plt.close(figure)
