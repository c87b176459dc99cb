"""One benchmark of *Pu 2021* in the simulator with one seed: the values and curves of figures 7 to 15."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace

from benchmarks.energy_sim import CRITICAL, FOR_RATE, TUPLES, Case, shortened, simulate, unsteady, use_by_machine
from benchmarks.harness import Results
from penstock.sim.storm_benchmarks import BENCHMARKS, STRATEGIES
from penstock.sim.storm_few_pairs import FEW_PAIRS, FEW_PAIRS_STRATEGIES

PAIRS = "-few-pairs"
"""The end of a part's name: the set-up of ``penstock.sim.storm_few_pairs``."""
FRAME = 20
"""Tuples in a frame. Smaller ones hardly change the results (``concepts/simulator.md``) and take several times as
long."""
_PERCENT = 100.0


def measure_cluster(results: Results, options: argparse.Namespace) -> None:
    """``options.part`` names the benchmark, with ``PAIRS`` in the set-up of few pairs."""
    name = options.part.removesuffix(PAIRS)
    benchmarks, strategies = (
        (BENCHMARKS, STRATEGIES) if name == options.part else (FEW_PAIRS, FEW_PAIRS_STRATEGIES)
    )
    whole = benchmarks[name]
    set_up = shortened(name, whole, True) if options.quick else replace(whole, frame=FRAME)
    chosen = list(strategies) if name == "rollingcount" else list(FOR_RATE)
    cases = {strategy: simulate(name, strategy, set_up, options.seed, strategies) for strategy in chosen}
    _rates(results, cases)
    _moves(results, cases["erdm"])
    if name == "rollingcount":
        _energy(results, cases)


def measure_critical(results: Results, options: argparse.Namespace) -> None:
    """*Pu 2021*, figure 4: the critical nodes of one path, as the paper defines them, beside the widened ones."""
    for name, whole in BENCHMARKS.items():
        set_up = shortened(name, whole, options.quick)
        set_up = replace(set_up, frame=FRAME, seconds=min(set_up.seconds, 180), switch=min(set_up.switch, 60.0))
        default = simulate(name, "default", set_up, options.seed)
        for critical in CRITICAL:
            case = simulate(name, critical, set_up, options.seed, CRITICAL)
            released = len(case.outcome.released)
            less = _PERCENT * (1 - case.joules_a_tuple / default.joules_a_tuple)
            results.row(benchmark=name, critical=critical, released=released, **{"energy %": less})
            results.bar(f"critical.{critical}.{name}.released", released, "machines of 16")
            results.bar(f"critical.{critical}.{name}.energy", less, "% less energy than default, at rest")


def _rates(results: Results, cases: Mapping[str, Case]) -> None:
    """*Pu 2021*, figures 10 to 12."""
    default = cases["default"]
    base = default.outcome.mean_rate(*default.after)
    wait = default.outcome.mean_latency(*default.after)
    for strategy, case in cases.items():
        rate, latency = case.outcome.mean_rate(*case.after), case.outcome.mean_latency(*case.after)
        results.row(strategy=strategy, **{"tuple/s": rate, "ms": 1e3 * latency})
        results.bar(f"rate.{strategy}", rate, "tuple/s at rest")
        results.bar(f"latency.{strategy}", 1e3 * latency, "ms at rest")
        results.bar(f"faster.{strategy}", _PERCENT * (rate / base - 1), "% above default")
        results.bar(f"sooner.{strategy}", _PERCENT * (1 - latency / wait), "% below default")
        results.bar(
            f"unsteady.{strategy}", _PERCENT * unsteady(case.outcome.between(*case.after)), "% of the rate"
        )
        ticks = case.outcome.ticks
        times = [tick.time for tick in ticks]
        results.curve(f"rate.{strategy}", times, [tick.processed for tick in ticks])
        waited = [(tick.time, 1e3 * tick.latency) for tick in ticks if tick.latency is not None]
        results.curve(f"latency.{strategy}", [at for at, _ in waited], [value for _, value in waited])
        results.curve(f"power.{strategy}", times, [tick.power.total for tick in ticks])
    peak = max(tick.latency or 0.0 for tick in cases["erdm"].outcome.between(default.before[1], default.after[0]))
    results.bar("peak.erdm", peak / cases["erdm"].outcome.mean_latency(*default.before), "× the latency before")


def _moves(results: Results, case: Case) -> None:
    """*Pu 2021*, figures 7 to 9, and the moves that section 4.3 counts."""
    switch, cost = case.outcome.switch, case.cost
    assert switch is not None
    before, after = (use_by_machine(case, span) for span in (case.before, case.after))
    results.bar("released", len(case.outcome.released), "machines of 16")
    results.bar("moved", _PERCENT * len(switch.carried) / len(switch.snapshot.executors), "% of the executors")
    results.bar("saved", _PERCENT * cost.saved, "% of the communication between machines")
    results.bar("use.before", _PERCENT * sum(before) / len(before), "% in use, mean of three resources")
    results.bar("use.after", _PERCENT * sum(after) / len(after), "% in use, of the machines that are left")
    for when, use in (("before", before), ("after", after)):
        machines = [float(number) for number in range(1, len(use) + 1)]
        results.curve(f"use.{when}", machines, [_PERCENT * share for share in sorted(use, reverse=True)])


def _energy(results: Results, cases: Mapping[str, Case]) -> None:
    """*Pu 2021*, figures 13 to 15."""
    default = cases["default"]
    seconds = TUPLES / default.outcome.mean_rate(*default.after)
    for strategy, case in cases.items():
        results.bar(f"power.{strategy}", case.outcome.mean_power(*case.after), "W at rest, modelled")
        joules, took = TUPLES * case.joules_a_tuple, TUPLES / case.outcome.mean_rate(*case.after)
        results.bar(f"energy.{strategy}", joules / 1e3, "kJ for 15 M tuples at rest, modelled")
        less = 1 - case.joules_a_tuple / default.joules_a_tuple
        results.bar(f"less.{strategy}", _PERCENT * less, "% less energy than default, at rest")
        results.bar(f"seconds.{strategy}", took, "s for 15 M tuples at rest")
        results.bar(f"shorter.{strategy}", _PERCENT * (1 - took / seconds), "% less time than default, at rest")
        ticks, tick = case.outcome.ticks, case.outcome.set_up.tick
        tuples, used, done, spent = [], [], 0.0, 0.0
        for each in ticks:
            done += each.processed
            spent += each.power.total * tick
            tuples.append(done / 1e6)
            used.append(spent / 1e3)
        results.curve(f"energy.{strategy}", tuples, used)
        results.curve(f"time.{strategy}", tuples, [each.time for each in ticks])
