"""What a worker inside a Spark task reports; without Spark, to a real coordinator."""

from types import SimpleNamespace

import pytest

from penstock import TopologyBuilder, make_plan
from penstock.driver.server import Coordinator
from penstock.metrics.bus import MetricsBus
from penstock.plan.model import WorkerId
from penstock.protocol.client import ControlClient
from penstock.protocol.commands import AssignWorker
from penstock.protocol.events import Hello
from penstock.protocol.job import make_job
from penstock.spark.pickling import dumps
from penstock.testing import CaptureBolt, FeederSpout
from penstock.worker import host as host
from penstock.worker.host import WorkerHost
from penstock.worker.wake import Wake
from tests.helpers import settings_with


@pytest.fixture
def drive():
    coordinator = Coordinator()
    coordinator.start()

    def drive(**settings):
        """A worker's driver, and the list its reports go to."""
        builder = TopologyBuilder()
        builder.set_spout("words", FeederSpout("word"))
        builder.set_bolt("show", CaptureBolt()).local_or_shuffle_grouping("words")
        topology = builder.build("t", settings_with(**settings))
        plan = make_plan(topology)
        job = make_job(topology, plan, "", dumps)
        coordinator.begin(0, plan, MetricsBus(plan), job.key)
        wake = Wake()
        control = ControlClient(coordinator.address, coordinator.secret, wake.set)
        control.send(Hello(0, 0, 0, 1, "here"))
        driver = WorkerHost(WorkerId(0, 0), job, 0, control, wake, AssignWorker(0))
        driver._worker.streams[1, 2] = [10, 200]
        reports = []
        driver._control.send = reports.append
        return driver, reports

    yield drive
    coordinator.stop()


@pytest.fixture
def clock(monkeypatch):
    """The time, as the driver reads it; set ``clock[0]``."""
    now = [1000.0]
    time = SimpleNamespace(monotonic=lambda: now[0], process_time=lambda: 1.5)
    monkeypatch.setattr(host, "time", time)
    return now


def test_streams_are_told_four_times_a_window(drive, clock):
    driver, reports = drive(monitor="memory", monitor_window=20.0)
    for clock[0] in (1000.0, 1000.25, 1004.75, 1005.0, 1005.25, 1009.75):
        driver._report(0)
    assert [report.streams for report in reports] == [[[1, 2, 10, 200]], None, None] * 2
    assert [bool(report.machine) for report in reports] == [True, False, False] * 2
    assert reports[0].machine["cores"] >= 1


def test_the_last_report_has_all(drive, clock):
    driver, reports = drive(monitor="memory")
    driver._report(0)
    driver._worker.streams[1, 2][0] = 11
    driver._closed = True
    driver._report(0)
    assert reports[-1].streams == [[1, 2, 11, 200]]


def test_without_the_monitor_only_the_machine_is_told(drive, clock):
    driver, reports = drive()
    driver._report(0)
    assert reports[0].streams is None
    assert reports[0].machine["memory"] > 0
