"""The tables, figures and algorithms of *Lu 2020*."""

from __future__ import annotations

from benchmarks.reproduction.model import SEED, Curve, Exhibit, Experiment, Picture, Value

PAPER = "Lu 2020"
CASES = {"a": "1/1/1", "b": "1/2/1", "c": "1/2/2", "d": "1/4/6"}
_L = {"a": 60_323, "b": 61_307, "c": 64_535, "d": 67_063}
_D = {"a": 50_836, "b": 53_614, "c": 60_312}
_RATIO = {"a": 60_323 / 50_836, "b": 61_307 / 53_614, "c": 64_535 / 60_312, "d": 1.0}
_H = {"a": 53_036, "b": 55_762, "c": 62_188}
_SIX = (
    "six servers with a Core i7 of 2.2 GHz and 16 GB in the paper, two cores of one machine here, Kafka included"
)
_STORM = "Storm 2.8.3; in the paper Storm 1.1.0 and Heron 0.17.5"

EXPERIMENTS = (
    Experiment(
        "lu-fig13",
        "FastWordCount in four parallelisms with a given load: step-by-step backpressure against none and against "
        "stopping spouts, on this engine; Storm beside it",
        ("penstock", "bench", "backpressure", "--only", "fig13"),
        quick_seconds=210,
        full_seconds=300,
        duration="per case and system 7 s of warm-up and 10 s; message time-out 5 s instead of 30 s, so that two "
        "or three time-outs pass in a run. The paper repeats 50 times and does not state a duration",
        differences=(
            _SIX,
            "each word takes 1 ms, as for a call to another system, and the load is the same in all cases; the "
            "paper's spout emits as fast as it can. So a and b are overloaded 4.6 times, c 2.3 times, and d is "
            "not, on any machine",
            _STORM,
            "with the mechanisms off, nothing limits what is pending (Storm's default)",
        ),
        needs=("Maven (for Storm)",),
    ),
    Experiment(
        "lu-fig13-local",
        "The same load in the local runner: real workers, acks and flow control on a simulated clock",
        ("python", "-m", "benchmarks.reproduction.measure", "flow", "--seed", SEED),
        quick_seconds=45,
        full_seconds=150,
        duration="40 simulated seconds for each case and system, the first 10 for warming up; message time-out "
        "5 s",
        differences=("one thread; n count tasks are simulated by a n-th of the time for each word",),
        spark=False,
        version=2,
    ),
    Experiment(
        "lu-fig15",
        "Word count from Kafka, lines 1, split 2, count 4, persist 1, with a slow and with a fast persist bolt: "
        "latency "
        "over time with the mechanisms on and off",
        ("penstock", "bench", "backpressure", "--only", "fig15"),
        quick_seconds=200,
        full_seconds=200,
        duration="8 s of warm-up and 14 s for each system; message time-out 5 s instead of 30 s. The paper "
        "repeats 50 "
        "times and does not state a duration",
        differences=(
            _SIX,
            "400 lines/s and 1 ms for each word to be persisted, so that the persist bolt is overloaded "
            "fourfold on any "
            "machine; the paper's spout reads as fast as it can",
            "the paper's D is Storm 1.1.0, ours 2.8.3; *off* is this engine without the mechanisms, and nothing "
            "limits what is pending (Storm's default)",
        ),
        needs=("Maven (for Kafka and Storm)",),
        takes_text=True,
    ),
    Experiment(
        "lu-fig16",
        "The same results into a store that takes 50 ms for each write: latency over time, memory",
        ("penstock", "bench", "persistence", "--only", "sleep"),
        quick_seconds=150,
        full_seconds=290,
        duration="46 s for each case, 18 s for queues in Redis and memcached; the paper states no duration",
        differences=(
            _SIX,
            "a spout of 2,000 results per second in place of the word count from Kafka, so that every case has "
            "the same load",
        ),
        needs=("Maven (for Redis and memcached, in full)",),
    ),
    Experiment(
        "lu-fig10",
        "20,000 results per second into a slow store, with little memory for the process: it is ended when it "
        "needs more",
        ("penstock", "bench", "persistence", "--only", "memory"),
        quick_seconds=80,
        full_seconds=95,
        duration="40 s for each case; 80 MB of growth end the process",
        differences=(_SIX,),
    ),
    Experiment(
        "lu-fig17",
        "Word count with slowed split and count, one task each, under a growing load: scaling policies beside "
        "Storm's "
        "rebalance",
        ("penstock", "bench", "replacement", "--only", "fig17"),
        quick_seconds=70,
        full_seconds=390,
        duration="115 s for each policy and for Storm: 65, 130 and 260 lines/s; 17 s in short form, without Storm",
        differences=(
            _SIX,
            "the paper's topology is overloaded from the start; here the load doubles at 30 and at 70 s",
            "Storm is rebalanced by a script that knows the load; in the paper by hand at 40 and 90 s",
        ),
        needs=("Maven (for Storm)",),
    ),
    Experiment(
        "lu-replay",
        "Memory of the pending table with 50,000 pending tuples of 10 KB",
        ("penstock", "bench", "delivery", "--only", "replay-memory"),
        quick_seconds=30,
        full_seconds=60,
        duration="no duration in the paper",
    ),
    Experiment(
        "lu-overload",
        "Replacement of a saturated topology, both policies, both guarantees",
        ("penstock", "bench", "replacement", "--only", "overload"),
        quick_seconds=100,
        full_seconds=215,
        duration="45 s for each policy and guarantee; no experiment in the paper",
    ),
    Experiment(
        "lu-scaling-sim",
        "The scaling experiment simulated: policies rate and failures",
        ("python", "-m", "benchmarks.scaling_sim"),
        quick_seconds=5,
        full_seconds=10,
        duration="10 simulated minutes; 11 seeds in a repeat, which always have the same results",
        spark=False,
        varies=False,
    ),
)


def _figure_13(part: str) -> Exhibit:
    case, name = CASES[part], "lu-fig13"
    differs = "the rates are set by the load and by 1 ms for each word"
    nothing = "" if part == "d" else "the load makes off complete nothing, and off then counts as 1/s"
    heron = _L[part] / _H[part] if part in _H else 1.0
    values = [
        Value(name, f"lu13.on_vs_off.{case}", "completed, on / off", "×", _RATIO[part], differs=nothing),
        Value(name, f"lu13.on_vs_spout.{case}", "completed, on / stopping spouts as Heron does (H)", "×", heron),
        Value(name, f"lu13.on_vs_storm.{case}", "completed, on / Storm (D)", "×", _RATIO[part]),
        *(
            Value(
                name, f"lu13.rate.{case}.{system}", label, "sentences/s", paper, differs=differs if paper else ""
            )
            for system, label, paper in (
                ("on", "on (L; the paper: tuple/s)", _L[part]),
                ("off", "off", None),
                ("spout", "stopping spouts (H)", _H.get(part)),
                ("storm", "Storm (D)", _D.get(part)),
            )
        ),
    ]
    local = "lu-fig13-local"
    values += [
        Value(
            local,
            f"on_vs_off.{case}",
            "simulated clock: completed, on / off (off: at least 1/s)",
            "×",
            _RATIO[part],
            differs=nothing,
        ),
        *(
            Value(local, f"rate.{case}.{system}", f"simulated clock: {label}", "sentences/s", None)
            for system, label in (("on", "on"), ("off", "off"), ("spout", "stopping spouts"))
        ),
        Value(local, f"failed.{case}.on", "simulated clock: timed out, on", "sentences", None, "lower"),
        Value(local, f"failed.{case}.off", "simulated clock: timed out, off", "sentences", None, "lower"),
    ]
    if part == "a":
        label = "completed, on / off, the least of the overloaded cases a and b"
        values.insert(0, Value(name, "lu13.on_vs_off.overloaded", label, "×", None, bar=1.17))
    if part == "d":
        label = "completed, on / off, where nothing is overloaded"
        values.insert(0, Value(name, "lu13.on_vs_off.otherwise", label, "×", None, bar=0.98))
    systems = {"on": "on", "off": "off", "spout": "stopping spouts", "storm": "Storm"}
    return Exhibit(
        f"lu-fig13{part}",
        PAPER,
        f"figure 13 {part}",
        f"Throughput of FastWordCount {case} over time",
        tuple(values),
        picture=Picture(
            "time, s",
            "completed sentences/s",
            (
                *(Curve(name, f"lu13.{case}.{s}", label) for s, label in systems.items()),
                *(Curve(local, f"{case}.{s}", f"simulated clock: {systems[s]}") for s in ("on", "off", "spout")),
            ),
        ),
    )


EXHIBITS = (
    Exhibit(
        "lu-fig1",
        PAPER,
        "figure 1",
        "A directed acyclic graph of computation",
        code=("src/penstock/topology/builder.py",),
        tests=("tests/unit/test_validation.py",),
    ),
    Exhibit(
        "lu-table1",
        PAPER,
        "table 1",
        "Storm's concepts",
        code=("docs/reference/glossary.md",),
        tests=("tests/unit/test_docs_site.py",),
    ),
    Exhibit(
        "lu-fig2",
        PAPER,
        "figure 2",
        "A component, the events of its stream and the signal p",
        code=("src/penstock/control/signals.py",),
        tests=("tests/unit/test_backpressure.py",),
    ),
    Exhibit(
        "lu-eq1",
        PAPER,
        "equation 1",
        "Sensitivity of the timer of backpressure",
        code=("src/penstock/control/overload_detectors.py",),
        tests=("tests/unit/test_backpressure.py", "tests/property/test_backpressure.py"),
        note="the paper's V is the rate at which the task sends; here it is the rate at which it receives, which "
        "fills the queue",
    ),
    Exhibit(
        "lu-alg1",
        PAPER,
        "algorithm 1",
        "Step-by-step backpressure",
        code=("src/penstock/control/overload_detectors.py", "src/penstock/control/rate_limiters.py"),
        tests=("tests/unit/test_backpressure.py", "tests/integration/test_flow.py"),
    ),
    Exhibit(
        "lu-fig3",
        PAPER,
        "figure 3",
        "States of a tuple: Storm keeps what is in flight (a), stateless replay does not (b)",
        (
            Value(
                "lu-replay",
                "replay.bytes_per_pending",
                "bytes of a pending tuple of 10 KB",
                "bytes",
                None,
                "lower",
                bar=100,
            ),
        ),
        code=("src/penstock/replay/decisions.py",),
        tests=("tests/property/test_replay_decisions.py",),
    ),
    Exhibit(
        "lu-fig4",
        PAPER,
        "figure 4",
        "Stateless replay: Data Queue, Eden, From, To, copy and backflow threads",
        code=("src/penstock/replay/replayer.py", "src/penstock/replay/sources.py"),
        tests=("tests/unit/test_replay_replayer.py", "tests/fault/test_replay_kill.py"),
    ),
    Exhibit(
        "lu-eq2",
        PAPER,
        "equations 2 and 3",
        "Mean and weighted variance of the time-outs",
        code=("src/penstock/control/scaling.py",),
        tests=("tests/unit/test_scaling_policy.py",),
    ),
    Exhibit(
        "lu-eq4",
        PAPER,
        "equations 4 and 5",
        "Doubling and halving, and where a key goes",
        code=("src/penstock/control/scaling.py", "src/penstock/topology/hashing.py"),
        tests=("tests/unit/test_scaling_policy.py", "tests/property/test_hashing.py"),
        note="equation 5 has XOR with the new number of tasks, which lies outside of the table; the old one is "
        "meant",
    ),
    Exhibit(
        "lu-fig5",
        PAPER,
        "figure 5",
        "Half of the keys stay where they are when tasks double",
        code=("src/penstock/topology/groupings.py", "src/penstock/plan/owners.py"),
        tests=("tests/contract/test_groupings.py", "tests/unit/test_owners.py"),
    ),
    Exhibit(
        "lu-alg2",
        PAPER,
        "algorithm 2",
        "Adaptive topology replacement",
        code=("src/penstock/control/scaling.py", "src/penstock/driver/steps.py"),
        tests=("tests/unit/test_scaling_policy.py", "tests/unit/test_scaling_controller.py"),
    ),
    Exhibit(
        "lu-alg3",
        PAPER,
        "algorithm 3",
        "The delayed persistent queue",
        code=("src/penstock/persist/policy.py", "src/penstock/persist/processor.py"),
        tests=("tests/unit/test_persist_processor.py",),
    ),
    Exhibit(
        "lu-fig6",
        PAPER,
        "figure 6",
        "Messages between tasks through ZooKeeper",
        code=("src/penstock/worker/zookeeper_board.py",),
        tests=("tests/contract/test_message_boards.py",),
    ),
    Exhibit(
        "lu-table2",
        PAPER,
        "table 2",
        "The nine steps of a message between tasks",
        code=("src/penstock/control/signals.py", "src/penstock/worker/zookeeper_board.py"),
        tests=("tests/contract/test_message_boards.py",),
    ),
    Exhibit(
        "lu-fig7",
        PAPER,
        "figure 7",
        "Structure of step-by-step backpressure",
        code=("src/penstock/worker/flow_control.py",),
        tests=("tests/unit/test_flow.py", "tests/integration/test_flow.py"),
    ),
    Exhibit(
        "lu-fig8",
        PAPER,
        "figure 8",
        "Replacement of a topology by one with fewer tasks",
        code=("src/penstock/driver/replacement.py",),
        tests=("tests/integration/test_replacement.py", "tests/fault/test_replace_kill.py"),
        note="halvings are measured with *Storm overview*, section 2.5.2",
    ),
    Exhibit(
        "lu-fig9",
        PAPER,
        "figure 9",
        "Replacement of a topology by one with more tasks",
        tuple(
            Value("lu-overload", f"replace.overload.{name}", f"saturated: {label}", unit, None, "lower", bar=bar)
            for name, label, unit, bar in (
                ("silent_s", "spouts silent", "s", 0.5),
                ("gap_s", "longest gap in the output", "s", 1.0),
                ("prepare_s", "from the decision to the switch", "s", 5.0),
                ("commit_gap_s", "longest time without a commit, exactly once", "s", None),
                ("wrong", "lost or wrong", "results", 0),
                ("idle", "cases without a replacement", "", 0),
            )
        ),
        code=("src/penstock/driver/replacement.py",),
        tests=("tests/integration/test_replacement.py",),
        note="the paper has no experiment of its own; see also figure 17",
    ),
    Exhibit(
        "lu-fig10",
        PAPER,
        "figure 10",
        "A queue inside the bolt that persists: fast, but its memory grows until the process ends",
        (
            Value(
                "lu-fig10",
                "lu10.memory_ratio",
                "most memory, queue inside (ended after 80 MB of growth) / delayed queue",
                "×",
                None,
            ),
            Value("lu-fig10", "lu10.inner.lost", "queue inside: acked results lost", "results", None, "lower"),
            Value("lu-fig10", "lu10.delayed.lost", "delayed: acked results lost", "results", None, "lower", bar=0),
            Value(
                "lu-fig16", "inner.worker_growth", "queue inside: growth of its process", "MB/min", None, "lower"
            ),
            Value("lu-fig16", "delayed.worker_growth", "delayed: growth of its process", "MB/min", None, "lower"),
        ),
        note="The paper says that memory overflows and what waits is lost, without figures. The queue inside "
        "the bolt "
        "is the case *inner* of the benchmark.",
        picture=Picture(
            "time, s",
            "MB of the worker",
            (
                Curve("lu-fig10", "memory.inner.worker MB", "queue inside the bolt"),
                Curve("lu-fig10", "memory.delayed.worker MB", "delayed persistent queue"),
            ),
        ),
    ),
    Exhibit(
        "lu-fig11",
        PAPER,
        "figure 11",
        "The delayed persistent queue in memcached, with a processor of its own",
        code=("src/penstock/persist/memcached.py", "src/penstock/persist/process.py"),
        tests=("tests/contract/test_persist_queues.py", "tests/fault/test_persist_kill.py"),
    ),
    Exhibit(
        "lu-fig12",
        PAPER,
        "figure 12",
        "The topology of the throughput test",
        code=("benchmarks/words.py", "benchmarks/on_off.py"),
        tests=("tests/unit/test_on_off.py",),
    ),
    Exhibit(
        "lu-table3",
        PAPER,
        "table 3",
        "Parallelism of the throughput test: 1/1/1, 1/2/1, 1/2/2, 1/4/6",
        code=("benchmarks/peers/bench.py",),
        tests=("tests/unit/test_on_off.py",),
    ),
    *(_figure_13(part) for part in CASES),
    Exhibit(
        "lu-fig14",
        PAPER,
        "figure 14",
        "The topology of the latency test",
        code=("benchmarks/alice_topology.py",),
        tests=("tests/unit/test_alice.py",),
    ),
    Exhibit(
        "lu-table4",
        PAPER,
        "table 4",
        "Parallelism of the latency test: 1, 2, 4, 1",
        code=("benchmarks/alice_topology.py",),
        tests=("tests/unit/test_alice.py",),
    ),
    Exhibit(
        "lu-fig15",
        PAPER,
        "figure 15",
        "Latency of the word count from Kafka over time",
        (
            Value(
                "lu-fig15",
                "lu15.fast.packed_vs_storm.p50",
                "p50, default packing / Storm (D)",
                "×",
                380 / 485,
                "lower",
                differs="the paper's spout reads as fast as it can; here nothing waits",
            ),
            Value("lu-fig15", "lu15.fast.on_vs_off.p50", "p50, on / off", "×", None, "lower"),
            Value("lu-fig15", "lu15.on_vs_off.p50", "overloaded: p50, on / off", "×", None, "lower", bar=0.8),
            Value("lu-fig15", "lu15.on_vs_off.overloaded", "overloaded: lines, on / off", "×", None, bar=1.17),
            Value("lu-fig15", "lu15.on_vs_off.otherwise", "not overloaded: lines, on / off", "×", None, bar=0.98),
            Value("lu-fig15", "lu15.on_vs_spout.p50", "overloaded: p50, on / stopping spouts", "×", None, "lower"),
            Value("lu-fig15", "lu15.on_vs_storm.p50", "overloaded: p50, on / Storm", "×", None, "lower"),
            *(
                Value(
                    "lu-fig15",
                    f"lu15.p50.{system}",
                    f"overloaded: p50, {label}",
                    "ms",
                    paper,
                    "lower",
                    differs=differs,
                )
                for system, label, paper, differs in (
                    ("on", "on", None, ""),
                    ("off", "off", None, ""),
                    ("spout", "stopping spouts", None, ""),
                    ("storm", "Storm", None, ""),
                )
            ),
            *(
                Value("lu-fig15", f"lu15.rate.{system}", f"overloaded: completed, {label}", "lines/s", None)
                for system, label in (
                    ("on", "on"),
                    ("off", "off"),
                    ("spout", "stopping spouts"),
                    ("storm", "Storm"),
                )
            ),
        ),
        note="The paper gives means, we give medians (p50), of the time from the spout's last read of a line "
        "until the counts of its words were persisted; words of lines that timed out later count too. With a "
        "full topic, as in the paper, Penstock beside Storm is measured by penstock bench fit --only backlog. "
        "Overloaded means a persist bolt that is four times too slow.",
        picture=Picture(
            "time, s",
            "latency, ms",
            (
                Curve("lu-fig15", "lu15.fast.packed", "default packing"),
                Curve("lu-fig15", "lu15.fast.on", "on"),
                Curve("lu-fig15", "lu15.fast.storm", "Storm (median)"),
                Curve("lu-fig15", "lu15.on", "overloaded, on"),
                Curve("lu-fig15", "lu15.off", "overloaded, off"),
                Curve("lu-fig15", "lu15.spout", "overloaded, stopping spouts"),
                Curve("lu-fig15", "lu15.storm", "overloaded, Storm (median)"),
            ),
            lines=(("L, 380 ms", 380), ("D, 485 ms", 485)),
            logarithmic=True,
        ),
    ),
    Exhibit(
        "lu-fig16",
        PAPER,
        "figure 16",
        "Latency with a slow store: delayed persistent queue (L) and direct writes (D)",
        (
            Value(
                "lu-fig16",
                "delayed.p95_vs_instant",
                "L: p95 with the slow store / with a fast one",
                "×",
                1.0,
                "lower",
                equal=0.1,
            ),
            Value(
                "lu-fig16", "lu16.flat", "L: p50 of the last third / of the first", "×", 1.0, "lower", equal=0.1
            ),
            Value("lu-fig16", "lu16.direct", "D: p50 of the last third / of the first", "×", None, "lower"),
            Value("lu-fig16", "delayed.p95_slope", "L: rise of the p95", "%/min", None, "lower"),
            Value("lu-fig16", "direct.p95_growth", "D: p95 at the end / at the beginning", "×", None, "lower"),
            Value(
                "lu-fig16",
                "delayed.rows_wrong",
                "L: results missing or doubled in the store",
                "rows",
                None,
                "lower",
                bar=0,
            ),
        ),
        note="The paper: L stays at 380 ms, as without the slow store; D rises all the time.",
        picture=Picture(
            "time, s",
            "median of the latency, ms",
            (
                Curve("lu-fig16", "delayed.p50", "delayed (L)"),
                Curve("lu-fig16", "direct.p50", "direct (D)"),
                Curve("lu-fig16", "inner.p50", "queue inside the bolt"),
            ),
            lines=(("L, 380 ms", 380),),
            logarithmic=True,
        ),
    ),
    Exhibit(
        "lu-fig17",
        PAPER,
        "figure 17",
        "Latency of an overloaded word count: adaptive replacement (L) and Storm's rebalance (D)",
        (
            Value(
                "lu-fig17",
                "lu17.gap_s",
                "L: longest gap at a replacement, both policies",
                "s",
                None,
                "lower",
                bar=0.3,
            ),
            Value("lu-fig17", "lu17.lost", "L: words lost", "words", None, "lower", bar=0),
            Value(
                "lu-fig17", "lu17.idle", "L: policies that did not replace the topology", "", None, "lower", bar=0
            ),
            Value(
                "lu-fig17",
                "lu17.storm_gap_s",
                "D: output stops at a rebalance",
                "s",
                22.0,
                "same",
                differs="Storm waits for its message time-out, 30 s, before it rebalances",
            ),
            Value("lu-fig17", "lu17.vs_storm", "gap, L / D", "×", None, "lower"),
            Value(
                "lu-scaling-sim",
                "scaling.rate.steps",
                "simulated, rate: replacements after the load rises eightfold",
                "",
                None,
                "lower",
            ),
        ),
        note="The paper: L replaces itself at 40 and 80 s without a stop; D stops for 22 s at each of two "
        "rebalances.",
        picture=Picture(
            "time, s",
            "median of the latency, ms",
            (
                Curve("lu-fig17", "lu17.failures", "failures (L)"),
                Curve("lu-fig17", "lu17.rate", "rate"),
                Curve("lu-fig17", "lu17.storm", "Storm's rebalance (D)"),
            ),
            logarithmic=True,
        ),
    ),
)
