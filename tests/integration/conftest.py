"""Spark for the integration tests: one session for all tests, in this process or, with ``--cluster``, on a cluster
of two nodes."""

import json
from pathlib import Path

import pytest

from penstock import submit
from penstock.spark.session import close_session, open_session
from penstock.testing.servers.cluster import SparkCluster
from tests.helpers import wide


def pytest_addoption(parser):
    parser.addoption("--cluster", action="store_true", help="run topologies on a cluster of two nodes")


@pytest.fixture(scope="session")
def spark(request):
    if not request.config.getoption("--cluster"):
        yield open_session()
        close_session()
        return
    with SparkCluster(nodes=2, link="100mbit", slots=32) as cluster:
        yield open_session(cluster.master)
        close_session()


@pytest.fixture
def run(spark, tmp_path):
    """Run topologies whose sinks write what they saw to ``conf["folder"]``; all are killed at the end."""
    started = []

    class Runs:
        folder = tmp_path

        def submit(self, topology, **options):
            """With a worker for each executor, so that a test has the processes that its topology declares,
            whatever the machine is like."""
            return self.submit_packed(wide(topology), **options)

        def submit_packed(self, topology, **options):
            running = submit(topology, **options)
            started.append(running)
            return running

        def witnessed(self, component):
            """The records of each task of a witness, lowest task first."""
            found = {}
            for path in Path(tmp_path).glob(f"{component}-*.json"):
                found[int(path.stem.rpartition("-")[2])] = json.loads(path.read_text())
            return [found[task] for task in sorted(found)]

    yield Runs()
    for running in started:
        running.kill(drain=False)
