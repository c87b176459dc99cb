"""CPU limits of nodes: the files of both versions of control groups, and the kernel of this machine if it has
them."""

import errno
import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.cluster import cpu_groups, manage, record
from penstock.cluster.cpu_groups import CpuGroups, find
from penstock.cluster.manage import ClusterPlan
from penstock.cluster.standalone import environment
from penstock.errors import EnvironmentFault, SettingError
from penstock.metrics.machine import NODE_CPUS, cpu_quota, usable_cores

BURN = """
import time
begun, used = time.monotonic(), time.process_time()
while time.monotonic() - begun < 1.0:
    pass
print(time.process_time() - used)
"""


def mounts(tmp_path, *lines):
    (tmp_path / "mounts").write_text("".join(f"{line}\n" for line in lines))
    return tmp_path / "mounts"


def test_version_1_is_used_if_it_has_the_cpu_controller(tmp_path):
    listing = mounts(
        tmp_path, "cgroup2 /groups/unified cgroup2 rw 0 0", "cgroup /groups/cpu cgroup rw,cpu,cpuacct 0 0"
    )
    found = find("ab12", listing)
    assert (str(found.folder), found.version) == ("/groups/cpu/penstock-ab12", 1)


def test_version_2_is_used_if_it_has_the_cpu_controller(tmp_path):
    listing = mounts(tmp_path, f"cgroup2 {tmp_path} cgroup2 rw 0 0", "cgroup /x cgroup rw,cpuset 0 0")
    assert find("ab12", listing) is None, "it has no controllers"
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu io memory\n")
    assert find("ab12", listing) == CpuGroups(tmp_path, 2, "ab12")


def test_a_limit_of_version_1(tmp_path):
    groups = CpuGroups(tmp_path, 1, "ab12")
    groups.make("node-1", 0.5)
    assert (groups.group("node-1") / "cpu.cfs_quota_us").read_text() == "50000"
    assert (groups.group("node-1") / "cpu.cfs_period_us").read_text() == "100000"
    assert groups.throttled("node-1") is None
    (groups.group("node-1") / "cpu.stat").write_text("nr_periods 24\nthrottled_time 1500000000\n")
    assert groups.throttled("node-1") == 1.5


def test_a_limit_of_version_2(tmp_path):
    (tmp_path / "cgroup.subtree_control").write_text("memory")
    groups = CpuGroups(tmp_path, 2, "ab12")
    groups.make("node-1", 1.5)
    assert (groups.group("node-1") / "cpu.max").read_text() == "150000 100000"
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+cpu"
    assert (groups.folder / "cgroup.subtree_control").read_text() == "+cpu"
    (groups.group("node-1") / "cpu.stat").write_text("usage_usec 9\nthrottled_usec 250000\n")
    assert groups.throttled("node-1") == 0.25


def test_groups_that_cannot_be_written_are_refused(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        EnvironmentFault,
        match=r"cluster's CPU limits: control groups \(version 1\) in .*file cannot be written: Not a directory. "
        r"This needs root and a writable /sys/fs/cgroup \(in a container: --privileged\). Without --cpus",
    ):
        CpuGroups(tmp_path / "file", 1, "ab12").make("node-1", 0.5)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(cpu_groups, "find", lambda *_: None)
    with pytest.raises(EnvironmentFault, match="no control groups with the cpu controller are mounted"):
        manage.up(ClusterPlan(plain=True, cpus=0.5), "/java")
    assert not record.folder().exists(), "nothing was started"


def test_a_group_that_the_kernel_still_holds_is_removed_later(tmp_path, monkeypatch):
    """Threads of a killed JVM may end after the process seems gone. The groups of a killed cluster stayed."""
    groups, busy = CpuGroups(tmp_path, 1, "ab12"), ["node-1"] * 3
    for node in ("node-1", "node-2"):
        groups.group(node).mkdir(parents=True)
    (groups.group("node-2") / "cgroup.procs").write_text("4711\n")
    remove = Path.rmdir

    def rmdir(path):
        if path.name in busy:
            busy.remove(path.name)
            raise OSError(errno.EBUSY, "Device or resource busy")
        remove(path)

    monkeypatch.setattr(Path, "rmdir", rmdir)
    monkeypatch.setattr(cpu_groups, "_REMOVE_SECONDS", 0.1)
    groups.remove()
    assert not busy
    assert not groups.group("node-1").exists()
    assert groups.group("node-2").exists(), "it has a process"


@pytest.mark.parametrize("cpus", [0.0, -1.0, 0.01, 5000.0, float("nan")])
def test_a_number_of_cores_that_no_node_can_have(cpus):
    with pytest.raises(SettingError, match=r"--cpus: .* is not between 0.05 and 1024 cores"):
        ClusterPlan(cpus=cpus)
    with pytest.raises(SettingError, match="--cpus"):
        manage.add(1, "/java", cpus=cpus)


def test_nodes_are_told_their_limit(tmp_path, monkeypatch):
    monkeypatch.setenv(NODE_CPUS, "7")
    assert environment("/java", "10.1.2.2", tmp_path, 0.5)[NODE_CPUS] == "0.5"
    assert NODE_CPUS not in environment("/java", "10.1.2.2", tmp_path), "that of another node"


def test_the_quota_is_the_least_of_all_that_are_known(tmp_path, monkeypatch):
    monkeypatch.delenv(NODE_CPUS, raising=False)
    groups, proc = tmp_path / "groups", tmp_path / "proc"
    own = groups / "cpu/jobs/7"
    own.mkdir(parents=True)
    (proc / "self").mkdir(parents=True)
    (proc / "self/cgroup").write_text("3:cpuset:/\n1:cpu,cpuacct:/jobs/7\n0::/\n")
    assert cpu_quota(groups, proc) is None
    for folder, quota in ((own, 150_000), (groups / "cpu", -1)):
        (folder / "cpu.cfs_quota_us").write_text(str(quota))
        (folder / "cpu.cfs_period_us").write_text("100000")
    assert cpu_quota(groups, proc) == 1.5
    (groups / "cpu.max").write_text("120000 100000")
    assert cpu_quota(groups, proc) == 1.2
    monkeypatch.setenv(NODE_CPUS, "0.5")
    assert cpu_quota(groups, proc) == 0.5
    assert usable_cores(groups) == 1, "rounded up"


def test_stale_groups_are_removed_and_others_are_not(kernel):
    stale = CpuGroups(kernel.root, kernel.version, secrets.token_hex(2))
    stale.make("node-1", 0.5)
    kernel.make("node-1", 0.5)
    with subprocess.Popen(
        kernel.inside("node-1", ["sh", "-c", "echo ready; read line"]), stdin=-1, stdout=-1
    ) as process:
        assert process.stdout.readline() == b"ready\n"
        with kernel.locked():
            kernel.remove_stale()
        assert not stale.folder.exists()
        kernel.remove()
        assert kernel.group("node-1").exists(), "it has a process"
        process.communicate(b"\n")


def test_the_kernel_enforces_the_limit(kernel):
    kernel.make("node-1", 0.2)
    burn = [sys.executable, "-c", BURN]
    with subprocess.Popen(kernel.inside("node-1", burn), stdout=subprocess.PIPE, text=True) as process:
        assert kernel.await_joined("node-1")
        used = float(process.communicate()[0])
    assert used < 0.35, "a fifth of a second, and one period more at most"
    assert kernel.throttled("node-1") is not None
    kernel.remove("node-1")
    assert not kernel.folder.exists()


@pytest.fixture
def kernel():
    found = find(f"test{secrets.token_hex(4)}")
    if found is None or not os.access(found.root, os.W_OK):
        pytest.skip("control groups cannot be written here")
    yield found
    found.remove()
