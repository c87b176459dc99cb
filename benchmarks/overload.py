"""Topologies with a bolt that is too slow for its input, for the flow control benchmarks."""

from __future__ import annotations

import time

import pyarrow as pa

from penstock import (
    BatchBolt,
    BatchCollector,
    BatchSpout,
    BatchSpoutCollector,
    Conf,
    Context,
    OutputDeclarer,
    Settings,
    Source,
    Topology,
    TopologyBuilder,
)

PAYLOAD = "x" * 92
"""Together with the number, a tuple has 100 bytes."""
_MOST = 1_000  # tuples per batch of the spout
_CATCH_UP = 2.0  # a source that was held back emits at most at twice its rate until it has caught up


class PacedSpout(BatchSpout):
    """Offers ``rate`` tuples per second on each of its streams, and ``burst`` times as many between two times of
    the run. It asks whether a stream is ready, so that a stream with overloaded receivers does not stop the
    others."""

    def __init__(
        self, streams: tuple[str, ...], rate: float, burst: tuple[float, float, float] = (1, 0, 0)
    ) -> None:
        self._streams, self._rate, self._burst = streams, rate, burst

    def declare_output_fields(self, declarer: OutputDeclarer) -> None:
        for stream in self._streams:
            declarer.declare(("number", int), ("payload", str), stream=stream)

    def open(self, conf: Conf, context: Context, collector: BatchSpoutCollector) -> None:
        self._collector = collector
        self._due = dict.fromkeys(self._streams, 0.0)
        self._number = 0

    def activate(self) -> None:
        self._begun = self._last = time.monotonic()

    def next_batch(self) -> None:
        now = time.monotonic()
        factor, begin, end = self._burst
        rate = self._rate * (factor if begin <= now - self._begun < end else 1.0)
        elapsed, self._last = now - self._last, now
        for stream in self._streams:
            self._due[stream] += rate * elapsed
            if not self._collector.ready(stream):
                continue
            count = int(min(self._due[stream], max(1.0, rate * elapsed * _CATCH_UP), _MOST))
            if count:
                self._due[stream] -= count
                numbers = pa.array(range(self._number, self._number + count), pa.int64())
                self._number += count
                self._collector.emit_batch([numbers, pa.array([PAYLOAD] * count)], stream)


class TakesTime(BatchBolt):
    """Waits for each tuple, as for a database. Waiting costs no CPU, so only the waiting is measured. If a sleep
    takes too long, the next one is shorter, so that small batches do not take longer than large ones."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._overslept = 0.0

    def execute_batch(self, batch: pa.RecordBatch, source: Source, collector: BatchCollector) -> None:
        wanted = self._seconds * batch.num_rows - self._overslept
        if wanted > 0:
            begun = time.monotonic()
            time.sleep(wanted)
            self._overslept = time.monotonic() - begun - wanted
        else:
            self._overslept = max(0.0, -wanted) if self._seconds else 0.0


def two_branches(slow: float, rate: float, settings: Settings) -> Topology:
    """A spout with two streams of ``rate`` tuples per second each. One ends in a bolt that takes ``slow`` seconds
    per tuple, the other in a bolt that takes none."""
    builder = TopologyBuilder()
    builder.set_spout("source", PacedSpout(("left", "right"), rate))
    builder.set_bolt("slow", TakesTime(slow)).shuffle_grouping("source", "left")
    builder.set_bolt("healthy", TakesTime(0.0)).shuffle_grouping("source", "right")
    return builder.build("two-branches", settings)


def one_branch(seconds: float, rate: float, burst: tuple[float, float, float], settings: Settings) -> Topology:
    """A spout that emits ``rate`` tuples per second, more in the burst, and a bolt that takes ``seconds`` per
    tuple."""
    builder = TopologyBuilder()
    builder.set_spout("source", PacedSpout(("default",), rate, burst))
    builder.set_bolt("work", TakesTime(seconds)).shuffle_grouping("source")
    return builder.build("burst", settings)
