"""A skewed keyed aggregate with real work, on Spark: JSON lines with Zipf keys are parsed and hashed by the two
tasks of a fields-grouped bolt, one of which owns the hot key and runs on the slower branch."""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmarks.hops import APART
from penstock import (
    BasicBolt,
    BatchSpout,
    BatchSpoutCollector,
    Collector,
    Conf,
    Context,
    Flow,
    Lifecycle,
    Migration,
    OutputDeclarer,
    Settings,
    Topology,
    TopologyBuilder,
    Transport,
    Tuple,
)
from penstock.aggregates import KeyedAggregate, KeyedBolt

TASKS = 2  # one for each core of the machine on which this is run
KEYS, ZIPF = 400, 1.6  # the hottest key has 0.44 of all tuples
PAYLOAD = 600  # characters of a line besides its fields
ROUNDS = 300  # hashes of a line: with parsing, some 0.25 ms of work
SLOW = 1.5  # the owner of the hot key does so many times the rounds, as on a slower node
QUEUE = 1_000  # tuples in an inbox: some 0.3 s of work, three intervals of the migration
FRAME = 20_000  # bytes: frames of some 25 tuples, so that a decision takes effect at once
BATCH = 50  # tuples that the spout emits in one call

Totals = dict[str, tuple[int, int, int]]
"""Key → the number of its tuples, the sum of their amounts, and the smallest digest."""


class Lines(BatchSpout):
    """Emits all lines as fast as flow control lets it."""

    def __init__(self, count: int, seed: int) -> None:
        self._count, self._seed = count, seed

    def declare_output_fields(self, declarer: OutputDeclarer) -> None:
        declarer.declare(("key", str), ("line", str))

    def open(self, conf: Conf, context: Context, collector: BatchSpoutCollector) -> None:
        self._collector, self._context, self._sent = collector, context, 0
        self._lines = lines(self._count, self._seed)

    def activate(self) -> None:
        self._context.publish([[time.time()]])

    def next_batch(self) -> None:
        chosen = self._lines[self._sent : self._sent + BATCH]
        if chosen and self._collector.ready():
            begin, self._sent = self._sent, self._sent + len(chosen)
            keys, texts = zip(*chosen, strict=True)
            self._collector.emit_batch([keys, texts], msg_ids=range(begin, self._sent))


class Parsed(KeyedAggregate):
    """Parses and hashes each line. The result does not depend on the number of rounds."""

    key, results = ("key",), ("count", "total", "least")

    def __init__(self, rounds: int = ROUNDS) -> None:
        self.rounds = rounds

    def zero(self) -> tuple[int, int, int]:
        return 0, 0, 2**56

    def add(self, state: tuple[int, int, int], tup: Tuple) -> tuple[int, int, int]:
        amount, digest = work(tup.line, self.rounds)
        return state[0] + 1, state[1] + amount, min(state[2], digest)

    def merge(self, state: tuple[int, int, int], other: tuple[int, int, int]) -> tuple[int, int, int]:
        return state[0] + other[0], state[1] + other[1], min(state[2], other[2])

    def result(self, state: tuple[int, int, int]) -> tuple[int, int, int]:
        return state


class UnequalBolt(KeyedBolt):
    """The bolt of ``Parsed``, whose task with this index does more rounds for each line."""

    def __init__(self, slow: int) -> None:
        super().__init__(Parsed())
        self._slow = slow

    def prepare(self, conf: Conf, context: Context) -> None:
        super().prepare(conf, context)
        self._aggregate = Parsed(int(ROUNDS * SLOW) if context.index == self._slow else ROUNDS)


class Collected(BasicBolt):
    """Keeps the newest result of each key, and publishes the time and all of them when every line is counted."""

    def __init__(self, count: int) -> None:
        self._count = count

    def prepare(self, conf: Conf, context: Context) -> None:
        self._context, self._newest, self._seen = context, {}, 0  # type: ignore[var-annotated]

    def execute(self, tup: Tuple, collector: Collector) -> None:
        key, *result = tup
        before = self._newest.get(key)
        self._seen += result[0] - (before[0] if before else 0)
        self._newest[key] = result
        if self._seen == self._count:
            results = [[key, *result] for key, result in self._newest.items()]
            self._context.publish([[time.time(), 0, 0, 0], *results])


def lines(count: int, seed: int) -> list[tuple[str, str]]:
    """⟨Key, line⟩; the same for every strategy."""
    rng = np.random.default_rng(seed)
    shares = 1.0 / np.arange(1, KEYS + 1) ** ZIPF
    ranks = rng.choice(KEYS, count, p=shares / shares.sum())
    draw = random.Random(seed)
    filler = "".join(draw.choices("abcdefghij", k=PAYLOAD))
    keys = [f"{seed}-{rank}" for rank in ranks]
    return [
        (key, json.dumps({"user": key, "amount": n * 7919 % 1000, "n": n, "text": filler}))
        for n, key in enumerate(keys)
    ]


def work(line: str, rounds: int) -> tuple[int, int]:
    """The amount in a line, and a digest of it after one of so many rounds."""
    parsed = json.loads(line)
    data = line.encode()
    first = digest = hashlib.sha256(data).digest()
    for _ in range(rounds - 1):
        digest = hashlib.sha256(digest + data).digest()
    return parsed["amount"], int.from_bytes(first[:7], "little")


def expected(count: int, seed: int) -> Totals:
    """What a sequential run computes."""
    aggregate, states = Parsed(1), {}  # type: ignore[var-annotated]
    for key, line in lines(count, seed):
        amount, digest = work(line, 1)
        states[key] = aggregate.merge(states.get(key, aggregate.zero()), (1, amount, digest))
    return states


def owner_of_the_hot_key(seed: int) -> int:
    """The task to which the fields grouping sends the most frequent key."""
    import pyarrow as pa

    from penstock.topology.hashing import hash_rows

    return int(hash_rows([pa.array([f"{seed}-0"])])[0] % np.uint64(TASKS))


def keyed_topology(count: int, seed: int, strategy: str, conf: Mapping[str, Any] | None = None) -> Topology:
    """``strategy``: credit or migration."""
    settings = Settings(
        flow=Flow("step" if strategy == "migration" else "credit", inbox_capacity=QUEUE, overflow_bytes=0),
        migration=Migration(strategy == "migration", interval=0.1),
        workers=APART,
        transport=Transport(frame_bytes=FRAME),
        lifecycle=Lifecycle(metrics_interval=0.05),
    ).with_values(dict(conf or {}))
    builder = TopologyBuilder()
    builder.set_spout("lines", Lines(count, seed))
    bolt = UnequalBolt(owner_of_the_hot_key(seed))
    builder.set_bolt("parse", bolt, TASKS).fields_grouping("lines", "key")
    builder.set_bolt("total", Parsed().merged()).fields_grouping("parse", "key")
    builder.set_bolt("out", Collected(count)).local_or_shuffle_grouping("total")
    return builder.build("keyed-migration", settings)


def complete_keyed(
    count: int, seed: int, strategy: str, patience: float, conf: Mapping[str, Any] | None = None
) -> tuple[float, Totals, int]:
    """Seconds until the last result, the results, and the number of migrations."""
    from benchmarks.harness import running

    with running(keyed_topology(count, seed, strategy, conf)) as handle:
        limit = time.monotonic() + patience
        while time.monotonic() < limit:
            published = handle.internals.bus.published()
            if "out" in published:
                (end, *_), *rows = published["out"]
                elapsed = end - published["lines"][0][0]
                results = {key: (number, total, least) for key, number, total, least in rows}
                migrations = sum("→" in each.text for each in list(handle.internals.migrations.decisions))
                return elapsed, results, migrations
            handle.wait(0.02)
    raise TimeoutError(f"{strategy}: not complete after {patience:g} s")
