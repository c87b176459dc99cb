"""Checks the results of the benchmarks of *Pu 2021* and notes when they come: wraps the spout and the last bolt
of a topology.

The last bolt sorts what it processes into ``BUCKETS`` by a hash, and keeps the number and the sum of the hashes
of each bucket in its state, exactly like its results. When its tasks close, they write them to ``conf.witness``,
and the spouts write how many messages they have emitted. ``wrong_buckets`` computes from these numbers what each
bucket should have.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from benchmarks.book import micros
from benchmarks.erdm_topologies import Generated, scale_of
from benchmarks.persistence_topology import IntArray, Notes
from penstock import (
    BatchBolt,
    BatchCollector,
    BatchSpout,
    BatchSpoutCollector,
    Conf,
    Context,
    Failure,
    OutputDeclarer,
    Source,
    Topology,
)
from penstock.aggregates.bolts import NEWEST
from penstock.topology.hashing import hash_column

BUCKETS = 512
LAST = {"word_count": "count", "sol": "level3", "rolling_sort": "sort", "rolling_count": "rolling_count"}
"""The last bolt of each benchmark."""
_SOURCE = "source"
_FLAGS = ("emits_partials", "merges_partials", "same_task", "reads", "tick_interval", "control_stream")
_COLUMNS = 3  # of a record: when it came, tuples, latency
_COPIED = 1_000  # messages of a spout that are computed at a time

HashArray = npt.NDArray[np.uint64]


def witnessed(topology: Topology, name: str) -> Topology:
    """The topology with its spout and its last bolt wrapped. ``conf.witness`` must name a folder."""
    last, nodes = LAST[name], dict(topology.nodes)
    column = "word" if "count" in name else "id"
    weight = "count" if name == "rolling_count" else None
    nodes[_SOURCE] = replace(nodes[_SOURCE], component=WitnessSpout(nodes[_SOURCE].component))  # type: ignore[arg-type]
    nodes[last] = replace(nodes[last], component=WitnessBolt(nodes[last].component, column, weight))  # type: ignore[arg-type]
    return replace(topology, nodes=nodes)


@dataclass(frozen=True)
class Came:
    """The batches that the last bolt has processed, in order."""

    times: IntArray
    """When, in microseconds since 1970."""
    tuples: IntArray
    latencies: IntArray
    """Microseconds since the oldest tuple of the batch was emitted."""

    def between(self, begin: int, end: int) -> Came:
        inside = (self.times >= begin) & (self.times < end)
        return Came(self.times[inside], self.tuples[inside], self.latencies[inside])


def came(folder: Path) -> Came:
    """The batches of all processes of a run so far."""
    rows = [np.fromfile(file, "<i8") for file in sorted(folder.glob("came-*"))]
    whole = [each[: len(each) // _COLUMNS * _COLUMNS].reshape(-1, _COLUMNS) for each in rows]
    found = np.concatenate([np.empty((0, _COLUMNS), np.int64), *whole])
    return Came(*found[np.argsort(found[:, 0], kind="stable")].T)


def wrong_buckets(folder: Path, source: Generated, words: bool) -> tuple[int, int]:
    """The number of buckets whose results differ from a sequential run, and the number of messages. ``source``:
    the spout of the topology, prepared by ``begin``. Called after all tasks have closed."""
    counts, sums = np.zeros(BUCKETS, np.int64), np.zeros(BUCKETS, np.uint64)
    messages = 0
    for file in folder.glob("emitted-*"):
        index, spouts, emitted = (int(text) for text in file.read_text().split())
        messages += emitted
        for begin in range(0, emitted, _COPIED):
            numbers = np.arange(begin, min(begin + _COPIED, emitted))
            ids = source.originals(numbers) * spouts + index
            if words:
                lines = source.drawn(source.draws(ids))
                hashes = hash_column(pa.array([word for line in lines for word in line.split(" ")]))
            else:
                hashes = hash_column(pa.array(ids))
            _add(counts, sums, hashes, None)
    for file in folder.glob("results-*.npz"):
        with np.load(file) as found:
            counts -= found["counts"]
            sums -= found["sums"]
    return int(((counts != 0) | (sums != 0)).sum()), messages


def _add(counts: IntArray, sums: HashArray, hashes: HashArray, weights: IntArray | None) -> None:
    places = (hashes % np.uint64(BUCKETS)).astype(np.int64)
    ones = np.ones(len(hashes), np.int64) if weights is None else weights
    np.add.at(counts, places, ones)
    np.add.at(sums, places, hashes * ones.astype(np.uint64))


class WitnessSpout(BatchSpout):
    """A generated source that writes how many messages it has emitted when it closes."""

    def __init__(self, spout: Generated) -> None:
        self.spout = spout

    def declare_output_fields(self, declarer: OutputDeclarer) -> None:
        self.spout.declare_output_fields(declarer)

    def open(self, conf: Conf, context: Context, collector: BatchSpoutCollector) -> None:
        self._file = Path(conf["witness"]) / f"emitted-{context.index}"
        self._place = f"{context.index} {context.parallelism}"
        self.spout.open(conf, context, collector)

    def next_batch(self) -> None:
        self.spout.next_batch()

    def before_snapshot(self) -> None:
        self.spout.before_snapshot()

    def ack_many(self, msg_ids: Sequence[Any]) -> None:
        self.spout.ack_many(msg_ids)

    def fail(self, msg_id: Any, failure: Failure) -> None:
        self.spout.fail(msg_id, failure)

    def close(self) -> None:
        self.spout.close()
        staged = self._file.with_name(f".{self._file.name}-{os.getpid()}")
        staged.write_text(f"{self._place} {self.spout.emitted}")
        staged.rename(self._file)


class WitnessBolt(BatchBolt):
    """A last bolt that counts what it processes in its state, and notes when."""

    def __init__(self, bolt: BatchBolt, column: str, weight: str | None) -> None:
        """``column``: what is hashed. ``weight``: the column with the number of tuples that a row stands for."""
        self.bolt, self._column, self._weight = bolt, column, weight
        self._time = NEWEST if weight else "time"
        for flag in _FLAGS:
            if hasattr(bolt, flag):
                setattr(self, flag, getattr(bolt, flag))

    def declare_output_fields(self, declarer: OutputDeclarer) -> None:
        self.bolt.declare_output_fields(declarer)

    def prepare(self, conf: Conf, context: Context) -> None:
        self._file = Path(conf["witness"]) / f"results-{context.index}.npz"
        self._notes = Notes(self._file.with_name(f"came-{context.index}-{os.getpid()}-{micros()}"))
        self._state = context.state.value("witness", None)
        self._scale = scale_of(conf)
        zeros = np.zeros(BUCKETS, np.int64), np.zeros(BUCKETS, np.uint64)
        self._counts: IntArray
        self._sums: HashArray
        self._counts, self._sums = zeros if self._state.value is None else self._state.value
        self.bolt.prepare(conf, context)

    def execute_batch(self, batch: pa.RecordBatch, source: Source, collector: BatchCollector) -> None:
        self.bolt.execute_batch(batch, source, collector)
        if source.stream == self.bolt.control_stream:
            return
        weights = None if self._weight is None else batch.column(self._weight).to_numpy()
        _add(self._counts, self._sums, hash_column(batch.column(self._column)), weights)
        rows = batch.num_rows if weights is None else int(weights.sum())
        now = micros()
        emitted = pc.min(batch.column(self._time)).as_py() * self._scale
        self._notes.add(np.array([now, rows, now - round(emitted * 1e6)], np.int64))

    def skip_batch(self, batch: pa.RecordBatch, source: Source, collector: BatchCollector) -> None:
        self.bolt.skip_batch(batch, source, collector)

    def tick(self, collector: BatchCollector) -> None:
        self.bolt.tick(collector)

    def before_snapshot(self) -> None:
        self._state.value = self._counts.copy(), self._sums.copy()
        self.bolt.before_snapshot()

    def cleanup(self) -> None:
        self.bolt.cleanup()
        staged = self._file.with_name(f".{os.getpid()}-{self._file.name}")
        np.savez(staged, counts=self._counts, sums=self._sums)
        staged.rename(self._file)
