"""FastWordCount in the tuple form as users write it: no ``emit_columns``, no ``plain_tuples``."""

from __future__ import annotations

from collections import defaultdict

from benchmarks.words import Sentences
from penstock import (
    BasicBolt,
    Collector,
    Conf,
    Context,
    OutputDeclarer,
    Settings,
    Topology,
    TopologyBuilder,
    Tuple,
)


class PlainSplit(BasicBolt):
    def declare_output_fields(self, declarer: OutputDeclarer) -> None:
        declarer.declare(("word", str))

    def execute(self, tup: Tuple, collector: Collector) -> None:
        for word in tup.sentence.split(" "):
            collector.emit([word])


class PlainCount(BasicBolt):
    def prepare(self, conf: Conf, context: Context) -> None:
        self._counts: defaultdict[str, int] = defaultdict(int)

    def execute(self, tup: Tuple, collector: Collector) -> None:
        self._counts[tup.word] += 1


def plain_word_count(spouts: int, splits: int, counts: int, settings: Settings) -> Topology:
    """``fast_word_count`` with these bolts."""
    builder = TopologyBuilder()
    builder.set_spout("sentences", Sentences(), spouts)
    builder.set_bolt("split", PlainSplit(), splits).shuffle_grouping("sentences")
    builder.set_bolt("count", PlainCount(), counts).fields_grouping("split", "word")
    return builder.build("plain-word-count", settings)
