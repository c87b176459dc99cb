"""One benchmark of *Pu 2021* in the simulator with one seed: the values and curves of figures 7 to 15."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
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
_HIGHER = 1.02
"""A second with more than this multiple of the default's mean is higher. Latency and power of the default vary by
less."""


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
        _power(results, cases)
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
    _peak_of_latency(results, cases["erdm"], default)


def _peak_of_latency(results: Results, case: Case, default: Case) -> None:
    """*Pu 2021*, figure 10: the switch."""
    ticks = case.outcome.between(default.before[1], default.after[0])
    waited = [(tick.time, tick.latency) for tick in ticks if tick.latency is not None]
    before = case.outcome.mean_latency(*default.before)
    results.bar("peak.erdm", max(latency for _, latency in waited) / before, "× the latency before")
    above = seconds_above(waited, default.before[1], default.outcome.mean_latency(*default.after))
    results.bar("latency_above.erdm", above, "s from the switch until the latency is no higher than default's")


def seconds_above(values: Iterable[tuple[float, float]], switch: float, usual: float) -> float:
    """Seconds from the switch to the end of the last second that is higher than usual; 0 if none is. ``values``:
    ⟨end of a second, value⟩ from the switch to the steady state."""
    return max((at - switch for at, value in values if value > _HIGHER * usual), default=0.0)


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


def _power(results: Results, cases: Mapping[str, Case]) -> None:
    """*Pu 2021*, figure 13."""
    default = cases["default"]
    whole = 0.0, float(default.outcome.set_up.seconds)
    usual = default.outcome.mean_power(*whole)
    for strategy, case in cases.items():
        watts = case.outcome.mean_power(*whole)
        results.bar(f"power.{strategy}", case.outcome.mean_power(*case.after), "W at rest, modelled")
        results.bar(f"power_from_0.{strategy}", watts, "W, mean of the run, modelled")
        results.bar(f"power_above.{strategy}", _PERCENT * (watts / usual - 1), "% above default, means of the run")
    ticks = cases["erdm"].outcome.between(default.before[1], default.after[0])
    drawn = [(tick.time, tick.power.total) for tick in ticks]
    peak = seconds_above(drawn, default.before[1], default.outcome.mean_power(*default.after))
    results.bar("power_peak.erdm", peak, "s from the switch until the power is no higher than default's")


def _energy(results: Results, cases: Mapping[str, Case]) -> None:
    """*Pu 2021*, figures 14 and 15: 15 M tuples, from 0 on as in the paper, and at rest after the moves."""
    default = cases["default"]
    seconds, joules = TUPLES / default.outcome.mean_rate(*default.after), TUPLES * default.joules_a_tuple
    seconds_from_0, joules_from_0 = from_0(default, TUPLES)
    for strategy, case in cases.items():
        took, used = from_0(case, TUPLES)
        results.bar(f"energy_from_0.{strategy}", used / 1e3, "kJ for 15 M tuples from 0 on, modelled")
        less = _PERCENT * (1 - used / joules_from_0)
        results.bar(f"less_from_0.{strategy}", less, "% less energy than default, from 0 on")
        results.bar(f"seconds_from_0.{strategy}", took, "s for 15 M tuples from 0 on")
        shorter = _PERCENT * (1 - took / seconds_from_0)
        results.bar(f"shorter_from_0.{strategy}", shorter, "% less time than default, from 0 on")
        took, used = TUPLES / case.outcome.mean_rate(*case.after), TUPLES * case.joules_a_tuple
        results.bar(f"energy.{strategy}", used / 1e3, "kJ for 15 M tuples at rest, modelled")
        results.bar(f"less.{strategy}", _PERCENT * (1 - used / joules), "% less energy than default, at rest")
        results.bar(f"seconds.{strategy}", took, "s for 15 M tuples at rest")
        results.bar(f"shorter.{strategy}", _PERCENT * (1 - took / seconds), "% less time than default, at rest")
        _courses(results, case)


def from_0(case: Case, tuples: float) -> tuple[float, float]:
    """Seconds and joules from the start of the run until so many tuples are processed.

    What is missing when the run ends is extrapolated with the rate and the power at rest: of 15 M tuples in 300 s
    up to 6 % (TMSH-Storm; the others process them all), in the short form 60 %.
    """
    if reached := case.outcome.until(tuples):
        return reached
    outcome, seconds = case.outcome, float(case.outcome.set_up.seconds)
    missing = tuples - seconds * outcome.mean_rate(0, seconds)
    joules = seconds * outcome.mean_power(0, seconds) + missing * case.joules_a_tuple
    return seconds + missing / outcome.mean_rate(*case.after), joules


def _courses(results: Results, case: Case) -> None:
    """Energy and time by processed tuples."""
    tuples, used, done, spent = [], [], 0.0, 0.0
    for each in case.outcome.ticks:
        done += each.processed
        spent += each.power.total * case.outcome.set_up.tick
        tuples.append(done / 1e6)
        used.append(spent / 1e3)
    results.curve(f"energy.{case.strategy}", tuples, used)
    results.curve(f"time.{case.strategy}", tuples, [each.time for each in case.outcome.ticks])
