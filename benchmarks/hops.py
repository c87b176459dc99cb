"""Components that isolate one cost each: paced and flooding spouts, bolts that do nothing, a sink that
measures."""

from __future__ import annotations

import os
import time
from dataclasses import replace

import numpy as np
import pyarrow as pa

from penstock import (
    BasicBolt,
    BatchBolt,
    BatchCollector,
    BatchSpout,
    Collector,
    Conf,
    Context,
    OutputDeclarer,
    Settings,
    Source,
    Spout,
    SpoutCollector,
    Topology,
    TopologyBuilder,
    Tuple,
)
from penstock.settings import Workers

BATCH = 4_096
APART = Workers(64)
"""As many workers as a local master has slots: each executor has its own, so that a stream is a hop unless its
ends are always fused."""


class Flood(Spout):
    """Emits numbers as fast as possible."""

    def declare_output_fields(self, declarer: OutputDeclarer) -> None:
        declarer.declare(("n", int))

    def open(self, conf: Conf, context: Context, collector: SpoutCollector) -> None:
        self._collector = collector
        self._n = 0

    def next_tuple(self) -> None:
        self._n += 1
        self._collector.emit([self._n])


class BatchFlood(BatchSpout):
    """Like ``Flood``, in batches."""

    def declare_output_fields(self, declarer: OutputDeclarer) -> None:
        declarer.declare(("n", int))

    def open(self, conf: Conf, context: Context, collector: BatchCollector) -> None:
        self._collector = collector
        self._n = 0

    def next_batch(self) -> None:
        self._collector.emit_batch([pa.array(np.arange(self._n, self._n + BATCH))])
        self._n += BATCH


class Paced(Spout):
    """Emits ``rate`` tuples per second, each with the wall time at which it was due, so that lateness counts as
    latency."""

    def __init__(self, rate: float) -> None:
        self._gap = 1.0 / rate

    def declare_output_fields(self, declarer: OutputDeclarer) -> None:
        declarer.declare(("due", float))

    def open(self, conf: Conf, context: Context, collector: SpoutCollector) -> None:
        self._collector = collector

    def activate(self) -> None:
        self._due = time.time()

    def next_tuple(self) -> None:
        if time.time() >= self._due:
            self._collector.emit([self._due])
            self._due += self._gap


class Silent(Spout):
    """Never emits."""

    def declare_output_fields(self, declarer: OutputDeclarer) -> None:
        declarer.declare(("n", int))

    def next_tuple(self) -> None:
        pass


class Null(BasicBolt):
    """Receives tuples and does nothing."""

    def execute(self, tup: Tuple, collector: Collector) -> None:
        pass


class BatchNull(BatchBolt):
    def execute_batch(self, batch: pa.RecordBatch, source: Source, collector: BatchCollector) -> None:
        pass


class Identity(BasicBolt):
    """Emits what it receives."""

    def __init__(self, field: str, kind: type) -> None:
        self._field, self._kind = field, kind

    def declare_output_fields(self, declarer: OutputDeclarer) -> None:
        declarer.declare((self._field, self._kind))

    def execute(self, tup: Tuple, collector: Collector) -> None:
        collector.emit(tup)


class BatchIdentity(BatchBolt):
    def declare_output_fields(self, declarer: OutputDeclarer) -> None:
        declarer.declare(("n", int))

    def execute_batch(self, batch: pa.RecordBatch, source: Source, collector: BatchCollector) -> None:
        collector.emit_batch(batch)


class LatencySink(BasicBolt):
    """Records when each tuple was due and when it arrived. Writes the times to ``conf["result"]`` at the end."""

    def prepare(self, conf: Conf, context: Context) -> None:
        self._path = str(conf["result"])
        self._due: list[float] = []
        self._came: list[float] = []
        self._publish = context.publish

    def execute(self, tup: Tuple, collector: Collector) -> None:
        self._came.append(time.time())
        self._due.append(tup[0])
        if len(self._due) == 1:
            self._publish([["first", self._came[0]]])

    def cleanup(self) -> None:
        np.save(self._path, np.array([self._due, self._came]))


class SlowSink(BasicBolt):
    """A bolt that is too slow: 1 ms per tuple."""

    def execute(self, tup: Tuple, collector: Collector) -> None:
        time.sleep(0.001)


def flood(batch: bool, bolts: int, hops: bool, settings: Settings) -> Topology:
    """A flooding spout and this many bolts, the last of which does nothing; without hops they are fused, with hops
    each is in another worker."""
    builder = TopologyBuilder()
    builder.set_spout("spout", BatchFlood() if batch else Flood())
    last = "spout"
    for number in range(1, bolts + 1):
        name = "sink" if number == bolts else f"identity{number}"
        if number == bolts:
            declarer = builder.set_bolt(name, BatchNull() if batch else Null())
        else:
            declarer = builder.set_bolt(name, BatchIdentity() if batch else Identity("n", int))
        if hops:
            declarer.shuffle_grouping(last)
        else:
            declarer.local_or_shuffle_grouping(last)
        last = name
    return builder.build(f"flood-{os.getpid()}", replace(settings, workers=APART))


def paced(rate: float, hops: int, result: str) -> Topology:
    """A paced spout and this many hops between workers, the last one to the measuring sink."""
    builder = TopologyBuilder()
    builder.set_spout("spout", Paced(rate))
    last = "spout"
    for number in range(1, hops):
        builder.set_bolt(f"identity{number}", Identity("due", float)).shuffle_grouping(last)
        last = f"identity{number}"
    builder.set_bolt("sink", LatencySink()).shuffle_grouping(last)
    return builder.build("paced", Settings(workers=APART, conf={"result": result}))
