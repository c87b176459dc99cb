"""*Storm overview*, section 2.4.1: how much memory a count by key takes with shuffle, fields and partial key
grouping, and how evenly the load is spread. Counted in a topology in the local runner, with skewed words."""

from __future__ import annotations

import argparse
from collections import Counter

import numpy as np

from benchmarks.harness import Results
from penstock import BasicBolt, Collector, Conf, Context, TopologyBuilder, Tuple
from penstock.testing import FeederSpout, LocalRunner

TASKS, KEYS = 8, 400
EXPONENT = 1.1
"""Of Zipf's law: the most frequent key has a sixth of all tuples."""


class KeyCount(BasicBolt):
    def prepare(self, conf: Conf, context: Context) -> None:
        self.counts: Counter[int] = Counter()

    def execute(self, tup: Tuple, collector: Collector) -> None:
        self.counts[tup[0]] += 1


def measure_groupings(results: Results, options: argparse.Namespace) -> None:
    """Entries in the tables of all tasks for each key, and the load of the busiest task relative to the mean."""
    tuples = 40_000 if options.quick else 200_000
    rng = np.random.default_rng(options.seed)
    weights = 1 / np.arange(1, KEYS + 1) ** EXPONENT
    drawn = rng.choice(KEYS, tuples, p=weights / weights.sum())
    keys = np.concatenate(
        [np.repeat(np.arange(KEYS), TASKS), drawn]
    )  # each key occurs in every task that may get it
    for grouping in ("shuffle", "fields", "partial_key"):
        tables = counted(grouping, keys.tolist())
        entries = sum(map(len, tables)) / KEYS
        loads = [sum(table.values()) for table in tables]
        assert sum(loads) == len(keys), f"{grouping}: {sum(loads)} of {len(keys)} tuples were counted"
        imbalance = max(loads) / (sum(loads) / TASKS)
        results.row(grouping=grouping, **{"entries for each key": entries, "busiest / mean": imbalance})
        results.bar(f"{grouping}.entries", entries, f"entries for each of {KEYS} keys, {TASKS} tasks")
        results.bar(f"{grouping}.busiest", imbalance, "× the mean load")


def counted(grouping: str, keys: list[int]) -> list[Counter[int]]:
    """The table of each task."""
    builder = TopologyBuilder()
    builder.set_spout("keys", FeederSpout(("key", int), rows=[(key,) for key in keys]))
    bolt = builder.set_bolt("count", KeyCount(), TASKS)
    if grouping == "shuffle":
        bolt.shuffle_grouping("keys")
    elif grouping == "fields":
        bolt.fields_grouping("keys", "key")
    else:
        bolt.partial_key_grouping("keys", "key")
    runner = LocalRunner(builder.build("keys"))
    runner.run_until_idle()
    return [bolt.counts for bolt in runner.component("count")]
