"""The cost of delivery guarantees: acks compared with Storm's, ack latency, epochs, Kafka to Kafka at 50,000/s."""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from benchmarks.ackers import measure_ackers
from benchmarks.harness import Results, median, rate_of, run_parts, running, say
from benchmarks.hops import Identity
from benchmarks.peers.bench import build_storm, run_storm
from benchmarks.replay_memory import measure_replay_memory
from benchmarks.words import BatchCount, BatchSplit, fast_word_count
from penstock import (
    BasicBolt,
    BatchBolt,
    BatchCollector,
    Collector,
    Conf,
    Context,
    Delivery,
    OutputDeclarer,
    Settings,
    Source,
    Spout,
    SpoutCollector,
    Topology,
    TopologyBuilder,
    Tuple,
)
from penstock.spark.session import close_session

PARTS = ("acked", "latency", "ackers", "epochs", "kafka", "replay-memory")
PENDING = 5_000  # tuples in flight, for both systems
BATCH = 1_000  # sentences per batch, so that five batches are in flight
Times = npt.NDArray[np.float64]


def main(options: argparse.Namespace) -> int:
    """``penstock bench delivery``"""
    measures = (
        measure_acked,
        measure_latency,
        measure_ackers,
        measure_epochs,
        measure_kafka,
        measure_replay_memory,
    )
    return run_parts("delivery", dict(zip(PARTS, measures, strict=True)), options)


# ---- acks against Storm's ------------------------------------------------------------------------------


def measure_acked(results: Results, options: argparse.Namespace) -> None:
    """FastWordCount 1/1/1 at least once, both systems with the same number of tuples in flight. They take
    turns."""
    warm_up, seconds = (4, 4) if options.quick else (15, 10)
    repeats = options.repeats or (1 if options.quick else 3)
    build_storm()
    systems = ("penstock batch", "penstock tuple", "storm", "storm tuned")
    rates: dict[str, list[float]] = {system: [] for system in systems}
    for number in range(repeats):
        for system in systems:
            rates[system].append(_acked_rate(system, warm_up, seconds))
            say(f"  repeat {number + 1}: {system} {rates[system][-1] / 1e6:.2f} M words/s, acked")
    for system, values in rates.items():
        row: dict[str, Any] = {"what": "word count 1/1/1, acked", "system": system, "words/s": median(values)}
        for peer in ("storm", "storm tuned"):
            row[f"× {peer}"] = median([ours / theirs for ours, theirs in zip(values, rates[peer], strict=True)])
        row["repeats"] = " ".join(f"{value / 1e6:.2f}" for value in values)
        results.row(**row)
        if system.startswith("penstock"):
            form = system.removeprefix("penstock ")
            results.bar(f"fwc.{form}.acked.vs_storm", row["× storm"], "× storm")
            results.bar(f"fwc.{form}.acked.vs_storm_tuned", row["× storm tuned"], "× storm tuned")


def _acked_rate(system: str, warm_up: int, seconds: int) -> float:
    if system.startswith("storm"):
        more = {"acks": "true", "max-pending": PENDING}
        return float(run_storm((1, 1, 1), system.endswith("tuned"), warm_up, seconds, **more)["words_per_s"])
    try:
        with tempfile.TemporaryDirectory() as folder:
            settings = Settings(
                delivery=Delivery("at_least_once", max_spout_pending=PENDING, state_dir=folder),
                conf={"batch": BATCH},
            )
            with running(fast_word_count(1, 1, 1, system.endswith("batch"), settings)) as handle:
                rate = rate_of(handle, "count", warm_up, seconds)
                totals = handle.internals.bus.totals()["sentences"]
                assert totals.failed == 0, f"{totals.failed} tuples failed"
                return rate
    finally:
        close_session()  # no JVM of Penstock may run while the next system is measured


# ---- ack latency ---------------------------------------------------------------------------------------


class PacedAcked(Spout):
    """Emits ``rate`` tuples per second. Records when each was due and when it was acked."""

    def __init__(self, rate: float) -> None:
        self._gap = 1.0 / rate

    def declare_output_fields(self, declarer: OutputDeclarer) -> None:
        declarer.declare(("due", float))

    def open(self, conf: Conf, context: Context, collector: SpoutCollector) -> None:
        self._collector, self._path = collector, str(conf["result"])
        self._times: list[tuple[float, float]] = []

    def activate(self) -> None:
        self._due = time.time()

    def next_tuple(self) -> None:
        if time.time() >= self._due:
            self._collector.emit([self._due], msg_id=self._due)
            self._due += self._gap

    def ack(self, msg_id: Any) -> None:
        self._times.append((msg_id, time.time()))

    def close(self) -> None:
        np.save(self._path, np.array(self._times).T)


class Take(BasicBolt):
    def execute(self, tup: Tuple, collector: Collector) -> None:
        pass


def measure_latency(results: Results, options: argparse.Namespace) -> None:
    """Time from when a tuple is due to its ack, over two hops as in the word count, at 1,000 tuples per second."""
    seconds = 10 if options.quick else 60
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/acks.npy"
        builder = TopologyBuilder()
        builder.set_spout("spout", PacedAcked(1_000))
        builder.set_bolt("middle", Identity("due", float)).shuffle_grouping("spout")
        builder.set_bolt("sink", Take()).shuffle_grouping("middle")
        settings = Settings(delivery=Delivery("at_least_once", state_dir=folder), conf={"result": path})
        due, acked = _run(builder.build("paced-acks", settings), 5 + seconds, path)
    waited = (acked - due)[due > due[0] + 5] * 1000
    p50, p99 = np.percentile(waited, [50, 99])
    results.row(what="ack latency at 1,000/s, two hops", tuples=len(waited), p50_ms=float(p50), p99_ms=float(p99))
    results.bar("ack.p50_ms", float(p50), "ms")
    results.bar("ack.p99_ms", float(p99), "ms")


# ---- epochs --------------------------------------------------------------------------------------------

KEYS = 100_000  # keys of the stateful bolt in the latency measurement


class StatefulCount(BasicBolt):
    """The bolt of the word count, with its counts in state."""

    plain_tuples = True

    def prepare(self, conf: Conf, context: Context) -> None:
        self._counts = context.state.map("counts", 0)

    def execute(self, tup: Tuple, collector: Collector) -> None:
        self._counts[tup[0]] += 1


class StatefulBatchCount(BatchCount):
    """Like ``StatefulCount``, in batches."""

    def prepare(self, conf: Conf, context: Context) -> None:
        super().prepare(conf, context)
        self._state = context.state.map("counts", 0)

    def before_snapshot(self) -> None:
        counts = self.counts()
        self._state.update(counts)


class Timing(BasicBolt):
    """Counts random keys in state. Records when each tuple was due, when it arrived, and when the state was
    snapshotted."""

    def prepare(self, conf: Conf, context: Context) -> None:
        self._counts = context.state.map("counts", 0)
        self._path = str(conf["result"])
        self._times: list[tuple[float, float]] = []
        self._snapshots: list[float] = []
        self._random = random.Random(1).random
        self._counts.update(dict.fromkeys(range(KEYS), 0))

    def execute(self, tup: Tuple, collector: Collector) -> None:
        self._counts[int(self._random() * KEYS)] += 1
        self._times.append((tup[0], time.time()))

    def before_snapshot(self) -> None:
        self._snapshots.append(time.time())

    def cleanup(self) -> None:
        np.save(self._path, np.array(self._times).T)
        np.save(self._path + ".snapshots.npy", np.array(self._snapshots))


class Paced(PacedAcked):
    """Like ``PacedAcked``, without message ids."""

    def next_tuple(self) -> None:
        if time.time() >= self._due:
            self._collector.emit([self._due])
            self._due += self._gap

    def close(self) -> None:
        pass


def measure_epochs(results: Results, options: argparse.Namespace) -> None:
    """Exactly once with epochs of 10 s compared with at most once, on the same topologies."""
    _measure_epoch_throughput(results, options)
    _measure_epoch_latency(results, options)


def _measure_epoch_throughput(results: Results, options: argparse.Namespace) -> None:
    warm_up, seconds = (5, 21) if options.quick else (10, 41)
    repeats = options.repeats or (1 if options.quick else 3)
    ratios: dict[bool, list[float]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(repeats):
            for batch in (True, False):
                rates = []
                for delivery in ("at_most_once", "exactly_once"):
                    settings = Settings(delivery=Delivery(delivery, state_dir=f"{folder}/{number}"))
                    with running(_stateful_count(batch, settings)) as handle:
                        rates.append(rate_of(handle, "count", warm_up, seconds))
                        committed = handle.internals.committed
                    form = "batch" if batch else "tuple"
                    say(f"  {form}, {delivery}: {rates[-1] / 1e6:.2f} M words/s, epoch {committed} committed")
                ratios[batch].append(rates[1] / rates[0])
    for batch, values in ratios.items():
        form = "batch" if batch else "tuple"
        results.row(
            what=f"exactly once / at most once, {form}", ratio=median(values), repeats=str(np.round(values, 2))
        )
        results.bar(f"epochs.throughput_ratio.{form}", median(values), "×")
    results.bar("epochs.throughput_ratio", min(median(values) for values in ratios.values()), "× (the lower)")


def _stateful_count(batch: bool, settings: Settings) -> Topology:
    from benchmarks.words import BatchSentences, Sentences, Split

    builder = TopologyBuilder()
    builder.set_spout("sentences", BatchSentences() if batch else Sentences())
    builder.set_bolt("split", BatchSplit() if batch else Split()).shuffle_grouping("sentences")
    count = StatefulBatchCount() if batch else StatefulCount()
    builder.set_bolt("count", count).fields_grouping("split", "word")
    return builder.build("stateful-word-count", settings)


def _measure_epoch_latency(results: Results, options: argparse.Namespace) -> None:
    """Latency of tuples that arrive within 100 ms after a snapshot, compared with all others."""
    seconds = 45 if options.quick else 300
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/times.npy"
        builder = TopologyBuilder()
        builder.set_spout("spout", Paced(1_000))
        builder.set_bolt("middle", Identity("due", float)).shuffle_grouping("spout")
        builder.set_bolt("sink", Timing()).shuffle_grouping("middle")
        settings = Settings(delivery=Delivery("exactly_once", state_dir=folder), conf={"result": path})
        due, came = _run(builder.build("paced-epochs", settings), 8 + seconds, path)
        snapshots = np.load(path + ".snapshots.npy")
    settled = due > due[0] + 5
    due, came = due[settled], came[settled]
    last_snapshot = np.concatenate([[-np.inf], snapshots])[np.searchsorted(snapshots, came)]
    after, waited = came - last_snapshot < 0.1, (came - due) * 1000
    near, far = np.percentile(waited[after], 99), np.percentile(waited[~after], 99)
    results.row(
        what="p99 at 1,000/s, within 100 ms after a snapshot / otherwise",
        snapshots=len(snapshots),
        tuples=int(after.sum()),
        after_ms=float(near),
        otherwise_ms=float(far),
    )
    results.bar("epochs.p99_ratio", float(near / far), "×")


# ---- Kafka to Kafka ------------------------------------------------------------------------------------


class CountAndReport(BatchBolt):
    """Counts words in its state, and every second emits the counts of the words seen since the last report."""

    tick_interval = 1.0

    def declare_output_fields(self, declarer: OutputDeclarer) -> None:
        declarer.declare(("line", str))

    def prepare(self, conf: Conf, context: Context) -> None:
        self._counts = context.state.map("counts", 0)
        self._columns: list[pa.Array] = []
        self._seen: set[str] = set()

    def execute_batch(self, batch: pa.RecordBatch, source: Source, collector: BatchCollector) -> None:
        self._columns.append(batch.column(0))

    def before_snapshot(self) -> None:
        if self._columns:
            found = pa.chunked_array(self._columns).value_counts()
            words = found.field(0).to_pylist()
            self._counts.add_columns(words, found.field(1).to_pylist())
            self._seen.update(words)
            self._columns = []

    def tick(self, collector: BatchCollector) -> None:
        self.before_snapshot()
        collector.emit_batch([[f"{word} {self._counts[word]}" for word in self._seen]])
        self._seen.clear()


def measure_kafka(results: Results, options: argparse.Namespace) -> None:
    """Read lines from Kafka, split and count them, write counts to Kafka, at least once and at a steady rate. The
    result is the growth of the lag."""
    from penstock.connectors.kafka import KafkaBolt, KafkaSpout
    from penstock.testing.servers.kafka import KafkaServer

    seconds, rate = (25 if options.quick else 120), 50_000
    with KafkaServer() as kafka, tempfile.TemporaryDirectory() as folder:
        kafka.create_topic("lines", partitions=4)
        kafka.create_topic("counts", partitions=1)
        builder = TopologyBuilder()
        builder.set_spout("lines", KafkaSpout(kafka.bootstrap, "lines"))
        builder.set_bolt("split", BatchSplit()).shuffle_grouping("lines")
        builder.set_bolt("count", CountAndReport()).fields_grouping("split", "word")
        builder.set_bolt("sink", KafkaBolt(kafka.bootstrap, "counts")).shuffle_grouping("count")
        settings = Settings(delivery=Delivery("at_least_once", state_dir=folder))
        with running(builder.build("kafka-word-count", settings)) as handle:
            producer = _Producer(kafka.bootstrap, rate)
            time.sleep(5)
            begun, lags = time.monotonic(), []
            while time.monotonic() - begun < seconds:
                time.sleep(1)
                lags.append(
                    (time.monotonic() - begun, producer.sent() - handle.internals.bus.totals()["lines"].acked)
                )
            sent, achieved = producer.stop()
            totals = handle.internals.bus.totals()
    times, lag = np.array(lags).T
    slope = float(np.polyfit(times, lag, 1)[0])
    results.row(
        what=f"Kafka to Kafka at {rate:,} lines/s",
        seconds=seconds,
        sent=sent,
        achieved=achieved,
        first_lag=float(np.median(lag[: len(lag) // 4])),
        last_lag=float(np.median(lag[-len(lag) // 4 :])),
        largest_lag=float(lag.max()),
        failed=totals["lines"].failed,
    )
    results.bar("kafka.lag_growth", slope, "lines/s (slope of the lag at 50,000 lines/s)")


class _Producer:
    """Sends lines at a steady rate, from its own process, because the driver's interpreter must handle acks."""

    def __init__(self, bootstrap: str, rate: int) -> None:
        command = [sys.executable, "-m", "benchmarks.kafka_producer", bootstrap, str(rate)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._begun = time.monotonic()

    def sent(self) -> int:
        """Lines sent so far."""
        return self._ask("how many")

    def stop(self) -> tuple[int, float]:
        """Stop the producer. Returns the lines sent, and the lines per second."""
        sent = self.sent()
        seconds = time.monotonic() - self._begun
        self._process.communicate(timeout=60)
        return sent, sent / seconds

    def _ask(self, question: str) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(question + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


def _run(topology: Topology, seconds: float, path: str) -> Times:
    """Run a topology for this long. Returns the times that a component wrote when it ended."""
    Path(path).unlink(missing_ok=True)
    with running(topology):
        time.sleep(seconds)
    times: Times = np.load(path)
    return times
