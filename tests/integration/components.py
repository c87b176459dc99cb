"""Components of the integration tests. They are shipped to the workers like a user's module."""

import json
from collections import defaultdict
from pathlib import Path

import numpy as np

from penstock import BasicBolt, CustomGrouping, Spout, TransactionalSink

FIELDS = (("origin", int), ("n", int), ("key", str), ("sent", int))
"""``sent`` counts what a task has emitted: between two tasks it only ever grows."""


class Numbers(Spout):
    """⟨origin, n, key, sent⟩ for n = 0 .. count - 1; also on a direct stream, to task n mod tasks."""

    def __init__(self, count, keys=10, direct_to=None):
        self.count, self.keys, self.direct_to = count, keys, direct_to

    def declare_output_fields(self, declarer):
        declarer.declare(*FIELDS)
        if self.direct_to:
            declarer.declare(*FIELDS, stream="direct", direct=True)

    def open(self, conf, context, collector):
        self.collector, self.context, self.n = collector, context, 0

    def next_tuple(self):
        if self.n < self.count:
            values = (self.context.task, self.n, f"key-{self.n % self.keys}", self.n)
            self.collector.emit(values)
            if self.direct_to:
                tasks = self.context.tasks[self.direct_to]
                self.collector.emit_direct(tasks[self.n % len(tasks)], values, stream="direct")
            self.n += 1


class Order:
    """Checks that what comes from a task comes in the order it was sent."""

    def __init__(self):
        self.last = {}
        self.broken = 0

    def check(self, tup):
        self.broken += tup.sent <= self.last.get((tup.source_task, tup.source_stream), -1)
        self.last[tup.source_task, tup.source_stream] = tup.sent


class Pass(BasicBolt):
    """Emits what it gets, renumbered; an overtaken tuple is an error."""

    def declare_output_fields(self, declarer):
        declarer.declare(*FIELDS)

    def prepare(self, conf, context):
        self.order, self.sent = Order(), 0

    def execute(self, tup, collector):
        self.order.check(tup)
        if self.order.broken:
            raise ValueError(f"{tup} was overtaken")
        collector.emit((tup.origin, tup.n, tup.key, self.sent))
        self.sent += 1


class Away(TransactionalSink):
    """Its server does not answer."""

    def write(self, batch, source):
        pass

    def prepare_commit(self, epoch):
        raise ConnectionRefusedError("no server")

    def commit(self, token):
        raise AssertionError("nothing was prepared")

    def recover(self, tokens):
        pass


class Witness(BasicBolt):
    """Notes everything and writes it down at the end: sums for floods, lists for small runs."""

    def __init__(self, most=100_000):
        self.most = most

    def prepare(self, conf, context):
        self.context = context
        self.path = Path(conf["folder"]) / f"{context.component}-{context.task}.json"
        self.seen = defaultdict(lambda: np.zeros(0, np.uint8))
        self.order = Order()
        self.keys = defaultdict(int)
        self.tuples = []

    def execute(self, tup, collector):
        origin, n = tup.origin, tup.n
        seen = self.seen[origin]
        if n >= len(seen):
            seen = self.seen[origin] = np.concatenate([seen, np.zeros(max(4096, n), np.uint8)])
        seen[n] += 1
        self.order.check(tup)
        self.keys[tup.key] += 1
        if len(self.tuples) < self.most:
            self.tuples.append([tup.source_component, tup.source_stream, tup.source_task, origin, n])

    def cleanup(self):
        report = {
            "task": self.context.task,
            "node": self.context.node,
            "disorder": self.order.broken,
            "keys": self.keys,
            "counts": {str(origin): np.bincount(seen).tolist() for origin, seen in self.seen.items()},
            "received": int(sum(seen.sum() for seen in self.seen.values())),
            "ns": {str(origin): np.flatnonzero(seen).tolist() for origin, seen in self.seen.items()}
            if self.most
            else {},
            "tuples": self.tuples,
        }
        self.path.write_text(json.dumps(report))


class LastOfKey(CustomGrouping):
    """A grouping of the user's own: by the last character of the key."""

    def prepare(self, targets):
        self.tasks = targets.tasks

    def choose(self, values):
        return [self.tasks[int(values[2][-1]) % len(self.tasks)]]


class RaisesAt(BasicBolt):
    """Raises on one tuple, passes the others on."""

    def __init__(self, n, where="execute"):
        self.n, self.where = n, where

    def declare_output_fields(self, declarer):
        declarer.declare(*FIELDS)

    def prepare(self, conf, context):
        if self.where == "prepare":
            raise RuntimeError("no database here")

    def execute(self, tup, collector):
        if tup.n == self.n:
            raise ValueError("cannot digest this")
        collector.emit(tup)


class WrongCount(RaisesAt):
    def execute(self, tup, collector):
        collector.emit([tup.n] if tup.n == self.n else tup)


class WrongType(RaisesAt):
    def execute(self, tup, collector):
        collector.emit([tup.origin, "three", tup.key, tup.sent] if tup.n == self.n else tup)
