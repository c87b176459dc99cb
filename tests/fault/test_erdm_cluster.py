"""ERDM by itself on four nodes of half a core: it moves executors, releases nodes, takes them back when the load
returns, and every result is exact. With ``--full`` a worker is killed as well."""

import os
import signal

import pytest

from benchmarks.energy_auto import BY_ITSELF, CPUS, LINK, MEMORY, NODES, Times, running_auto
from penstock.cluster import cpu_groups, network
from penstock.spark.session import close_session
from penstock.testing.servers.cluster import SparkCluster

pytestmark = [
    pytest.mark.spark,
    pytest.mark.skipif(bool(network.usable()), reason=f"a cluster's network: {network.usable()}"),
    pytest.mark.skipif(cpu_groups.find("test") is None, reason="no control groups with the cpu controller"),
    pytest.mark.usefixtures("no_other_cluster"),
]

TIMES = Times(sample=3.0, warm=0.0, measured=0.0)
CALM, BUSY = 500.0, 5_000.0  # messages per second: two nodes are enough; two are not
SLOTS = 32
GAP = 3.0  # seconds; a move is silent for 0.1 s, on a busy machine for longer


def test_erdm_by_itself_releases_nodes_and_takes_them_back(tmp_path, request):
    with SparkCluster(NODES, LINK, SLOTS, MEMORY, cpus=CPUS) as cluster:
        try:
            with running_auto("word_count", BY_ITSELF, TIMES, tmp_path, cluster, CALM) as run:
                internals = run.handle.internals
                run.await_("two nodes should be released", lambda: internals.placing.nodes_away >= 2)
                assert internals.placing.moves, "executors move one by one"
                assert all(each.gap < GAP for each in internals.placing.moves)
                run.handle.set_max_rate("source", BUSY)
                run.await_("nodes should be requested again", lambda: internals.placing.nodes_away == 0)
                run.handle.set_max_rate("source", CALM)
                run.await_nodes(NODES)
                assert all(each.gap < GAP for each in internals.replacements)
                if request.config.getoption("--full"):
                    os.kill(min(worker.hello.pid for worker in internals.workers.values()), signal.SIGKILL)
                    run.await_("it should be restarted", lambda: internals.restarts == 1)
                    run.await_("it should run again", lambda: internals.state == "active")
            assert internals.placements.outcomes, "each load sample has an outcome"
            wrong, messages = run.wrong()
            assert (wrong, messages > 1_000) == (0, True)
        finally:
            close_session()
