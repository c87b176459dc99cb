"""What a tuple costs in the tuple form: CPU nanoseconds per tuple in one process, without Spark.

Components are written as users write them: no ``plain_tuples``, no ``emit_columns``. Each figure is the median
over several runs of a topology in the local runner; the cost of one bolt is the difference between two topologies.

    python -m benchmarks.tuple_path            # the native form, if it is built
    PENSTOCK_PURE=1 python -m benchmarks.tuple_path
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any, ClassVar

from penstock import (
    BasicBolt,
    Context,
    Delivery,
    OutputDeclarer,
    Settings,
    Spout,
    Topology,
    TopologyBuilder,
    Tuple,
)
from penstock.testing import LocalRunner
from penstock.topology.components import Collector, Conf, SpoutCollector

_SENTENCE = "the quick brown fox jumps over the lazy dog and then"
_WORDS = len(_SENTENCE.split())
_SENTENCES = [f"{_SENTENCE[:-4]}{number % 1000:04d}" for number in range(4096)]


class Sentences(Spout):
    """Emits a sentence per call."""

    finished: ClassVar[bool] = False

    def __init__(self, count: int) -> None:
        self.left = count

    def declare_output_fields(self, declarer: OutputDeclarer) -> None:
        declarer.declare("sentence")

    def open(self, conf: Conf, context: Context, collector: SpoutCollector) -> None:
        self.collector, self.acks = collector, context.delivery == "at_least_once"

    def next_tuple(self) -> None:
        left = self.left
        if left:
            self.left = left - 1
            if self.acks:
                self.collector.emit([_SENTENCES[left & 4095]], msg_id=left)
            else:
                self.collector.emit([_SENTENCES[left & 4095]])
        else:
            Sentences.finished = True


class Split(BasicBolt):
    def declare_output_fields(self, declarer: OutputDeclarer) -> None:
        declarer.declare("word")

    def execute(self, tup: Tuple, collector: Collector) -> None:
        for word in tup.sentence.split():
            collector.emit([word])


class Identity(BasicBolt):
    def declare_output_fields(self, declarer: OutputDeclarer) -> None:
        declarer.declare("word")

    def execute(self, tup: Tuple, collector: Collector) -> None:
        collector.emit([tup[0]])


class Count(BasicBolt):
    """Counts words in a ``Counter`` or a ``defaultdict``."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make

    def prepare(self, conf: Conf, context: Context) -> None:
        self.counts = self.make()

    def execute(self, tup: Tuple, collector: Collector) -> None:
        self.counts[tup.word] += 1


def _zeros() -> defaultdict[str, int]:
    return defaultdict(int)


def chain(bolts: list[BasicBolt], sentences: int, acks: bool) -> Topology:
    """The spout and the bolts in a row. Every bolt is fused with the component before it."""
    builder = TopologyBuilder()
    builder.set_spout("spout", Sentences(sentences))
    source = "spout"
    for number, bolt in enumerate(bolts):
        builder.set_bolt(f"bolt{number}", bolt).local_or_shuffle_grouping(source)
        source = f"bolt{number}"
    delivery = Delivery("at_least_once", max_spout_pending=20_000) if acks else Delivery("at_most_once")
    return builder.build("tuple-path", Settings(delivery=delivery))


def seconds(bolts: list[BasicBolt], sentences: int, acks: bool = False) -> float:
    """CPU seconds of one run."""
    runner = LocalRunner(chain(bolts, sentences, acks))
    gc.collect()
    Sentences.finished = False
    started = time.process_time()
    while not Sentences.finished:  # a full inbox makes the runner idle too
        runner.run_until_idle()
    return time.process_time() - started


def measure(sentences: int, runs: int) -> dict[str, float]:
    """CPU nanoseconds by what is measured."""
    split: Callable[[], list[BasicBolt]] = lambda: [Split()]  # noqa: E731
    forms: dict[str, tuple[Callable[[], list[BasicBolt]], bool]] = {
        "spout": (list, False),
        "split": (split, False),
        "counter": (lambda: [Split(), Count(Counter)], False),
        "defaultdict": (lambda: [Split(), Count(_zeros)], False),
        "identity": (lambda: [Split(), Identity()], False),
        "split acks": (split, True),
        "identity acks": (lambda: [Split(), Identity()], True),
        "counter acks": (lambda: [Split(), Count(Counter)], True),
    }
    times: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(runs):  # in turns, so that a busy machine disturbs all alike
        for name, (bolts, acks) in forms.items():
            times[name].append(seconds(bolts(), sentences, acks))
    median = {name: statistics.median(each) * 1e9 for name, each in times.items()}
    words = sentences * _WORDS
    return {
        "spout, per tuple": median["spout"] / sentences,
        "split, per word": (median["split"] - median["spout"]) / words,
        "count, per word, Counter": (median["counter"] - median["split"]) / words,
        "count, per word, defaultdict": (median["defaultdict"] - median["split"]) / words,
        "one more identity bolt": (median["identity"] - median["split"]) / words,
        "one more identity bolt, acks": (median["identity acks"] - median["split acks"]) / words,
        "spout + split + count, per word": median["counter"] / words,
        "spout + split + count, per word, acks": median["counter acks"] / words,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sentences", type=int, default=20_000)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = measure(options.sentences, options.runs)
    if options.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:40} {value:7.0f} ns")


if __name__ == "__main__":
    main()
