"""A saturated topology is scaled and loses a worker: its markers overtake what waits, and results stay exact."""

import math
import os
import signal
import time

import pyarrow.dataset as ds
import pytest

from penstock import TopologyBuilder
from penstock.connectors.parquet import ParquetSink
from tests.fault.components import Count, Numbers, Pass
from tests.helpers import MANY, settings_with
from tests.integration.test_replacement import World

pytestmark = pytest.mark.spark

RATE = 600  # tuples per second of both spout tasks together
COUNT = 2500  # for each spout task; most of it waits for the bolt when it is scaled


class Busy(Count):
    """Takes five milliseconds for a tuple: one task does less than a third of what is emitted."""

    def execute(self, tup, collector):
        time.sleep(0.005)
        super().execute(tup, collector)

    def cleanup(self):
        self.publish(sorted(self.counts.items()))

    def prepare(self, conf, context):
        super().prepare(conf, context)
        self.publish = context.publish


class Saturated(World):
    def __init__(self, run):
        self.count, self.output = COUNT, str(run.folder / "output")
        self.settings = settings_with(
            delivery="exactly_once", state_dir=str(run.folder / "state"), epoch_interval=0.5, workers=MANY
        )
        self.running = run.submit(self.topology())

    def written(self):
        return ds.dataset(self.output, format="parquet").count_rows()

    def topology(self):
        builder = TopologyBuilder()
        builder.set_spout("numbers", Numbers(self.count, 1_000_000), 2).set_max_rate(RATE)
        builder.set_bolt("pass", Pass(), 1).shuffle_grouping("numbers")
        builder.set_bolt("count", Busy(), 1).fields_grouping("pass", "key")
        builder.set_bolt("sink", ParquetSink(self.output)).shuffle_grouping("count")
        return builder.build("saturated", self.settings)


def test_a_saturated_topology_is_scaled_and_loses_a_worker(run):
    world = Saturated(run)
    running = world.running
    world.until(lambda: world.executed() > 200, "it is overloaded")
    waiting = running.internals.bus.totals()["count"].queued
    assert waiting > 200, "or it proves nothing"
    for tasks in (2, 4):
        done = running.scale({"count": tasks})
        print(f"{tasks} tasks: silent {done.gap:.2f} s, took {done.seconds:.2f} s: {dict(done.steps)}")
        assert done.left_behind == "", "nothing is repeated"
        world.goes_on()
        if tasks == 2:
            worker = max(running.internals.workers.items())[1]
            os.kill(worker.hello.pid, signal.SIGKILL)
            world.until(lambda: running.internals.restarts, "the loss is noticed")
            world.goes_on()
    running.set_max_rate("numbers", math.inf)
    world.until(lambda: world.written() >= 2 * COUNT, "all input is through")
    counted, rows = world.finish()
    assert counted == world.oracle()
    assert rows == world.rows()
