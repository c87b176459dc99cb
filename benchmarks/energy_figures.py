"""Figures of the energy benchmarks, in the style of *Pu 2021*, figures 7 to 15."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from benchmarks.energy_cluster import Phase, Sample
    from benchmarks.energy_sim import Case

FOLDER = Path("results")


def plot_phases(
    name: str, samples: Sequence[Sample], pairs: Sequence[tuple[Phase, Phase]], node_count: int
) -> Path:
    """Like *Pu 2021*, figures 7 to 13: rate, latency, power and nodes over time; use of the nodes before and
    after."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 11), layout="constrained")
    rate, latency, power, nodes, use = figure.subplots(5, 1)
    times = [sample.time for sample in samples]
    acked = [sample.acked for sample in samples]
    rate.plot(times[1:], np.diff(acked) / np.diff(times))
    latency.plot(times, [float("nan") if each.p50 is None else 1e3 * each.p50 for each in samples])
    power.plot(times, [each.base + each.dynamic for each in samples], label="base and dynamic")
    power.plot(times, [each.base for each in samples], label="base")
    nodes.step(times, [each.nodes for each in samples], where="post")
    for panel, text in (
        (rate, "tuple/s"),
        (latency, "p50, ms"),
        (power, "W, modelled"),
        (nodes, "nodes in use"),
    ):
        panel.set(ylabel=text, ylim=(0, None))
        panel.grid(alpha=0.3)
        for marked, colour in (("default", "tab:orange"), ("erdm", "tab:green")):
            panel.fill_between(
                times,
                0,
                1,
                where=[each.phase == marked for each in samples],
                color=colour,
                alpha=0.15,
                transform=panel.get_xaxis_transform(),
            )
    rate.set(title=f"{name}: orange default, green ERDM")
    power.legend()
    nodes.set(xlabel="s")
    for place, phase in enumerate(pairs[-1]):
        use.bar(
            [index + 0.4 * place for index in range(len(phase.use))],
            [100 * share for share in phase.use.values()],
            0.38,
            label=phase.name,
        )
    use.set(ylabel="CPU in use, %", xlabel="node", xticks=range(node_count), xticklabels=range(1, node_count + 1))
    use.legend()
    return _save(figure, f"energy_{name}.png", dpi=100)


def plot_course(name: str, cases: Mapping[str, Case], strategies: Sequence[str]) -> Path:
    """Like *Pu 2021*, figures 10 to 12."""
    figure, (above, below) = _figure(2)
    for strategy in strategies:
        ticks = cases[strategy].outcome.ticks
        times = [tick.time for tick in ticks]
        above.plot(
            times,
            [float("nan") if tick.latency is None else 1000 * tick.latency for tick in ticks],
            label=strategy,
        )
        below.plot(times, [tick.processed for tick in ticks], label=strategy)
    above.set(ylabel="latency, ms", title=f"{name}, simulated; dotted: the switch")
    below.set(xlabel="s", ylabel="tuple/s")
    _finish((above, below), cases)
    return _save(figure, f"energy_sim_{name}.png")


def plot_use(name: str, cases: Mapping[str, Case]) -> Path:
    """Like *Pu 2021*, figures 7 to 9. A machine without bars was released."""
    figure, axes = _figure(2)
    case = cases["erdm"]
    for one, span, title in zip(axes, (case.before, case.after), ("before", "after ERDM's moves"), strict=True):
        ticks = case.outcome.between(*span)
        count = len(ticks[0].cpu)
        for place, resource in enumerate(("cpu", "memory", "bandwidth")):
            means = [100 * sum(getattr(t, resource)[index] for t in ticks) / len(ticks) for index in range(count)]
            one.bar([index + 1 + 0.27 * (place - 1) for index in range(count)], means, 0.25, label=resource)
        one.set(ylabel="% in use", ylim=(0, 100), title=f"{name}, {title}", xlabel="machine")
        one.set_xticks(range(1, count + 1))
    axes[0].legend()
    return _save(figure, f"energy_sim_{name}_use.png")


def plot_energy(cases: Mapping[str, Case]) -> Path:
    """Like *Pu 2021*, figures 13 to 15."""
    figure, (above, middle, below) = _figure(3)
    for strategy, case in cases.items():
        ticks, tick = case.outcome.ticks, case.outcome.set_up.tick
        above.plot([each.time for each in ticks], [each.power.total for each in ticks], label=strategy)
        tuples, joules, done, used = [], [], 0, 0.0
        for each in ticks:
            done += each.processed
            used += each.power.total * tick
            tuples.append(done / 1e6)
            joules.append(used / 1e3)
        middle.plot(tuples, joules, label=strategy)
        below.plot(tuples, [each.time for each in ticks], label=strategy)
    above.set(xlabel="s", ylabel="W, modelled", title="rollingcount, simulated")
    middle.set(xlabel="million tuples", ylabel="kJ, modelled")
    below.set(xlabel="million tuples", ylabel="s")
    above.legend(ncols=3)
    for one in (above, middle, below):
        one.grid(alpha=0.3)
    return _save(figure, "energy_sim_energy.png")


def _figure(rows: int) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 2.6 * rows), layout="constrained")
    return figure, figure.subplots(rows, 1)


def _finish(panels: Sequence[Any], cases: Mapping[str, Case]) -> None:
    for panel in panels:
        panel.grid(alpha=0.3)
        panel.axvline(cases["default"].outcome.set_up.switch, color="grey", linewidth=0.8, linestyle=":")
        panel.legend()


def _save(figure: Any, name: str, dpi: int = 80) -> Path:
    FOLDER.mkdir(exist_ok=True)
    figure.savefig(FOLDER / name, dpi=dpi)
    return FOLDER / name
