"""Word count: sentences, split into words, counted; the most frequent words are shown."""

import random
from collections import Counter

from penstock import BasicBolt, ShowBolt, Spout, TopologyBuilder

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


class Count(BasicBolt):
    def declare_output_fields(self, declarer):
        declarer.declare("word", "count")

    def prepare(self, conf, context):
        self.counts = Counter()

    def execute(self, tup, collector):
        self.counts[tup.word] += 1
        collector.emit([tup.word, self.counts[tup.word]])


builder = TopologyBuilder()
builder.set_spout("sentences", Sentences())
builder.set_bolt("split", Split(), 2).shuffle_grouping("sentences")
builder.set_bolt("count", Count(), 2).fields_grouping("split", "word")
builder.set_bolt("show", ShowBolt()).global_grouping("count")
topology = builder.build("word-count")
