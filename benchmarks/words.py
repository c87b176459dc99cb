"""FastWordCount: random sentences of 50-100 bytes, split and counted, with batches and with tuples."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock import (
    BasicBolt,
    BatchBolt,
    BatchCollector,
    BatchSpout,
    BatchSpoutCollector,
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

SENTENCES = 1_000
BATCH = 2_000  # sentences per batch: about 150 KB; larger batches reduce the cost per byte only a little


def sentences(seed: int = 1) -> list[str]:
    """The pool the spouts draw from: words of 3-8 letters, 50-100 bytes per sentence."""
    rng = random.Random(seed)
    pool = []
    for _ in range(SENTENCES):
        length, words = rng.randint(50, 92), [_word(rng)]
        while sum(map(len, words)) + len(words) < length:
            words.append(_word(rng))
        pool.append(" ".join(words))
    return pool


def _word(rng: random.Random) -> str:
    return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(3, 8)))


class BatchSentences(BatchSpout):
    def declare_output_fields(self, declarer: OutputDeclarer) -> None:
        declarer.declare(("sentence", str))

    def open(self, conf: Conf, context: Context, collector: BatchSpoutCollector) -> None:
        self._collector = collector
        self._pool = pa.array(sentences())
        self._rng = np.random.default_rng(context.task)
        self._tracked = context.delivery == "at_least_once"
        self._size = min(BATCH, int(conf.get("batch", BATCH)))
        self._next = 0

    def next_batch(self) -> None:
        size = self._size
        ids = range(self._next, self._next + size) if self._tracked else None
        self._next += size
        column = self._pool.take(pa.array(self._rng.integers(0, SENTENCES, size)))
        self._collector.emit_batch([column], msg_ids=ids)


class BatchSplit(BatchBolt):
    def declare_output_fields(self, declarer: OutputDeclarer) -> None:
        declarer.declare(("word", str))

    def execute_batch(self, batch: pa.RecordBatch, source: Source, collector: BatchCollector) -> None:
        collector.emit_batch([pc.split_pattern(batch.column(0), " ").flatten()])


class BatchCount(BatchBolt):
    """Counts in Arrow: words are collected in columns and merged into the counts a quarter million at a time, so
    that Python handles each distinct word once per merge."""

    FOLD = 262_144  # words per merge, about 3 MB

    def prepare(self, conf: Conf, context: Context) -> None:
        self._counts: Counter[str] = Counter()
        self._columns: list[pa.Array] = []
        self._waiting = 0

    def execute_batch(self, batch: pa.RecordBatch, source: Source, collector: BatchCollector) -> None:
        self._columns.append(batch.column(0))
        self._waiting += batch.num_rows
        if self._waiting >= self.FOLD:
            self.counts()

    def counts(self) -> Counter[str]:
        """The counts of everything received so far."""
        if self._columns:
            found = pa.chunked_array(self._columns).value_counts()
            words, times = found.field(0).to_pylist(), found.field(1).to_pylist()
            self._counts.update(dict(zip(words, times, strict=True)))
            self._columns, self._waiting = [], 0
        return self._counts


class Sentences(Spout):
    def declare_output_fields(self, declarer: OutputDeclarer) -> None:
        declarer.declare(("sentence", str))

    def open(self, conf: Conf, context: Context, collector: SpoutCollector) -> None:
        self._collector = collector
        self._pool = sentences()
        self._random = random.Random(context.task).random
        self._tracked = context.delivery == "at_least_once"
        self._next = 0

    def next_tuple(self) -> None:
        sentence = self._pool[int(self._random() * SENTENCES)]
        if self._tracked:
            self._next += 1
            self._collector.emit([sentence], msg_id=self._next)
        else:
            self._collector.emit([sentence])


class Split(BasicBolt):
    def declare_output_fields(self, declarer: OutputDeclarer) -> None:
        declarer.declare(("word", str))

    def execute(self, tup: Tuple, collector: Collector) -> None:
        collector.emit_columns(tup[0].split(" "))


class Count(BasicBolt):
    plain_tuples = True

    def prepare(self, conf: Conf, context: Context) -> None:
        self._counts: defaultdict[str, int] = defaultdict(int)

    def execute(self, tup: Tuple, collector: Collector) -> None:
        self._counts[tup[0]] += 1


def fast_word_count(spouts: int, splits: int, counts: int, batch: bool, settings: Settings) -> Topology:
    """The topology of the throughput experiment of *Lu 2020*."""
    parts: tuple[Any, Any, Any] = (
        (BatchSentences(), BatchSplit(), BatchCount()) if batch else (Sentences(), Split(), Count())
    )
    builder = TopologyBuilder()
    builder.set_spout("sentences", parts[0], spouts)
    builder.set_bolt("split", parts[1], splits).shuffle_grouping("sentences")
    builder.set_bolt("count", parts[2], counts).fields_grouping("split", "word")
    return builder.build("fast-word-count", settings)
