"""A start that fails or is interrupted leaves nothing behind, however far it came."""

import threading
import types

import pytest

from penstock import Delivery, Monitor, Settings, TopologyBuilder, TopologyFailed
from penstock.driver import discovery
from penstock.driver.lifecycle import TopologyPhase
from penstock.errors import StateError
from penstock.spark import submit as submitting
from penstock.testing import CaptureBolt, FeederSpout
from tests.unit.fake_world import FakeEngine, World, topology

PATIENCE = 10.0  # seconds; an end takes milliseconds


class FakeLease:
    """A lease in memory."""

    owner = error = None

    def __init__(self):
        self.released = 0

    def release(self):
        self.released += 1


def raising(error):
    def fail(*args):
        raise error

    return fail


@pytest.fixture
def new_threads():
    """The names of the threads that the test has started and that still run."""
    before = set(threading.enumerate())
    return lambda: [thread.name for thread in threading.enumerate() if thread not in before]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Where running topologies are registered."""
    monkeypatch.setattr(discovery, "folder", lambda: tmp_path / "running")
    return tmp_path / "running"


@pytest.fixture
def lease(monkeypatch):
    lease = FakeLease()
    monkeypatch.setattr(submitting, "_lease", lambda topology, take_over: lease)
    return lease


@pytest.fixture
def spark(monkeypatch):
    """A session of no cluster."""
    context = types.SimpleNamespace(master="local[4]")
    monkeypatch.setattr(submitting, "open_session", lambda master: types.SimpleNamespace(sparkContext=context))


@pytest.fixture
def world(tmp_path, monkeypatch, spark, lease):
    """What ``submit`` starts: a world that is not started yet."""
    world = World(tmp_path / "state", start=False)
    monkeypatch.setattr(submitting, "SparkEngine", lambda spark: world.engine)

    def supervisor(topology, engine, host, port, lease):
        world.supervisor._lease = lease
        return world.supervisor

    monkeypatch.setattr(submitting, "_supervisor", supervisor)
    return world


def submit(world):
    return submitting.submit(topology(world.folder, world.guarantee))


def check_ended(world, lease, new_threads):
    assert world.supervisor.lifecycle.phase is TopologyPhase.FAILED
    world.check()
    assert lease.released == 1
    assert discovery.running() == []
    assert new_threads() == []


def test_a_started_topology_is_registered_and_supervised(world, lease, folder):
    running = submit(world)
    assert [path.suffix for path in folder.iterdir()] == [".json"]
    running.kill()
    assert (running.state, list(folder.iterdir()), lease.released) == ("ended", [], 1)


def test_an_engine_that_fails_after_the_start_ends_the_topology(world, lease, new_threads):
    world.engine.warning = raising(OSError("the JVM has ended"))
    with pytest.raises(TopologyFailed, match=r"its start failed \(OSError: the JVM has ended\)"):
        submit(world)
    check_ended(world, lease, new_threads)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), StateError("store", "it does not fit")])
def test_an_interruption_after_the_start_ends_the_topology(world, lease, error, new_threads):
    world.engine.warning = raising(error)
    with pytest.raises(type(error)):
        submit(world)
    check_ended(world, lease, new_threads)


def test_an_interruption_before_the_supervisors_thread_runs_ends_the_topology(
    world, lease, monkeypatch, new_threads
):
    start = threading.Thread.start
    broken = raising(RuntimeError("can't start new thread"))

    def start_others(thread):
        (broken if thread.name == "supervisor" else start)(thread)

    monkeypatch.setattr(threading.Thread, "start", start_others)
    with pytest.raises(TopologyFailed, match="can't start new thread"):
        submit(world)
    check_ended(world, lease, new_threads)


def test_an_interruption_when_the_supervisors_thread_runs_already_leaves_the_end_to_it(
    world, lease, monkeypatch, new_threads
):
    start = threading.Thread.start

    def start_and_interrupt(thread):
        start(thread)
        if thread.name == "supervisor":
            raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", start_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        submit(world)
    for thread in threading.enumerate():
        if thread.name == "supervisor":
            thread.join(PATIENCE)
    check_ended(world, lease, new_threads)


def test_an_interruption_of_the_shutdown_after_a_failed_start_is_raised(world, lease):
    world.mute = True  # no worker connects
    world.engine.close = raising(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        submit(world)
    assert world.supervisor.lifecycle.phase is TopologyPhase.ENDING


@pytest.mark.parametrize("error", [KeyboardInterrupt(), StateError("store", "it does not fit")])
def test_a_start_that_cannot_be_prepared_ends_what_was_opened(
    tmp_path, monkeypatch, spark, lease, new_threads, error
):
    engine = FakeEngine(None)
    monkeypatch.setattr(submitting, "SparkEngine", lambda spark: engine)
    coordinators = []

    def fail(supervisor, savepoint, fresh):
        coordinators.append(supervisor.server)
        raise error

    monkeypatch.setattr(submitting, "_prepare", fail)
    builder = TopologyBuilder()
    builder.set_spout("numbers", FeederSpout("x"))
    builder.set_bolt("show", CaptureBolt()).shuffle_grouping("numbers")
    settings = Settings(delivery=Delivery(state_dir=str(tmp_path)), monitor=Monitor("sqlite"))
    with pytest.raises(type(error)):
        submitting.submit(builder.build("words", settings), fresh=True)
    assert (engine.closed, lease.released) == (True, 1)
    assert new_threads() == []
    assert coordinators[0]._loop.is_closed()
