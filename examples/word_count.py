"""Word count: sentences are split into words, counted as partials and merged; the most frequent words are
shown."""

import random

from penstock import BasicBolt, Reduce, ShowBolt, Spout, TopologyBuilder
from penstock.aggregates import Count

LINES = ["the cow jumped over the moon", "an apple a day keeps the doctor away", "four score and seven years ago"]


class Sentences(Spout):
    def declare_output_fields(self, declarer):
        declarer.declare("sentence")

    def open(self, conf, context, collector):
        self.collector = collector

    def next_tuple(self):
        self.collector.emit([random.choice(LINES)])


class Split(BasicBolt):
    def declare_output_fields(self, declarer):
        declarer.declare("word")

    def execute(self, tup, collector):
        for word in tup.sentence.split():
            collector.emit([word])


counts = Reduce("word", count=Count())

builder = TopologyBuilder()
builder.set_spout("sentences", Sentences())
builder.set_bolt("split", Split(), 2).shuffle_grouping("sentences")
builder.set_bolt("count", counts.partials(), 2).fields_grouping("split", "word")
builder.set_bolt("total", counts.merged()).fields_grouping("count", "word")
builder.set_bolt("show", ShowBolt()).local_or_shuffle_grouping("total")
topology = builder.build("word-count")
