"""A worker's life, driven by commands and turns, without a host."""

import pyarrow as pa
import pytest

from penstock import SimulatedClock, TopologyBuilder, make_plan
from penstock.control.signals import TaskMessage
from penstock.errors import PenstockError
from penstock.faults import CrashPoint
from penstock.frames.header import Header, Kind
from penstock.plan.model import WorkerId
from penstock.protocol.commands import (
    AssignWorker,
    CancelLeave,
    CloseTasks,
    EndEpoch,
    OpenTasks,
    PrepareToLeave,
    RouteWorker,
)
from penstock.protocol.events import (
    ChannelsWarm,
    LeavePrepared,
    SnapshotWritten,
    TasksClosed,
    TasksOpened,
    WorkerFailed,
    WorkerLeft,
    WorkerRouted,
)
from penstock.protocol.job import make_job
from penstock.spark.pickling import dumps
from penstock.testing import CaptureBolt, FeederSpout
from penstock.worker.archive import WorkerArchive
from penstock.worker.phase import TRANSITIONS, IllegalTransition, WorkerPhase
from penstock.worker.worker import Worker
from tests.helpers import Driven, Pass, settings_with

HERE = WorkerId(1, 0)
FIRST = AssignWorker(0)


@pytest.fixture
def start(tmp_path):
    def start(assignment=FIRST, delivery="exactly_once"):
        """The middle one of three workers."""
        builder = TopologyBuilder()
        builder.set_spout("words", FeederSpout("word"))
        builder.set_bolt("pass", Pass("word")).shuffle_grouping("words")
        builder.set_bolt("show", CaptureBolt()).shuffle_grouping("pass")
        topology = builder.build("t", settings_with(delivery=delivery, flow="step"))
        job = make_job(topology, make_plan(topology), str(tmp_path), dumps)
        archive = WorkerArchive(str(tmp_path), HERE, CrashPoint(""))
        return Driven(Worker(HERE, job, SimulatedClock(), assignment, archive))

    return start


def control(kind, epoch=0):
    return pa.py_buffer(Header(kind, 1, 0, 0, 0, epoch=epoch).pack())


def kinds(rows):
    return [(slot, Kind(memoryview(frame)[3]).name) for slot, frame in rows if frame is not None]


def opened(start, **how):
    worker = start(**how)
    worker.turn()
    worker.offer(control(Kind.WARM))
    worker.tell(OpenTasks({}))
    worker.turn()
    return worker


def test_it_warms_its_channels_and_says_once_that_it_is_open(start):
    worker = start()
    assert kinds(worker.turn()) == [(0, "WARM")]
    worker.tell(OpenTasks({}))
    worker.turn()
    assert not [event for event in worker.events if isinstance(event, ChannelsWarm | TasksOpened)]
    worker.offer(control(Kind.WARM))
    worker.turn()
    worker.turn()
    assert [event for event in worker.events if isinstance(event, ChannelsWarm | TasksOpened)] == [
        ChannelsWarm(),
        TasksOpened(False),
    ]
    assert worker.worker.phase is WorkerPhase.OPEN


def test_it_leaves_at_the_end_of_the_epoch_with_a_snapshot(start):
    worker = opened(start)
    worker.tell(PrepareToLeave(commit=1, epoch=1))
    assert worker.events[-1] == LeavePrepared(1)
    worker.turn()
    assert worker.worker.phase is WorkerPhase.LEAVING
    worker.offer(control(Kind.MARKER, 1))
    assert kinds(worker.turn()) == [(0, "MARKER")]
    assert worker.worker.phase is WorkerPhase.LEFT
    (left,) = [event for event in worker.events if isinstance(event, WorkerLeft)]
    assert left.epoch == 1
    (job,) = worker.jobs
    assert worker.worker.finish(job.run()) == [SnapshotWritten(1, job.run().tasks)]
    assert worker.turn() == []


def test_signals_for_a_worker_that_has_left_go_to_the_one_that_has_its_tasks(start):
    worker = opened(start)
    worker.tell(PrepareToLeave(1, 1))
    worker.offer(control(Kind.MARKER, 1))
    worker.turn()
    message = TaskMessage(3, 2, "slow", 1.0)
    worker.tell(message)
    worker.tell(CloseTasks())
    assert message in worker.events
    assert isinstance(worker.events[-1], TasksClosed)
    assert not worker.worker.gone
    worker.offer(control(Kind.LAST))
    assert worker.worker.gone


def test_it_continues_where_it_is_not_to_leave_after_all(start):
    worker = opened(start)
    worker.tell(PrepareToLeave(1, 1))
    worker.offer(control(Kind.MARKER, 1))
    worker.turn()
    worker.tell(CancelLeave())
    worker.turn()
    assert worker.worker.phase is WorkerPhase.OPEN
    worker.offer(control(Kind.MARKER, 2))
    worker.turn()
    assert [job.snapshot.epoch for job in worker.jobs] == [1, 2]


def test_one_that_stands_by_and_is_not_needed_frees_its_slot(start):
    worker = start(AssignWorker(0, [[0]], takes_over=True))
    worker.turn()
    assert worker.worker.phase is WorkerPhase.STANDING_BY
    worker.tell(CloseTasks())
    assert worker.worker.gone


def test_rows_for_a_worker_go_to_all_its_slots(start):
    worker = opened(start, assignment=AssignWorker(0, [[0]]))
    worker.tell(RouteWorker(0, [0, 4]))
    assert worker.events[-1] == WorkerRouted(0, [0, 4])
    assert kinds(worker.turn()) == [(4, "WARM")]
    worker.offer(control(Kind.MARKER, 1))
    assert kinds(worker.turn()) == [(0, "MARKER"), (4, "MARKER")]
    worker.tell(RouteWorker(0, [4]))
    assert kinds(worker.turn()) == [(0, "LAST")]


def test_a_failure_is_said_once_and_then_it_does_nothing(start):
    worker = opened(start)
    worker.events += worker.worker.fail(ZeroDivisionError("oops"))
    worker.events += worker.worker.fail(PenstockError("x", "y"))
    (failed,) = [event for event in worker.events if isinstance(event, WorkerFailed)]
    assert failed.where == "worker 1.0"
    assert "internal error (please report it)" in failed.problem
    assert "ZeroDivisionError: oops" in failed.problem
    worker.offer(control(Kind.MARKER, 1))
    assert worker.turn() == []
    worker.tell(CloseTasks())
    assert worker.worker.phase is WorkerPhase.CLOSED


def test_tasks_are_opened_once(start):
    worker = opened(start)
    with pytest.raises(IllegalTransition, match="a worker that is OPEN cannot become OPEN"):
        worker.tell(OpenTasks({}))
    assert worker.worker.phase is WorkerPhase.OPEN


def test_every_phase_has_its_transitions_and_others_are_refused(start):
    assert set(TRANSITIONS) == set(WorkerPhase)
    worker = opened(start)
    with pytest.raises(IllegalTransition, match="a worker that is OPEN cannot become STANDING_BY"):
        worker.worker._become(WorkerPhase.STANDING_BY)
    worker.tell(EndEpoch(1))
    worker.worker.validate()
