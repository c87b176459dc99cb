"""ERDM on a cluster of four nodes with links of 100 Mb/s: default placement and ERDM by turns in one run (*Pu
2021*, figures 7 to 15), the cost of moves while results are counted, and a filter for duplicates. All watts and
joules are computed by the power model."""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.book import micros
from benchmarks.energy_figures import plot_phases
from benchmarks.erdm_topologies import FOUR_NODES, sol, word_count
from benchmarks.harness import Results, median, say
from benchmarks.replacement_figures import longest_gap, lost, wrong_keys
from benchmarks.replacement_topology import Schedule, arrivals, committed, end_input, total
from benchmarks.replacement_topology import word_count as numbered_words
from penstock.driver.handle import RunningTopology
from penstock.driver.requests import Replaced
from penstock.spark.session import close_session
from penstock.spark.submit import submit
from penstock.testing.servers.cluster import SparkCluster
from penstock.topology.builder import Topology

NODES, LINK, BANDWIDTH = 4, "100mbit", 25e6
"""``BANDWIDTH``: bytes per second, both directions together."""
SLOTS = 64  # per node: old and new topology run side by side, possibly on two nodes only
CORES = 2.0  # per node: all nodes are on one machine, and each may use all of its cores
WINDOW = 10.0  # seconds of a load sample
ROUNDS = 4  # consecutive load samples, after which ERDM has nothing left to do
MESSAGE_SCALE = 1.0  # the sizes of Pu 2021: 2,000 bytes per message of Sol
UNLIMITED = 1e9  # messages per second: the spouts are limited by acks only, 200 messages each (Pu 2021, table 3)
MOVED_RATE, MOVED_KEYS, MOVED_TASKS = 1_000, 10_000, 6
MOVED_SPARE = 1  # spare slots on each node for each stage of bolts, as targets of moves
DUPLICATES, DUPLICATE_RATE = 0.5, 400.0
_PATIENCE = 180.0  # seconds; time limit for everything that should take seconds
_CATCH_UP = 1.0  # seconds after a move that still belong to it
_WARM = 15.0  # seconds after a start or a move that are not measured, because the code is not warm yet


Span = tuple[int, int]
"""Microseconds since 1970."""


@dataclass(frozen=True)
class Sample:
    """One second of a run."""

    time: float
    """Seconds since the beginning."""
    acked: int
    sent: int
    """Bytes over the nodes' links so far, in both directions."""
    p50: float | None
    """Seconds, of recently acked messages."""
    base: float
    dynamic: float
    """Watts, by the power model."""
    nodes: int
    phase: str


@dataclass(frozen=True)
class Phase:
    """Measurements of one placement in a steady state."""

    name: str
    rate: float
    bytes: float
    """Bytes over links per tuple."""
    p50: float
    mean: float
    """Seconds from emission to ack; so is p50."""
    watts: float
    nodes: int
    use: Mapping[str, float]
    """Share of its cores in use, by node."""

    @property
    def joules(self) -> float:
        """Joules per tuple."""
        return self.watts / self.rate


class Watch:
    """Samples a running topology once a second, on its own thread."""

    def __init__(self, handle: RunningTopology, cluster: SparkCluster, spout: str = "source") -> None:
        self.samples: list[Sample] = []
        self.phase = "begin"
        self._handle, self._spout = handle, spout
        self._record = cluster.record
        self._begun = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="watch", daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._stop.wait(1.0):
            self.samples.append(self._sample())

    def _sample(self) -> Sample:
        handle, network = self._handle, self._record.network
        assert network is not None
        view = next(each for each in handle.internals.bus.view() if each.component == self._spout)
        nodes = [node for node in handle.internals.monitor.energy.nodes if node.workers]
        return Sample(
            time.monotonic() - self._begun,
            handle.internals.bus.totals()[self._spout].acked,
            sum(network.passed(node.number)[0] for node in self._record.nodes),
            view.latency_p50,
            sum(node.base_watts for node in nodes),
            sum(node.dynamic_watts for node in nodes),
            len({worker.hello.node for worker in handle.internals.workers.values()}),
            self.phase,
        )

    def measure(self, name: str, seconds: float) -> Phase:
        """Measure from now on. The topology must be in a steady state."""
        time.sleep(_WARM)
        self.phase, first = name, len(self.samples)
        before = self._handle.internals.bus.totals()[self._spout].latency
        time.sleep(seconds)
        acked = self._handle.internals.bus.totals()[self._spout].latency.minus(before)
        self.phase, seen = "between", self.samples[first:]
        begin, end = seen[0], seen[-1]
        tuples, passed = end.acked - begin.acked, end.time - begin.time
        sample = self._handle.internals.monitor.sample
        return Phase(
            name,
            tuples / passed,
            (end.sent - begin.sent) / tuples,
            float(np.mean([each.p50 for each in seen if each.p50 is not None])),
            acked.seconds / acked.count,
            float(np.mean([each.base + each.dynamic for each in seen])),
            end.nodes,
            {} if sample is None else {n.node: (n.used.cpu + n.other.cpu) / n.capacity.cpu for n in sample.nodes},
        )


# ---- default and ERDM by turns -------------------------------------------------------------------------


def measure_energy_cluster(results: Results, options: argparse.Namespace) -> None:
    """Measure both placements of one running topology by turns: default, ERDM, default, ERDM … Each turn is a
    replacement, so that both are equally warm."""
    turns = options.repeats or (1 if options.quick else 3)
    seconds = 10.0 if options.quick else 30.0
    pairs: dict[str, list[tuple[Phase, Phase]]] = {}
    for name, make in (("sol", sol), ("word_count", word_count)):
        with submitted(make(FOUR_NODES, UNLIMITED)) as (handle, cluster), Watch(handle, cluster) as watch:
            pairs[name] = [
                _turn(handle, watch, seconds, f"{name}, {turn + 1} of {turns}") for turn in range(turns)
            ]
        for pair in pairs[name]:
            for phase in pair:
                _report(results, name, phase)
        say(f"  {plot_phases(name, watch.samples, pairs[name], NODES)}")
    bars(results, pairs)


def _turn(handle: RunningTopology, watch: Watch, seconds: float, what: str) -> tuple[Phase, Phase]:
    if handle.internals.placing.nodes_away:
        _spread(handle)
    default = watch.measure("default", seconds)
    say(f"    {what}: default {default.rate:,.0f}/s, p50 {default.p50 * 1e3:.0f} ms, {default.watts:.0f} W")
    rearranged(handle)
    erdm = watch.measure("erdm", seconds)
    say(
        f"    {what}: ERDM {erdm.rate:,.0f}/s, p50 {erdm.p50 * 1e3:.0f} ms, {erdm.watts:.0f} W, {erdm.nodes} nodes"
    )
    return default, erdm


def rearranged(handle: RunningTopology, spans: dict[str, list[Span]] | None = None) -> int:
    """Let ERDM place the workers, one load sample after the other, until it decides nothing more. Returns the
    times of its actions, including a second to catch up: workers ``moved`` one by one, and topologies
    ``replaced``."""
    moved = idle = 0
    seen: object = handle.internals.monitor.sample
    while idle < ROUNDS // 2 and moved < ROUNDS:
        seen = _next_sample(handle, seen)
        begin = micros()
        done = handle.internals.placing.rearrange()
        if done is None:
            idle += 1
            continue
        moved, idle = moved + 1, 0
        silent = [done.gap] if isinstance(done, Replaced) else [each.gap for each in done]
        shown = " ".join(f"{gap * 1e3:.0f}" for gap in silent)
        say(f"    {handle.internals.placements.decisions[-1].text}; {shown} ms silent")
        if spans is not None:
            time.sleep(_CATCH_UP)
            spans["replaced" if isinstance(done, Replaced) else "moved"].append((begin, micros()))
    return moved


def _next_sample(handle: RunningTopology, last: object) -> object:
    """The newest load sample of the current query run."""

    def newest() -> object:
        return handle.internals.monitor.newest(handle.internals.bus)

    _await("a load sample should end", lambda: newest() not in (None, last))
    return newest()


def _spread(handle: RunningTopology) -> None:
    before = len(handle.internals.replacements)
    handle.internals.placing.spread()
    _await("the nodes must come back", lambda: len(handle.internals.replacements) > before)


def _report(results: Results, name: str, phase: Phase) -> None:
    results.row(
        what=name,
        case=phase.name,
        **{
            "nodes": phase.nodes,
            "tuple/s": round(phase.rate),
            "p50 ms": round(phase.p50 * 1e3, 1),
            "bytes/tuple": round(phase.bytes),
            "W": round(phase.watts, 1),
            "J/1000": round(1e3 * phase.joules, 1),
            "CPU %": " ".join(f"{100 * share:.0f}" for share in phase.use.values()),
        },
    )


def bars(results: Results, pairs: Mapping[str, Sequence[tuple[Phase, Phase]]]) -> None:
    def change(of: Callable[[Phase], float], name: str) -> float:
        """Change in percent: the median of the turns."""
        return 100 * (median([of(erdm) / of(default) for default, erdm in pairs[name]]) - 1)

    for name, turns in pairs.items():
        released = min(default.nodes - erdm.nodes for default, erdm in turns)
        results.bar(f"erdm.internode_bytes.{name}", -change(lambda p: p.bytes, name), "% fewer a tuple")
        results.bar(f"erdm.rate.{name}", change(lambda p: p.rate, name), "% above default")
        results.bar(f"erdm.p50.{name}", -change(lambda p: p.p50, name), "% below default")
        results.bar(f"erdm.nodes_released.{name}", released, f"of {NODES}, the minimum of {len(turns)} turns")
        results.bar(f"erdm.energy.{name}", -change(lambda p: p.joules, name), "% less a tuple, modelled")


# ---- what moving costs, and whether results stay right -------------------------------------------------


def measure_energy_moves(results: Results, options: argparse.Namespace) -> None:
    """ERDM moves executors one by one, then releases nodes by a replacement, then takes them back, repeatedly,
    while keys are counted exactly once. Then the input ends and all counts are compared. Gaps are measured at the
    last bolt's output."""
    turns = options.repeats or (1 if options.quick else 4)
    gaps, gone = _moves_timed(turns)
    for what, seen in gaps.items():
        shown = " ".join(f"{gap:.3f}" for gap in seen)
        results.row(what=what, case="exactly once", times=len(seen), gaps=shown)
    moved, replaced = gaps["moved"], gaps["replaced"]
    results.bar("erdm.longest_gap_s", max(moved), f"s without output while executors moved, {len(moved)} times")
    results.bar("erdm.release_gap_s", max(replaced), f"s while nodes were released, {len(replaced)} times")
    results.bar("erdm.longest_gap_back_s", max(gaps["taken back"]), "s while released nodes were used again")
    results.bar("erdm.nodes_released.moves", gone, f"of {NODES}")
    wrong, inputs, moves = _moves_counted(turns)
    results.row(what="counted", case="exactly once", times=moves, inputs=inputs, **{"keys wrong": wrong})
    results.bar(
        "erdm.wrong", wrong, f"keys of {MOVED_KEYS:,} with a wrong count, {inputs:,} inputs, {moves} moves"
    )


def _moves_timed(turns: int) -> tuple[dict[str, list[float]], int]:
    """The longest gap of each move of executors, release and return of nodes, and of times without any."""
    spans: dict[str, list[Span]] = {"moved": [], "replaced": [], "taken back": [], "at rest": []}
    gone = 0
    with tempfile.TemporaryDirectory(prefix="penstock-moves-") as root:
        with submitted(_numbered(Path(root), commits=False)) as (handle, _):
            for _turn in range(turns):
                begin = micros()
                time.sleep(_WARM)
                spans["at rest"].append((begin + int(_WARM / 2 * 1e6), micros()))
                rearranged(handle, spans)
                gone = max(gone, handle.internals.placing.nodes_away)
                if handle.internals.placing.nodes_away:
                    begin = micros()
                    _spread(handle)
                    time.sleep(_CATCH_UP)
                    spans["taken back"].append((begin, micros()))
        came = arrivals(Path(root)).came
    return {what: [longest_gap(came, *span) for span in each] for what, each in spans.items()}, gone


def _moves_counted(turns: int) -> tuple[int, int, int]:
    with tempfile.TemporaryDirectory(prefix="penstock-moves-") as root:
        folder = Path(root)
        with submitted(_numbered(folder, commits=True)) as (handle, _):
            for _turn in range(turns):
                rearranged(handle)
                if handle.internals.placing.nodes_away:
                    _spread(handle)
            end_input(folder)
            _await("the source should end", lambda: total(folder) is not None)
            inputs = total(folder) or 0
            _await("all must arrive", lambda: not lost(committed(folder)[0], inputs))
            handle.kill()
            moves = len(handle.internals.replacements) + len(handle.internals.placing.moves)
        return wrong_keys(*committed(folder), inputs, MOVED_KEYS), inputs, moves


def _numbered(folder: Path, commits: bool) -> Topology:
    schedule = Schedule(((3 * 3600.0, MOVED_RATE),))
    topology = numbered_words(folder, "exactly_once", MOVED_KEYS, schedule, load=False, commits=commits)
    topology = topology.scaled({"count": MOVED_TASKS})
    return dataclasses.replace(
        topology,
        settings=dataclasses.replace(
            topology.settings, placement=dataclasses.replace(topology.settings.placement, spare_slots=MOVED_SPARE)
        ),
    )


# ---- duplicates ----------------------------------------------------------------------------------------


def measure_energy_dedup(results: Results, options: argparse.Namespace) -> None:
    """Lines, half of them copies, at a given rate, with and without a ``DedupBolt`` after the spouts."""
    seconds = 10.0 if options.quick else 30.0
    found = {}
    for dedup in (False, True):
        topology = word_count(FOUR_NODES, DUPLICATE_RATE, dedup)
        conf = {"duplicates": DUPLICATES}
        with submitted(topology, conf) as (handle, cluster), Watch(handle, cluster) as watch:
            default = watch.measure("default", seconds)
            rearranged(handle)
            erdm = watch.measure("erdm", seconds)
        between = [each.p50 for each in watch.samples if each.phase == "between" and each.p50 is not None]
        case = "DedupBolt" if dedup else "without"
        found[dedup] = default, erdm
        for phase in (default, erdm):
            _report(results, f"duplicates, {case}", phase)
        results.row(what=f"duplicates, {case}", case="through the switch", **{"p50 ms": 1e3 * max(between)})
    for place, name in enumerate(("default", "erdm")):
        without, with_ = found[False][place], found[True][place]
        for what, of in (("bytes", "bytes"), ("p50", "p50"), ("energy", "joules")):
            change = 100 * (getattr(with_, of) / getattr(without, of) - 1)
            results.bar(
                f"dedup.{what}.{name}", change, f"% with DedupBolt, {DUPLICATES:.0%} of the lines are copies"
            )


# ---- the cluster ---------------------------------------------------------------------------------------


@contextmanager
def submitted(
    topology: Topology, conf: Mapping[str, Any] | None = None
) -> Iterator[tuple[RunningTopology, SparkCluster]]:
    """Run a topology on its own cluster, with the load monitor."""
    with (
        tempfile.TemporaryDirectory(prefix="penstock-energy-") as state,
        _on_cluster(topology, state, conf) as found,
    ):
        yield found


@contextmanager
def _on_cluster(
    topology: Topology, state: str, conf: Mapping[str, Any] | None
) -> Iterator[tuple[RunningTopology, SparkCluster]]:
    settings = dataclasses.replace(
        topology.settings,
        delivery=dataclasses.replace(topology.settings.delivery, state_dir=state),
        monitor=dataclasses.replace(topology.settings.monitor, store="memory", interval=WINDOW),
        placement=dataclasses.replace(topology.settings.placement, node_cores=CORES, node_bandwidth=BANDWIDTH),
        conf={**topology.settings.conf, "scale": MESSAGE_SCALE, **(conf or {})},
    )
    with SparkCluster(nodes=NODES, link=LINK, slots=SLOTS) as cluster:
        try:
            handle = submit(dataclasses.replace(topology, settings=settings), cluster.master)
            try:
                yield handle, cluster
            finally:
                handle.kill(drain=False)
        finally:
            close_session()


def _await(rule: str, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"{rule}, but did not within {_PATIENCE:g} s")
        time.sleep(0.2)
