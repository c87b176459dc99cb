"""Generated bids through one bolt into Parquet files, exactly once, in the tuple form (query 0 of the Nexmark
benchmark): events per CPU second of all processes, compared with Bytewax, which keeps the events in memory."""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.fit_options import repeats_of
from benchmarks.harness import Results, cpu_by_process, cpu_since, median, running
from benchmarks.peers.bids import FIELDS, make_bids
from benchmarks.peers.bytewax import install_bytewax, run_peer
from benchmarks.turns import median_ratio, spread, take_turns
from penstock import (
    BasicBolt,
    Collector,
    Conf,
    Context,
    Delivery,
    OutputDeclarer,
    Settings,
    Spout,
    SpoutCollector,
    Topology,
    TopologyBuilder,
    Tuple,
)
from penstock.connectors.parquet import ParquetSink
from penstock.spark.session import close_session

PENSTOCK = "penstock tuple, Parquet, exactly once"
BYTEWAX = "bytewax"
PEERS = {
    BYTEWAX: ("bytewax_bids", 1_000),
    "bytewax, batches of 10": ("bytewax_bids", 10),
    "plain loop": ("bids", 1_000),
}
"""Program and events per batch. Bytewax's own sources read 1,000 at a time."""


@dataclass(frozen=True)
class Speed:
    """Events per second, and per CPU second of all processes."""

    per_s: float
    per_cpu_s: float

    def __str__(self) -> str:
        return f"{self.per_s:,.0f} events/s, {self.per_cpu_s:,.0f} per CPU second"


def measure_passthrough(results: Results, options: argparse.Namespace) -> None:
    """Part of ``penstock bench fit``."""
    repeats = repeats_of(options)
    warm_up, seconds = (5, 10) if options.quick else (15, 30)  # the longer one is three epochs
    install_bytewax()

    def turn(system: str, number: int) -> Speed:
        if system == PENSTOCK:
            return _penstock(warm_up, seconds)
        module, batch = PEERS[system]
        return Speed(**run_peer(module, warm_up, seconds, batch))

    found = take_turns("pass-through", (PENSTOCK, *PEERS), repeats, turn, str)
    ratio = {system: median_ratio(found[PENSTOCK], speeds, _per_cpu_s) for system, speeds in found.items()}
    for system, speeds in found.items():
        results.row(
            what="pass-through of generated bids",
            system=system,
            **{"events/s": median([each.per_s for each in speeds])},
            **{"events per CPU s": median([each.per_cpu_s for each in speeds]), "penstock ×": ratio[system]},
            repeats=spread([each.per_cpu_s for each in speeds], "{:,.0f}".format),
        )
    results.bar("fit.passthrough.vs_bytewax", ratio[BYTEWAX], "× Bytewax's events per CPU second")


def _per_cpu_s(speed: Speed) -> float:
    return speed.per_cpu_s


def _penstock(warm_up: float, seconds: float) -> Speed:
    with tempfile.TemporaryDirectory() as folder:
        try:
            with running(passthrough(Path(folder))) as handle:
                time.sleep(warm_up)
                cpu, begun = cpu_by_process(), time.monotonic()
                events = -handle.internals.bus.totals()["sink"].executed
                time.sleep(seconds)
                events += handle.internals.bus.totals()["sink"].executed
                return Speed(events / (time.monotonic() - begun), events / cpu_since(cpu))
        finally:
            close_session()


def passthrough(folder: Path) -> Topology:
    """The topology, with all its files in ``folder``."""
    builder = TopologyBuilder()
    builder.set_spout("bids", Bids())
    builder.set_bolt("pass", Pass()).shuffle_grouping("bids")
    builder.set_bolt("sink", ParquetSink(folder / "bids")).shuffle_grouping("pass")
    delivery = Delivery("exactly_once", state_dir=str(folder / "state"))
    return builder.build(f"passthrough-{os.getpid()}", Settings(delivery=delivery))


class Bids(Spout):
    """Emits as many bids as possible."""

    def declare_output_fields(self, declarer: OutputDeclarer) -> None:
        declarer.declare(*FIELDS)

    def open(self, conf: Conf, context: Context, collector: SpoutCollector) -> None:
        self._collector = collector
        self._next_bid = make_bids(context.task)

    def next_tuple(self) -> None:
        self._collector.emit(self._next_bid())


class Pass(BasicBolt):
    """Emits what it receives."""

    def declare_output_fields(self, declarer: OutputDeclarer) -> None:
        declarer.declare(*FIELDS)

    def execute(self, tup: Tuple, collector: Collector) -> None:
        collector.emit(tup)
