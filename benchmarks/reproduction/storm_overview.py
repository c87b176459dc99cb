"""What *Storm overview* shows and states. Its figures, tables and algorithms have no numbers: they are named by
their sections."""

from __future__ import annotations

from benchmarks.reproduction.acker import EDGES, PENDING
from benchmarks.reproduction.groupings import TASKS
from benchmarks.reproduction.model import SEED, Exhibit, Experiment, Value

PAPER = "Storm overview"

EXPERIMENTS = (
    Experiment(
        "storm-groupings",
        "A count by key with shuffle, fields and partial key grouping in the local runner",
        ("python", "-m", "benchmarks.reproduction.measure", "groupings", "--seed", SEED),
        quick_seconds=2,
        full_seconds=5,
        duration="200,000 skewed tuples, 400 keys, 8 tasks",
        spark=False,
    ),
    Experiment(
        "storm-acker",
        "The acker with 1,048,576 open roots, which fill its ring, and with 50,000",
        ("python", "-m", "benchmarks.reproduction.measure", "acker", "--seed", SEED),
        quick_seconds=2,
        full_seconds=10,
        duration="1, 10 and 100 tuples for each root",
        spark=False,
        version=2,
    ),
    Experiment(
        "storm-ackers",
        "1, 2 and 4 ackers at the rate where one is saturated",
        ("penstock", "bench", "delivery", "--only", "ackers"),
        quick_seconds=60,
        full_seconds=60,
        duration="80 tallies of the roots of 4.5 ms, for each number of ackers; the paper has no experiment",
    ),
    Experiment(
        "storm-exactly-once",
        "Replacements under load while keys are counted; then all counts are compared with a sequential run",
        ("penstock", "bench", "replacement", "--only", "correct"),
        quick_seconds=60,
        full_seconds=150,
        duration="ten replacements for each guarantee",
    ),
)

EXHIBITS = (
    Exhibit(
        "storm-arch",
        PAPER,
        "section 2.1, figure 1",
        "Nimbus, supervisors, ZooKeeper, workers",
        code=("src/penstock/driver/supervisor.py", "src/penstock/worker/worker.py"),
        tests=("tests/unit/test_lifecycle.py", "tests/unit/test_worker.py"),
        note="The driver is Nimbus, workers are workers; Spark starts the processes.",
    ),
    Exhibit(
        "storm-task",
        PAPER,
        "section 2.1, figure 2",
        "A topology of spouts and bolts with several tasks",
        code=("src/penstock/plan/planner.py",),
        tests=("tests/unit/test_planner.py",),
    ),
    Exhibit(
        "storm-stream",
        PAPER,
        "section 2.2",
        "A stream is ⟨component, stream, fields⟩",
        code=("src/penstock/topology/streams.py",),
        tests=("tests/unit/test_validation.py",),
    ),
    Exhibit(
        "storm-spout",
        PAPER,
        "section 2.3.1",
        "The methods of a spout",
        code=("src/penstock/topology/components.py",),
        tests=("tests/unit/test_public_api.py",),
    ),
    Exhibit(
        "storm-bolt",
        PAPER,
        "section 2.3.2",
        "The methods of a bolt",
        code=("src/penstock/topology/components.py",),
        tests=("tests/unit/test_public_api.py",),
    ),
    Exhibit(
        "storm-topology",
        PAPER,
        "section 2.3.3",
        "The topology builder",
        code=("src/penstock/topology/builder.py",),
        tests=("tests/unit/test_validation.py",),
    ),
    Exhibit(
        "storm-groupings",
        PAPER,
        "section 2.4.1, table",
        "The eight groupings",
        code=("src/penstock/topology/groupings.py",),
        tests=("tests/contract/test_groupings.py", "tests/property/test_routing.py"),
    ),
    Exhibit(
        "storm-memory",
        PAPER,
        "section 2.4.1, memory",
        "Memory of a count by key: shuffle O(K·T), fields O(K), partial key twice that of fields",
        (
            Value(
                "storm-groupings",
                "shuffle.entries",
                "shuffle: entries for each key",
                "entries",
                float(TASKS),
                "lower",
                equal=0.1,
            ),
            Value(
                "storm-groupings",
                "fields.entries",
                "fields: entries for each key",
                "entries",
                1.0,
                "lower",
                equal=0.0,
            ),
            Value(
                "storm-groupings",
                "partial_key.entries",
                "partial key: entries for each key",
                "entries",
                2.0,
                "lower",
                equal=0.05,
                bar=2.0,
            ),
            Value(
                "storm-groupings", "fields.busiest", "fields: load of the busiest task / mean", "×", None, "lower"
            ),
            Value(
                "storm-groupings",
                "partial_key.busiest",
                "partial key: load of the busiest task / mean",
                "×",
                None,
                "lower",
            ),
        ),
        code=("src/penstock/topology/groupings.py",),
        tests=("tests/unit/test_reproduction.py",),
        note=f"{TASKS} tasks, so the paper's O(K·T) is {TASKS} entries for each key.",
    ),
    Exhibit(
        "storm-parallelism",
        PAPER,
        "section 2.4.2",
        "Parallelism: threads and tasks",
        code=("src/penstock/plan/planner.py",),
        tests=("tests/property/test_plan.py",),
        note="by default an executor runs one task; several executors share a worker",
    ),
    Exhibit(
        "storm-tree",
        PAPER,
        "section 2.5.1, figure",
        "The tree of tuples of a sentence",
        code=("src/penstock/acking/lineage.py",),
        tests=("tests/property/test_acking_dags.py",),
    ),
    Exhibit(
        "storm-emit",
        PAPER,
        "section 2.5.1, emit of a spout",
        "Root ids, edge ids and the pending table",
        code=("src/penstock/acking/ids.py", "src/penstock/acking/pending.py"),
        tests=("tests/unit/test_acking.py",),
    ),
    Exhibit(
        "storm-anchor",
        PAPER,
        "section 2.5.1, emit of a bolt",
        "Edge ids for each target and anchor",
        code=("src/penstock/acking/lineage.py", "src/penstock/worker/tracking.py"),
        tests=("tests/property/test_acking_dags.py",),
        note="one edge id for each target, the improvement that the overview proposes",
    ),
    Exhibit(
        "storm-ack",
        PAPER,
        "section 2.5.1, ack",
        "XOR of the ids of a root",
        code=("src/penstock/acking/ledger.py",),
        tests=("tests/unit/test_acking.py", "tests/property/test_acking_dags.py"),
    ),
    Exhibit(
        "storm-bytes",
        PAPER,
        "section 2.5.1, acker",
        "The acker keeps ⟨root, value, task⟩, 8 + 8 + 4 bytes, for each root",
        (
            *(
                Value(
                    "storm-acker",
                    f"acker.bytes_per_root.{edges}",
                    f"bytes a root with {edges} tuple{'s' * (edges > 1)}, in a full ring",
                    "bytes",
                    20.0,
                    "lower",
                    bar=20,
                )
                for edges in EDGES
            ),
            *(
                Value(
                    "storm-acker",
                    f"acker.bytes_per_root_of_{PENDING}.{edges}",
                    f"bytes a root with {edges} tuple{'s' * (edges > 1)}, {PENDING:,} open roots",
                    "bytes",
                    20.0,
                    "lower",
                )
                for edges in EDGES
            ),
            *(
                Value(
                    "storm-acker",
                    f"acker.left_open.{edges}",
                    f"roots left open, {edges} tuple{'s' * (edges > 1)} each",
                    "roots",
                    0.0,
                    "lower",
                    equal=0.0,
                )
                for edges in EDGES
            ),
            Value(
                "storm-ackers",
                "ackers.scale",
                "roots per CPU second of the busiest acker, four ackers / one",
                "×",
                None,
                bar=2.5,
            ),
        ),
        code=("src/penstock/acking/ledger.py",),
        tests=("tests/unit/test_acking.py",),
        note=f"17 bytes in a full ring; 22 with {PENDING:,} open roots, the default of "
        "`delivery.max_spout_pending`, because the capacity of a ring is a power of two.",
    ),
    Exhibit(
        "storm-once",
        PAPER,
        "section 2.5.2",
        "At most once, at least once, exactly once",
        (
            Value(
                "storm-exactly-once",
                "replace.wrong",
                "exactly once: keys with a wrong count",
                "keys",
                0.0,
                "lower",
                equal=0.0,
                bar=0,
            ),
            Value(
                "storm-exactly-once",
                "replace.lost",
                "at least once: inputs lost",
                "tuples",
                0.0,
                "lower",
                equal=0.0,
                bar=0,
            ),
        ),
        code=("src/penstock/driver/commits.py",),
        tests=("tests/consistency/test_exactly_once.py", "tests/fault/test_kills.py"),
        note="Exactly once is for every tuple here; Trident's is for batches.",
    ),
)
