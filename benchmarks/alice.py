"""The word count from Kafka compared with Storm's, both at least once (*Lu 2020*, section 6.2): latency at a given
rate, then throughput with a backlog. The systems take turns. Ratios are computed within a repeat; their median is
reported.

The spout of *Lu 2020* adds the time to a line when it reads the line from a full topic, so its latency is measured
under full load. The backlog measurement does the same. At a given rate, latency is measured from the producer's
send.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from benchmarks.alice_topology import kafka_word_count
from benchmarks.book import book, micros
from benchmarks.harness import Results, median, running, say
from benchmarks.peers.bench import PEERS, build_storm, run_storm_kafka
from benchmarks.turns import median_ratio, spread, take_turns
from penstock import Delivery, Settings, Topology
from penstock.settings import Workers
from penstock.spark.session import close_session
from penstock.testing.servers.kafka import KafkaServer

ROOT = Path(__file__).resolve().parents[1]
SYSTEMS = ("penstock batch", "penstock tuple", "storm", "storm tuned")
RATES = (2_000, 10_000)  # lines/s, of 11 words each
PENDING = 5_000  # lines in flight, for both systems, while a backlog is processed


@dataclass(frozen=True)
class Load:
    """The work given to a system."""

    bootstrap: str
    topic: str
    since: str
    """Start of the latency measurement: "sent" by the producer, or "read" by the spout, as in *Lu 2020*."""
    words: int
    """Words in the topic, after which the run ends; 0: the run does not end by itself."""
    warm_up: int
    """Seconds from the first word, or the time of a quarter of the words if that is shorter."""
    seconds: int
    """Length of the measurement after that, unless the words end before."""
    pending: int = 0
    """Lines in flight; 0: the system's default."""

    @property
    def start(self) -> Literal["earliest", "latest"]:
        """Where the spout begins: with the backlog, or with lines that arrive after the system has started."""
        return "earliest" if self.words else "latest"


@dataclass(frozen=True)
class Outcome:
    """What a system did with its load."""

    words_per_s: float
    percentiles: npt.NDArray[np.float64]
    """Latency of words in ms: 1st to 99th percentile."""
    failed: int
    workers: int = 0
    """Penstock's workers."""

    @property
    def p50(self) -> float:
        return float(self.percentiles[49])

    @property
    def p99(self) -> float:
        return float(self.percentiles[98])

    def __str__(self) -> str:
        return (
            f"p50 {self.p50:.1f} ms, p99 {self.p99:.1f} ms, {self.words_per_s:,.0f} words/s, {self.failed} failed"
        )


Outcomes = dict[str, list[Outcome]]


def measure_alice(results: Results, options: argparse.Namespace) -> None:
    """Part of ``penstock bench backpressure``. ``options.text`` is the book, see ``book``."""
    repeats = options.repeats or (1 if options.quick else 3)
    build_storm()
    curves: dict[str, dict[str, npt.NDArray[np.float64]]] = {}
    with KafkaServer() as kafka:
        for rate in RATES[:1] if options.quick else RATES:
            outcomes = measure_latency(kafka, rate, SYSTEMS, repeats, options)
            curves[f"{rate:,} lines/s, since a line was sent"] = curves_of(outcomes)
            report_latency(results, rate, outcomes, words_a_line(options))
        outcomes = measure_backlog(kafka, SYSTEMS, repeats, options)
        curves["full load, since the spout read a line"] = curves_of(outcomes)
        report_backlog(results, outcomes, words_a_line(options))
    draw(curves, (Path(options.json).parent if options.json else Path("results")) / "alice-latency.png")


def measure_latency(
    kafka: KafkaServer, rate: int, systems: Sequence[str], repeats: int, options: argparse.Namespace
) -> Outcomes:
    """Measure the systems at a rate of lines per second, since the producer's send."""
    warm_up, seconds = (6, 6) if options.quick else (15, 20)

    def turn(system: str, number: int) -> Outcome:
        topic = f"lines-{rate}-{number}-{system.replace(' ', '-')}"
        kafka.create_topic(topic)
        with sending(kafka.bootstrap, topic, rate, options.text):
            return run(system, Load(kafka.bootstrap, topic, "sent", 0, warm_up, seconds))

    return take_turns(f"{rate:,} lines/s", systems, repeats, turn, str)


def measure_backlog(
    kafka: KafkaServer, systems: Sequence[str], repeats: int, options: argparse.Namespace
) -> Outcomes:
    """Measure the systems with a full topic, since the spout's emit."""
    lines, warm_up, seconds = (200_000, 6, 6) if options.quick else (1_500_000, 15, 30)
    words = fill_topic(kafka, "backlog", lines, options.text)
    load = Load(kafka.bootstrap, "backlog", "read", words, warm_up, seconds, PENDING)
    return take_turns("backlog", systems, repeats, lambda system, number: run(system, load), str)


def fill_topic(kafka: KafkaServer, topic: str, lines: int, text: str | None) -> int:
    """Create a topic with this many lines. Returns the number of words in it."""
    kafka.create_topic(topic)
    command = [*_producer(kafka.bootstrap, topic, 0, text), "--lines", str(lines)]
    subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, check=True)
    pool = [len(line.split(" ")) for line in book(text)]
    return lines // len(pool) * sum(pool) + sum(pool[: lines % len(pool)])


# ---- one run -------------------------------------------------------------------------------------------


def run(system: str, load: Load, workers: int = 0) -> Outcome:
    """Run one system, with no other running. ``workers``: of Penstock; 0: its default."""
    with tempfile.TemporaryDirectory() as folder:
        if system.startswith("storm"):
            return _run_storm(system.endswith("tuned"), load, folder)
        try:
            return _run_penstock(system.endswith("batch"), load, folder, workers)
        finally:
            close_session()  # no JVM of Penstock may run while the next system is measured


def _run_storm(tuned: bool, load: Load, folder: str) -> Outcome:
    more: dict[str, Any] = {"since": load.since, "out": f"{folder}/counts", "until": load.words}
    more |= {"start": load.start, "max-pending": load.pending}
    found = run_storm_kafka(load.bootstrap, load.topic, tuned, load.warm_up, load.seconds, **more)
    return Outcome(found["words_per_s"], np.array(found["percentiles_ms"]), found["failed"])


def _run_penstock(batch: bool, load: Load, folder: str, workers: int) -> Outcome:
    settings = words_settings(load, folder, workers)
    name = f"alice-{micros()}"  # unique, so that the replay topics are too
    return observe(kafka_word_count(load.bootstrap, load.topic, load.start, batch, settings, name), load)


def words_settings(load: Load, folder: str, workers: int = 0) -> Settings:
    """The settings of a word count whose files are in ``folder``."""
    conf = {"since": load.since, "out": f"{folder}/counts", "times": f"{folder}/times.npy"}
    delivery = Delivery("at_least_once", state_dir=folder)
    if load.pending:
        delivery = replace(delivery, max_spout_pending=load.pending)
    return Settings(delivery=delivery, workers=Workers(workers), conf=conf)


def observe(topology: Topology, load: Load) -> Outcome:
    """Run a word count of ``alice_topology`` with ``words_settings``."""
    with running(topology) as handle:

        def wait_for(least: int, seconds: float) -> bool:
            """Wait until this many words were persisted or the time is over. Returns whether the words came."""
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                if handle.internals.bus.totals()["persist"].executed >= least:
                    return True
                time.sleep(0.02)
            return False

        if not wait_for(1, 60):
            raise SystemExit(f"no word arrived in topology '{topology.name}' within a minute")
        wait_for(load.words // 4 or sys.maxsize, load.warm_up)
        begun = micros()
        wait_for(load.words or sys.maxsize, load.seconds)
        ended = micros()
        failed, workers = handle.internals.bus.totals()["lines"].failed, len(handle.internals.workers)
    since, came = np.load(str(topology.settings.conf["times"]))
    return replace(judge(since, came, begun, ended, failed), workers=workers)


def judge(
    since: npt.NDArray[np.int64], came: npt.NDArray[np.int64], begun: int, ended: int, failed: int
) -> Outcome:
    """The outcome of the words that arrived between ``begun`` and ``ended``, or until the last word."""
    chosen = (came >= begun) & (came <= ended)
    if not chosen.any():
        raise SystemExit("no word arrived during the measurement")
    waited = (came - since)[chosen] / 1000
    elapsed = (min(ended, int(came.max())) - begun) / 1e6
    return Outcome(float(chosen.sum() / elapsed), np.percentile(waited, range(1, 100)), failed)


@contextmanager
def sending(bootstrap: str, topic: str, rate: int, text: str | None) -> Iterator[None]:
    """Run a process that sends the book's lines repeatedly during the block. Prints a message if it was too
    slow."""
    process = subprocess.Popen(
        [*_producer(bootstrap, topic, rate, text), "--linger", "1"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("how many\n")
    process.stdin.flush()
    before, begun = int(process.stdout.readline()), time.monotonic()  # the producer answers when it is ready
    try:
        yield
    finally:
        took = time.monotonic() - begun
        answer, _ = process.communicate("how many\n", timeout=60)
    achieved = (int(answer) - before) / took
    if achieved < 0.95 * rate:
        say(f"  the producer was too slow: {achieved:,.0f} lines/s instead of {rate:,}")


def _producer(bootstrap: str, topic: str, rate: int, text: str | None) -> list[str]:
    command = [sys.executable, "-m", "benchmarks.kafka_producer", bootstrap, str(rate), "--topic", topic]
    return [*command, "--book", *([str(Path(text).resolve())] if text else [])]


# ---- report --------------------------------------------------------------------------------------------


def report_latency(results: Results, rate: int, outcomes: Outcomes, words_a_line: float) -> None:
    add_latency_rows(results, rate, outcomes, words_a_line)
    for system, found in outcomes.items():
        if rate == RATES[0] and system.startswith("penstock"):
            ratio = median_ratio(found, outcomes["storm"], p50)
            results.bar(_name("paced_p50", system), ratio, "× storm's p50, from the producer's send")


def report_backlog(results: Results, outcomes: Outcomes, words_a_line: float) -> None:
    add_backlog_rows(results, outcomes, words_a_line)
    for system, found in outcomes.items():
        if system.startswith("penstock"):
            ratio, wait = (median_ratio(found, outcomes["storm"], value) for value in (words_per_s, p50))
            results.bar(_name("throughput", system), ratio, "× storm, target: at least 1")
            results.bar(_name("p50", system), wait, "× storm's p50 with a full topic, target: 0.8")


def add_latency_rows(results: Results, rate: int, outcomes: Outcomes, words_a_line: float) -> None:
    """Add a row for each system, with its ratios to Storm. The latency of a system that did not keep up says only
    for how long it was measured."""
    for system, found in outcomes.items():
        results.row(
            what=f"word count from Kafka, {rate:,} lines/s",
            system=system,
            p50_ms=median([each.p50 for each in found]),
            p99_ms=median([each.p99 for each in found]),
            **{"words/s": median([each.words_per_s for each in found])},
            **_ratios("p50", outcomes, system, p50),
            **_ratios("p99", outcomes, system, p99),
            failed=sum(each.failed for each in found),
            **{"kept up": f"{kept_up(found, rate * words_a_line)} of {len(found)}"},
            repeats=spread([each.p50 for each in found], "{:.1f}".format),
            **{"repeats p99": spread([each.p99 for each in found], "{:.0f}".format)},
        )


def add_backlog_rows(results: Results, outcomes: Outcomes, words_a_line: float) -> None:
    """Add a row for each system, with its ratios to Storm."""
    for system, found in outcomes.items():
        rates = [each.words_per_s for each in found]
        results.row(
            what="word count from Kafka, backlog",
            system=system,
            p50_ms=median([each.p50 for each in found]),
            p99_ms=median([each.p99 for each in found]),
            **{"words/s": median(rates), "lines/s": median(rates) / words_a_line},
            **_ratios("words/s", outcomes, system, words_per_s),
            **_ratios("p50", outcomes, system, p50),
            failed=sum(each.failed for each in found),
            repeats=spread(rates, lambda rate: f"{rate / 1e3:.0f}k"),
        )


def kept_up(found: Sequence[Outcome], offered: float) -> int:
    """The number of repeats in which a system processed at least 97 % of the words that it was sent per second."""
    return sum(each.words_per_s >= 0.97 * offered for each in found)


def p50(outcome: Outcome) -> float:
    return outcome.p50


def p99(outcome: Outcome) -> float:
    return outcome.p99


def words_per_s(outcome: Outcome) -> float:
    return outcome.words_per_s


def _ratios(what: str, outcomes: Outcomes, system: str, value: Callable[[Outcome], float]) -> dict[str, float]:
    """The ratio to each Storm configuration that was measured."""
    peers = [peer for peer in PEERS if peer in outcomes]
    return {f"{what} × {peer}": median_ratio(outcomes[system], outcomes[peer], value) for peer in peers}


def _name(what: str, system: str) -> str:
    """The name of a bar. The batch form, which is the fast one, has no suffix."""
    return f"alice.vs_storm.{what}" + (".tuple" if system.endswith("tuple") else "")


def words_a_line(options: argparse.Namespace) -> float:
    lines = book(options.text)
    return sum(len(line.split(" ")) for line in lines) / len(lines)


def curves_of(outcomes: Outcomes) -> dict[str, npt.NDArray[np.float64]]:
    """The median latency curve of each system."""
    return {system: np.median([each.percentiles for each in found], axis=0) for system, found in outcomes.items()}


def draw(curves: dict[str, dict[str, npt.NDArray[np.float64]]], path: Path) -> None:
    """Draw the share of words persisted within a given time, one panel per load."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * len(curves), 4), layout="constrained")
    panels = figure.subplots(1, len(curves), squeeze=False)[0]
    for panel, (what, systems) in zip(panels, curves.items(), strict=True):
        for system, percentiles in systems.items():
            panel.plot(percentiles, range(1, 100), label=system)
        panel.set(xscale="log", xlabel="ms", ylabel="% of words", title=what, ylim=(0, 100))
        panel.grid(alpha=0.3)
        panel.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
