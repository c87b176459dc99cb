"""The experiment of *Sun 2022* in the simulator: migration compared with credits and static shares, and the grid
of α and β."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Results, median, run_parts, say
from penstock.control.migration import MigrationPolicy
from penstock.sim.branching import TICK, BranchingOutcome, oracle, run
from penstock.sim.strategies import BranchingStrategy, CreditStrategy, MigrationStrategy, StaticStrategy

PARTS = ("sim", "grid")
FOLDER = Path("results")
SIZES = {"500MB": 500, "1GB": 1_024, "2GB": 2_048, "5GB": 5_120}
"""Packets of 1 MB."""
PUBLISHED_SECONDS = {
    "500MB": (55.37, 52.55),
    "1GB": (113.94, 98.41),
    "2GB": (257.35, 216.08),
    "5GB": (634.78, 537.92),
}
"""*Sun 2022*, table 2: credit, migration."""
ALPHAS, BETAS = (0.1, 0.3, 0.5, 0.7, 0.9), (0.3, 0.5, 0.7, 1.0, 2.0)
PUBLISHED_GRID = {
    0.3: (544.94, 542.89, 538.62, 540.91, 544.77),
    0.5: (539.17, 537.21, 541.26, 539.56, 540.67),
    0.7: (553.08, 550.72, 549.52, 553.61, 551.28),
    1.0: (564.91, 559.38, 561.85, 566.02, 561.75),
    2.0: (629.84, 631.78, 627.52, 622.23, 628.43),
}
"""*Sun 2022*, table 1: by β, for each α."""
FIRST_SEED = 100
"""Not among the seeds with which the set-up was calibrated."""
STRATEGIES: Mapping[str, Callable[[], BranchingStrategy]] = {
    "credit": CreditStrategy,
    "static": StaticStrategy,
    "migration": MigrationStrategy,
}


def main(options: argparse.Namespace) -> int:
    return run_parts("migration_sim", {"sim": measure_sim, "grid": measure_sim_grid}, options)


def measure_sim(results: Results, options: argparse.Namespace) -> None:
    """*Sun 2022*, table 2, figures 7 and 8. The merged result of every run is compared with a sequential merge."""
    seeds = range(FIRST_SEED, FIRST_SEED + (5 if options.quick else 21))
    differences = []
    for size, count in SIZES.items():
        outcomes = {name: [checked(make(), count, seed) for seed in seeds] for name, make in STRATEGIES.items()}
        seconds = {name: median([each.seconds for each in runs]) for name, runs in outcomes.items()}
        better = 100 * (1 - seconds["migration"] / seconds["credit"])
        credit, migration = PUBLISHED_SECONDS[size]
        theirs = 100 * (1 - migration / credit)
        differences.append(better - theirs)
        each = [
            100 * (1 - ours.seconds / other.seconds)
            for ours, other in zip(outcomes["migration"], outcomes["credit"], strict=True)
        ]
        for index, seed in enumerate(seeds):
            by_seed = {f"{name} s": round(runs[index].seconds, 1) for name, runs in outcomes.items()}
            results.row(what=f"simulated, {size}", seed=seed, **by_seed, **{"better %": each[index]})
        low, high = np.percentile(each, [25, 75])
        row: dict[str, Any] = {f"{name} s": round(value, 1) for name, value in seconds.items()}
        row |= {"better %": better, "quartiles %": f"{low:.1f} to {high:.1f}", "Sun 2022 better %": theirs}
        row |= {"Sun 2022 credit s": credit, "Sun 2022 migration s": migration}
        note = f"median of {len(seeds)} seeds; half of them {low:.1f} to {high:.1f} % better"
        results.row(what=f"simulated, {size}", seed="median", **row, note=note)
        results.bar(f"migration.sim.vs_credit.{size}", better, f"% faster than credit (Sun 2022: {theirs:.1f})")
        plotted = _plot_shares(size, {name: runs[0] for name, runs in outcomes.items()})
        say(f"  {size}: credit {seconds['credit']:.1f} s, migration {seconds['migration']:.1f} s; {plotted}")
    worst = min(differences)
    note = "points: our improvement minus the paper's, the lowest of four sizes; above 0: better than the paper"
    results.row(what="simulated, worst row", **{"better %": worst}, note=note)
    results.bar(
        "migration.sim.vs_credit", worst, "points (the lowest of our improvement − the paper's, four sizes)"
    )


def measure_sim_grid(results: Results, options: argparse.Namespace) -> None:
    """*Sun 2022*, table 1: seconds at 5 GB for each α and β.

    The paper's spread of 17 % is not reproduced. The overloaded branch is no candidate, so the score chooses
    between two branches, and in 56 of 69 migrations one of them had an empty queue that did not grow: it scores 0
    for every α and β. The choice also matters little: sending to the branch with the *highest* pressure cost 0.4
    %, always to the widest link nothing, always to the narrowest 1.7 %. In some 60 other set-ups (speeds,
    bandwidths, queues of 10 to 120 packets, load samples of 1 to 5 s, bursts of all branches at once, saturated
    sources) β = 2 was between 4.5 % faster and 0.8 % slower than β = 0.5. The paper's formula without our
    normalization, and routes kept until recovery, changed as little. We do not know what made the difference in
    the paper.
    """
    seeds = range(FIRST_SEED, FIRST_SEED + (2 if options.quick else 7))
    count = SIZES["5GB"]
    seconds = np.zeros((len(BETAS), len(ALPHAS)))
    for y, beta in enumerate(BETAS):
        for x, alpha in enumerate(ALPHAS):
            runs = [checked(MigrationStrategy(MigrationPolicy(alpha, beta)), count, seed) for seed in seeds]
            every = [each.seconds for each in runs]
            seconds[y, x] = median(every)
            results.row(
                what="simulated, 5GB",
                alpha=alpha,
                beta=beta,
                **{"migration s": round(seconds[y, x], 1), "least s": min(every), "most s": max(every)},
                **{
                    "Sun 2022 migration s": PUBLISHED_GRID[beta][x],
                    "by seed": dict(zip(seeds, every, strict=True)),
                },
            )
        found = " ".join(f"{value:.1f}" for value in seconds[y])
        theirs = f"{min(PUBLISHED_GRID[beta]):.0f} to {max(PUBLISHED_GRID[beta]):.0f} s"
        say(f"  β {beta:g}, α {' '.join(_labels(ALPHAS))}: {found} s; Sun 2022 {theirs}")
    chosen = seconds[BETAS.index(0.5), ALPHAS.index(0.3)]
    spread = 100 * (seconds.max() / seconds.min() - 1)
    results.bar(
        "migration.sim.grid.default_vs_best", 100 * (chosen / seconds.min() - 1), "% slower than the grid's best"
    )
    results.bar("migration.sim.grid.spread", spread, "% between best and worst (Sun 2022: 17.6)")
    say(f"  {_plot_grid(seconds)}")


def checked(strategy: BranchingStrategy, count: int, seed: int) -> BranchingOutcome:
    outcome = run(strategy, count, seed)
    if outcome.totals != oracle(count, seed):
        raise AssertionError(
            f"{type(strategy).__name__}, seed {seed}: the merged result differs from the sequential merge"
        )
    return outcome


def _plot_shares(size: str, outcomes: Mapping[str, BranchingOutcome]) -> Path:
    """Like *Sun 2022*, figures 7 and 8, for the first seed."""
    figure, axes = _figure()
    for name, outcome in outcomes.items():
        shares = [0.0, *(100 * share for share in outcome.shares)]
        axes.plot([TICK * index for index in range(len(shares))], shares, label=f"{name}, {outcome.seconds:.0f} s")
    axes.set(
        xlabel="s", ylabel="% completed", title=f"{size}: share completed every {TICK:g} s, seed {FIRST_SEED}"
    )
    axes.legend()
    return _save(figure, f"migration_sim_{size}.png")


def _plot_grid(seconds: np.ndarray[Any, Any]) -> Path:
    """Our grid and the paper's with the same color scale."""
    figure, axes = _figure(columns=2)
    theirs = np.array([PUBLISHED_GRID[beta] for beta in BETAS])
    for one, values, title in zip(axes, (seconds, theirs), ("simulated", "Sun 2022, table 1"), strict=True):
        one.imshow(values, cmap="YlOrRd", aspect="auto", vmin=min(seconds.min(), theirs.min()), vmax=theirs.max())
        one.set(title=f"5 GB, s: {title}", xlabel="α", ylabel="β")
        one.set_xticks(range(len(ALPHAS)), _labels(ALPHAS))
        one.set_yticks(range(len(BETAS)), _labels(BETAS))
        for (y, x), value in np.ndenumerate(values):
            one.text(x, y, f"{value:.0f}", ha="center", va="center", color="black")
    return _save(figure, "migration_sim_grid.png")


def _labels(values: Sequence[float]) -> list[str]:
    return [f"{value:g}" for value in values]


def _figure(columns: int = 1) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, columns, figsize=(6.4 * columns, 4.0), layout="constrained")
    return figure, axes


def _save(figure: Any, name: str) -> Path:
    from matplotlib import pyplot

    FOLDER.mkdir(exist_ok=True)
    figure.savefig(FOLDER / name, dpi=120)
    pyplot.close(figure)
    return FOLDER / name


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer seeds")
    parser.add_argument("--only", action="append", choices=PARTS, help="one part")
    parser.add_argument("--json", help="write rows and bars to this file")
    raise SystemExit(main(parser.parse_args()))
