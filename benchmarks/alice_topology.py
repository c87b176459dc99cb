"""The word count from Kafka of *Lu 2020*: lines → split 2 → count 4 → persist 1, with tuples and with batches. The
Storm program (``peers/storm``, KafkaWordCount) does the same with each line and each word."""

from __future__ import annotations

import time
from array import array
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from benchmarks.book import TEXT_BEGINS, micros, sent_at, words_of
from penstock import (
    BasicBolt,
    BatchBolt,
    BatchCollector,
    BatchSpoutCollector,
    Collector,
    Conf,
    Context,
    OutputDeclarer,
    Settings,
    Source,
    Topology,
    TopologyBuilder,
    Tuple,
)
from penstock.connectors.kafka_eden import KafkaEden
from penstock.connectors.kafka_positions import Start
from penstock.replay import ReplaySpout
from penstock.topology.streams import DEFAULT_STREAM

_BUFFER = 65_536  # bytes of the output file's buffer, as in the Storm program


def kafka_word_count(
    bootstrap: str, topic: str, start: Start, batch: bool, settings: Settings, name: str
) -> Topology:
    """``start``: "latest" begins with new lines, "earliest" with those already in the topic.

    ``settings.conf``: ``since`` is the start of the latency measurement, "sent" (the time in the line) or "read"
    (when the spout emits it); ``out`` is the output file, ``times`` the file with the words' times."""
    builder = TopologyBuilder()
    builder.set_spout("lines", Lines(KafkaEden(bootstrap, topic, start=start)))
    add_bolts(builder, batch)
    return builder.build(name, settings)


def add_bolts(builder: TopologyBuilder, batch: bool) -> None:
    """Add the bolts after a spout ``lines`` that emits ⟨line, read⟩."""
    bolts: tuple[Any, Any, Any] = (
        (BatchSplit(), BatchCount(), BatchPersist()) if batch else (Split(), Count(), Persist())
    )
    builder.set_bolt("split", bolts[0], 2).shuffle_grouping("lines")
    builder.set_bolt("count", bolts[1], 4).fields_grouping("split", "word")
    builder.set_bolt("persist", bolts[2], 1).shuffle_grouping("count")


class Lines(ReplaySpout):
    """Replay spout that adds the time of emission to each line, like the spout of *Lu 2020*."""

    def declare_output_fields(self, declarer: OutputDeclarer) -> None:
        declarer.declare(("line", str), ("read", int))

    def open(self, conf: Conf, context: Context, collector: BatchSpoutCollector) -> None:
        super().open(conf, context, _Stamping(collector))


class _Stamping:
    """A collector that adds the time of emission."""

    def __init__(self, collector: BatchSpoutCollector) -> None:
        self._collector = collector

    def ready(self, stream: str = DEFAULT_STREAM) -> bool:
        return self._collector.ready(stream)

    def room(self, stream: str = DEFAULT_STREAM) -> int:
        return self._collector.room(stream)

    def emit_batch(self, columns: Any, stream: str = DEFAULT_STREAM, msg_ids: Sequence[Any] | None = None) -> None:
        times = pa.array(np.full(len(columns[0]), micros()))
        self._collector.emit_batch([*columns, times], stream, msg_ids)

    def emit_batch_direct(
        self, task: int, columns: Any, stream: str = DEFAULT_STREAM, msg_ids: Sequence[Any] | None = None
    ) -> None:
        raise NotImplementedError("lines are not sent to a chosen task")


# ---- tuple at a time -----------------------------------------------------------------------------------


class Split(BasicBolt):
    plain_tuples = True

    def declare_output_fields(self, declarer: OutputDeclarer) -> None:
        declarer.declare(("word", str), ("since", int))

    def prepare(self, conf: Conf, context: Context) -> None:
        self._sent = conf["since"] == "sent"

    def execute(self, tup: Tuple, collector: Collector) -> None:
        line, read = tup
        words = words_of(line)
        collector.emit_columns(words, [sent_at(line) if self._sent else read] * len(words))


class Count(BasicBolt):
    plain_tuples = True

    def declare_output_fields(self, declarer: OutputDeclarer) -> None:
        declarer.declare(("word", str), ("count", int), ("since", int))

    def prepare(self, conf: Conf, context: Context) -> None:
        self._counts: defaultdict[str, int] = defaultdict(int)

    def execute(self, tup: Tuple, collector: Collector) -> None:
        word, since = tup
        count = self._counts[word] = self._counts[word] + 1
        collector.emit((word, count, since))


class Persist(BasicBolt):
    """Writes each count to a file, and at the end the time from which and until which each word was in flight."""

    plain_tuples = True

    def prepare(self, conf: Conf, context: Context) -> None:
        self._file = open(str(conf["out"]), "w", _BUFFER)  # noqa: SIM115 - closed in cleanup
        self._path = str(conf["times"])
        self._since, self._came = array("q"), array("q")

    def execute(self, tup: Tuple, collector: Collector) -> None:
        word, count, since = tup
        self._file.write(f"{word} {count}\n")
        self._since.append(since)
        self._came.append(time.time_ns())

    def cleanup(self) -> None:
        self._file.close()
        save_times(self._path, np.array(self._since), np.array(self._came) // 1000)


# ---- in batches ----------------------------------------------------------------------------------------


class BatchSplit(BatchBolt):
    def declare_output_fields(self, declarer: OutputDeclarer) -> None:
        declarer.declare(("word", str), ("since", int))

    def prepare(self, conf: Conf, context: Context) -> None:
        self._sent = conf["since"] == "sent"

    def execute_batch(self, batch: pa.RecordBatch, source: Source, collector: BatchCollector) -> None:
        lines, since = batch.columns
        if self._sent:
            since = pc.utf8_slice_codeunits(lines, 0, TEXT_BEGINS - 1).cast(pa.int64())
        words = pc.split_pattern(pc.utf8_slice_codeunits(lines, TEXT_BEGINS), " ")
        collector.emit_batch([words.flatten(), since.take(pc.list_parent_indices(words))])


class BatchCount(BatchBolt):
    def declare_output_fields(self, declarer: OutputDeclarer) -> None:
        declarer.declare(("word", str), ("count", int), ("since", int))

    def prepare(self, conf: Conf, context: Context) -> None:
        self._counts: defaultdict[str, int] = defaultdict(int)

    def execute_batch(self, batch: pa.RecordBatch, source: Source, collector: BatchCollector) -> None:
        words, since = batch.columns
        counts, totals = self._counts, []
        for word in words.to_pylist():
            count = counts[word] = counts[word] + 1
            totals.append(count)
        collector.emit_batch([words, pa.array(totals, pa.int64()), since])


class BatchPersist(BatchBolt):
    """Like ``Persist``, in batches."""

    def prepare(self, conf: Conf, context: Context) -> None:
        self._file = open(str(conf["out"]), "w", _BUFFER)  # noqa: SIM115 - closed in cleanup
        self._path = str(conf["times"])
        self._since: list[Any] = []
        self._came: list[int] = []

    def execute_batch(self, batch: pa.RecordBatch, source: Source, collector: BatchCollector) -> None:
        words, counts, since = batch.columns
        rows = pc.binary_join_element_wise(words, counts.cast(pa.string()), " ").to_pylist()
        self._file.write("\n".join(rows) + "\n")
        self._since.append(since.to_numpy())
        self._came.append(micros())

    def cleanup(self) -> None:
        self._file.close()
        since = np.concatenate([np.empty(0, np.int64), *self._since])
        save_times(self._path, since, np.repeat(np.array(self._came, np.int64), list(map(len, self._since))))


def save_times(path: str, since: Any, came: Any) -> None:
    """Save ⟨since, arrived⟩ of each word in microseconds since 1970, in order of arrival."""
    np.save(path, np.array([since, came], np.int64))
