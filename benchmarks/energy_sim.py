"""The experiment of *Pu 2021* in the simulator: ERDM compared with Storm's default and the paper's other
strategies on sixteen machines; and the growth of planning and simulation time to 100 and 1,000 machines. All watts
and joules are computed by the power model."""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from benchmarks.energy_figures import plot_course, plot_energy, plot_use
from benchmarks.harness import Results, run_parts, say
from penstock.control.energy import PowerModel
from penstock.control.erdm import InterNode, inter_node
from penstock.sim.cluster import run
from penstock.sim.outcome import ClusterOutcome, ClusterSetUp, ClusterTick
from penstock.sim.relocation import PlacementStrategy
from penstock.sim.storm_benchmarks import BENCHMARKS, PUBLISHED, STRATEGIES, erdm, erdm_path

PARTS = ("sim", "sim-seeds", "sim-scale", "sim-critical")
SEED = 1
SEEDS = (1, 2, 3)
"""For the part sim-seeds; all other parts use the first one."""
FOR_RATE = ("default", "erdm", "tmsh")
"""*Pu 2021*, figures 10 to 12; the other strategies on RollingCount only, as in its figures 13 and 14."""
CRITICAL = {"path": erdm_path, "widened": erdm}
"""ERDM by the setting ``placement.critical``."""
TUPLES = 15e6
"""*Pu 2021*, figures 14 and 15."""
PUBLISHED_WATTS = {"default": 1_063.15, "erdm": 1_065.37, "dvrnp": 1_045.32, "dvrcp": 1_023.17, "leedsp": 1_073.71}
PUBLISHED_KILOJOULES = {"default": 7_270.3, "erdm": 5_286.8, "dvrnp": 6_317.3, "dvrcp": 6_031.5, "leedsp": 5_934.7}
PUBLISHED_SECONDS = {"default": 300.0, "erdm": 216.0}
SETTLED = 45.0
"""Seconds after the switch from which the steady state is measured; the paper's peaks end after 30."""
USES = (0.45, 0.475, 0.5, 0.55, 0.6, 0.7)
"""Utilization of all resources with the default strategy, for which ERDM's saving is computed."""
SIZES = {100: (6, 20), 1_000: (62, 12)}
"""Machines: copies of RollingCount, simulated seconds."""


@dataclass(frozen=True)
class Case:
    """One run of a benchmark with one strategy."""

    name: str
    strategy: str
    outcome: ClusterOutcome
    wall: float

    @property
    def before(self) -> tuple[float, float]:
        set_up = self.outcome.set_up
        return set_up.switch - set_up.sample_seconds, set_up.switch

    @property
    def after(self) -> tuple[float, float]:
        set_up = self.outcome.set_up
        return set_up.switch + SETTLED, set_up.seconds

    @property
    def cost(self) -> InterNode:
        """Communication between machines before and after the moves, by the load sample taken before."""
        switch = self.outcome.switch
        assert switch is not None, "the strategy was asked"
        graph = switch.snapshot.graph
        places = list(graph.places)
        for move in switch.carried:
            places[graph.position[move.executor]] = graph.node_position[move.target]
        return inter_node(switch.snapshot, places)

    @property
    def joules_a_tuple(self) -> float:
        """Begin and end of the steady state after the switch."""
        return self.outcome.mean_power(*self.after) / self.outcome.mean_rate(*self.after)


def main(options: argparse.Namespace) -> int:
    return run_parts("energy_sim", dict(zip(PARTS, MEASURES, strict=True)), options)


def measure_energy_sim(results: Results, options: argparse.Namespace) -> None:
    """*Pu 2021*, figures 7 to 15, and the table that compares its results with ours."""
    ordered: list[bool] = []
    for name, set_up in BENCHMARKS.items():
        chosen = list(STRATEGIES) if name == "rollingcount" else list(FOR_RATE)
        cases = {strategy: simulate(name, strategy, shortened(name, set_up, options.quick)) for strategy in chosen}
        for case in cases.values():
            _report(results, case, cases["default"])
        _bars(results, name, cases)
        rates = {each: cases[each].outcome.mean_rate(*cases[each].after) for each in FOR_RATE}
        ordered += [
            rates["erdm"] > rates["default"],
            rates["tmsh"] > rates["default"],
            rates["tmsh"] > rates["erdm"],
        ]
        say(f"  {plot_course(name, cases, FOR_RATE)}, {plot_use(name, cases)}")
        if name == "rollingcount":
            _energy(results, cases, TUPLES * (0.2 if options.quick else 1.0))
    note = f"of {len(ordered)}: ERDM and TMSH above default, TMSH above ERDM, for each benchmark as in Pu 2021"
    results.bar("sim.pu2021.order.rate", sum(ordered), note)
    for use in USES:
        results.row(what="computed: 16 machines at this utilization, the same rate", **at_use(use))


def measure_energy_sim_seeds(results: Results, options: argparse.Namespace) -> None:
    """The influence of the seed on the steady state: medians of shorter runs."""
    above: list[bool] = []
    for name, whole in BENCHMARKS.items():
        found: dict[str, list[float]] = {}
        set_up = shortened(name, whole, options.quick)
        set_up = replace(set_up, seconds=min(set_up.seconds, 180), switch=min(set_up.switch, 60.0))
        for seed in SEEDS:
            cases = {each: simulate(name, each, set_up, seed) for each in FOR_RATE}
            default = cases.pop("default")
            for strategy, case in cases.items():
                rate = case.outcome.mean_rate(*case.after) / default.outcome.mean_rate(*case.after)
                energy = case.joules_a_tuple / default.joules_a_tuple
                row = {"rate": round(100 * (rate - 1), 2), "energy": round(100 * (energy - 1), 2)}
                row["unsteady"] = round(100 * unsteady(case.outcome.between(*case.after)), 1)
                results.row(what="against default, %", benchmark=name, strategy=strategy, seed=seed, **row)
                for what, value in row.items():
                    found.setdefault(f"{strategy}.{what}", []).append(value)
        for what, values in found.items():
            unit = "%" if what.endswith("unsteady") else "% against default"
            spread = f"{unit}, median of {len(values)} seeds, {min(values):g} to {max(values):g}"
            results.bar(f"sim.pu2021.{name}.seeds.{what}", statistics.median(values), spread)
        ours, theirs = (statistics.median(found[f"{each}.rate"]) for each in ("erdm", "tmsh"))
        above += [ours > 0, theirs > 0, theirs > ours]
    note = (
        f"of {len(above)}, medians: ERDM and TMSH above default, TMSH above ERDM, for each benchmark as in Pu 2021"
    )
    results.bar("sim.pu2021.order.rate_of_seeds", sum(above), note)


def at_use(
    use: float, machines: int = 16, fill: float = 0.95 * 0.95, model: PowerModel | None = None
) -> dict[str, Any]:
    """What ERDM can save at most at this utilization of all three resources and the same rate: the remaining
    machines are filled to the limit and take over the work of the released ones."""
    model = model or PowerModel()
    left = math.ceil(machines * use / fill)
    dynamic = machines * model.dynamic(use, use, use)
    before, after = machines * model.idle + dynamic, left * model.idle + dynamic
    return {
        "use before %": round(100 * use, 1),
        "released": machines - left,
        "use after %": round(100 * use * machines / left),
        "W before": round(before),
        "W after": round(after),
        "energy %": round(100 * (after / before - 1), 1),
    }


def measure_energy_sim_scale(results: Results, options: argparse.Namespace) -> None:
    """CPU time of a plan and of a run: copies of RollingCount, each on sixteen consecutive machines; ERDM decides
    once."""
    for machines, (copies, seconds) in SIZES.items():
        if options.quick and machines > 100:
            continue
        set_up = replace(
            BENCHMARKS["rollingcount"],
            machines=machines,
            copies=copies,
            frame=20,
            seconds=seconds,
            switch=seconds / 2,
            sample_seconds=seconds / 4,
        )
        planned: list[float] = []

        def timed(snapshot: Any, planned: list[float] = planned) -> Any:
            begun = time.process_time()
            proposal = erdm(snapshot)
            planned.append(time.process_time() - begun)
            return proposal

        begun, cpu = time.monotonic(), time.process_time()
        outcome = run(set_up, timed, SEED, _teller(f"{machines} machines", 2))
        wall, cpu = time.monotonic() - begun, time.process_time() - cpu
        switch = outcome.switch
        assert switch is not None
        row = {
            "machines": machines,
            "executors": len(switch.snapshot.executors),
            "streams": len(switch.snapshot.streams),
            "plan s": round(planned[0], 2),
            "run, CPU s": round(cpu, 1),
            "run, wall s": round(wall, 1),
            "simulated s": seconds,
            "tuples": sum(outcome.processed.values()),
        }
        note = f"{len(switch.carried)} moves, {len(switch.proposal.releases)} machines to be released"
        results.row(what=f"simulated, {machines} machines", **row, note=note)
        results.bar(f"sim.scale.{machines}.plan", planned[0], "CPU s of ERDM's plan")
        results.bar(f"sim.scale.{machines}.run", cpu / seconds, "CPU s per simulated second")
        say(f"  {machines} machines: {note}, plan {planned[0]:.2f} s, run {wall:.1f} s")


def measure_energy_sim_critical(results: Results, options: argparse.Namespace) -> None:
    """The critical nodes of one path, as *Pu 2021* defines them, beside the widened ones."""
    for name, whole in BENCHMARKS.items():
        set_up = shortened(name, whole, options.quick)
        set_up = replace(set_up, seconds=min(set_up.seconds, 180), switch=min(set_up.switch, 60.0))
        default = simulate(name, "default", set_up)
        for critical, strategy in CRITICAL.items():
            begun = time.monotonic()
            outcome = run(set_up, strategy, SEED, _teller(f"{name}, {critical}, seed {SEED}", 60))
            case = Case(name, critical, outcome, time.monotonic() - begun)
            _report(results, case, default)
            results.bar(f"sim.critical.{critical}.{name}.released", len(outcome.released), "machines of 16")
            per_tuple = 100 * (1 - case.joules_a_tuple / default.joules_a_tuple)
            results.bar(f"sim.critical.{critical}.{name}.energy", per_tuple, "% below default, per tuple")


MEASURES = (
    measure_energy_sim,
    measure_energy_sim_seeds,
    measure_energy_sim_scale,
    measure_energy_sim_critical,
)


def shortened(name: str, set_up: ClusterSetUp, quick: bool) -> ClusterSetUp:
    if quick:
        return replace(set_up, seconds=120, switch=40.0, sample_seconds=20.0, frame=20)
    # Long enough to process the number of tuples in Pu 2021 from the switch on.
    return replace(set_up, seconds=420) if name == "rollingcount" else set_up


def simulate(
    name: str,
    strategy: str,
    set_up: ClusterSetUp,
    seed: int = SEED,
    strategies: Mapping[str, PlacementStrategy] = STRATEGIES,
) -> Case:
    begun = time.monotonic()
    outcome = run(set_up, strategies[strategy], seed, _teller(f"{name}, {strategy}, seed {seed}", 60))
    if outcome.emitted != outcome.completed + outcome.pending:
        raise AssertionError(f"{name}, {strategy}: {outcome.emitted} emitted, {outcome.completed} completed")
    return Case(name, strategy, outcome, time.monotonic() - begun)


def _teller(what: str, every: float) -> Callable[[float], None]:
    begun = time.monotonic()

    def tell(now: float) -> None:
        if now % every == 0:
            say(f"    {what}: {now:g} s simulated in {time.monotonic() - begun:.0f} s")

    return tell


# ---- figures ----------------------------------------------------------------------------------------------


def _report(results: Results, case: Case, default: Case) -> None:
    outcome, switch = case.outcome, case.outcome.switch
    assert switch is not None
    rate, other = outcome.mean_rate(*case.after), default.outcome.mean_rate(*case.after)
    latency, theirs = outcome.mean_latency(*case.after), default.outcome.mean_latency(*case.after)
    cost = case.cost
    row: dict[str, Any] = {
        "benchmark": case.name,
        "strategy": case.strategy,
        "released": len(outcome.released),
        "moved": len(switch.carried),
        "refused": switch.refused,
        "streams made local": cost.local - cost.opened,
        "comm. saved %": round(100 * cost.saved, 1),
        "tuple/s": round(rate),
        "rate %": round(100 * (rate / other - 1), 1),
        "unsteady %": round(100 * unsteady(outcome.between(*case.after)), 1),
        "latency ms": round(1000 * latency),
        "latency %": round(100 * (latency / theirs - 1), 1),
        "use before %": _span(use_by_machine(case, case.before)),
        "use after %": _span(use_by_machine(case, case.after)),
        "W after": round(outcome.mean_power(*case.after)),
        "J/1000 tuples": round(1000 * case.joules_a_tuple, 2),
        "moving s": round(switch.took, 1),
        "wall s": round(case.wall, 1),
    }
    results.row(**row)
    say(f"  {case.name}, {case.strategy}: " + ", ".join(f"{k} {v}" for k, v in list(row.items())[2:]))


def _bars(results: Results, name: str, cases: Mapping[str, Case]) -> None:
    ours, default, there = cases["erdm"], cases["default"], PUBLISHED[name]
    rate, base = ours.outcome.mean_rate(*ours.after), default.outcome.mean_rate(*ours.after)
    latency = ours.outcome.mean_latency(*ours.after) / default.outcome.mean_latency(*ours.after)
    switch = ours.outcome.switch
    assert switch is not None
    sooner = "no figure in Pu 2021" if there.sooner is None else f"Pu 2021: −{there.sooner}"
    share = 100 * len(switch.carried) / len(switch.snapshot.executors)
    published = f"Pu 2021: {100 * there.moved / there.executors:.1f}"
    results.bar(
        f"sim.pu2021.{name}.released", len(ours.outcome.released), f"machines of 16 (Pu 2021: {there.released})"
    )
    results.bar(f"sim.pu2021.{name}.moved", share, f"% of executors ({published})")
    results.bar(
        f"sim.pu2021.{name}.communication",
        100 * ours.cost.saved,
        f"% saved between machines (Pu 2021: {there.saved})",
    )
    results.bar(f"sim.pu2021.{name}.rate", 100 * (rate / base - 1), f"% above default (Pu 2021: +{there.faster})")
    results.bar(
        f"sim.pu2021.{name}.default_rate",
        base,
        f"tuple/s (Pu 2021: {there.default_rate:,.0f}; set up to match it)",
    )
    results.bar(f"sim.pu2021.{name}.latency", 100 * (latency - 1), f"% relative to default ({sooner})")
    for when, span in (("before", ours.before), ("after", ours.after)):
        means = use_by_machine(ours, span)
        bounds = "50 to 70" if when == "before" else "80 to 100"
        results.bar(
            f"sim.pu2021.{name}.use_{when}", 100 * sum(means) / len(means), f"% on average (Pu 2021: {bounds})"
        )
    per_tuple = 100 * (1 - ours.joules_a_tuple / default.joules_a_tuple)
    results.bar(f"sim.pu2021.{name}.energy_a_tuple", per_tuple, "% below default, steady state after the switch")
    peak = max(tick.latency or 0.0 for tick in ours.outcome.between(ours.before[1], ours.after[0]))
    results.bar(
        f"sim.pu2021.{name}.latency_peak", peak / ours.outcome.mean_latency(*ours.before), "× before, during moves"
    )


def _energy(results: Results, cases: Mapping[str, Case], tuples: float) -> None:
    """*Pu 2021*, figures 13 to 15: a number of tuples in the steady state, from the switch, and from the
    beginning."""
    joules: dict[str, dict[str, float]] = {"": {}, "_from_switch": {}, "_from_0": {}}
    for strategy, case in cases.items():
        spans = {"_from_0": case.outcome.until(tuples), "_from_switch": case.outcome.until(tuples, case.before[1])}
        rest = tuples / case.outcome.mean_rate(*case.after), tuples * case.joules_a_tuple
        watts = case.outcome.mean_power(0, case.outcome.set_up.seconds)
        row: dict[str, Any] = {"benchmark": "rollingcount", "strategy": strategy, "W": round(watts, 1)}
        row["Pu 2021 W"] = PUBLISHED_WATTS.get(strategy, "")
        for name, found in {"": rest, **spans}.items():
            if found is not None:
                joules[name][strategy] = found[1]
                when = name.replace("_", " ") or " at rest"
                row |= {f"s{when}": round(found[0], 1), f"kJ{when}": round(found[1] / 1e3, 1)}
        row |= {
            "Pu 2021 s": PUBLISHED_SECONDS.get(strategy, ""),
            "Pu 2021 kJ": PUBLISHED_KILOJOULES.get(strategy, ""),
        }
        results.row(what=f"{tuples / 1e6:g} M tuples, modelled", **row)
    for name, by_strategy in joules.items():
        for strategy, found_joules in by_strategy.items():
            if strategy == "default":
                continue
            theirs = PUBLISHED_KILOJOULES.get(strategy)
            saving = None if theirs is None else 100 * (1 - theirs / PUBLISHED_KILOJOULES["default"])
            published = "no figure in Pu 2021" if saving is None else f"Pu 2021: {saving:.1f}"
            below = 100 * (1 - found_joules / by_strategy["default"])
            when = name.strip("_").replace("_", " ") or "steady state after the switch"
            results.bar(
                f"sim.pu2021.rollingcount.energy{name}.{strategy}",
                below,
                f"% below default, {when}, modelled ({published})",
            )
        pairs = list(combinations([each for each in PUBLISHED_KILOJOULES if each in by_strategy], 2))
        same = [
            (by_strategy[a] < by_strategy[b]) == (PUBLISHED_KILOJOULES[a] < PUBLISHED_KILOJOULES[b])
            for a, b in pairs
        ]
        results.bar(
            f"sim.pu2021.order.energy{name}", sum(same), f"of {len(same)} pairs of strategies in the paper's order"
        )
    say(f"  {plot_energy(cases)}")


def use_by_machine(case: Case, span: tuple[float, float]) -> list[float]:
    """For each machine with executors at the end, the mean utilization of its three resources (*Pu 2021*, figures
    8 and 9)."""
    ticks = case.outcome.between(*span)
    machines = [index for index, share in enumerate(ticks[-1].memory) if share]
    return [
        sum(tick.cpu[index] + tick.memory[index] + tick.bandwidth[index] for tick in ticks) / 3 / len(ticks)
        for index in machines
    ]


def _span(values: Sequence[float]) -> str:
    return f"{100 * min(values):.0f}–{100 * max(values):.0f}"


def unsteady(ticks: Sequence[ClusterTick]) -> float:
    """Standard deviation of the rate, as a share of its mean."""
    rates = [tick.processed for tick in ticks]
    mean = sum(rates) / len(rates)
    spread = sum((rate - mean) ** 2 for rate in rates) / len(rates)
    return float(spread**0.5 / mean)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="shorter runs with larger frames")
    parser.add_argument("--only", action="append", choices=PARTS, help="one part")
    parser.add_argument("--json", help="write rows and bars to this file")
    raise SystemExit(main(parser.parse_args()))
