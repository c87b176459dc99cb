"""Components of the fault tests. The input is numbered, so that the output can be compared with it."""

import faulthandler
import fcntl
import os
import signal
import time

import numpy as np

from penstock import BasicBolt, BatchBolt, Spout
from penstock.connectors.watermark import LowWater


class Numbers(Spout):
    """⟨origin, n, key⟩ for n = 0 .. count - 1, at so many a second; goes on where a commit left it.

    At least once it keeps the mark below which all is acked, and emits again what failed. In the folder ``owners``
    it holds a lock for as long as it may emit, so that no other can, dead or alive, without its being known.
    """

    def __init__(self, count, rate, keys=50, owners=None):
        self.count, self.rate, self.keys, self.owners = count, rate, keys, owners
        self.lock = None

    def declare_output_fields(self, declarer):
        declarer.declare(("origin", int), ("n", int), ("key", str))

    def open(self, conf, context, collector):
        self.collector, self.origin = collector, context.index
        self.tracked = context.delivery == "at_least_once"
        self.position = context.state.value("position", 0)
        self.next = self.position.value
        self.acked = LowWater(self.next)
        self.again = []

    def activate(self):
        self.began, self.first = time.monotonic(), self.next
        if self.owners:
            self.lock = open(f"{self.owners}/{self.origin}.lock", "a+")  # noqa: SIM115 - held while active
            try:
                fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.complain()
            self.lock.truncate(0)
            self.lock.write(str(os.getpid()))
            self.lock.flush()

    def complain(self):
        self.lock.seek(0)
        with open(f"{self.owners}/two", "a") as file:
            file.write(f"spout {self.origin}: {os.getpid()} emits, and {self.lock.read()} does still\n")

    def deactivate(self):
        if self.lock is not None:
            self.lock.close()
            self.lock = None

    def next_tuple(self):
        if self.again:
            self.emit(self.again.pop())
        elif self.next < min(self.count, self.first + self.rate * (time.monotonic() - self.began)):
            if self.tracked:
                self.acked.add(self.next, 1)
            self.emit(self.next)
            self.next += 1

    def emit(self, n):
        values = (self.origin, n, f"key-{n % self.keys}")
        if self.tracked:
            self.collector.emit(values, msg_id=n)
        else:
            self.collector.emit(values)

    def ack(self, msg_id):
        self.acked.ack(np.array([msg_id]))

    def fail(self, msg_id, failure):
        self.again.append(msg_id)

    def before_snapshot(self):
        self.position.value = self.acked.mark if self.tracked else self.next


class Pass(BatchBolt):
    def declare_output_fields(self, declarer):
        declarer.declare(("origin", int), ("n", int), ("key", str))

    def execute_batch(self, batch, source, collector):
        collector.emit_batch(batch)


class Parse(BasicBolt):
    """Lines ``origin n key`` from Kafka."""

    def declare_output_fields(self, declarer):
        declarer.declare(("origin", int), ("n", int), ("key", str))

    def execute(self, tup, collector):
        origin, n, key = tup[0].split()
        collector.emit((int(origin), int(n), key))


class OtherPass(Pass):
    """The same, as changed code."""


class OtherParse(Parse):
    """The same, as changed code."""


def as_line(row):
    return " ".join(str(value) for value in row.values())


class Count(BasicBolt):
    """Counts the keys in its state and passes the tuples on."""

    def declare_output_fields(self, declarer):
        declarer.declare(("origin", int), ("n", int), ("key", str))

    def prepare(self, conf, context):
        self.counts = context.state.map("counts", 0)

    def execute(self, tup, collector):
        self.counts[tup.key] += 1
        collector.emit(tup)


class CountAlong(BasicBolt):
    """Counts the keys in its state, and says with each tuple how many of its key there have been. On SIGUSR1 its
    process prints its stacks."""

    def declare_output_fields(self, declarer):
        declarer.declare(("origin", int), ("n", int), ("key", str), ("seen", int))

    def prepare(self, conf, context):
        faulthandler.register(signal.SIGUSR1)
        self.counts = context.state.map("counts", 0)

    def execute(self, tup, collector):
        self.counts[tup.key] += 1
        collector.emit((*tup, self.counts[tup.key]))
