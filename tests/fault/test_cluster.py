"""A topology on a standalone cluster whose executors are killed and whose nodes are added, drained and lost."""

import os
import signal
import subprocess
import sys

import psutil
import pytest

from penstock.cluster import network
from penstock.testing.servers.cluster import SparkCluster
from tests.fault.harness import Run

pytestmark = [
    pytest.mark.skipif(bool(network.usable()), reason=f"a cluster's network: {network.usable()}"),
    pytest.mark.usefixtures("no_other_cluster"),
]

PATIENCE = 90.0  # seconds; a busy machine


@pytest.fixture
def cluster():
    with SparkCluster(nodes=2, link="100mbit") as cluster:
        yield cluster


def penstock(*arguments):
    command = [sys.executable, "-m", "penstock.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=2 * PATIENCE, check=False)


def executor_of(pid):
    """The JVM of Spark's that a worker belongs to."""
    return next(
        parent.pid for parent in psutil.Process(pid).parents() if "CoarseGrained" in "".join(parent.cmdline())
    )


@pytest.mark.seeds(0, 1)
def test_exactly_once_over_an_executors_death_other_numbers_and_nodes_that_come_and_go(
    cluster, tmp_path, campaign, seed
):
    # Few tuples: the machine's cores are for the JVMs of nodes that start.
    slow = {"count": 12_000, "rate": 250, "epoch_interval": 1.0, "start_timeout": 2 * PATIENCE}
    with Run(tmp_path, 1200 + seed, "exactly_once", master=cluster.master, **slow) as run:
        run.deadline += 2 * PATIENCE

        def nodes():
            return {cluster.node_of(pid) for pid in run.status().get("workers", {}).values()}

        assert nodes() == {"node-1", "node-2"}, "workers are on different nodes"
        before = run.status()
        os.kill(executor_of(min(before["workers"].values())), signal.SIGKILL)
        run.recovered("executor", before)

        restarts = run.status()["restarts"]
        (added,) = cluster.add()
        run.await_("the new node to join", lambda: run.status().get("nodes") == 3)
        scaled = penstock("scale", "faults", "count=3")
        assert "count 3" in scaled.stdout, scaled.stderr
        run.await_("the new node to be used", lambda: added.name in nodes())

        drained = penstock("cluster", "drain", "node-1")
        assert "removed node-1" in drained.stdout, drained.stdout + drained.stderr + run.story()
        assert "of 'faults' off node-1" in drained.stdout
        assert cluster.nodes == ["node-2", added.name]
        assert "node-1" not in nodes()
        assert run.status()["restarts"] == restarts, "nothing was lost on the way"

        before = run.status()
        cluster.lose(added.name)
        run.recovered("node", before)
        assert nodes() == {"node-2"}
        run.finish()
    campaign(run)
