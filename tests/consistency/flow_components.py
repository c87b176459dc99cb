"""Sources with a rate and slow bolts on a simulated clock, and a runner whose channels fill up as Spark's do."""

from __future__ import annotations

from penstock import BasicBolt, SimulatedClock, Spout
from penstock.plan.model import WorkerId
from penstock.testing import LocalRunner

CLOCK = SimulatedClock()
"""The clock of all that takes time here; each test takes it on from where it stands."""


class Branches(Spout):
    """Emits ⟨n⟩ on each stream, so many a second of each, as a queue would offer them: what is not taken in time
    can be had later. Asks which stream is ready unless told not to."""

    def __init__(self, asks=True, until=None, **rates):
        self._asks, self._rates, self._until = asks, rates, until
        self.emitted = dict.fromkeys(rates, 0)
        self.acked = dict.fromkeys(rates, 0)

    def declare_output_fields(self, declarer):
        for stream in self._rates:
            declarer.declare(("n", int), stream=stream)

    def open(self, conf, context, collector):
        self._collector, self._begin = collector, CLOCK.now()

    def next_tuple(self):
        passed = CLOCK.now() - self._begin
        if self._until is not None:
            passed = min(passed, self._until)
        for stream, rate in self._rates.items():
            n = self.emitted[stream]
            if n < int(passed * rate) and (not self._asks or self._collector.ready(stream)):
                self._collector.emit([n], stream=stream, msg_id=stream)
                self.emitted[stream] = n + 1

    def ack(self, msg_id):
        self.acked[msg_id] += 1


class Worker(BasicBolt):
    """Keeps the numbers it gets and passes them on; each takes it ``seconds``."""

    def __init__(self, seconds=0.0):
        self._seconds, self.got = seconds, []

    def declare_output_fields(self, declarer):
        declarer.declare(("n", int))

    def execute(self, tup, collector):
        self.got.append(tup.n)
        if self._seconds:
            CLOCK.advance(self._seconds)
        collector.emit([tup.n])


class BoundedRunner(LocalRunner):
    """A worker waits while a channel it may send to is full, as a Spark task does: what the mode ``none`` is."""

    most = 4
    """Frames in a channel."""

    def _round(self):
        for id in self.workers:
            ahead = [slot.channel for slot in self._slots.values() if slot.id.stage == id.stage + 1]
            self._pace[id] = 0.0 if any(len(channel) > self.most for channel in ahead) else 1.0
        super()._round()


def inbox_of(runner, component, index=0):
    """The inbox of one task."""
    task = runner.plan.tasks_of[component][index]
    return runner.workers[runner.plan.routes.worker_of[task]].intake.inboxes[task]


def send_queue_of(runner, source, target, index=0):
    """The send queue from one task to a component."""
    task = runner.plan.tasks_of[source][index]
    worker: WorkerId = runner.plan.routes.worker_of[task]
    return runner.workers[worker]._flow.send_queue(task, runner.plan.tasks_of[target][0])
