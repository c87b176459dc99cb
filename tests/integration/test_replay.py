"""Replay on Spark, over the queue on disk and over Kafka: what is in flight when a topology is replaced reaches
the new form through To, also if workers are killed meanwhile."""

import os
import signal
import time
from contextlib import ExitStack

import pytest

from penstock import BasicBolt, Delivery, Settings, TopologyBuilder
from penstock.connectors.kafka_eden import KafkaEden
from penstock.connectors.kafka_replay import Broker
from penstock.replay import DiskQueue, QueueEden, ReplayRecord, ReplaySpout
from penstock.storage.segments import SegmentLog
from penstock.testing.servers.kafka import KafkaServer

pytestmark = pytest.mark.spark

PATIENCE = 90.0  # seconds; enough on a busy machine
LINES = [f"line {number}" for number in range(2_500)]
BAD = "line 1234"
PENDING = 1_000


class Slow(BasicBolt):
    """Takes 3 ms for a tuple, so that more is in flight than can finish in the moment that a replacement allows.
    Writes down what it has executed."""

    def __init__(self, path):
        self._path = path

    def prepare(self, conf, context):
        self._out = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def execute(self, tup, collector):
        if tup.line == BAD:
            raise ValueError("cannot use this")
        time.sleep(0.003)  # the work that makes inboxes fill
        os.write(self._out, f"{tup.line}\n".encode())


class OnDisk:
    """The source, and how much was appended to From and To."""

    def __init__(self, folder, stack):
        self._folder = folder
        queue = DiskQueue(folder / "eden")
        queue.append([ReplayRecord((line,)) for line in LINES])
        queue.close()
        self.eden = QueueEden(folder / "eden", ("line",))

    def handed_on(self):
        [folder] = {path.parent for path in (self._folder / "state").rglob("replay/about.json")}
        logs = [SegmentLog(folder / name) for name in ("from", "to")]
        ends = [log.end() for log in logs]
        for log in logs:
            log.close()
        return sum(ends)


class OnKafka:
    def __init__(self, folder, stack):
        pytest.importorskip("confluent_kafka")
        kafka = stack.enter_context(KafkaServer())
        kafka.create_topic("lines")
        bootstrap = kafka.bootstrap
        self._broker = Broker("test", bootstrap, {})
        self._broker.produce("lines", 0, [line.encode() for line in LINES])
        self.eden = KafkaEden(bootstrap, "lines")

    def handed_on(self):
        consumer = self._broker.consumer("test")
        ends = [self._broker.ends(consumer, f"replayed.lines.{name}", 0)[1] for name in ("from", "to")]
        consumer.close()
        return sum(ends)


@pytest.mark.parametrize("kind", [OnDisk, OnKafka])
def test_what_the_old_form_leaves_reaches_the_new_one_through_to(run, kind):
    seen = run.folder / "seen.txt"
    with ExitStack() as stack:
        source = kind(run.folder, stack)
        builder = TopologyBuilder()
        builder.set_spout("lines", ReplaySpout(source.eden, max_attempts=3))
        builder.set_bolt("slow", Slow(str(seen))).shuffle_grouping("lines")
        delivery = Delivery(
            "at_least_once", state_dir=str(run.folder / "state"), epoch_interval=0.5, max_spout_pending=PENDING
        )
        running = run.submit(builder.build("replayed", Settings(delivery=delivery)))
        server, totals = running.internals.server, lambda: running.internals.bus.totals()["lines"]

        def executed():
            return seen.read_text().splitlines() if seen.exists() else []

        in_flight = lambda: totals().emitted - totals().acked  # noqa: E731
        assert server.wait(lambda: len(executed()) > 100 and in_flight() > 0.7 * PENDING, PATIENCE)
        assert source.handed_on() == 0
        running.scale({"slow": 2})
        handed_on = source.handed_on()
        assert handed_on > PENDING / 2, "nothing has failed but what the old form had in flight"
        kill_worker_of(running, "lines")
        assert server.wait(lambda: running.status().restarts > 0, PATIENCE)
        assert server.wait(lambda: set(executed()) >= set(LINES) - {BAD}, PATIENCE), sorted(
            set(LINES) - set(executed())
        )
        assert server.wait(lambda: totals().given_up > 0, PATIENCE), "the bad one is a dead letter"
        assert source.handed_on() >= handed_on + 2, "after two more attempts"
        assert BAD not in executed()
        running.kill()


def kill_worker_of(running, component):
    """kill -9 of the worker with the first task of a component."""
    plan = running.internals.plan
    task = plan.tasks_of[component][0]
    [id] = [worker for worker in plan.worker_ids() if task in plan.routes.tasks_of(worker)]
    os.kill(running.internals.workers[id].hello.pid, signal.SIGKILL)
