"""Components of the flow control tests: a source that offers more than a bolt can process, until the test changes
that. Tests and components communicate through files in ``conf["folder"]`` and through published results."""

import os
import time
from collections import Counter

from penstock import BasicBolt, CustomGrouping, Spout, TopologyBuilder
from penstock.aggregates import Count, MergeBolt, PartialBolt, Sum

FIELDS = (("n", int), ("key", str))
KEYS = 10
HOT = 6  # of ten tuples those with the first key
SPEEDS = (200.0, 1_000.0, 600.0)  # tuples a second of three branches; the first has the hot key


def key_of(n):
    """The key of a number; most tuples have the first key."""
    return f"key-{max(0, n % KEYS - HOT + 1)}"


class Switch:
    """False until the test creates the file with this name. Checks at intervals, because a spout asks very
    often."""

    def __init__(self, conf, name):
        self._path, self._on, self._look = os.path.join(conf["folder"], name), False, 0.0

    @property
    def on(self):
        now = time.monotonic()
        if not self._on and now >= self._look:
            self._on, self._look = os.path.exists(self._path), now + 0.02
        return self._on


class Offers(Spout):
    """Offers ⟨n, key⟩ on each stream, so many a second, as a queue would: what is not taken in time can be had
    later. It ends with ``count`` of each stream, or where it stands when the test says ``enough``.

    Goes on from the positions in its state. Publishes for each stream what was offered, emitted and acked.
    """

    def __init__(self, streams, rate, count=10**9):
        self.streams, self.rate, self.count = streams, rate, count

    def declare_output_fields(self, declarer):
        for stream in self.streams:
            declarer.declare(*FIELDS, stream=stream)

    def open(self, conf, context, collector):
        self.collector, self.context = collector, context
        self.enough = Switch(conf, "enough")
        self.position = {stream: context.state.value(stream, 0) for stream in self.streams}
        self.acked = dict.fromkeys(self.streams, 0)
        self.began = self.offered = None

    def next_tuple(self):
        if self.began is None:
            self.began, self.first = time.monotonic(), min(each.value for each in self.position.values())
        if not self.enough.on:
            self.offered = min(self.count, self.first + int((time.monotonic() - self.began) * self.rate))
        for stream, position in self.position.items():
            n = position.value
            if n < self.offered and self.collector.ready(stream):
                msg_id = stream if self.context.delivery == "at_least_once" else None
                self.collector.emit((n, key_of(n)), stream, msg_id)
                position.value = n + 1
        self.publish()

    def ack(self, msg_id):
        self.acked[msg_id] += 1
        self.publish()

    def publish(self):
        rows = [[stream, self.offered, each.value, self.acked[stream]] for stream, each in self.position.items()]
        self.context.publish([*rows, ["enough", self.enough.on]])


class Takes(BasicBolt):
    """Takes so many seconds for each tuple until the test says ``healed``. Keeps and publishes how many it got and
    their sum, and passes them on."""

    def __init__(self, seconds=0.0):
        self.seconds = seconds

    def declare_output_fields(self, declarer):
        declarer.declare(*FIELDS)

    def prepare(self, conf, context):
        self.publish, self.healed = context.publish, Switch(conf, "healed")
        self.seen = context.state.map("seen", 0)

    def execute(self, tup, collector):
        if self.seconds and not self.healed.on:
            time.sleep(self.seconds)
        seen = self.seen
        seen[tup.source_component, "count"] += 1
        seen[tup.source_component, "sum"] += tup.n
        self.publish([[*key, value] for key, value in seen.items()])
        collector.emit(tup)


class SlowPartials(PartialBolt):
    """The partials of a ``Reduce``, by tasks of different speed: tuples a second by the task's index."""

    def __init__(self, key, merges, speeds):
        super().__init__(key, merges)
        self.speeds = speeds

    def prepare(self, conf, context):
        self.seconds = 1 / self.speeds[context.index]

    def execute_batch(self, batch, source, collector):
        time.sleep(self.seconds * batch.num_rows)
        super().execute_batch(batch, source, collector)


class ShownMerge(MergeBolt):
    """Publishes what is merged: each key and its partials."""

    def prepare(self, conf, context):
        super().prepare(conf, context)
        self.show = context.publish

    def execute_batch(self, batch, source, collector):
        super().execute_batch(batch, source, collector)
        first = next(iter(self.partials.values()))
        self.show([[key, *(partials[key] for partials in self.partials.values())] for key in first])


class ByKey(CustomGrouping):
    """The first key to the first task, and so on."""

    def prepare(self, targets):
        self.tasks = targets.tasks

    def choose(self, values):
        return [self.tasks[int(values[1][-1]) % len(self.tasks)]]


def branches_with_partials(source, settings):
    """Sums and counts by key, as partials: the branch of the hot key is too slow for it, the others could help."""
    merges = {"count": Count(), "total": Sum("n")}
    builder = TopologyBuilder()
    builder.set_spout("source", source)
    builder.set_bolt("work", SlowPartials(["key"], merges, SPEEDS), 3).grouping("source", ByKey(), stream="left")
    builder.set_bolt("merge", ShownMerge(["key"], merges)).global_grouping("work")
    return builder.build("in-parts", settings)


def oracle(count):
    """⟨key, count, sum⟩ of each key, sequentially."""
    counts, sums = Counter(), Counter()
    for n in range(count):
        counts[key_of(n)] += 1
        sums[key_of(n)] += n
    return sorted([key, counts[key], sums[key]] for key in counts)
