"""Figures of the machine, read from folders that look like those of Linux."""

import os

import pytest

from penstock.metrics.machine import MachineProbe, Rapl, spark_jvm


def domain(root, name, label, energy, most=1_000_000):
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "name").write_text(f"{label}\n")
    (folder / "energy_uj").write_text(f"{energy}\n")
    (folder / "max_energy_range_uj").write_text(f"{most}\n")
    return folder / "energy_uj"


def test_rapl_adds_packages_and_their_memory(tmp_path):
    package = domain(tmp_path, "intel-rapl:0", "package-0", 500_000)
    cores = domain(tmp_path, "intel-rapl:0:0", "core", 400_000)
    memory = domain(tmp_path, "intel-rapl:0:1", "dram", 100_000)
    whole = domain(tmp_path, "intel-rapl:1", "psys", 0)
    rapl = Rapl(tmp_path)
    assert rapl.joules() == 0, "since the first reading"
    for counter, energy in ((package, 700_000), (cores, 500_000), (memory, 150_000), (whole, 999_999)):
        counter.write_text(str(energy))
    assert rapl.joules() == pytest.approx(0.25), "a core is in its package, psys has all of it once more"


def test_rapl_comes_round(tmp_path):
    package = domain(tmp_path, "intel-rapl:0", "package-0", 900_000)
    rapl = Rapl(tmp_path)
    rapl.joules()
    package.write_text("100000")
    assert rapl.joules() == pytest.approx(0.2)
    package.write_text("300000")
    assert rapl.joules() == pytest.approx(0.4)


def test_a_machine_without_rapl(tmp_path):
    assert Rapl(tmp_path).joules() is None
    assert Rapl(tmp_path / "none").joules() is None
    counter = domain(tmp_path, "intel-rapl:0", "package-0", 0)
    counter.unlink()
    counter.mkdir()  # unreadable for everyone, as it is for all users but root
    assert Rapl(tmp_path).joules() is None


def test_this_machine():
    told = MachineProbe(os.getpid()).read()
    assert told["cores"] >= 1
    assert told["memory"] > 2**20
    pid, seconds, resident = told["jvm"]
    assert pid == os.getpid()
    assert seconds == pytest.approx(sum(os.times()[:2]), abs=1.0)
    assert resident > 2**20


def test_what_a_machine_does_not_tell_is_left_out(tmp_path):
    told = MachineProbe(4242, tmp_path, tmp_path).read()
    assert (told["id"], told["memory"]) == ("", 0)
    assert "jvm" not in told
    assert "rapl" not in told


def process(proc, pid, parent, name):
    (proc / str(pid)).mkdir()
    (proc / str(pid) / "stat").write_text(f"{pid} ({name} (x)) S {parent} 0 0")
    (proc / str(pid) / "comm").write_text(f"{name}\n")


def test_the_spark_executor_is_the_daemon_s_parent(tmp_path):
    assert spark_jvm(tmp_path) is None
    process(tmp_path, os.getppid(), 77, "python3")
    process(tmp_path, 77, 1, "java")
    assert spark_jvm(tmp_path) == 77
    (tmp_path / "77" / "comm").write_text("bash\n")
    assert spark_jvm(tmp_path) is None, "no Spark around"


def test_spark_s_processes_are_the_executor_the_daemon_and_the_worker_that_started_it(tmp_path):
    process(tmp_path, os.getppid(), 77, "python3")
    process(tmp_path, 77, 70, "java")
    process(tmp_path, 70, 1, "java")
    clock, page = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
    for pid, parent, ticks in ((os.getppid(), 77, 1), (77, 70, 10), (70, 1, 100)):
        fields = [parent, *[0] * 9, ticks * clock, 0, *[0] * 8, ticks]
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (x) S {' '.join(map(str, fields))}")
    (tmp_path / "70" / "cmdline").write_text("java\0org.apache.spark.deploy.master.Master")
    assert MachineProbe(77, tmp_path, tmp_path).read()["jvm"] == [77, 11, 11 * page], "not every JVM is its worker"
    (tmp_path / "70" / "cmdline").write_text("java\0org.apache.spark.deploy.worker.Worker")
    assert MachineProbe(77, tmp_path, tmp_path).read()["jvm"] == [77, 111, 111 * page]
