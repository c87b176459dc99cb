"""The tables, figures and the algorithm of *Sun 2022*."""

from __future__ import annotations

from benchmarks.migration_sim import ALPHAS, BETAS, PUBLISHED_GRID, PUBLISHED_SECONDS
from benchmarks.reproduction.model import SEED, Curve, Exhibit, Experiment, Picture, Value

PAPER = "Sun 2022"
_SIMULATED = (
    "the paper's network in NS-3 has speeds, bandwidths and bursts that it does not state. Ours were fitted to "
    "its table 2: of 93 sets of round values, the one whose times and gains with seeds 0 to 4 were closest (in "
    "the last round without 5 GB; sim/branching.py). Other seeds are reported",
)
_ALPHA, _BETA = 0.3, 0.5
"""The pair that the paper chose in table 1."""
_CHOSEN_SECONDS = PUBLISHED_GRID[_BETA][ALPHAS.index(_ALPHA)]
_FITTED = "fitted to this table"
_FITTED_GAINS = (
    "The set-up of the simulator was fitted to the times and gains of table 2; those on Spark were not."
)
_PUBLISHED_GAIN = {size: 100 * (1 - migration / credit) for size, (credit, migration) in PUBLISHED_SECONDS.items()}


def _simulation(part: str, title: str, quick: float, full: float, duration: str, version: int = 1) -> Experiment:
    return Experiment(
        f"sun-{part}",
        title,
        ("python", "-m", "benchmarks.reproduction.measure", part, "--seed", SEED),
        quick_seconds=quick,
        full_seconds=full,
        duration=duration,
        differences=_SIMULATED,
        spark=False,
        first_seed=1,
        version=version,
    )


def _cell(alpha: float, beta: float) -> Value:
    """A cell of table 1, relative to the pair that the paper chose."""
    more = 100 * (PUBLISHED_GRID[beta][ALPHAS.index(alpha)] / _CHOSEN_SECONDS - 1)
    label = f"α {alpha:g}, β {beta:g}: more than with α {_ALPHA:g}, β {_BETA:g}"
    return Value("sun-grid", f"above.{alpha:g}.{beta:g}", label, "%", more, "same", slack=1.0)


EXPERIMENTS = (
    _simulation("load", "Bursty and skewed packets", 1, 1, "1 GB"),
    _simulation(
        "sizes",
        "Credit, static shares and migration in the simulated network, four sizes",
        10,
        40,
        "all packets of each size; 21 seeds in a repeat",
    ),
    _simulation(
        "grid",
        "25 pairs of α and β in the simulated network",
        15,
        45,
        "all packets of 5 GB; 3 seeds in a repeat",
        version=2,
    ),
    Experiment(
        "sun-spark",
        "Three branches of different speed on Spark that compress packets: credit, static shares, migration",
        ("penstock", "bench", "migration", "--only", "spark", "--seed", SEED),
        first_seed=100,
        quick_seconds=120,
        full_seconds=280,
        duration="all packets of each size; packets have 10 KB in place of 1 MB, branches are ten times as fast "
        "in packets",
        differences=(
            "Penstock's credits, which are Flink's, on the same engine",
            "branches compute for 40 % of the time that a packet takes and wait for the rest: three that only "
            "compute need three cores",
        ),
        version=2,
    ),
    Experiment(
        "sun-keyed",
        "A skewed aggregate by key on Spark, real processing: migration against credit",
        ("penstock", "bench", "migration", "--only", "keyed", "--seed", SEED),
        first_seed=100,
        quick_seconds=60,
        full_seconds=120,
        duration="30,000 lines; another seed in each repeat, none of which was used to choose the set-up",
        differences=(
            "tuples of a key space in place of packets that carry the name of a branch",
            "two tasks instead of three branches; the hottest of 400 keys has 44 % of the tuples, and its owner "
            "is 1.5 times as slow",
        ),
    ),
)

EXHIBITS = (
    Exhibit(
        "sun-fig1",
        PAPER,
        "figure 1",
        "Overview: detect, choose, migrate, recover",
        code=("src/penstock/driver/migration_controller.py",),
        tests=("tests/unit/test_migration_controller.py",),
    ),
    Exhibit(
        "sun-alg1",
        PAPER,
        "algorithm 1",
        "Data migration",
        code=("src/penstock/control/migration.py", "src/penstock/worker/migration_routes.py"),
        tests=(
            "tests/unit/test_migration_policy.py",
            "tests/property/test_migration_policy.py",
            "tests/consistency/test_migration.py",
        ),
    ),
    Exhibit(
        "sun-eq1",
        PAPER,
        "equations 1 to 4",
        "Pressure of a branch: queue, surplus, bandwidth",
        code=("src/penstock/control/migration.py",),
        tests=("tests/unit/test_migration_policy.py",),
    ),
    Exhibit(
        "sun-fig2",
        PAPER,
        "figure 2",
        "The tasks of a word count",
        code=("src/penstock/topology/builder.py",),
        tests=("tests/unit/test_examples.py",),
    ),
    Exhibit(
        "sun-eq5",
        PAPER,
        "equations 5 to 7",
        "Results stay exact: partials with counts",
        code=("src/penstock/aggregates/reduce.py",),
        tests=("tests/property/test_merges.py", "tests/consistency/test_migration.py"),
    ),
    Exhibit(
        "sun-fig3",
        PAPER,
        "figure 3",
        "The network: a source, three branches, a sink",
        code=("src/penstock/sim/branching.py", "benchmarks/branches.py"),
        tests=("tests/unit/test_sim_network.py",),
    ),
    Exhibit(
        "sun-fig4",
        PAPER,
        "figure 4",
        "A node with a queue; a full one stops its senders",
        code=("src/penstock/sim/network.py",),
        tests=("tests/unit/test_sim_network.py",),
    ),
    Exhibit(
        "sun-fig5",
        PAPER,
        "figure 5",
        "Flink's credits",
        code=("src/penstock/sim/flow.py", "src/penstock/control/rate_limiters.py"),
        tests=("tests/unit/test_sim_network.py", "tests/unit/test_backpressure.py"),
    ),
    Exhibit(
        "sun-fig6",
        PAPER,
        "figure 6",
        "The load of the branches over time, 1 GB",
        (
            Value("sun-load", "burst", "highest rate of the source / mean", "×", None),
            Value("sun-load", "uneven", "highest rate of a branch / mean of a branch", "×", None),
        ),
        note="The paper shows bursts that come to the branches at different times, without figures.",
        picture=Picture(
            "time, s",
            "load (first repeat), MB/s",
            tuple(Curve("sun-load", f"load.{branch}", f"branch {branch}") for branch in "abc"),
            repeats="first",
        ),
    ),
    Exhibit(
        "sun-table1",
        PAPER,
        "table 1",
        "Seconds for 5 GB with 25 pairs of α and β",
        (
            Value(
                "sun-grid",
                "chosen",
                "α 0.3, β 0.5 above the best pair",
                "%",
                0.0,
                "lower",
                differs="all pairs are within 0.7 %, so no pair is the best",
            ),
            Value("sun-grid", "spread", "worst pair above the best", "%", 100 * (631.78 / 537.21 - 1), "same"),
            Value(
                "sun-grid",
                f"seconds.{_ALPHA:g}.{_BETA:g}",
                f"α {_ALPHA:g}, β {_BETA:g}",
                "s",
                _CHOSEN_SECONDS,
                "lower",
                differs="the set-up was fitted to table 2",
            ),
            *(_cell(alpha, beta) for beta in BETAS for alpha in ALPHAS if (alpha, beta) != (_ALPHA, _BETA)),
        ),
        note="The paper's spread of 17 % is not reproduced in any of some 60 set-ups: the overloaded branch is "
        "no candidate, so the score "
        "chooses between two branches, and one of them usually has an empty queue "
        "(`benchmarks/migration_sim.py`).",
        picture=Picture(
            "β",
            "time (median), s",
            tuple(Curve("sun-grid", f"alpha.{alpha:g}", f"α {alpha:g}") for alpha in ALPHAS),
            points=tuple(
                (f"α {alpha:g}", BETAS, tuple(PUBLISHED_GRID[beta][place] for beta in BETAS))
                for place, alpha in enumerate(ALPHAS)
            ),
            repeats="median",
        ),
    ),
    Exhibit(
        "sun-table2",
        PAPER,
        "table 2",
        "Seconds for four sizes, credit and migration",
        (
            *(
                Value(
                    "sun-sizes",
                    f"seconds.{size}.{name}",
                    f"{size}, {name}, simulated",
                    "s",
                    seconds,
                    "same" if name == "credit" else "lower",
                    differs=_FITTED,
                )
                for size, pair in PUBLISHED_SECONDS.items()
                for name, seconds in zip(("credit", "migration"), pair, strict=True)
            ),
            *(
                Value(
                    "sun-sizes",
                    f"better.{size}",
                    f"{size}: migration below credit, simulated",
                    "%",
                    gain,
                    differs=_FITTED,
                )
                for size, gain in _PUBLISHED_GAIN.items()
            ),
            *(
                Value(
                    "sun-spark",
                    f"migration.vs_credit.{size}",
                    f"{size}: migration below credit, on Spark",
                    "%",
                    gain,
                )
                for size, gain in _PUBLISHED_GAIN.items()
            ),
            Value(
                "sun-keyed",
                "migration.keyed.vs_credit",
                "a skewed aggregate by key on Spark: migration below credit",
                "%",
                15.26,
                bar=15,
            ),
            Value(
                "sun-keyed",
                "migration.keyed.wrong",
                "the same: keys with a wrong result",
                "keys",
                None,
                "lower",
                bar=0,
            ),
        ),
        note=_FITTED_GAINS,
        picture=Picture(y="s", unit="s"),
    ),
    *(
        Exhibit(
            f"sun-fig{number}",
            PAPER,
            f"figure {number}",
            f"Completed share over time, {size}",
            (
                Value(
                    "sun-sizes", f"better.{size}", "migration below credit, simulated", "%", _PUBLISHED_GAIN[size]
                ),
            ),
            note="The picture shows the first seed of each repeat; the value is the median of all seeds. "
            f"{_FITTED_GAINS}",
            picture=Picture(
                "time, s",
                "% completed",
                tuple(
                    Curve("sun-sizes", f"share.{size}.{name}", name) for name in ("credit", "migration", "static")
                ),
                points=tuple(
                    (name, (seconds,), (100.0,))
                    for name, seconds in zip(("credit", "migration"), PUBLISHED_SECONDS[size], strict=True)
                ),
            ),
        )
        for number, size in ((7, "1GB"), (8, "5GB"))
    ),
)
