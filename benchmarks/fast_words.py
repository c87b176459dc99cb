"""The throughput experiment of *Lu 2020*, section 6.1: FastWordCount in its four cases, at least once with replay
and default flow control, compared with Storm's defaults with acks. The systems take turns; ratios are computed
within a repeat."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable
from typing import Any

from benchmarks.harness import Results, median, rate_of, running, say
from benchmarks.peers.bench import CASES, build_storm, run_storm
from benchmarks.words import SENTENCES, BatchCount, BatchSplit, Count, Split, sentences
from penstock import Conf, Context, Delivery, Settings, Topology, TopologyBuilder
from penstock.acking.lineage import I64
from penstock.replay import Eden, ReplaySpout
from penstock.replay.progress import ReadProgress
from penstock.spark.session import close_session

SYSTEMS = ("penstock batch", "penstock tuple", "storm")
PENDING = 5_000  # sentences in flight, for both systems, as in the delivery benchmark
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: spreads neighbouring positions over the pool


class RandomSentences(Eden):
    """An endless source of random sentences of 50-100 bytes. The sentence at a position can be computed again, so
    it can be read again, as replay requires."""

    fields = (("sentence", str),)

    def open(self, conf: Conf, context: Context) -> None:
        self._pool = sentences()
        self._kept = context.state.value("eden", 0)
        self._progress = ReadProgress(self._kept.value)

    def read(self, limit: int) -> list[tuple[int, tuple[Any, ...]]]:
        start = self._progress.end
        positions = range(start, start + limit)
        self._progress.read(positions, positions.stop)
        return list(zip(positions, self._sentences(positions), strict=True))

    def read_again(self, positions: I64) -> list[tuple[Any, ...]]:
        return self._sentences(positions.tolist())

    def _sentences(self, positions: Iterable[int]) -> list[tuple[Any, ...]]:
        pool = self._pool
        return [(pool[(each * _GOLDEN >> 32) % SENTENCES],) for each in positions]

    def done(self, positions: I64) -> None:
        self._progress.done(positions)

    def before_snapshot(self) -> None:
        self._kept.value = self._progress.position

    def close(self) -> None:
        pass


def replayed_word_count(case: tuple[int, int, int], batch: bool, settings: Settings) -> Topology:
    """``fast_word_count`` with a replay spout whose queues are embedded, on local disk."""
    spouts, splits, counts = case
    parts: tuple[Any, Any] = (BatchSplit(), BatchCount()) if batch else (Split(), Count())
    builder = TopologyBuilder()
    builder.set_spout("sentences", ReplaySpout(RandomSentences()), spouts)
    builder.set_bolt("split", parts[0], splits).shuffle_grouping("sentences")
    builder.set_bolt("count", parts[1], counts).fields_grouping("split", "word")
    return builder.build("fast-word-count", settings)


def measure_fast_word_count(results: Results, options: argparse.Namespace) -> None:
    """Part of ``penstock bench backpressure``. ``--quick`` measures the first case only."""
    warm_up, seconds = (4, 4) if options.quick else (15, 10)
    repeats = options.repeats or (1 if options.quick else 3)
    build_storm()
    for case in CASES[:1] if options.quick else CASES:
        name = "/".join(map(str, case))
        rates: dict[str, list[float]] = {system: [] for system in SYSTEMS}
        failed = dict.fromkeys(SYSTEMS, 0)
        for number in range(repeats):
            for system in SYSTEMS:
                rate, lost = words_per_second(system, case, warm_up, seconds)
                rates[system].append(rate)
                failed[system] += lost
                say(f"  {name} repeat {number + 1}: {system} {rate / 1e6:.2f} M words/s, acked")
        for system, values in rates.items():
            ratio = median([ours / theirs for ours, theirs in zip(values, rates["storm"], strict=True)])
            results.row(
                what=f"FastWordCount {name}, acked and replayed",
                system=system,
                **{"words/s": median(values), "words/s × storm": ratio},
                failed=failed[system],
                repeats=" ".join(f"{value / 1e6:.2f}" for value in values),
            )
            if system.startswith("penstock"):
                form = ".tuple" if system.endswith("tuple") else ""
                results.bar(f"fast_words.{name}.vs_storm{form}", ratio, "× storm with acks")


def words_per_second(system: str, case: tuple[int, int, int], warm_up: int, seconds: int) -> tuple[float, int]:
    """Words per second at the counting bolts, and the number of failed sentences."""
    if system == "storm":
        more = {"acks": "true", "max-pending": PENDING}
        found = run_storm(case, False, warm_up, seconds, **more)
        return float(found["words_per_s"]), int(found["failed"])
    try:
        with tempfile.TemporaryDirectory() as folder:
            settings = Settings(delivery=Delivery("at_least_once", max_spout_pending=PENDING, state_dir=folder))
            with running(replayed_word_count(case, system.endswith("batch"), settings)) as handle:
                rate = rate_of(handle, "count", warm_up, seconds)
                return rate, handle.internals.bus.totals()["sentences"].failed
    finally:
        close_session()  # no JVM of Penstock may run while the next system is measured
