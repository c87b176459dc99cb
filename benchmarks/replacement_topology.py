"""Topologies for the replacement benchmarks: a word count whose source is paced by the wall clock, continues in a
new process where the last one stopped, and counts what was due while no spout was active; and the same with slow
bolts (*Lu 2020*, section 6.4)."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.dataset

from benchmarks.book import micros
from benchmarks.hops import APART
from benchmarks.overload import TakesTime
from benchmarks.persistence_topology import IntArray, Notes
from penstock import (
    BatchBolt,
    BatchCollector,
    BatchSpout,
    BatchSpoutCollector,
    Conf,
    Context,
    Delivery,
    Failure,
    OutputDeclarer,
    Settings,
    Source,
    Topology,
    TopologyBuilder,
)
from penstock.connectors.parquet import ParquetSink

WORDS = 4  # words per line of the slow word count
SPLIT = 0.010  # seconds per line there
COUNT = 0.0025  # seconds per word: a task of either bolt processes 100 lines per second
SLOW_KEYS = 10_000
_MOST = 1_000  # tuples per batch of the spout
_COLUMNS = 4  # of a record: when it arrived, when it was due, its number, its count

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Schedule:
    """The load of the source: steps of ⟨seconds, tuples per second⟩, and nothing after the last step."""

    steps: tuple[tuple[float, float], ...]

    @cached_property
    def ends(self) -> Floats:
        """Seconds from the beginning: 0, then the end of each step."""
        return np.cumsum([0.0, *(seconds for seconds, _ in self.steps)])

    @cached_property
    def totals(self) -> Floats:
        """Tuples due at the end of each step."""
        return np.cumsum([0.0, *(seconds * rate for seconds, rate in self.steps)])

    def due(self, elapsed: float) -> int:
        """How many tuples are due by this time; number 0 is due at once."""
        return min(int(np.interp(elapsed, self.ends, self.totals)) + 1, round(float(self.totals[-1])))

    def when(self, numbers: IntArray) -> Floats:
        """Seconds from the beginning at which each tuple is due."""
        return np.interp(numbers, self.totals, self.ends)

    @property
    def text(self) -> str:
        """As an option of the Storm program."""
        return ",".join(f"{seconds:g}:{rate:g}" for seconds, rate in self.steps)


def key_of(numbers: IntArray, keys: int) -> IntArray:
    """The key of each number: the first ``keys`` numbers have one key each, later ones are spread evenly
    (splitmix64)."""
    mixed = numbers.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    drawn = ((mixed ^ (mixed >> np.uint64(31))) % np.uint64(keys)).astype(np.int64)
    return np.where(numbers < keys, numbers, drawn)


# ---- topologies ----------------------------------------------------------------------------------------


def word_count(
    folder: Path, delivery: str, keys: int, schedule: Schedule, *, load: bool = True, commits: bool = False
) -> Topology:
    """Numbers → count by key, in task state → a bolt that records arrivals in ``folder``, see ``arrivals``; with
    ``commits`` results go to Parquet files instead, visible epoch by epoch, see ``committed``. ``load``: first
    emit each key once, as fast as possible. The last bolt always has one task."""
    builder = TopologyBuilder()
    builder.set_spout("numbers", PacedNumbers(schedule, keys, keys if load else 0))
    builder.set_bolt("count", CountNumbers()).fields_grouping("numbers", "word")
    last = ParquetSink(folder / "committed") if commits else NoteArrivals()
    builder.set_bolt("arrivals", last).global_grouping("count")
    settings = Settings(
        delivery=Delivery(
            delivery,
            epoch_interval=2.0 if commits else 10.0,  # the default, except where a test waits for it
            state_dir=str(folder / "state"),
        ),
        workers=APART,
        conf={"folder": str(folder)},
    )
    return builder.build(f"replacement-{folder.name}", settings)


def slow_word_count(folder: Path, schedule: Schedule, settings: Mapping[str, Any] | None = None) -> Topology:
    """Lines → split → count → arrivals, with one task each; split and count are slow (*Lu 2020*, section 6.4)."""
    builder = TopologyBuilder()
    builder.set_spout("numbers", PacedNumbers(schedule, SLOW_KEYS, 0))
    builder.set_bolt("split", SplitNumbers(SPLIT)).shuffle_grouping("numbers")
    builder.set_bolt("count", CountNumbers(COUNT)).fields_grouping("split", "word")
    builder.set_bolt("arrivals", NoteArrivals()).global_grouping("count")
    values: dict[str, Any] = {
        "delivery": "at_least_once",
        "delivery.state_dir": str(folder / "state"),
        **(settings or {}),
    }
    return builder.build(
        f"scaling-{folder.name}", Settings(workers=APART, conf={"folder": str(folder)}).with_values(values)
    )


# ---- what is left of a run -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Arrivals:
    """One entry per tuple at the last bolt, in order of arrival; times in microseconds since 1970."""

    came: IntArray
    since: IntArray
    """When it was due, or emitted while the keys were loaded."""
    number: IntArray
    count: IntArray

    def __len__(self) -> int:
        return len(self.came)


def arrivals(*paths: Path) -> Arrivals:
    """The records of the last bolt from all processes: from folders, or from files of the Storm program."""
    files = [each for path in paths for each in (sorted(path.glob("arrivals-*")) if path.is_dir() else [path])]
    rows = np.concatenate([np.empty((0, _COLUMNS), np.int64), *map(_whole_rows, files)])
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    return Arrivals(*rows.T)


def _whole_rows(path: Path) -> IntArray:
    """All records but the last if that is just being written."""
    numbers = np.fromfile(path, "<i8")
    return numbers[: len(numbers) // _COLUMNS * _COLUMNS].reshape(-1, _COLUMNS)


def committed(folder: Path) -> tuple[IntArray, IntArray]:
    """Committed numbers and their counts."""
    path = folder / "committed"
    if not any(path.glob("*.parquet")):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    table = pyarrow.dataset.dataset(str(path), format="parquet").to_table(["number", "count"])
    return table["number"].to_numpy(), table["count"].to_numpy()


def end_input(folder: Path) -> None:
    """End the input of the source."""
    (folder / "end").touch()


def total(folder: Path) -> int | None:
    """The total of the numbers; None until the spout has seen the end."""
    path = folder / "total"
    return int(path.read_text()) if path.exists() else None


# ---- components ----------------------------------------------------------------------------------------


class PacedNumbers(BatchSpout):
    """Emits numbers from 0 on, with keys and due times. What falls due while no spout is active is emitted as soon
    as one is, and counts as late. Its state is its position; at least once also what was in flight, which the next
    process emits again."""

    def __init__(self, schedule: Schedule, keys: int, loaded: int) -> None:
        """``loaded``: numbers that are due at once. The schedule begins when they are emitted."""
        self._schedule, self._keys, self._loaded = schedule, keys, loaded

    def declare_output_fields(self, declarer: OutputDeclarer) -> None:
        declarer.declare(("number", int), ("word", str), ("since", int))

    def open(self, conf: Conf, context: Context, collector: BatchSpoutCollector) -> None:
        self._collector, self._folder = collector, Path(conf["folder"])
        self._tracked = context.delivery == "at_least_once"
        self._position = context.state.value("position", (0, 0, ()))
        self._next, self._begun, under_way = self._position.value
        self._again: deque[int] = deque(under_way)
        self._open: set[int] = set()
        self._total = total(self._folder)

    def next_batch(self) -> None:
        numbers = np.array(self._take(min(_MOST, self._collector.room())), np.int64)
        if not len(numbers):
            return
        keys = pa.array(key_of(numbers, self._keys)).cast(pa.string())
        due = self._begun + (self._schedule.when(numbers - self._loaded) * 1e6).astype(np.int64)
        since = np.where(numbers < self._loaded, micros(), due)
        ids = numbers.tolist() if self._tracked else None
        if ids:
            self._open.update(ids)
        self._collector.emit_batch([pa.array(numbers), keys, pa.array(since)], msg_ids=ids)

    def before_snapshot(self) -> None:
        self._position.value = self._next, self._begun, tuple(sorted({*self._open, *self._again}))

    def ack_many(self, msg_ids: Sequence[Any]) -> None:
        self._open.difference_update(msg_ids)

    def fail(self, msg_id: Any, failure: Failure) -> None:
        self._open.discard(msg_id)
        self._again.append(msg_id)

    def _take(self, most: int) -> list[int]:
        taken = [self._again.popleft() for _ in range(min(most, len(self._again)))]
        end = min(self._due(), self._next + most - len(taken))
        taken += range(self._next, end)
        self._next = max(self._next, end)
        return taken

    def _due(self) -> int:
        """How many numbers may be emitted by now."""
        if self._total is None and (self._folder / "end").exists():
            self._total = self._end()
        if self._next < self._loaded:
            due = self._loaded
        else:
            self._begun = self._begun or micros()
            due = self._loaded + self._schedule.due((micros() - self._begun) / 1e6)
        return due if self._total is None else min(due, self._total)

    def _end(self) -> int:
        """Write the total to a file, atomically."""
        staged = self._folder / f".total-{os.getpid()}"
        staged.write_text(str(self._next))
        staged.rename(self._folder / "total")
        return int(self._next)


class SplitNumbers(BatchBolt):
    """Splits a line into ``WORDS`` words. A word's number is its line's number times that plus its position."""

    def __init__(self, seconds: float) -> None:
        self._slow = TakesTime(seconds)

    def declare_output_fields(self, declarer: OutputDeclarer) -> None:
        declarer.declare(("number", int), ("word", str), ("since", int))

    def execute_batch(self, batch: pa.RecordBatch, source: Source, collector: BatchCollector) -> None:
        self._slow.execute_batch(batch, source, collector)
        lines, since = batch.column("number").to_numpy(), batch.column("since").to_numpy()
        numbers = (lines[:, None] * WORDS + np.arange(WORDS)).ravel()
        words = pa.array(key_of(numbers, SLOW_KEYS)).cast(pa.string())
        rows = np.repeat(np.arange(batch.num_rows), WORDS)
        collector.emit_batch([pa.array(numbers), words, pa.array(since[rows])], anchors=rows.tolist())


class CountNumbers(BatchBolt):
    """Counts in the task's state, which a replacement restores."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._slow = TakesTime(seconds)

    def declare_output_fields(self, declarer: OutputDeclarer) -> None:
        declarer.declare(("number", int), ("count", int), ("since", int))

    def prepare(self, conf: Conf, context: Context) -> None:
        self._counts = context.state.map("counts", default=0)

    def execute_batch(self, batch: pa.RecordBatch, source: Source, collector: BatchCollector) -> None:
        self._slow.execute_batch(batch, source, collector)
        counts, told = self._counts, []
        for word in batch.column("word").to_pylist():
            count = counts[word] = counts[word] + 1
            told.append(count)
        collector.emit_batch([batch.column("number"), pa.array(told, pa.int64()), batch.column("since")])


class NoteArrivals(BatchBolt):
    """The last bolt: records arrivals in a file of this process."""

    def prepare(self, conf: Conf, context: Context) -> None:
        self._notes = Notes(Path(conf["folder"]) / f"arrivals-{os.getpid()}-{context.task}-{time.time_ns()}")

    def execute_batch(self, batch: pa.RecordBatch, source: Source, collector: BatchCollector) -> None:
        came = np.full(batch.num_rows, micros())
        columns = [batch.column(name).to_numpy() for name in ("since", "number", "count")]
        self._notes.add(np.stack([came, *columns], axis=1))
