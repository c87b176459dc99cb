"""Rolling count: how often each word occurred in the last ten seconds, emitted every two seconds.

The words are counted as partials: any task may count any word, and "total" merges the partials. So a task that
cannot keep up with a popular word can pass some of its tuples to another task, and the counts stay exact.
"""

import random
import time

from penstock import Reduce, ShowBolt, Spout, TopologyBuilder
from penstock.aggregates import Count


class Words(Spout):
    """Emits about 2,000 words per second, some far more frequent than others, each with its time."""

    def declare_output_fields(self, declarer):
        declarer.declare(("word", str), ("time", float))

    def open(self, conf, context, collector):
        self.collector, self.random = collector, random.Random(context.task)

    def activate(self):
        self.due = time.time()

    def next_tuple(self):
        if time.time() >= self.due:
            self.due += 1 / 2000
            self.collector.emit([f"word {int(self.random.paretovariate(1))}", self.due])


counts = Reduce("word", count=Count()).window("time", length=10, slide=2)

builder = TopologyBuilder()
builder.set_spout("words", Words())
builder.set_bolt("count", counts.partials(), 2).fields_grouping("words", "word")
builder.set_bolt("total", counts.merged()).fields_grouping("count", "word")
builder.set_bolt("show", ShowBolt()).local_or_shuffle_grouping("total")
topology = builder.build("rolling-count")
