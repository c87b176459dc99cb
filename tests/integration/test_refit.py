"""Components are packed into workers on Spark: the default, by hand while the topology runs, and by the policy."""

import math
import time
from collections import Counter

import pyarrow.dataset as ds
import pytest

from penstock import BasicBolt, Delivery, Settings, Spout, TopologyBuilder, Workers
from penstock.connectors.parquet import ParquetSink
from penstock.metrics.machine import usable_cores
from tests.fault.components import Count, Numbers, Pass

pytestmark = pytest.mark.spark

PATIENCE = 90.0  # seconds; enough on a busy machine
COUNT = 15_000


def build(folder, delivery="exactly_once", **workers):
    settings = Settings(
        delivery=Delivery(delivery, state_dir=str(folder / "state"), epoch_interval=0.5),
        workers=Workers(**workers),
    )
    builder = TopologyBuilder()
    builder.set_spout("numbers", Numbers(COUNT, 1_000_000), 2).set_max_rate(1_000)
    builder.set_bolt("pass", Pass(), 3).shuffle_grouping("numbers")
    builder.set_bolt("count", Count(), 4).fields_grouping("pass", "key")
    builder.set_bolt("sink", ParquetSink(str(folder / "output"))).shuffle_grouping("count")
    return builder.build("packed", settings)


def until(running, condition, what, seconds=PATIENCE):
    assert running.internals.server.wait(condition, seconds), f"{what}\n{running.status().to_json()}"


def workers(running):
    plan = running.internals.plan
    return [(*group.components, group.workers) for stage in plan.stages for group in stage.fused_groups]


def test_a_topology_has_at_most_as_many_workers_as_there_are_cores(run):
    running = run.submit_packed(build(run.folder))
    assert len(running.internals.workers) <= usable_cores() < 10
    assert len({worker.hello.pid for worker in running.internals.workers.values()}) == len(
        running.internals.workers
    )


def test_exactly_once_with_another_packing_again_and_again(run):
    running = run.submit_packed(build(run.folder, count=1))
    executed = lambda: running.internals.bus.totals()["count"].executed  # noqa: E731
    seen, gaps = [workers(running)], []
    for number in (2, 64, 3, 1):
        before = executed()
        until(running, lambda before=before: executed() > before + 200, "it goes on")
        gaps.append(running.refit(number).gap)
        seen.append(workers(running))
    assert seen[0] == seen[-1] == [("numbers", "pass", "count", "sink", 1)]
    assert seen[2] == [("numbers", 2), ("pass", 3), ("count", 4), ("sink", 1)]
    assert max(gaps) < 1.0
    running.set_max_rate("numbers", math.inf)
    until(running, lambda: executed() >= 2 * COUNT, "all input is counted")
    running.kill()
    table = ds.dataset(str(run.folder / "output"), format="parquet").to_table(columns=["origin", "n"])
    rows = Counter(zip(table["origin"].to_pylist(), table["n"].to_pylist(), strict=True))
    assert rows == Counter({(origin, n): 1 for origin in (0, 1) for n in range(COUNT)})


class Ticks(Spout):
    """200 tuples a second."""

    def declare_output_fields(self, declarer):
        declarer.declare("n")

    def open(self, conf, context, collector):
        self._collector, self._n = collector, 0

    def next_tuple(self):
        self._n += 1
        self._collector.emit([self._n])


class Sleeps(BasicBolt):
    def execute(self, tup, collector):
        time.sleep(0.01)


class Works(BasicBolt):
    def execute(self, tup, collector):
        pass


def test_a_bolt_that_sleeps_gets_a_worker_of_its_own(run):
    builder = TopologyBuilder()
    builder.set_spout("slow", Ticks()).set_max_rate(80)
    builder.set_spout("fast", Ticks()).set_max_rate(2_000)
    builder.set_bolt("sleeps", Sleeps()).shuffle_grouping("slow")
    builder.set_bolt("works", Works()).shuffle_grouping("fast")
    delivery = Delivery("at_least_once", state_dir=str(run.folder / "state"))
    settings = Settings(delivery=delivery, workers=Workers(1, refit_after=12.0))
    running = run.submit_packed(builder.build("blocking", settings))
    assert len(workers(running)) == 1
    until(running, lambda: running.internals.plan.blocking == ("sleeps",), "it is found")
    assert ("sleeps", 1) in workers(running)
    (decision,) = [each for each in running.status().decisions if each.kind == "refit"]
    assert "sleeps" in decision.text
    before = running.internals.bus.totals()["works"].executed
    until(running, lambda: running.internals.bus.totals()["works"].executed > before + 2_000, "the other goes on")
