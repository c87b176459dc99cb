"""A standalone cluster with its own network: running topologies, link rates, and cleanup."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from penstock.cluster import manage, network, record
from penstock.testing.servers.cluster import SparkCluster

pytestmark = [
    pytest.mark.spark,
    pytest.mark.skipif(bool(network.usable()), reason=f"a cluster's network: {network.usable()}"),
    pytest.mark.usefixtures("no_other_cluster"),
]

MBIT = 100
PAYLOAD = 4_000_000  # bytes: a third of a second at that rate
PATIENCE = 90.0  # seconds; enough on a busy machine

# Bytes from one node to another, or to itself; the receiver says how many came and how long it took.
RECEIVE = """
import socket, sys, time
with socket.create_server((sys.argv[1], 9999)) as server:
    print("ready", flush=True)
    link = server.accept()[0]
    begun, got = time.monotonic(), 0
    while chunk := link.recv(65536):
        got += len(chunk)
    print(got, time.monotonic() - begun, flush=True)
"""
SEND = "import socket, sys; socket.create_connection((sys.argv[1], 9999)).sendall(bytes(int(sys.argv[2])))"


def traces():
    """All a cluster may leave behind."""
    listing = subprocess.run(["ip", "-j", "netns", "list"], capture_output=True, text=True, check=True).stdout
    folders = [*Path(tempfile.gettempdir()).glob("penstock-cluster-*"), *Path("/etc").glob("netns/*")]
    return {
        "namespaces": {each["name"] for each in json.loads(listing or "[]")},
        "links": {each.name for each in Path("/sys/class/net").iterdir()},
        "processes": {pid for pid in psutil.pids() if b"PENSTOCK_CLUSTER_NODE=" in environment(pid)},
        "folders": {*folders, *record.folder().parent.glob("cluster")},
    }


def environment(pid):
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""  # just gone, or nobody's to look at


@pytest.fixture(scope="module")
def cluster():
    before = traces()
    with SparkCluster(nodes=2, link=f"{MBIT}mbit") as cluster:
        yield cluster
    assert traces() == before


def penstock(*arguments):
    """As from a shell: without the address that a session of Spark in this process has chosen for itself."""
    command = [sys.executable, "-m", "penstock.cli.main", *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "SPARK_LOCAL_IP"}
    return subprocess.run(command, capture_output=True, text=True, timeout=2 * PATIENCE, env=environment)


@pytest.mark.parametrize("how", ["namespaces", "plain"])
def test_what_a_killed_start_leaves_is_removed(tmp_path, monkeypatch, how):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    before = traces()
    options = ["--plain"] if how == "plain" else []
    command = [sys.executable, "-m", "penstock.cli.main", "cluster", "up", "--nodes", "2", *options]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + PATIENCE
        while (found := record.load()) is None or not any(node.process for node in found.nodes):
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.02)  # polls, because another process cannot be waited for
        process.kill()
    assert traces() != before
    assert not found.ready
    refused = penstock("cluster", "up")
    assert refused.returncode == 3
    assert "whose start did not complete. Use it" in refused.stderr
    assert manage.down()
    assert traces() == before
    assert not manage.down()


def seconds(cluster, sender, receiver):
    """What PAYLOAD takes from node to node."""
    net, address = cluster.record.network, cluster.record.node(receiver).host
    command = net.inside(receiver, [sys.executable, "-c", RECEIVE, address])
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        send = net.inside(sender, [sys.executable, "-c", SEND, address, str(PAYLOAD)])
        subprocess.run(send, check=True, timeout=PATIENCE)
        got, took = process.stdout.readline().split()
    assert int(got) == PAYLOAD
    return float(took)


def test_links_have_their_rate_and_a_nodes_own_traffic_does_not_use_them(cluster):
    net, node = cluster.record.network, cluster.record.node("node-1")
    least = (PAYLOAD - 300_000) * 8 / (MBIT * 1e6)  # less what a burst lets through at once, at both ends
    sent, received = net.passed(node.number)
    assert seconds(cluster, "node-1", "node-2") > least
    between = net.passed(node.number)
    assert between[0] - sent > PAYLOAD
    assert seconds(cluster, "node-2", "node-1") > least
    before = net.passed(node.number)
    assert before[1] - received > PAYLOAD
    seconds(cluster, "node-1", "node-1")
    after = net.passed(node.number)
    assert after[0] - before[0] < PAYLOAD / 10, "what Spark's heartbeats sent meanwhile"


def test_a_word_count_runs_there(cluster):
    done = penstock("run", "examples/word_count.py", "--master", cluster.master, "--seconds", "4", "--plain")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 restarts" in done.stdout
    numbers = {words[0]: words for words in map(str.split, done.stdout.splitlines()) if "executed" in words}
    assert numbers["split"][4] == numbers["count"][2] != "0", "all that was split is counted"
