"""The four benchmarks of *Pu 2021*, table 3. Each stresses another resource.

| topology | resource | spout → bolts |
|---|---|---|
| ``word_count`` | CPU | lines → split → count by word |
| ``sol`` | network | messages → bolts that pass them on, one per level after the first |
| ``rolling_sort`` | memory | messages → the newest chunk of them, sorted every 10 s |
| ``rolling_count`` | all of them | lines → split → count by word over 150 s, emitted every 30 s |

Run one of them by its function, sized for the machine:

    penstock run benchmarks/erdm_topologies.py:sol --set conf.scale=0.5
    penstock set erdm-sol source.max_rate=5000

``conf.scale`` is the share of the paper's sizes and times: message, chunk, window, the time between two results. 1
is as in the paper; the default is 0.1. ``conf.duplicates`` is the share of messages that are copies of an earlier
one; ``dedup=True`` adds a ``DedupBolt`` after the spouts, which drops them. ``conf.seed`` gives other messages.
The number of tasks is a ``Shape``: ``LAPTOP`` (the default), ``FOUR_NODES``, or ``FULL`` as in the paper, for a
simulator.

The file imports nothing from this folder, so that it can be run like a user's topology.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock import (
    BatchBolt,
    BatchCollector,
    BatchSpout,
    BatchSpoutCollector,
    ComponentError,
    Conf,
    Context,
    DedupBolt,
    Delivery,
    Failure,
    OutputDeclarer,
    Reduce,
    Settings,
    Source,
    Topology,
    TopologyBuilder,
)
from penstock.aggregates import Count
from penstock.topology.hashing import rehash

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Shape:
    """The size of a topology."""

    spouts: int
    bolts: int
    """Tasks of each bolt."""
    nodes: int
    """Number of workers it is meant for."""
    ackers: int
    """For simulators; here the driver tracks acks."""
    pending: int = 200
    """Messages in flight per spout task."""


FULL = Shape(50, 100, 16, 16)
"""*Pu 2021*, table 3."""
FOUR_NODES = Shape(4, 8, 4, 4)
"""Two tasks of each bolt per node, two of each spout as in the paper: 20 to 28 workers."""
LAPTOP = Shape(1, 2, 1, 1)

LEVELS = 3  # of Sol; the spouts are the first level
SOL_MESSAGE = 2_000  # bytes
SORT_MESSAGE = 100_000  # bytes
CHUNK = 2_000_000
"""Bytes of messages that a sort task keeps: 20 messages. In the benchmark that the paper uses, chunk.size is a
number of messages; two million would be 200 GB per task, on nodes with 8 GB."""
SORT_EVERY = 10.0  # seconds
WINDOW, COUNT_EVERY = 150.0, 30.0  # seconds
SCALE = 0.1

_TICK = 0.1  # seconds: the shortest time between two sorts
_BATCH_BYTES = 100_000  # bytes of a batch: about one frame
_MOST = 50  # messages per batch: 200 may be in flight
_VOCABULARY, _LINES, _WORDS = 5_000, 2_000, 10  # of the text: different words, different lines, words per line
_PLACES = 10_000  # positions in a text of random letters at which a message may begin
_LOOK_BACK = 100  # messages: the largest distance between a copy and its original


# ---- topologies ----------------------------------------------------------------------------------------


def word_count(shape: Shape = LAPTOP, rate: float = 2_000.0, dedup: bool = False) -> Topology:
    """Lines, split, counted by word; the counts are state."""
    builder = _begin(Lines(), shape, rate, dedup)
    builder.set_bolt("split", Split(), shape.bolts).shuffle_grouping(_first(dedup))
    builder.set_bolt("count", CountWords(), shape.bolts).fields_grouping("split", "word")
    return builder.build("erdm-word-count", _settings(shape))


def sol(shape: Shape = LAPTOP, rate: float = 2_000.0, dedup: bool = False, levels: int = LEVELS) -> Topology:
    """Speed of light: messages through several levels that only pass them on."""
    builder = _begin(Messages(SOL_MESSAGE), shape, rate, dedup)
    before = _first(dedup)
    for level in range(2, levels + 1):
        builder.set_bolt(f"level{level}", PassOn(), shape.bolts).shuffle_grouping(before)
        before = f"level{level}"
    return builder.build("erdm-sol", _settings(shape))


def rolling_sort(shape: Shape = LAPTOP, rate: float = 200.0, dedup: bool = False) -> Topology:
    """Each task keeps the newest messages up to a chunk, and emits them sorted at intervals."""
    builder = _begin(Messages(SORT_MESSAGE), shape, rate, dedup)
    builder.set_bolt("sort", SortChunk(), shape.bolts).shuffle_grouping(_first(dedup))
    return builder.build("erdm-rolling-sort", _settings(shape))


def rolling_count(shape: Shape = LAPTOP, rate: float = 2_000.0, dedup: bool = False) -> Topology:
    """Counts words over a sliding window. "parts" is fused with "split", because the paper's benchmark has no such
    bolt and should not need more workers here."""
    counts = Reduce("word", count=Count()).window("time", WINDOW, COUNT_EVERY)
    builder = _begin(Lines(), shape, rate, dedup)
    builder.set_bolt("split", Split(), shape.bolts).shuffle_grouping(_first(dedup))
    builder.set_bolt("partials", counts.partials(), shape.bolts).local_or_shuffle_grouping("split")
    builder.set_bolt("rolling_count", counts.merged(), shape.bolts).fields_grouping("partials", "word")
    return builder.build("erdm-rolling-count", _settings(shape))


TOPOLOGIES = {"word_count": word_count, "sol": sol, "rolling_sort": rolling_sort, "rolling_count": rolling_count}


def _begin(source: Generated, shape: Shape, rate: float, dedup: bool) -> TopologyBuilder:
    builder = TopologyBuilder()
    builder.set_spout("source", source, shape.spouts).set_max_rate(rate)
    if dedup:
        once = DedupBolt(*source.FIELDS, by="id", lossy=True)
        # One task per four spouts: it has little to do, and more tasks would make the frames after it smaller.
        builder.set_bolt("once", once, max(1, shape.spouts // 4)).fields_grouping("source", "id")
    return builder


def _first(dedup: bool) -> str:
    """The component that the first bolt reads."""
    return "once" if dedup else "source"


def _settings(shape: Shape) -> Settings:
    return Settings(delivery=Delivery("at_least_once", max_spout_pending=shape.pending))


def scale_of(conf: Conf) -> float:
    return float(conf.get("scale", SCALE))


# ---- sources -------------------------------------------------------------------------------------------


class Generated(BatchSpout):
    """Emits messages computed from their numbers. Message n of a task is always the same, so a failed one can be
    computed again, and after a restart the spout continues with the first message that was not acked. ``id`` is
    the same for copies."""

    FIELDS: tuple[tuple[str, type], ...] = (("id", int), ("message", str), ("time", float))
    """``time``: when it was emitted, in the paper's seconds, which pass 1 / ``conf.scale`` times as fast."""

    def declare_output_fields(self, declarer: OutputDeclarer) -> None:
        declarer.declare(*self.FIELDS)

    def open(self, conf: Conf, context: Context, collector: BatchSpoutCollector) -> None:
        self._collector = collector
        self._index, self._spouts = context.index, context.parallelism
        self.begin(conf)
        if not 0 <= self._share < 1 or not self._scale > 0:
            raise ComponentError(
                f"component '{context.component}'",
                "conf.duplicates must be at least 0 and less than 1 and conf.scale greater than "
                f"0, not {self._share:g} and {self._scale:g}",
                "Leave them out for 0 and 0.1.",
            )
        self._tracked = context.delivery == "at_least_once"
        self._position = context.state.value("position", 0)
        self._next: int = self._position.value
        self._open: set[int] = set()
        self._again: deque[int] = deque()

    def make(self, seed: int, scale: float) -> None:
        """Create the data from which all tasks take their messages."""
        raise NotImplementedError

    def drawn(self, draws: npt.NDArray[np.uint64]) -> Sequence[str]:
        """The message of each draw."""
        raise NotImplementedError

    @property
    def batch(self) -> int:
        """Messages per batch."""
        return _MOST

    @property
    def emitted(self) -> int:
        """Messages emitted so far by this task, also before a restart."""
        return self._next

    def begin(self, conf: Conf) -> None:
        """Prepare the data from which the messages are taken."""
        self._scale, self._share = scale_of(conf), float(conf.get("duplicates", 0.0))
        self._seed = int(conf.get("seed", 1))
        self.make(self._seed, self._scale)

    def draws(self, ids: IntArray) -> npt.NDArray[np.uint64]:
        """The random number from which each message is made."""
        return rehash(ids.astype(np.uint64), self._seed)

    def next_batch(self) -> None:
        if not self._collector.ready():
            return
        numbers = [self._again.popleft() for _ in range(min(self.batch, len(self._again)))]
        fresh = self.batch - len(numbers)
        numbers += range(self._next, self._next + fresh)
        self._next += fresh
        ids = self.originals(np.array(numbers, np.int64)) * self._spouts + self._index
        messages = self.drawn(self.draws(ids))
        times = np.full(len(numbers), time.time() / self._scale)
        if self._tracked:
            self._open.update(numbers)
        msg_ids = numbers if self._tracked else None
        self._collector.emit_batch([pa.array(ids), pa.array(messages), pa.array(times)], msg_ids=msg_ids)

    def originals(self, numbers: IntArray) -> IntArray:
        """The number of each message's original, or its own number."""
        while True:
            draws = rehash(numbers.astype(np.uint64), -self._seed & 0xFFFF_FFFF)
            copies = ((draws >> np.uint64(11)) * 2.0**-53 < self._share) & (numbers > 0)
            if not copies.any():
                return numbers
            back = (draws % np.uint64(_LOOK_BACK)).astype(np.int64) + 1
            numbers = np.where(copies, np.maximum(numbers - back, 0), numbers)

    def before_snapshot(self) -> None:
        self._position.value = min([self._next, *self._open, *self._again])

    def ack_many(self, msg_ids: Sequence[Any]) -> None:
        self._open.difference_update(msg_ids)

    def fail(self, msg_id: Any, failure: Failure) -> None:
        self._open.discard(msg_id)
        self._again.append(msg_id)


class Lines(Generated):
    """Ten words per line. As in a text, the nth word is 1/n as frequent as the first."""

    def make(self, seed: int, scale: float) -> None:
        rng = np.random.default_rng(seed)
        letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
        words = ["".join(rng.choice(letters, size)) for size in rng.integers(2, 10, _VOCABULARY)]
        chances = 1 / np.arange(1, _VOCABULARY + 1)
        drawn = rng.choice(_VOCABULARY, (_LINES, _WORDS), p=chances / chances.sum())
        self._lines = [" ".join(words[word] for word in line) for line in drawn]

    def drawn(self, draws: npt.NDArray[np.uint64]) -> Sequence[str]:
        return [self._lines[place] for place in (draws % np.uint64(_LINES)).tolist()]


class Messages(Generated):
    """Random letters, with a given number of bytes per message at scale 1."""

    def __init__(self, size: int) -> None:
        self._full_size = size

    def make(self, seed: int, scale: float) -> None:
        self._size = max(1, round(self._full_size * scale))
        drawn = np.random.default_rng(seed).integers(ord("a"), ord("z") + 1, self._size + _PLACES, np.uint8)
        self._text = drawn.tobytes().decode()

    def drawn(self, draws: npt.NDArray[np.uint64]) -> Sequence[str]:
        places = (draws % np.uint64(_PLACES)).tolist()
        return [self._text[place : place + self._size] for place in places]

    @property
    def batch(self) -> int:
        return max(1, min(_MOST, _BATCH_BYTES // self._size))


# ---- bolts ---------------------------------------------------------------------------------------------


class Split(BatchBolt):
    def declare_output_fields(self, declarer: OutputDeclarer) -> None:
        declarer.declare(("word", str), ("time", float))

    def execute_batch(self, batch: pa.RecordBatch, source: Source, collector: BatchCollector) -> None:
        words = pc.split_pattern(batch.column("message"), " ")
        rows = pc.list_parent_indices(words)
        times = batch.column("time").take(rows)
        collector.emit_batch([words.flatten(), times], anchors=rows.to_numpy().tolist())


class CountWords(BatchBolt):
    """Emits ⟨word, count⟩ for each word of a batch. The counts are in state, partitioned by word."""

    def declare_output_fields(self, declarer: OutputDeclarer) -> None:
        declarer.declare(("word", str), ("count", int))

    def prepare(self, conf: Conf, context: Context) -> None:
        self.counts = context.state.map("counts", default=0)

    def execute_batch(self, batch: pa.RecordBatch, source: Source, collector: BatchCollector) -> None:
        words = batch.column("word")
        self.counts.add_columns(words)
        changed = words.unique().to_pylist()
        collector.emit_batch([changed, self.counts.get_columns(changed)])


class PassOn(BatchBolt):
    def declare_output_fields(self, declarer: OutputDeclarer) -> None:
        declarer.declare(*Generated.FIELDS)

    def execute_batch(self, batch: pa.RecordBatch, source: Source, collector: BatchCollector) -> None:
        collector.emit_batch(batch, anchors=range(batch.num_rows))


class SortChunk(BatchBolt):
    """Emits ⟨rank, message⟩ for all messages it keeps, every 10 s at scale 1. The messages are in state."""

    tick_interval = _TICK

    def declare_output_fields(self, declarer: OutputDeclarer) -> None:
        declarer.declare(("rank", int), ("message", str))

    def prepare(self, conf: Conf, context: Context) -> None:
        scale = scale_of(conf)
        self._ticks, self._every = 0, max(1, round(SORT_EVERY * scale / _TICK))
        self._room = CHUNK * scale
        self._state = context.state.value("chunk", (), merge=_both)
        self.chunk: deque[str] = deque()
        self.bytes = 0
        self._keep(self._state.value)

    def execute_batch(self, batch: pa.RecordBatch, source: Source, collector: BatchCollector) -> None:
        self._keep(batch.column("message").to_pylist())

    def tick(self, collector: BatchCollector) -> None:
        self._ticks += 1
        if self._ticks % self._every == 0 and self.chunk:
            collector.emit_batch([pa.array(range(len(self.chunk))), pa.array(sorted(self.chunk))])

    def before_snapshot(self) -> None:
        self._state.value = tuple(self.chunk)

    def _keep(self, messages: Sequence[str]) -> None:
        for message in messages:
            self.chunk.append(message)
            self.bytes += len(message)
            while self.bytes > self._room:
                self.bytes -= len(self.chunk.popleft())


def _both(one: tuple[str, ...], other: tuple[str, ...]) -> tuple[str, ...]:
    return one + other
