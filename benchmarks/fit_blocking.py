"""A bolt that sleeps beside one that does not, in a topology with two spouts and one worker: does the other bolt
get all its tuples? The bolt that sleeps is declared as blocking, or Penstock has to notice it. In both cases it
should have a worker of its own."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from benchmarks.fit_options import repeats_of
from benchmarks.harness import Results, median, rate_of, running, say
from benchmarks.hops import Null, Paced
from benchmarks.turns import median_ratio, spread, take_turns
from penstock import BasicBolt, Collector, Settings, Topology, TopologyBuilder, Tuple
from penstock.settings import Workers

SLEEP = 0.010  # seconds per tuple
SLEEPER_RATE = 200.0  # tuples per second for the bolt that sleeps: twice what it can process
HEALTHY_RATE = 20_000.0  # tuples per second for the other bolt; far below the machine's limit
NOTICED = 45.0  # seconds from the start, after which a bolt that sleeps should have its own worker
CASES = ("without", "declared", "noticed")


def measure_blocking(results: Results, options: argparse.Namespace) -> None:
    """Part of ``penstock bench fit``."""
    repeats = repeats_of(options)
    warm_up, seconds = (4.0, 5.0) if options.quick else (10.0, 20.0)
    early: list[float] = []

    def turn(case: str, number: int) -> float:
        with running(two_bolts(case)) as handle:
            if case == "noticed":
                early.append(rate_of(handle, "healthy", warm_up, 5.0))
                say(f"  in the first {warm_up + 5:g} s: {early[-1]:,.0f}/s")
                time.sleep(max(0.0, NOTICED - warm_up - 5.0))
            return rate_of(handle, "healthy", warm_up, seconds)

    found = take_turns("a bolt that sleeps beside another", CASES, repeats, turn, "{:,.0f}/s".format)
    shares = {case: median_ratio(rates, found["without"]) for case, rates in found.items()}
    _report(results, "undisturbed", found["without"], shares["without"])
    _report(results, "set_blocking()", found["declared"], shares["declared"])
    _report(results, "not declared, at first", early, median_ratio(early, found["without"]))
    _report(results, f"not declared, after {NOTICED:g} s", found["noticed"], shares["noticed"])
    worst = min(shares["declared"], shares["noticed"])
    results.bar("fit.blocking.healthy", worst, "of its undisturbed rate, the lower of declared and noticed")


def _report(results: Results, case: str, rates: Sequence[float], share: float) -> None:
    results.row(
        what=f"a bolt beside one that sleeps {SLEEP * 1000:g} ms per tuple",
        case=case,
        **{"tuples/s": median(rates), "share": share},
        repeats=spread(rates, "{:,.0f}".format),
    )


def two_bolts(case: str) -> Topology:
    """``without``: only the bolt that does not sleep."""
    builder = TopologyBuilder()
    builder.set_spout("source", Paced(HEALTHY_RATE))
    builder.set_bolt("healthy", Null()).shuffle_grouping("source")
    if case != "without":
        builder.set_spout("other", Paced(SLEEPER_RATE))
        bolt = builder.set_bolt("sleeper", Sleeper()).shuffle_grouping("other")
        if case == "declared":
            bolt.set_blocking()
    return builder.build(f"blocking-{case}", Settings(workers=Workers(1, refit="always")))


class Sleeper(BasicBolt):
    def execute(self, tup: Tuple, collector: Collector) -> None:
        time.sleep(SLEEP)
