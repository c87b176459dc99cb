"""The experiments of *Sun 2022* in the simulator, with the seeds of one repeat: figures 6 to 8, tables 1 and 2."""

from __future__ import annotations

import argparse
from collections import Counter

from benchmarks.harness import Results, median
from benchmarks.migration_sim import ALPHAS, BETAS, SIZES, STRATEGIES, checked
from penstock.control.migration import MigrationPolicy
from penstock.sim.branching import FIGURE_3, TICK
from penstock.sim.strategies import MigrationStrategy
from penstock.sim.workload import packets

_FIGURE_6 = "1GB"
_CHOSEN = 0.3, 0.5  # α and β of the paper
_APART = 100  # seeds between two repeats
_SECONDS = 2.0  # width of a point of figure 6


def measure_sizes(results: Results, options: argparse.Namespace) -> None:
    """*Sun 2022*, table 2, figures 7 and 8: credit, static shares and migration with the same packets."""
    seeds = _seeds(options, 5 if options.quick else 21)
    for size, count in SIZES.items():
        outcomes = {name: [checked(make(), count, seed) for seed in seeds] for name, make in STRATEGIES.items()}
        seconds = {name: median([each.seconds for each in runs]) for name, runs in outcomes.items()}
        better = 100 * (1 - seconds["migration"] / seconds["credit"])
        results.row(size=size, **{f"{name} s": value for name, value in seconds.items()}, better=better)
        for name, runs in outcomes.items():
            results.bar(f"seconds.{size}.{name}", seconds[name], f"s, median of {len(seeds)} seeds")
            shares = [0.0, *(100 * share for share in runs[0].shares)]
            times = [min(TICK * index, runs[0].seconds) for index in range(len(shares))]
            results.curve(f"share.{size}.{name}", times, shares)
        results.bar(f"better.{size}", better, "% less time than credit")


def measure_grid(results: Results, options: argparse.Namespace) -> None:
    """*Sun 2022*, table 1: α and β at 5 GB."""
    seeds = _seeds(options, 1 if options.quick else 3)
    count = SIZES["5GB"]
    seconds = {}
    for alpha in ALPHAS:
        for beta in BETAS:
            policy = MigrationPolicy(alpha, beta)
            runs = [checked(MigrationStrategy(policy), count, seed).seconds for seed in seeds]
            seconds[alpha, beta] = median(runs)
            results.bar(f"seconds.{alpha:g}.{beta:g}", seconds[alpha, beta], f"s, median of {len(seeds)} seeds")
    for (alpha, beta), value in seconds.items():
        above = 100 * (value / seconds[_CHOSEN] - 1)
        results.bar(f"above.{alpha:g}.{beta:g}", above, "% more than with α 0.3, β 0.5")
    for alpha in ALPHAS:
        results.curve(f"alpha.{alpha:g}", BETAS, [seconds[alpha, beta] for beta in BETAS])
    least, most = min(seconds.values()), max(seconds.values())
    results.row(least=least, most=most)
    results.bar("spread", 100 * (most / least - 1), "% between the best and the worst")
    results.bar("chosen", 100 * (seconds[_CHOSEN] / least - 1), "% slower than the best, α 0.3 and β 0.5")


def _seeds(options: argparse.Namespace, count: int) -> range:
    """The seeds of a repeat. Repeats with consecutive numbers have no seed in common."""
    return range(options.seed * _APART, options.seed * _APART + count)


def measure_load(results: Results, options: argparse.Namespace) -> None:
    """*Sun 2022*, figure 6: how many MB of each branch the source offers over time."""
    sent: dict[str, Counter[int]] = {branch: Counter() for branch in FIGURE_3.branches}
    at = 0.0
    for packet in packets(SIZES[_FIGURE_6], FIGURE_3.branches, FIGURE_3.shape, options.seed):
        at += packet.gap
        sent[packet.bound][int(at / _SECONDS)] += 1
    last = max(max(counts) for counts in sent.values())
    rates = {branch: [counts[t] / _SECONDS for t in range(last + 1)] for branch, counts in sent.items()}
    for branch, values in rates.items():
        results.curve(f"load.{branch}", [_SECONDS * t for t in range(last + 1)], values)
    totals = [sum(values) for values in zip(*rates.values(), strict=True)]
    results.bar("burst", max(totals) / (sum(totals) / len(totals)), "× the mean rate, the highest")
    busiest = max(max(values) for values in rates.values())
    results.bar(
        "uneven", busiest / (sum(totals) / len(totals) / len(rates)), "× a branch's mean rate, the highest"
    )
