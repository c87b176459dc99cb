"""ERDM by itself on a cluster of four nodes of half a core: the four benchmarks of *Pu 2021* with the default
placement, and with ``placement=erdm``, which decides on its own load samples. Nobody asks it for anything. When
it has come to rest, the load returns, and it must take the nodes back.

All watts are computed by the power model from the measured use of cores, memory and links.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.book import micros
from benchmarks.erdm_topologies import TOPOLOGIES, Shape
from benchmarks.erdm_witness import came, witnessed, wrong_buckets
from benchmarks.harness import Results, median, say
from benchmarks.replacement_figures import longest_gap
from penstock.control.energy import PowerModel
from penstock.driver.handle import RunningTopology
from penstock.driver.placement_controller import plan_for
from penstock.settings import Workers
from penstock.spark.session import close_session
from penstock.spark.submit import submit
from penstock.testing.servers.cluster import SparkCluster
from penstock.topology.builder import Topology

NODES, CPUS, LINK, BANDWIDTH = 4, 0.5, "100mbit", 25e6
"""``BANDWIDTH``: bytes per second, both directions together."""
SLOTS, MEMORY = 48, "512m"  # per node: old and new form of the topology may run side by side on one node
SHAPE = Shape(2, 4, 4, 4)
"""*Pu 2021*, table 3, for two cores instead of 64: executors per core are the same."""
RATES = {"word_count": 1_900.0, "sol": 1_700.0, "rolling_sort": 180.0, "rolling_count": 1_100.0}
"""Messages per second at which the nodes are half idle with the default placement."""
RETURN = 1.6
"""The load that returns, as a multiple: too much for two nodes, not for four."""
_MORE_LOAD, _MOST_LOAD = 1.25, 3.0
"""If it is not too much, because the machine is faster."""
_SAMPLES_UNTIL_MORE = 4  # load samples
LIMIT, FILL = 0.95, 0.95
"""Of cores, memory and links; *Pu 2021*, figure 9: 80 to 100 % in use after the moves."""
BY_ITSELF, APART = "erdm", Workers(64)
"""``APART``: every executor has a worker of its own with the default placement, too."""
_AT_REST = 3  # load samples in a row from which nothing follows
_PATIENCE = 600.0  # seconds until it must be at rest, or have its nodes back
_CATCH_UP = 2.0  # seconds after the last action that still belong to it
_INTERVAL = 0.5  # seconds between two looks at the topology


@dataclass(frozen=True)
class Times:
    """Durations in seconds."""

    sample: float
    """Length of a load sample."""
    warm: float
    """Before anything is measured: cold code and the JVM's start take more CPU time."""
    measured: float


FULL, QUICK = Times(10.0, 15.0, 25.0), Times(5.0, 15.0, 20.0)
"""*Pu 2021* has load samples of 30 s (table 4); shorter ones make it act sooner. With 5 s, Sol asked for its nodes
back at once, because one sample was above the limit."""


@dataclass(frozen=True)
class Steady:
    """Measurements of a steady state."""

    rate: float
    """Tuples per second that the last bolt processes."""
    p50: float
    """Seconds from emission to the last bolt, of the oldest tuple of each batch."""
    base: float
    dynamic: float
    """Watts, modelled."""
    nodes: int
    """Nodes that are not released."""
    use: float
    """Share of the cores of these nodes in use."""

    @property
    def watts(self) -> float:
        return self.base + self.dynamic

    @property
    def joules(self) -> float:
        """Per tuple."""
        return self.watts / self.rate


@dataclass
class Found:
    """What one benchmark has shown."""

    default: Steady
    erdm: Steady
    back: Steady
    """After the load has returned."""
    moves: list[float] = field(default_factory=list)
    replacements: list[float] = field(default_factory=list)
    """Gaps in seconds."""
    output_gap: float = 0.0
    """The longest time without a result while it acted."""
    returned: float = 0.0
    """Seconds from the return of the load until all nodes are used again."""
    wrong: int = 0
    messages: int = 0
    load: float = RETURN
    """That returned, as a multiple."""

    @property
    def rate(self) -> float:
        return self.erdm.rate / self.default.rate

    @property
    def saved(self) -> float:
        return 100 * (1 - self.erdm.joules / self.default.joules)


def measure_energy_auto(results: Results, options: argparse.Namespace, names: Sequence[str] = ()) -> None:
    """``names``: the benchmarks; by default all four, in the short form one."""
    times = QUICK if options.quick else FULL
    names = names or (["word_count"] if options.quick else list(RATES))
    repeats = options.repeats or 1
    found: dict[str, list[Found]] = {name: [] for name in names}
    for name in names:
        for number in range(repeats):
            say(f"  {name}, {number + 1} of {repeats}")
            found[name].append(_measured(results, name, times))
    bars(results, found)


def bars(results: Results, found: Mapping[str, Sequence[Found]]) -> None:
    """The bars of all benchmarks together and of each."""
    every = [each for those in found.values() for each in those]
    rate, saved = ({n: median([of(each) for each in f]) for n, f in found.items()} for of in (_rate, _saved))
    note = f"the least of {len(found)} benchmarks"
    results.bar("erdm.auto.rate", min(rate.values()), f"× default, {note}; the load is given")
    results.bar(
        "erdm.auto.energy", min(saved.values()), f"% below default per tuple, modelled, {note} (Pu 2021: 27.3)"
    )
    results.bar("erdm.auto.wrong", sum(each.wrong for each in every), "buckets of results that are wrong")
    moves = [gap for each in every for gap in each.moves]
    gaps = moves + [gap for each in every for gap in each.replacements]
    results.bar("erdm.auto.gap_s", max(gaps, default=0.0), f"s, the longest of {len(gaps)} moves and replacements")
    results.bar(
        "erdm.auto.moves", len(moves), f"executors moved one by one; {len(gaps) - len(moves)} replacements"
    )
    for name, those in found.items():
        one = those[-1]
        results.bar(f"erdm.auto.{name}.rate", rate[name], "× default")
        results.bar(f"erdm.auto.{name}.energy", saved[name], "% below default per tuple, modelled")
        results.bar(f"erdm.auto.{name}.base", one.default.base - one.erdm.base, "W of base power saved, modelled")
        dynamic = one.default.dynamic - one.erdm.dynamic
        results.bar(f"erdm.auto.{name}.dynamic", dynamic, "W of dynamic power saved, modelled")
        results.bar(f"erdm.auto.{name}.released", one.default.nodes - one.erdm.nodes, f"nodes of {NODES}")
        results.bar(f"erdm.auto.{name}.output_gap_s", max(e.output_gap for e in those), "s without a result")
        results.bar(
            f"erdm.auto.{name}.returned_s", max(e.returned for e in those), "s until it has all nodes back"
        )
        back = median([each.back.rate / (each.load * each.default.rate) for each in those])
        results.bar(f"erdm.auto.{name}.rate_back", back, f"× {one.load:.3g} × default after the load has returned")


def _rate(found: Found) -> float:
    return found.rate


def _saved(found: Found) -> float:
    return found.saved


# ---- one benchmark -------------------------------------------------------------------------------------


def _measured(results: Results, name: str, times: Times) -> Found:
    with SparkCluster(NODES, LINK, SLOTS, MEMORY, progress=Progress(), cpus=CPUS) as cluster:
        try:
            with tempfile.TemporaryDirectory(prefix="penstock-auto-") as root:
                return _both_placements(results, name, times, cluster, Path(root))
        finally:
            close_session()


def _both_placements(results: Results, name: str, times: Times, cluster: SparkCluster, root: Path) -> Found:
    with running_auto(name, "spark", times, root / "default", cluster) as run:
        time.sleep(times.warm)
        default = run.steady(times.measured)
        _report(results, name, "default", default)
        compare_paths(results, name, run)
    wrong, messages = run.wrong()
    with running_auto(name, BY_ITSELF, times, root / "erdm", cluster) as run:
        spans = [run.timed(run.await_rest)]
        erdm = run.steady(times.measured)
        _report(results, name, "erdm", erdm)
        load = run.return_load(RATES[name], _SAMPLES_UNTIL_MORE * times.sample)
        run.await_nodes(NODES)
        spans.append((run.load_raised, micros()))
        returned = (spans[1][1] - run.load_raised) / 1e6
        back = run.steady(times.measured)
        _report(results, name, "load returned", back)
        moves = [each.gap for each in run.handle.internals.placing.moves]
        replacements = [each.gap for each in run.handle.internals.replacements]
        arrived = came(run.witness).times
        output_gap = max(longest_gap(arrived, begin, end + int(_CATCH_UP * 1e6)) for begin, end in spans)
    more_wrong, more = run.wrong()
    found = Found(
        default, erdm, back, moves, replacements, output_gap, returned, wrong + more_wrong, messages + more, load
    )
    results.row(
        what=name,
        case="moves",
        **{
            "moved": len(moves),
            "gaps ms": " ".join(f"{1e3 * gap:.0f}" for gap in moves),
            "replaced": len(replacements),
            "replacement gaps ms": " ".join(f"{1e3 * gap:.0f}" for gap in replacements),
            "output gap ms": round(1e3 * output_gap),
            "messages": found.messages,
            "wrong": found.wrong,
        },
    )
    return found


def compare_paths(results: Results, name: str, run: AutoRun) -> None:
    """What ERDM would do with the default placement's last load sample: with the one critical path of *Pu 2021*,
    and with the widened one."""
    sample = run.handle.internals.monitor.sample
    if sample is None:
        return
    for critical in ("path", "widened"):
        settings = run.settings.with_values({"placement.critical": critical})
        plan = plan_for(sample, settings)
        results.row(
            what=name,
            case=f"planned, critical={critical}",
            **{
                "critical nodes": len(plan.critical.nodes),
                "moves": len(plan.moves),
                "stay": len(plan.stays),
                "released": plan.emptied,
                "comm. saved %": round(100 * plan.cost.saved, 1),
            },
        )


def _report(results: Results, name: str, case: str, steady: Steady) -> None:
    row = {
        "nodes": steady.nodes,
        "tuple/s": round(steady.rate),
        "p50 ms": round(1e3 * steady.p50, 1),
        "CPU %": round(100 * steady.use),
        "W base": round(steady.base, 1),
        "W dynamic": round(steady.dynamic, 1),
        "W": round(steady.watts, 1),
        "J/1000, modelled": round(1e3 * steady.joules, 1),
    }
    results.row(what=name, case=case, **row)
    say(f"    {name}, {case}: " + ", ".join(f"{key} {value}" for key, value in row.items()))


# ---- a topology that runs ------------------------------------------------------------------------------


class AutoRun:
    """A benchmark that runs, with what ERDM has said so far."""

    def __init__(self, handle: RunningTopology, name: str, witness: Path) -> None:
        self.handle, self.name, self.witness = handle, name, witness
        self.settings = handle.internals.topology.settings
        self.load_raised = 0
        """When ``return_load`` raised the load last, in microseconds since 1970."""
        self._told = 0.0
        self._idle = 0

    def steady(self, seconds: float) -> Steady:
        """Measure from now on."""
        begun, watts, uses = micros(), [], []
        idle_watts = PowerModel().idle
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.listen()
            time.sleep(_INTERVAL)
            energy = [node for node in self.handle.internals.monitor.energy.nodes if node.workers]
            watts.append(sum(node.dynamic_watts for node in energy))
            used = sum(node.executor_cores + node.spark_cores for node in energy)
            uses.append(used / (self.nodes * CPUS))
        ended = micros()
        batches = came(self.witness).between(begun, ended)
        # from the first to the last batch in this time, so that the size of batches does not matter
        rate = float(batches.tuples[1:].sum()) / ((batches.times[-1] - batches.times[0]) / 1e6)
        p50 = float(np.median(batches.latencies)) / 1e6
        return Steady(rate, p50, idle_watts * self.nodes, _mean(watts), self.nodes, _mean(uses))

    def timed(self, act: Callable[[], None]) -> tuple[int, int]:
        """When ``act`` began and ended, in microseconds since 1970."""
        begun = micros()
        act()
        return begun, micros()

    @property
    def nodes(self) -> int:
        """Nodes that are not released, whether or not executors are on them."""
        return NODES - self.handle.internals.placing.nodes_away

    def await_rest(self) -> None:
        """Wait until ERDM has nothing more to do."""
        self._idle = 0
        self.await_("ERDM should have come to rest", lambda: self._idle >= _AT_REST)

    def return_load(self, rate: float, patience: float) -> float:
        """Raise the load until the released nodes are requested again: by ``RETURN``, and by more whenever that
        was enough for the nodes that are left, for ``patience`` seconds. Returns the load, as a multiple of
        ``rate``."""
        load = RETURN
        while True:
            self.handle.set_max_rate("source", load * rate)
            self.load_raised = micros()
            deadline = time.monotonic() + patience
            while self.nodes < NODES and time.monotonic() < deadline:
                self.listen()
                time.sleep(_INTERVAL)
            if self.nodes == NODES or load >= _MOST_LOAD:
                return load
            load *= _MORE_LOAD
            say(f"    {self.name}: {self.nodes} nodes do {load / _MORE_LOAD:.3g} times the load; now {load:.3g}")

    def await_nodes(self, nodes: int) -> None:
        """Wait until executors are on this many nodes."""

        def used() -> bool:
            workers = list(self.handle.internals.workers.values())
            return self.nodes >= nodes and len({worker.hello.node for worker in workers}) >= nodes

        self.await_(f"executors should be on {nodes} nodes again", used)

    def listen(self) -> None:
        """Tell what ERDM has made of its load samples since the last call."""
        placements = self.handle.internals.placements
        for outcome in list(placements.outcomes):
            if outcome.time > self._told:
                self._told = outcome.time
                acted = any(each.time >= outcome.time for each in list(placements.decisions))
                # While moves are suspended, because a node was full, it is not at rest: it tries again.
                self._idle = 0 if acted or placements.paused else self._idle + 1
                say(f"    {self.name}: {outcome.text}")

    def wrong(self) -> tuple[int, int]:
        """Wrong buckets and messages, after the end."""
        source = self.handle.internals.declared.nodes["source"].component.spout  # type: ignore[attr-defined]
        source.begin(self.settings.conf)
        return wrong_buckets(self.witness, source, "count" in self.name)

    def await_(self, rule: str, condition: Callable[[], bool]) -> None:
        """Wait for a condition, and tell what ERDM does meanwhile."""
        deadline = time.monotonic() + _PATIENCE
        while not condition():
            self.listen()
            if self.handle.error is not None:
                raise self.handle.error
            if time.monotonic() > deadline:
                raise SystemExit(f"{self.name}: {rule}, but had not within {_PATIENCE:g} s")
            time.sleep(_INTERVAL)


@contextmanager
def running_auto(
    name: str, placement: str, times: Times, folder: Path, cluster: SparkCluster, rate: float | None = None
) -> Iterator[AutoRun]:
    """Run a benchmark, with its own rate or this one. At a regular end everything emitted is processed."""
    witness = folder / "witness"
    witness.mkdir(parents=True)
    topology = topology_of(name, placement, times.sample, folder, witness, rate)
    handle = submit(topology, cluster.master)
    try:
        yield AutoRun(handle, name, witness)
        handle.kill(drain=True)
    finally:
        handle.kill(drain=False)


def topology_of(
    name: str, placement: str, sample: float, folder: Path, witness: Path, rate: float | None = None
) -> Topology:
    """A benchmark with given load whose results are checked."""
    topology = witnessed(TOPOLOGIES[name](SHAPE, rate or RATES[name]), name)
    settings = topology.settings
    settings = dataclasses.replace(
        settings,
        delivery=dataclasses.replace(settings.delivery, guarantee="exactly_once", state_dir=str(folder / "state")),
        monitor=dataclasses.replace(settings.monitor, store="memory", interval=sample),
        placement=dataclasses.replace(
            settings.placement,
            policy=placement,
            node_bandwidth=BANDWIDTH,
            cpu_limit=LIMIT,
            memory_limit=LIMIT,
            bandwidth_limit=LIMIT,
            fill=FILL,
        ),
        workers=settings.workers if placement == BY_ITSELF else APART,
        conf={**settings.conf, "scale": 1.0, "witness": str(witness)},
    )
    return dataclasses.replace(topology, settings=settings)


class Progress:
    """Tells how the cluster starts; a text that repeats, once."""

    def __init__(self) -> None:
        self._last = ""

    def __call__(self, text: str) -> None:
        if text != self._last:
            self._last = text
            say(f"    {text}")


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
