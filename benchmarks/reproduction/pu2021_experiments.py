"""The experiments of *Pu 2021*: what is run, for how long, and how it differs from the paper."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from benchmarks.reproduction.cluster_sim import PAIRS
from benchmarks.reproduction.model import SEED, Experiment

PAPER = "Pu 2021"
BENCHMARKS: Mapping[str, str] = MappingProxyType(
    {"wordcount": "WordCount", "sol": "Sol", "rollingsort": "RollingSort", "rollingcount": "RollingCount"}
)
"""The paper's names."""
ON_CLUSTER: Mapping[str, str] = MappingProxyType(
    {"wordcount": "word_count", "sol": "sol", "rollingsort": "rolling_sort", "rollingcount": "rolling_count"}
)
"""What the benchmarks are called where they run on Spark."""
AUTO = "pu-cluster"
"""ERDM by itself on four nodes."""
_SIMULATED = (
    "sixteen simulated machines; service times and sizes were chosen so that the default strategy has the paper's "
    "rate, and are the same for all strategies (concepts/simulator.md)",
    "power is computed by a model in both the simulator and on our cluster; a released machine draws nothing",
    "seeds 11 and following, none of which was used to choose the set-up",
)
_PAIRS = (
    "each executor receives from one other: what the paper saves with each moved executor (0.8, 1.1, 1.5, 1.3 %) "
    "means 125, 91, 67 and 77 streams between machines. Machines are used to 70 % before (Sol 65 %), and ERDM may "
    "fill them to 85 %, so that the paper's number of released machines is possible; their mean afterwards is 75 "
    "to 79 %, a little below figure 9's 80 to 100 %"
)
_VERSION = 2
"""Of the simulations of the benchmarks: energy and time are counted from 0 on, too."""


def _simulation(benchmark: str, quick: float, full: float) -> Experiment:
    return Experiment(
        f"pu-sim-{benchmark}",
        f"{BENCHMARKS[benchmark]} on sixteen simulated machines, the strategies with the same seed",
        ("python", "-m", "benchmarks.reproduction.measure", benchmark, "--seed", SEED),
        quick_seconds=quick,
        full_seconds=full,
        duration="300 simulated seconds, the switch at 105 s as in the paper; tuples in frames of 20",
        differences=_SIMULATED,
        spark=False,
        first_seed=11,
        version=_VERSION,
    )


def _few_pairs(simulated: Experiment) -> Experiment:
    """The same benchmark with few pairs of executors that exchange data."""
    benchmark = simulated.id.removeprefix("pu-sim-")
    return replace(
        simulated,
        id=f"pu-pairs-{benchmark}",
        title=f"{BENCHMARKS[benchmark]} with few pairs of executors that exchange data, simulated",
        program=tuple(f"{word}{PAIRS}" if word == benchmark else word for word in simulated.program),
        differences=(*_SIMULATED, _PAIRS),
    )


_SIMULATIONS = (
    _simulation("wordcount", 12, 25),
    _simulation("sol", 10, 20),
    _simulation("rollingsort", 10, 20),
    _simulation("rollingcount", 20, 50),
)

EXPERIMENTS = (
    *_SIMULATIONS,
    *(_few_pairs(each) for each in _SIMULATIONS),
    Experiment(
        "pu-critical",
        "One critical path, as the paper defines it, beside the widened critical nodes, simulated",
        ("python", "-m", "benchmarks.reproduction.measure", "critical", "--seed", SEED),
        quick_seconds=30,
        full_seconds=45,
        duration="180 simulated seconds, the switch at 60 s; tuples in frames of 20",
        differences=_SIMULATED,
        spark=False,
        first_seed=11,
    ),
    Experiment(
        "pu-monitor",
        "Cost of the load monitor: 250 executors on 16 nodes; no Spark",
        ("penstock", "bench", "monitor", "--only", "reports"),
        quick_seconds=5,
        full_seconds=15,
        duration="no duration; bytes are counted",
        differences=(
            "the paper writes every sample of every thread to MySQL; here workers report and the driver keeps it",
        ),
        spark=False,
    ),
    Experiment(
        "pu-delay",
        "Delay that the load monitor adds to tuples, word count on Spark",
        ("penstock", "bench", "monitor", "--only", "delay"),
        quick_seconds=60,
        full_seconds=260,
        duration="15 s without the monitor; 15, 24, 36, 48 and 60 s with load samples of 10 to 50 s, so that a "
        "sample ends in each; 8 s of warm-up before each",
        differences=(
            "one machine of two cores, 300 lines per second",
            "the paper writes to MySQL on another machine, ours to SQLite",
        ),
        version=2,
    ),
    Experiment(
        AUTO,
        "ERDM by itself on four nodes of half a core with links of 100 Mb/s, the four benchmarks",
        ("penstock", "bench", "energy", "--only", "auto"),
        quick_seconds=300,
        full_seconds=840,
        duration="load samples of 10 s in place of 30 s; 25 s are measured with the default placement, after ERDM "
        "has come to rest, and after 1.6 times the load has returned",
        differences=(
            "four nodes of half a core in place of sixteen with four cores",
            "power is computed by the model",
        ),
        needs=("root (network namespaces and control groups)",),
        version=2,
    ),
)
