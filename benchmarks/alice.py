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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from benchmarks.alice_topology import kafka_word_count
from benchmarks.book import book, micros
from benchmarks.harness import Results, median, running, say
from benchmarks.peers.bench import build_storm, run_storm_kafka
from penstock import Delivery, Settings
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

    @property
    def p50(self) -> float:
        return float(self.percentiles[49])

    @property
    def p99(self) -> float:
        return float(self.percentiles[98])


def measure_alice(results: Results, options: argparse.Namespace) -> None:
    """Part of ``penstock bench backpressure``. ``options.text`` is the book, see ``book``."""
    repeats = options.repeats or (1 if options.quick else 3)
    build_storm()
    curves: dict[str, dict[str, npt.NDArray[np.float64]]] = {}
    with KafkaServer() as kafka:
        for rate in RATES[:1] if options.quick else RATES:
            outcomes = _latency(kafka, rate, repeats, options)
            curves[f"{rate:,} lines/s, since a line was sent"] = _curves(outcomes)
            report_latency(results, rate, outcomes)
        outcomes = _backlog(kafka, repeats, options)
        curves["full load, since the spout read a line"] = _curves(outcomes)
        report_backlog(results, outcomes, _words_a_line(options))
    draw(curves, Path(options.json).parent if options.json else Path("results"))


Outcomes = dict[str, list[Outcome]]


def _latency(kafka: KafkaServer, rate: int, repeats: int, options: argparse.Namespace) -> Outcomes:
    warm_up, seconds = (6, 6) if options.quick else (15, 20)

    def turn(system: str, number: int) -> Outcome:
        topic = f"lines-{rate}-{number}-{system.replace(' ', '-')}"
        kafka.create_topic(topic)
        with sending(kafka.bootstrap, topic, rate, options.text):
            return run(system, Load(kafka.bootstrap, topic, "sent", 0, warm_up, seconds))

    return _turns(f"{rate:,} lines/s", repeats, turn)


def _backlog(kafka: KafkaServer, repeats: int, options: argparse.Namespace) -> Outcomes:
    lines, warm_up, seconds = (200_000, 6, 6) if options.quick else (1_500_000, 15, 30)
    kafka.create_topic("backlog")
    command = [*_producer(kafka.bootstrap, "backlog", 0, options.text), "--lines", str(lines)]
    subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, check=True)
    pool = [len(line.split(" ")) for line in book(options.text)]
    words = lines // len(pool) * sum(pool) + sum(pool[: lines % len(pool)])
    load = Load(kafka.bootstrap, "backlog", "read", words, warm_up, seconds, PENDING)
    return _turns("backlog", repeats, lambda system, number: run(system, load))


def _turns(what: str, repeats: int, turn: Callable[[str, int], Outcome]) -> Outcomes:
    outcomes: Outcomes = {system: [] for system in SYSTEMS}
    for number in range(repeats):
        for system in SYSTEMS:
            found = turn(system, number)
            outcomes[system].append(found)
            say(
                f"  {what}, repeat {number + 1}: {system} p50 {found.p50:.1f} ms, p99 {found.p99:.1f} ms, "
                f"{found.words_per_s:,.0f} words/s, {found.failed} failed"
            )
    return outcomes


# ---- one run -------------------------------------------------------------------------------------------


def run(system: str, load: Load) -> Outcome:
    """Run one system, with no other running."""
    with tempfile.TemporaryDirectory() as folder:
        if system.startswith("storm"):
            return _run_storm(system.endswith("tuned"), load, folder)
        try:
            return _run_penstock(system.endswith("batch"), load, folder)
        finally:
            close_session()  # no JVM of Penstock may run while the next system is measured


def _run_storm(tuned: bool, load: Load, folder: str) -> Outcome:
    more: dict[str, Any] = {"since": load.since, "out": f"{folder}/counts", "until": load.words}
    more |= {"start": load.start, "max-pending": load.pending}
    found = run_storm_kafka(load.bootstrap, load.topic, tuned, load.warm_up, load.seconds, **more)
    return Outcome(found["words_per_s"], np.array(found["percentiles_ms"]), found["failed"])


def _run_penstock(batch: bool, load: Load, folder: str) -> Outcome:
    times = f"{folder}/times.npy"
    conf = {"since": load.since, "out": f"{folder}/counts", "times": times}
    settings = Settings(delivery=Delivery("at_least_once", state_dir=folder), conf=conf)
    if load.pending:
        settings = replace(settings, delivery=replace(settings.delivery, max_spout_pending=load.pending))
    name = f"alice-{micros()}"  # unique, so that the replay topics are too
    with running(kafka_word_count(load.bootstrap, load.topic, load.start, batch, settings, name)) as handle:

        def wait_for(least: int, seconds: float) -> bool:
            """Wait until this many words were persisted or the time is over. Returns whether the words came."""
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                if handle.internals.bus.totals()["persist"].executed >= least:
                    return True
                time.sleep(0.02)
            return False

        if not wait_for(1, 60):
            raise SystemExit(f"no word of {load.topic} arrived within a minute")
        wait_for(load.words // 4 or sys.maxsize, load.warm_up)
        begun = micros()
        wait_for(load.words or sys.maxsize, load.seconds)
        ended = micros()
        failed = handle.internals.bus.totals()["lines"].failed
    since, came = np.load(times)
    return judge(since, came, begun, ended, failed)


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


def report_latency(results: Results, rate: int, outcomes: Outcomes) -> None:
    for system, found in outcomes.items():
        ratios = _ratios(outcomes, system, lambda each: each.p50)
        results.row(
            what=f"word count from Kafka, {rate:,} lines/s",
            system=system,
            p50_ms=median([each.p50 for each in found]),
            p99_ms=median([each.p99 for each in found]),
            **{"words/s": median([each.words_per_s for each in found])},
            **{f"p50 × {peer}": ratio for peer, ratio in ratios.items()},
            failed=sum(each.failed for each in found),
            repeats=" ".join(f"{each.p50:.1f}" for each in found),
        )
        if rate == RATES[0] and system.startswith("penstock"):
            results.bar(_name("paced_p50", system), ratios["storm"], "× storm's p50, from the producer's send")


def report_backlog(results: Results, outcomes: Outcomes, words_a_line: float) -> None:
    for system, found in outcomes.items():
        ratios = _ratios(outcomes, system, lambda each: each.words_per_s)
        waits = _ratios(outcomes, system, lambda each: each.p50)
        rates = [each.words_per_s for each in found]
        results.row(
            what="word count from Kafka, backlog",
            system=system,
            p50_ms=median([each.p50 for each in found]),
            p99_ms=median([each.p99 for each in found]),
            **{"words/s": median(rates), "lines/s": median(rates) / words_a_line},
            **{f"words/s × {peer}": ratio for peer, ratio in ratios.items()},
            **{f"p50 × {peer}": ratio for peer, ratio in waits.items()},
            failed=sum(each.failed for each in found),
            repeats=" ".join(f"{rate / 1e3:.0f}k" for rate in rates),
        )
        if system.startswith("penstock"):
            results.bar(_name("throughput", system), ratios["storm"], "× storm, target: at least 1")
            results.bar(_name("p50", system), waits["storm"], "× storm's p50 with a full topic, target: 0.8")


def _ratios(outcomes: Outcomes, system: str, value: Callable[[Outcome], float]) -> dict[str, float]:
    """The ratio to each Storm configuration: the median of the ratios within a repeat."""
    return {
        peer: median(
            [value(ours) / value(theirs) for ours, theirs in zip(outcomes[system], outcomes[peer], strict=True)]
        )
        for peer in ("storm", "storm tuned")
    }


def _name(what: str, system: str) -> str:
    """The name of a bar. The batch form, which is the fast one, has no suffix."""
    return f"alice.vs_storm.{what}" + (".tuple" if system.endswith("tuple") else "")


def _words_a_line(options: argparse.Namespace) -> float:
    lines = book(options.text)
    return sum(len(line.split(" ")) for line in lines) / len(lines)


def _curves(outcomes: Outcomes) -> dict[str, npt.NDArray[np.float64]]:
    return {system: np.median([each.percentiles for each in found], axis=0) for system, found in outcomes.items()}


def draw(curves: dict[str, dict[str, npt.NDArray[np.float64]]], folder: Path) -> None:
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
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / "alice-latency.png", dpi=120)
