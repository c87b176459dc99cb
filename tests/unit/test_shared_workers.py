"""Components that share a worker: what goes wrong only if several things come together."""

import datetime
import itertools
import time
from dataclasses import replace

import numpy as np
import pytest

from penstock import BasicBolt, BatchBolt, Delivery, Settings, TopologyBuilder, Workers
from penstock.acking.flights import EmittedRows, Flight, FlightLog, MadeRows
from penstock.columns import ColumnBatch
from penstock.errors import UserCodeError
from penstock.plan.model import Fit
from penstock.plan.planner import make_plan
from penstock.testing import CaptureBolt, FeederSpout, LocalRunner
from penstock.topology.groupings import CustomGrouping
from tests.helpers import Pass, RichPass

WORD = ("w", str)


def run(builder, workers=1, seconds=1.0, **delivery):
    runner = LocalRunner(
        builder.build(
            "t", Settings(workers=Workers(workers), delivery=Delivery(**delivery) if delivery else Delivery())
        )
    )
    runner.run(seconds)
    return runner


def two_spouts(bolt):
    builder = TopologyBuilder()
    builder.set_spout("a", FeederSpout(WORD, rows=[[f"a{n}"] for n in range(50)]))
    builder.set_bolt("x", Pass(WORD)).shuffle_grouping("a")
    builder.set_spout("b", FeederSpout(WORD, rows=[[f"b{n}"] for n in range(50)]))
    builder.set_bolt("y", bolt).fields_grouping("x", "w").fields_grouping("b", "w")
    return builder


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize("weights", itertools.product((0.1, 0.5), repeat=4))
def test_spouts_are_in_the_first_stage_whatever_is_measured(workers, weights):
    """A spout's position is snapshotted, and its worker never moves, because it is in the first stage."""
    topology = two_spouts(CaptureBolt()).build("t")
    traffic = {("a", "x"): 1e4, ("x", "y"): 10.0, ("b", "y"): 1e4}
    plan = make_plan(topology, Fit(workers, dict(zip("axby", weights, strict=True)), traffic))
    assert [plan.stage_of[spout] for spout in "ab"] == [0, 0]


@pytest.mark.parametrize("bolt", [CaptureBolt, RichPass])
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_messages_of_all_spouts_are_acked_however_they_are_packed(workers, bolt):
    runner = run(two_spouts(bolt(WORD) if bolt is RichPass else bolt()), workers, 60.0, guarantee="at_least_once")
    for spout in "ab":
        (task,) = runner.component(spout)
        assert (len(task.acked), len(task.failed)) == (50, 0)


class Twice(CustomGrouping):
    """Some tuples go to a task twice, others nowhere."""

    def prepare(self, targets):
        self._task = targets.tasks[0]

    def choose(self, values):
        return [self._task] * 2 if values[0] == "twice" else []


@pytest.mark.parametrize("workers", [1, 2])
def test_a_custom_grouping_may_repeat_a_task(workers):
    builder = TopologyBuilder()
    builder.set_spout("a", FeederSpout(WORD, rows=[["twice"], ["never"]]))
    builder.set_bolt("y", CaptureBolt()).grouping("a", Twice())
    assert [tuple(row) for row in run(builder, workers).captured("y")] == [("twice",), ("twice",)]


def test_rows_are_selected_as_they_are_chosen():
    batch = ColumnBatch([("n", None)], [[1, 2]])
    assert batch.select(np.array([0, 0])).values == [[1, 1]]
    assert batch.select(np.array([], np.int64)).values == [[]]
    assert batch.select(slice(None)) is batch


class Misanchored(BatchBolt):
    def declare_output_fields(self, declarer):
        declarer.declare(WORD)

    def execute_batch(self, batch, source, collector):
        collector.emit_batch([["x"]], anchors=[99])


class Fails(BasicBolt):
    def execute(self, tup, collector):
        raise ValueError("no")


@pytest.mark.parametrize("workers", [1, 3])
def test_an_anchor_out_of_range_is_an_error_of_the_bolt(workers):
    builder = TopologyBuilder()
    builder.set_spout("a", FeederSpout(WORD, rows=[["p"], ["q"]]))
    builder.set_bolt("x", Misanchored()).shuffle_grouping("a")
    builder.set_bolt("y", Fails()).shuffle_grouping("x")
    runner = run(builder, workers, guarantee="at_least_once")
    assert runner.errors
    assert all(isinstance(error, UserCodeError) for error in runner.errors)
    assert "IndexError" in str(runner.errors[0])


class Unpicklable(datetime.tzinfo):
    def __init__(self):
        self.offset = datetime.timedelta(0)

    def utcoffset(self, moment):
        return self.offset

    def __reduce__(self):
        raise TypeError("cannot pickle")


class Moments(FeederSpout):
    def open(self, *args):
        super().open(*args)
        self._rows.extend([["ok"], [datetime.datetime(2020, 1, 1, tzinfo=Unpicklable())]])


class Batches(BatchBolt):
    def prepare(self, conf, context):
        self.got = []

    def execute_batch(self, batch, source, collector):
        self.got += batch.column(0).to_pylist()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_value_that_arrow_cannot_hold_costs_its_row_only(workers):
    builder = TopologyBuilder()
    builder.set_spout("a", Moments("w"))
    builder.set_bolt("x", Batches()).shuffle_grouping("a")
    runner = run(builder, workers)
    assert runner.component("x")[0].got == ["ok"]
    assert "field 'w'" in str(runner.errors[0])


def test_failures_behind_batch_bolts_cost_no_more_than_their_messages():
    rows, begun = 3_000, time.process_time()
    flight = Flight(FlightLog(), 1, 0, rows)
    trace = EmittedRows(range(rows), [(flight, rows)])
    for _ in range(4):  # rows ** 4 steps, if each row were traced through each bolt
        trace = MadeRows(trace, rows, None, 0, rows)
    assert len(trace.messages_of(5)) == rows
    assert trace.messages() is trace.messages_of(0)
    assert time.process_time() - begun < 2.0


def test_a_failed_batch_fails_each_message_once():
    builder = TopologyBuilder()
    builder.set_spout("a", FeederSpout(WORD, rows=[[f"{n}"] for n in range(200)]))
    builder.set_bolt("x", Passes()).shuffle_grouping("a")
    builder.set_bolt("y", FailsInBatches()).shuffle_grouping("x")
    runner = run(builder, 1, 0.5, guarantee="at_least_once")
    (task,) = runner.component("a")
    assert len(task.failed) >= 200
    assert runner.stats("a")[0].failed == len(task.failed), "each failure is of another emission"


class Passes(BatchBolt):
    def declare_output_fields(self, declarer):
        declarer.declare(WORD)

    def execute_batch(self, batch, source, collector):
        collector.emit_batch(batch)


class FailsInBatches(BatchBolt):
    def execute_batch(self, batch, source, collector):
        raise ValueError("no")


def test_the_limit_that_an_operator_sets_holds_for_the_policy():
    from penstock.driver.refit_controller import RefitController

    topology = two_spouts(CaptureBolt()).build("t")
    refits = RefitController(make_plan(topology, Fit(3)), topology, topology.settings)
    assert refits._policy.workers == 3
    limited = replace(Fit(3), workers=1)
    refits.replaced(make_plan(topology, limited), topology, 10.0, by_refit=False)
    assert refits._policy.workers == 1
