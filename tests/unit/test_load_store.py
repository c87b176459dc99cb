"""Windows of the load monitor in a real SQLite file, and a database that is too slow."""

import logging
import sqlite3
import threading

import pytest

from penstock.control.placement import ExecutorStream, Use
from penstock.driver.load_monitor import LoadMonitor
from penstock.driver.load_sample import ExecutorLoad, MonitorSample, NodeLoad
from penstock.driver.load_store import LoadStore, SQLite, open_store
from penstock.errors import SettingError
from tests.unit.test_load_monitor import Cluster


def sample(ended, topology="words", cpu=0.5):
    use = Use(4.0, 1e9, 1e6)
    return MonitorSample(
        topology,
        ended,
        30.0,
        (ExecutorLoad("split@1.0", "split", "a/1", cpu, 1000.0, 10.0, 20.0, 30.0),),
        (ExecutorStream("lines@0.0", "split@1.0", 5.0, 10.0), ExecutorStream("lines@0.0", "split@1.1", 0.0, 0.0)),
        (NodeLoad("a/1", Use(cpu, 1000.0, 30.0), Use(0.25, 50.0), use, use),),
    )


def rows(path, table, order="ended"):
    with sqlite3.connect(path) as connection:
        return connection.execute(f"SELECT * FROM {table} ORDER BY {order}").fetchall()


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "deep" / "load.sqlite")


@pytest.fixture
def store(path):
    store = LoadStore(SQLite(path), keep=100.0)
    yield store
    store.close()


def test_what_is_kept(store, path):
    store.put(sample(1000.0))
    store.flush()
    assert rows(path, "penstock_load_samples") == [("words", 1000.0, 30.0)]
    assert rows(path, "penstock_executor_loads") == [
        ("words", 1000.0, "split@1.0", "split", "a/1", 0.5, 1000.0, 10.0, 20.0)
    ]
    assert rows(path, "penstock_stream_loads") == [("words", 1000.0, "lines@0.0", "split@1.0", 5.0, 10.0)]
    assert rows(path, "penstock_node_loads") == [("words", 1000.0, "a/1", 0.5, 1000.0, 30.0, 0.25, 50.0)]
    assert (store.written, store.dropped, store.error) == (1, 0, "")


def test_old_load_samples_go_and_those_of_other_topologies_stay(store, path):
    store.put(sample(900.0, "other"))
    for ended in (900.0, 930.0, 1010.0):
        store.put(sample(ended))
    store.flush()
    for table in (
        "penstock_load_samples",
        "penstock_executor_loads",
        "penstock_stream_loads",
        "penstock_node_loads",
    ):
        assert [row[:2] for row in rows(path, table)] == [("other", 900.0), ("words", 930.0), ("words", 1010.0)]


def test_the_end_writes_what_waits(path):
    store = LoadStore(SQLite(path), keep=100.0)
    for number in range(5):
        store.put(sample(1000.0 + number))
    store.close()
    assert len(rows(path, "penstock_load_samples")) == 5


class Stuck:
    """A database that answers when the test permits it; ``fails``: with an error."""

    def __init__(self):
        self.let, self.asked, self.fails = threading.Event(), threading.Event(), False
        self.closed = 0

    def run(self, statements):
        self.asked.set()
        self.let.wait(10)
        if self.fails:
            raise OSError("the disk is on fire")

    def close(self):
        self.closed += 1


def test_a_slow_database_holds_up_nothing(caplog):
    database = Stuck()
    store = LoadStore(database, keep=100.0)
    store.put(sample(0.0))
    assert database.asked.wait(10)
    with caplog.at_level(logging.WARNING, "penstock.monitor"):
        for number in range(1, 12):  # one is being written, eight fit
            store.put(sample(float(number)))
    assert (store.written, store.dropped) == (0, 3)
    assert store.error == "8 load samples are waiting to be written"
    assert len(caplog.records) == 1, "said once"
    database.let.set()
    store.flush()
    assert (store.written, store.dropped, store.error) == (9, 3, "")
    store.close()
    assert database.closed == 1


def test_what_fails_is_dropped_and_the_next_is_tried(caplog):
    database = Stuck()
    database.let.set()
    database.fails = True
    store = LoadStore(database, keep=100.0)
    store.put(sample(0.0))
    store.flush()
    assert (store.dropped, store.error, database.closed) == (1, "OSError: the disk is on fire", 1)
    database.fails = False
    store.put(sample(1.0))
    store.flush()
    assert (store.written, store.error) == (1, "")
    store.close()


def test_a_topology_is_told_what_was_not_kept():
    database = Stuck()
    database.let.set()
    database.fails = True
    store = LoadStore(database, keep=100.0)
    cluster = Cluster(monitor_interval=10.0)
    cluster.watched.monitor = LoadMonitor(cluster.watched.topology.settings, cluster.clock, store)
    cluster.run(10)
    store.flush()
    cluster.run(10)
    store.flush()
    (note,) = cluster.watched.bus.notes()
    assert (note.kind, note.text) == (
        "monitor",
        "1 load sample could not be stored so far: OSError: the disk is on fire",
    )
    store.close()


def test_the_monitor_keeps_its_load_samples_in_the_state_directory(tmp_path):
    cluster = Cluster(monitor="sqlite", state_dir=str(tmp_path / "state"), monitor_interval=10.0)
    cluster.run(20)
    cluster.monitor.close()
    found = rows(tmp_path / "state" / "load.sqlite", "penstock_load_samples")
    assert found == [("word-count", 1010.0, 10.0), ("word-count", 1020.0, 10.0)]
    busiest = rows(tmp_path / "state" / "load.sqlite", "penstock_executor_loads", "cpu DESC")[0]
    assert busiest[2] == "split@1.0"


@pytest.mark.parametrize("target", ["off", "memory"])
def test_nothing_is_kept(target):
    assert open_store(target, "state", 100.0) is None


@pytest.mark.parametrize(
    ("target", "folder", "text"),
    [
        (
            "sqlite",
            "s3://bucket/state",
            "sqlite needs delivery.state_dir on a local disk, but delivery.state_dir is s3://bucket/state. Set ",
        ),
        ("yes", "state", "'yes' is neither off, memory, sqlite, a file name with a suffix, nor postgresql://…"),
        ("mysql://db/x.db", "state", "'mysql://db/x.db' is neither off, memory, sqlite"),
    ],
)
def test_targets_that_cannot_be(target, folder, text):
    with pytest.raises(SettingError) as caught:
        open_store(target, folder, 100.0)
    assert text in str(caught.value)
