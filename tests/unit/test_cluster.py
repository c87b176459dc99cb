"""The cluster on one machine, as far as it needs neither root nor Spark."""

import ipaddress
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from random import Random

import pytest

from penstock.cli.main import main
from penstock.cluster import manage, network, processes, record, standalone
from penstock.cluster.manage import ClusterPlan
from penstock.cluster.network import ClusterNetwork, Rate, free_range, routes
from penstock.cluster.processes import Process
from penstock.cluster.record import ClusterNode, ClusterRecord
from penstock.errors import EnvironmentFault, SettingError
from penstock.spark import session


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def cluster(**fields):
    work = str(record.folder().parent / f"penstock-cluster-ab12-{0:016x}")
    names = {"tag": "ab12", "key": "0123456789abcdef", "secret": "s", "boot": record.boot(), "work": work}
    offers = {"slots": 16, "memory": "1g", "host": "10.1.2.1", "port": 7077, "web_port": 1, "ready": True}
    return ClusterRecord(**{**names, **offers, **fields})


def saved(**fields):
    with record.changing(make=True):
        made = cluster(**fields)
        made.save()
    return made


# ---- the network ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "bits"), [("100mbit", 100_000_000), ("1.5Gbit", 1_500_000_000), ("8kbit", 8_000), ("9600bit", 9_600)]
)
def test_rates_read_as_tc_writes_them(text, bits):
    assert Rate.parse(text) == Rate(bits)


def test_no_limit_is_a_rate_too():
    assert Rate.parse("none") is None


@pytest.mark.parametrize("text", ["fast", "100", "0mbit", "1tbit", "-5mbit", "200gbit"])
def test_what_is_no_rate(text):
    with pytest.raises(SettingError, match=r"--link .*: .* is neither a rate.*Try 100mbit"):
        Rate.parse(text)


def test_a_burst_has_room_for_the_largest_packet():
    slow, fast = Rate.parse("1mbit").shaping("eth0"), Rate.parse("10gbit").shaping("eth0")
    assert slow[slow.index("burst") + 1] == "65536"
    assert int(fast[fast.index("burst") + 1]) == 6_250_000
    assert int(fast[fast.index("limit") + 1]) > int(fast[fast.index("burst") + 1])


def test_a_range_that_is_in_use_is_not_taken():
    used = [ipaddress.IPv4Network("10.0.0.0/9"), ipaddress.IPv4Network("10.200.0.0/16")]
    for seed in range(50):
        drawn = free_range(used, Random(seed))
        assert drawn.prefixlen == 24
        assert drawn.is_private
        assert not any(drawn.overlaps(each) for each in used)


def test_where_one_block_is_taken_another_is_tried():
    assert str(free_range([ipaddress.IPv4Network("10.0.0.0/8")], Random(1))).startswith("172.")


def test_no_free_range():
    used = [ipaddress.IPv4Network("0.0.0.0/0")]
    with pytest.raises(EnvironmentFault, match=r"no range of 256 private addresses is free: 1 routes.*--plain"):
        free_range(used, Random(1))


def test_routes_of_the_machine():
    listing = [{"dst": "default"}, {"dst": "10.1.0.0/16"}, {"dst": "192.168.1.7", "type": "local"}]
    assert routes(json.dumps(listing)) == [
        ipaddress.IPv4Network("10.1.0.0/16"), ipaddress.IPv4Network("192.168.1.7/32")
    ]  # fmt: skip
    assert routes("") == []


def test_addresses_are_those_of_the_range():
    net = ClusterNetwork("ab12", "10.1.2.0/24", None)
    assert (net.host_address, net.address(1), net.address(net.most)) == ("10.1.2.1", "10.1.2.2", "10.1.2.254")
    assert max(map(len, (net.host_link, f"n{net.most}"))) < 16, "the longest name of a link"


def test_no_root(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert network.usable() == "network namespaces need root"
    with pytest.raises(
        EnvironmentFault, match=r"needs root and the commands.*\(network namespaces need root\).*--plain"
    ):
        manage.up(ClusterPlan(), "/java")
    assert not record.folder().exists()


def test_no_tools(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(EnvironmentFault, match=r"\(ip, tc, unshare not found\). Install iproute2"):
        manage.up(ClusterPlan(), "/java")
    assert not record.folder().exists()


def test_a_command_that_fails_says_what_is_needed():
    with pytest.raises(EnvironmentFault, match=r"'false x' failed \(exit code 1\).*--privileged.*--plain"):
        network._run("false", "x")
    assert network._run("false", "x", strict=False) == ""
    with pytest.raises(EnvironmentFault, match="No such file"):
        network._run("no-such-command")


# ---- what is written down ------------------------------------------------------------------------------


def test_a_record_is_read_as_it_was_written():
    node = ClusterNode("node-1", 1, "10.1.2.2", 7078, Process(5, 6), True)
    made = saved(
        network=ClusterNetwork("ab12", "10.1.2.0/24", 10**8), master=Process(3, 4), nodes=(node,), named=1
    )
    assert record.load() == made
    assert record.find("spark://10.1.2.1:7077") == made
    assert record.find("spark://10.1.2.1:7078") is None
    assert (record.folder() / "cluster.json").stat().st_mode & 0o777 == 0o600


def test_a_record_of_another_kind():
    saved()
    (record.folder() / "cluster.json").write_text('{"tag": 1}')
    with pytest.raises(EnvironmentFault, match=r"it is not a record that penstock cluster up writes \(KeyError"):
        record.load()
    assert record.find("spark://10.1.2.1:7077") is None


def test_a_folder_that_others_may_read(tmp_path):
    (tmp_path / "penstock").mkdir(mode=0o755)
    with (
        pytest.raises(EnvironmentFault, match=r"must belong to this user alone.*mode 755"),
        record.changing(make=True),
    ):
        pass


def test_one_changes_it_at_a_time():
    order, inside = [], threading.Event()

    def second():
        inside.set()
        with record.changing(make=True):
            order.append("second")

    with record.changing(make=True):
        thread = threading.Thread(target=second)
        thread.start()
        inside.wait()
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


def test_numbers_are_used_again_and_names_are_not():
    made = cluster(
        network=ClusterNetwork("ab12", "10.1.2.0/24", None),
        named=3,
        nodes=(ClusterNode("node-3", 3, "10.1.2.4", 7078),),
    )
    assert manage._next_node(made) == ClusterNode("node-4", 1, "10.1.2.2", 7078)


# ---- processes -----------------------------------------------------------------------------------------


@pytest.fixture
def sleeper(tmp_path):
    started = processes.launch(["sleep", "600"], os.environ, "test-key", "node-1", tmp_path / "log")
    yield started
    processes.end([started], 5.0)


def test_processes_are_known_by_their_mark(sleeper):
    assert sleeper.alive
    assert processes.marked("test-key") == processes.marked("test-key", "node-1") == [sleeper]
    assert processes.marked("test-key", "node-2") == processes.marked("other-key") == []
    assert processes.node_of(sleeper.pid, "test-key") == "node-1"
    assert processes.node_of(sleeper.pid, "other-key") is None
    assert processes.node_of(os.getpid(), "test-key") is None
    assert processes.end([sleeper], 5.0) == []
    assert not sleeper.alive
    assert processes.marked("test-key") == []


def test_a_process_id_that_was_given_again_is_left_alone(sleeper):
    earlier = Process(sleeper.pid, sleeper.started - 1)
    assert not earlier.alive
    assert processes.end([earlier], 5.0) == []
    processes.send(earlier, signal.SIGKILL)
    assert sleeper.alive


def test_who_does_not_listen_is_killed(tmp_path):
    deaf = ["sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.05; done"]
    started = processes.launch(deaf, os.environ, "deaf-key", "node-1", tmp_path / "log")
    while not (tmp_path / "log").read_text():
        pass
    assert processes.end(processes.marked("deaf-key"), 0.3) == []
    assert not started.alive


# ---- commands ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"nodes": 0}, "--nodes: 0 is not between 1 and 200"),
        ({"slots": 0}, "--slots: 0 is not between 1 and 1024"),
        ({"memory": "lots"}, "--memory: 'lots' is not a number followed by m or g"),
        ({"link": "x"}, "--link"),
    ],
)
def test_settings_of_a_plan(wrong, message):
    with pytest.raises(SettingError, match=message):
        ClusterPlan(**wrong)


def test_the_secret_is_on_no_command_line(tmp_path):
    made = cluster(secret="do-not-tell")
    node = ClusterNode("node-1", 1, "10.1.2.2", 7078)
    commands = [
        standalone.master_command(made, "/java", tmp_path / "spark.conf"),
        standalone.worker_command(made, node, "/java", tmp_path / "spark.conf", tmp_path),
    ]
    assert not any("do-not-tell" in word for command in commands for word in command)
    assert "spark.authenticate.secret do-not-tell\n" in standalone.settings_text("do-not-tell")


def test_workers_do_not_have_what_the_user_set_for_spark(monkeypatch, tmp_path):
    monkeypatch.setenv("SPARK_HOME", "/elsewhere")
    monkeypatch.setenv("PYSPARK_PYTHON", "/elsewhere/python")
    environment = standalone.environment("/java", "10.1.2.2", tmp_path)
    assert environment["SPARK_HOME"] == str(standalone.spark_home())
    assert "PYSPARK_PYTHON" not in environment
    assert environment["SPARK_SCALA_VERSION"].count(".") == 1


def test_none_is_up(capsys):
    for command in (["status"], ["add"], ["drain", "node-1"]):
        assert main(["cluster", *command]) == 3
        assert "cluster: this user has no cluster on this machine" in capsys.readouterr().err
    assert main(["cluster", "down"]) == 0
    assert capsys.readouterr().out == "there is no cluster\n"


def test_one_is_up_already(capsys):
    saved()
    assert main(["cluster", "up", "--plain"]) == 3
    told = capsys.readouterr().err
    assert "this user already has a cluster" in told
    assert "penstock cluster down" in told
    assert record.load() is not None, "it was left alone"


def test_one_that_is_not_completely_up_cannot_be_changed():
    saved(ready=False)
    with pytest.raises(EnvironmentFault, match="it is not up: penstock cluster up did not complete"):
        manage.decommission("node-1")
    assert manage.down()
    assert not record.folder().exists()


def test_what_was_just_started_is_found_at_once(tmp_path):
    """The kernel shows the environment of a process a moment after its exec: without a wait some are missed."""
    for turn in range(100):
        started = processes.launch(["sleep", "600"], os.environ, "new-key", f"node-{turn}", tmp_path / "log")
        try:
            assert processes.node_of(started.pid, "new-key") == f"node-{turn}"
        finally:
            processes.send(started, signal.SIGKILL)
            os.waitpid(started.pid, 0)


def test_a_command_that_ends_at_once_is_not_waited_for(tmp_path):
    started = processes.launch(["true"], os.environ, "brief-key", "node-1", tmp_path / "log")
    processes.end([started], 5.0)
    assert not started.alive


def test_down_ends_what_is_marked_and_nothing_else(sleeper, tmp_path):
    made = saved(key="down-key")
    Path(made.work).mkdir(mode=0o700)
    ours = processes.launch(["sleep", "600"], os.environ, made.key, "node-1", tmp_path / "other.log")
    assert manage.down()
    assert not ours.alive
    assert sleeper.alive
    assert not Path(made.work).exists()


def test_nodes_are_drained_by_name_and_not_the_last():
    saved(nodes=(ClusterNode("node-1", 1, "10.1.2.2", 7078),), named=1)
    with pytest.raises(EnvironmentFault, match=r"node 'node-7': the cluster has no such node; it has node-1"):
        manage.decommission("node-7")
    with pytest.raises(EnvironmentFault, match=r"node 'node-1': it is the cluster's only node.*cluster add"):
        manage.decommission("node-1")


def test_a_drained_node_is_told_and_removed(tmp_path):
    heard = ["sh", "-c", "trap 'echo told; exit 0' PWR; echo ready; while :; do sleep 0.05; done"]
    worker = processes.launch(heard, os.environ, "0123456789abcdef", "node-1", tmp_path / "log")
    while not (tmp_path / "log").read_text():
        pass
    nodes = (ClusterNode("node-1", 1, "127.0.0.1", 1, worker), ClusterNode("node-2", 2, "127.0.0.1", 2))
    saved(nodes=nodes, named=2)
    manage.decommission("node-1")
    assert record.load().node("node-1").draining
    os.waitpid(worker.pid, 0)
    assert (tmp_path / "log").read_text() == "ready\ntold\n"
    assert manage.await_empty("node-1", 5.0)
    manage.remove("node-1")
    assert [node.name for node in record.load().nodes] == ["node-2"]


def test_status_shows_the_nodes(capsys):
    saved(nodes=(ClusterNode("node-1", 1, "127.0.0.1", 1),), named=1, host="127.0.0.1")
    assert main(["cluster", "status", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["nodes"][0] | {"state": "dead", "executors": 0, "sent": None} == shown["nodes"][0]
    assert "secret" not in json.dumps(shown)
    assert main(["cluster", "status"]) == 0
    assert "node-1" in capsys.readouterr().out


def test_without_root_a_word_is_said(monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(manage, "up", lambda plan, java, progress: seen.append(plan) or cluster())
    assert main(["cluster", "up", "--link", "10mbit"]) == 0
    assert seen[0].plain
    assert "without root the nodes share the loopback" in capsys.readouterr().out


def test_a_topology_finds_its_cluster():
    made = saved(
        secret="s3",
        nodes=(ClusterNode("node-1", 1, "h", 1), ClusterNode("node-2", 2, "h", 2, None, True)),
        named=2,
    )
    assert session._secret_conf(made.url)["spark.authenticate.secret"] == "s3"
    conf = session._cluster_conf(made.url)
    assert (conf["spark.executor.cores"], conf["spark.executor.memory"]) == ("16", "1g")
    assert session.expected(made.url) == 1
    assert session.expected("spark://elsewhere:7077") is None
    assert session.expected("local-cluster[3,4,1024]") == 3
    assert "spark.authenticate.secret" not in session._secret_conf("spark://elsewhere:7077")
    assert session._cluster_conf("local[4]") == {}


def test_a_cluster_is_managed_without_spark():
    code = "import sys, penstock.cluster.manage; sys.exit('pyspark' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
