"""What a worker reports, and how often."""

import numpy as np
import pytest

from penstock import SimulatedClock, TopologyBuilder, make_plan
from penstock.plan.model import WorkerId
from penstock.protocol import codec, wire
from penstock.protocol.client import framed
from penstock.protocol.commands import AssignWorker, CloseTasks, OpenTasks, RequestReport
from penstock.protocol.events import WorkerReport
from penstock.protocol.job import make_job
from penstock.spark.pickling import dumps
from penstock.testing import CaptureBolt, FeederSpout
from penstock.worker.worker import Worker
from tests.helpers import Driven, settings_with


@pytest.fixture
def clock():
    return SimulatedClock(1000.0)


MOST = (1 << 63) - 1


class Behind(FeederSpout):
    """Its source says how far it is behind."""

    def __init__(self, lag):
        super().__init__("word")
        self._lag = lag

    def lag(self):
        return self._lag


class Counts(FeederSpout):
    """It counts what it gave up and what came too late."""

    def __init__(self, count):
        super().__init__("word")
        self._count = count

    def open(self, conf, context, collector):
        super().open(conf, context, collector)
        context.gave_up(self._count)
        context.late(self._count)
        context.late(self._count)


@pytest.fixture
def start(clock):
    def start(spout=None, **settings):
        builder = TopologyBuilder()
        builder.set_spout("words", spout or FeederSpout("word"))
        builder.set_bolt("show", CaptureBolt()).local_or_shuffle_grouping("words")
        topology = builder.build("t", settings_with(**settings))
        plan = make_plan(topology)
        worker = Driven(Worker(WorkerId(0, 0), make_job(topology, plan, "", dumps), clock, AssignWorker(0)))
        worker.worker._sender._streams.add(1, 2, 10, 200)
        return worker

    return start


def reports(worker):
    return [event for event in worker.events if isinstance(event, WorkerReport)]


def at(worker, clock, *times):
    for time in times:
        clock.advance(time - clock.now())
        worker.turn()


def test_streams_are_told_four_times_a_window(start, clock):
    worker = start(monitor="memory", monitor_interval=20.0, metrics_interval=0.25)
    at(worker, clock, 1000.0, 1000.25, 1004.75, 1005.0, 1005.25, 1009.75)
    assert [report.streams for report in reports(worker)] == [[(1, 2, 10, 200)], None, None] * 2
    assert [bool(report.machine) for report in reports(worker)] == [True, False, False] * 2
    assert reports(worker)[0].machine["cores"] >= 1


def test_the_last_report_has_all(start, clock):
    worker = start(monitor="memory")
    worker.tell(OpenTasks({}))
    worker.turn()
    worker.worker._sender._streams.add(1, 2, 1, 0)
    worker.tell(CloseTasks())
    assert reports(worker)[-1].streams == [(1, 2, 11, 200)]


def test_without_the_monitor_only_the_machine_is_told(start):
    worker = start()
    worker.turn()
    (report,) = reports(worker)
    assert report.streams is None
    assert report.machine["memory"] > 0


def test_the_loop_reports_at_every_interval_and_wakes_for_it(start, clock):
    worker = start(metrics_interval=0.5)
    worker.turn()
    assert worker.wait == pytest.approx(0.5)
    at(worker, clock, 1000.4, 1000.5, 1000.6)
    assert len(reports(worker)) == 2


@pytest.mark.parametrize(
    ("lag", "reported"),
    [
        ({"orders/0": 7, 1: 8.9}, {"orders/0": 7, "1": 8}),
        ({"p": 1 << 70, "q": -(1 << 70)}, {"p": (1 << 63) - 1, "q": -(1 << 63)}),
        ({"topic-\udcff": 1}, {"topic-\\udcff": 1}),
        ({"p": float("nan")}, {}),
        ({"p": float("inf")}, {}),
    ],
)
def test_the_lag_is_sent_whatever_the_spout_returns(start, lag, reported):
    worker = start(Behind(lag))
    worker.tell(OpenTasks({}))
    worker.tell(RequestReport(1))
    report = codec.decode_event(framed(reports(worker)[-1])[wire.LENGTH.size :])
    assert not report.errors
    (spout, _) = report.tasks.values()
    assert spout.lag == reported


@pytest.mark.parametrize(("count", "given_up", "late"), [(np.int64(3), 3, 6), (1 << 70, MOST, MOST)])
def test_counts_of_user_code_are_sent_whatever_their_type_and_size(start, count, given_up, late):
    worker = start(Counts(count))
    worker.tell(OpenTasks({}))
    worker.tell(RequestReport(1))
    report = codec.decode_event(framed(reports(worker)[-1])[wire.LENGTH.size :])
    assert not report.errors
    (spout, _) = report.tasks.values()
    assert (spout.given_up, spout.late) == (given_up, late)
