"""The tables, figures and algorithms of *Pu 2021*. Its results (table 4, figures 7 to 15) are in
``pu2021_results``."""

from __future__ import annotations

from benchmarks.reproduction.model import Exhibit, Value
from benchmarks.reproduction.pu2021_experiments import BENCHMARKS, EXPERIMENTS, PAPER
from benchmarks.reproduction.pu2021_results import RESULTS
from penstock.sim.storm_benchmarks import PUBLISHED

__all__ = ["EXHIBITS", "EXPERIMENTS"]

EXHIBITS = (
    Exhibit(
        "pu-fig1",
        PAPER,
        "figure 1",
        "The logical graph of a stream application",
        code=("src/penstock/topology/builder.py",),
        tests=("tests/unit/test_planner.py",),
    ),
    Exhibit(
        "pu-fig2",
        PAPER,
        "figure 2",
        "Executors and the streams between them",
        code=("src/penstock/control/placement.py",),
        tests=("tests/unit/test_stream_counts.py",),
    ),
    Exhibit(
        "pu-fig3",
        PAPER,
        "figure 3",
        "Executors on nodes, one worker process for each node",
        code=("src/penstock/control/placement.py",),
        tests=("tests/unit/test_placement.py",),
        note="with placement=erdm every executor has a worker of its own, so that it can move alone",
    ),
    Exhibit(
        "pu-eq1",
        PAPER,
        "equations 1 to 5",
        "Cost of a path, and the critical path",
        code=("src/penstock/control/paths.py",),
        tests=("tests/unit/test_erdm.py", "tests/property/test_placement.py"),
    ),
    Exhibit(
        "pu-fig4",
        PAPER,
        "figure 4",
        "The critical path, critical nodes and executors",
        tuple(
            Value(
                "pu-critical",
                f"critical.{critical}.{benchmark}.{of}",
                f"{label}, {'one path' if critical == 'path' else 'widened'}: {what}",
                unit,
                paper,
            )
            for benchmark, label in BENCHMARKS.items()
            for critical in ("path", "widened")
            for of, what, unit, paper in (
                ("released", "machines released of 16", "", PUBLISHED[benchmark].released),
                ("energy", "energy per tuple below default", "%", None),
            )
        ),
        code=("src/penstock/control/paths.py",),
        tests=("tests/unit/test_erdm.py",),
    ),
    Exhibit(
        "pu-eq6",
        PAPER,
        "equations 6 to 12",
        "Limits of CPU, memory and bandwidth",
        code=("src/penstock/control/limits.py",),
        tests=("tests/unit/test_erdm.py",),
    ),
    Exhibit(
        "pu-eq13",
        PAPER,
        "equations 13 to 16",
        "Where non-critical executors go",
        code=("src/penstock/control/erdm.py",),
        tests=("tests/unit/test_erdm.py",),
    ),
    Exhibit(
        "pu-eq17",
        PAPER,
        "equations 17 to 25",
        "Cost before and after the moves",
        code=("src/penstock/control/erdm.py",),
        tests=("tests/unit/test_erdm.py",),
    ),
    Exhibit(
        "pu-fig5",
        PAPER,
        "figure 5",
        "The five steps of the strategy",
        code=("src/penstock/driver/placement_controller.py",),
        tests=("tests/unit/test_placement_controller.py",),
    ),
    Exhibit(
        "pu-alg1",
        PAPER,
        "algorithm 1",
        "Resource constraints",
        code=("src/penstock/control/limits.py",),
        tests=("tests/unit/test_erdm.py",),
    ),
    Exhibit(
        "pu-alg2",
        PAPER,
        "algorithm 2",
        "Data migration: ERDM",
        code=("src/penstock/control/erdm.py", "src/penstock/driver/move.py"),
        tests=("tests/unit/test_erdm.py", "tests/integration/test_placement.py"),
    ),
    Exhibit(
        "pu-eq26",
        PAPER,
        "equations 26 to 28",
        "Planning takes time in proportion to the size of the cluster",
        code=("benchmarks/energy_plan.py",),
        tests=("tests/unit/test_erdm_speed.py",),
    ),
    Exhibit(
        "pu-eq29",
        PAPER,
        "equations 29 to 33",
        "The energy model",
        code=("src/penstock/control/energy.py",),
        tests=("tests/unit/test_energy.py",),
    ),
    Exhibit(
        "pu-fig6",
        PAPER,
        "figure 6",
        "Load monitor, database, data migration module, scheduler",
        code=(
            "src/penstock/driver/load_monitor.py",
            "src/penstock/driver/load_store.py",
            "src/penstock/driver/placing.py",
        ),
        tests=("tests/unit/test_load_monitor.py", "tests/contract/test_load_store.py"),
    ),
    Exhibit(
        "pu-table1",
        PAPER,
        "table 1",
        "Hardware: 16 supervisors, 4 cores of 3.6 GHz, 8 GB, 100 Mb/s",
        code=("src/penstock/sim/machine.py",),
        tests=("tests/unit/test_sim_cluster.py",),
        note="simulated; on our cluster four nodes with the same links",
    ),
    Exhibit(
        "pu-table2",
        PAPER,
        "table 2",
        "Software versions",
        note="not applicable: each result states its own versions",
    ),
    Exhibit(
        "pu-table3",
        PAPER,
        "table 3",
        "Parameters of the four benchmarks: executors, ackers, pending tuples, sizes, windows",
        code=("src/penstock/sim/storm_benchmarks.py", "benchmarks/erdm_topologies.py"),
        tests=("tests/unit/test_erdm_topologies.py", "tests/unit/test_sim_cluster.py"),
    ),
    *RESULTS,
)
