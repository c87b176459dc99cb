"""The refit policy on Spark: it judges the CPU time of workers, so nothing else may run beside this test."""

import time

import pytest

from penstock import BasicBolt, Delivery, Settings, Spout, TopologyBuilder, Workers
from penstock.metrics.machine import usable_cores
from penstock.plan.model import Fit

pytestmark = pytest.mark.spark


class Ticks(Spout):
    def declare_output_fields(self, declarer):
        declarer.declare("n")

    def open(self, conf, context, collector):
        self._collector, self._n = collector, 0

    def next_tuple(self):
        self._n += 1
        self._collector.emit([self._n])


class Burns(BasicBolt):
    """Uses a millisecond of CPU time for each tuple."""

    def declare_output_fields(self, declarer):
        declarer.declare("n")

    def execute(self, tup, collector):
        end = time.thread_time() + 0.001
        while time.thread_time() < end:
            pass
        collector.emit([tup.n])


def workers(running):
    plan = running.internals.plan
    return [(*group.components, group.workers) for stage in plan.stages for group in stage.fused_groups]


@pytest.mark.skipif(usable_cores() < 2, reason="a second worker needs a second core")
def test_the_policy_divides_an_overloaded_worker(run):
    """With equal weights one worker is the better packing of three executors on two cores; with what two of them
    were measured to need, it is not."""
    builder = TopologyBuilder()
    builder.set_spout("ticks", Ticks())
    builder.set_bolt("first", Burns()).fields_grouping("ticks", "n")
    builder.set_bolt("second", Burns()).fields_grouping("first", "n")
    settings = Settings(
        workers=Workers(2, refit_after=12.0), delivery=Delivery("at_least_once", state_dir=str(run.folder))
    )
    running = run.submit_packed(builder.build("burns", settings))
    assert running.internals.plan.fit == Fit(2)
    assert workers(running) == [("ticks", "first", "second", 1)]
    assert running.internals.server.wait(lambda: len(workers(running)) == 2, 90), running.status().to_json()
    assert workers(running) == [("ticks", "first", 1), ("second", 1)]
    notes = [each.text for each in running.status().decisions if each.kind == "refit"]
    assert notes
    assert "% of a core" in notes[0]
