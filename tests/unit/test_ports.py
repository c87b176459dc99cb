"""Which sockets a process listens on, the settings that protect Spark's, and the jar behind them."""

import os
import re
import shutil
import socket
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pyspark
import pytest

from penstock.spark import class_archive, ports, session

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "java"))
import build  # noqa: E402

sys.path.pop(0)


def manifest():
    with zipfile.ZipFile(ports.JAR) as jar:
        return jar.read("META-INF/MANIFEST.MF").decode()


def test_the_jar_was_built_from_the_committed_sources():
    built_from = re.search(r"Penstock-Source: (\w+)", manifest())[1]
    assert built_from == build.source_hash()[:48], "run: make jar"


def test_the_same_compiler_gives_the_same_classes():
    if shutil.which("javac") is None or f"Penstock-Compiler: {build.javac_version()}\r" not in manifest():
        pytest.skip("another javac made the jar, or there is none here")
    with zipfile.ZipFile(ports.JAR) as jar:
        committed = {name: jar.read(name) for name in jar.namelist() if name.endswith(".class")}
    assert build.compiled() == committed


def test_a_reader_of_the_shuffle_handles_nothing_of_a_stranger(tmp_path):
    """The checks are in Java; they need no Spark session."""
    if shutil.which("javac") is None:
        pytest.skip("no javac here")
    path = f"{ports.JAR}:{Path(pyspark.__file__).parent}/jars/*"
    source = ROOT / "java" / "test" / "penstock" / "shuffle" / "StrangersCheck.java"
    compiler = ["javac", "--release", build.RELEASE, "-proc:none", "-nowarn", "-cp", path, "-d", tmp_path, source]
    subprocess.run(compiler, check=True)
    logs = f"-Dlog4j2.configurationFile={Path(session.__file__).with_name('log4j2.properties').as_uri()}"
    java = [
        "java",
        "-XX:TieredStopAtLevel=1",
        logs,
        "-cp",
        f"{tmp_path}:{path}",
        "penstock.shuffle.StrangersCheck",
    ]
    done = subprocess.run(java, capture_output=True, text=True, check=True, timeout=60)
    assert [line for line in done.stdout.splitlines() if not line.startswith("ok ")] == []
    assert done.stdout.count("ok ") == 6


def test_what_a_process_listens_on():
    with socket.create_server(("127.0.0.1", 0)) as here, socket.create_server(("0.0.0.0", 0)) as everywhere:
        local, exposed = here.getsockname(), everywhere.getsockname()
        found = ports.listening(os.getpid())
        assert {local, exposed} <= found
        assert exposed in ports.beyond_loopback(found)
        assert local not in ports.beyond_loopback(found)
        assert f"0.0.0.0:{exposed[1]}" in ports.exposure(os.getpid())
    assert not {local, exposed} & ports.listening(os.getpid())


def test_processes_that_the_jvm_has_started_are_looked_at_too():
    """In local-cluster: its executors."""
    code = (
        "import socket; s = socket.create_server(('0.0.0.0', 0)); print(s.getsockname()[1], flush=True); input()"
    )
    command = f'{sys.executable} -c "{code}"; exit'
    with subprocess.Popen(
        ["sh", "-c", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as shell:
        port = int(shell.stdout.readline())
        told = ports.exposure(shell.pid)
        ours = SimpleNamespace(sparkContext=SimpleNamespace(master="local-cluster[2,4,1024]"))
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(session, "JVM", SimpleNamespace(pid=shell.pid))
            assert session.exposure(ours) == told
            ours.sparkContext.master = "spark://far:7077"
            assert session.exposure(ours) == "", "on a cluster its nodes' addresses are meant"
        shell.stdin.close()
    assert f"0.0.0.0:{port}, which other machines can reach" in told
    assert f"process {shell.pid})" not in told, "the process that listens is named"


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
def test_sockets_of_ipv6():
    try:
        server = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("no IPv6 here")
    with server:
        assert ("::1", server.getsockname()[1]) in ports.listening(os.getpid())


def test_addresses_of_proc():
    assert ports._address("0100007F:1F90") == ("127.0.0.1", 8080)
    assert ports._address("0000000000000000FFFF00000100007F:0050") == ("127.0.0.1", 80)
    assert ports._address("00000000000000000000000000000000:0050") == ("::", 80)


def test_a_process_that_is_gone_listens_on_nothing():
    process = subprocess.Popen(["true"])
    process.wait()
    assert ports.listening(process.pid) == set()
    assert ports.exposure(process.pid) == ""


@pytest.mark.parametrize("master", ["local", "local[4]", "local-cluster[2,4,1024]"])
def test_runs_on_one_machine_authenticate_and_listen_on_loopback(master):
    secret, conf = session._secret_conf(master), session._port_conf(master)
    assert secret["spark.authenticate"] == "true"
    assert len(secret["spark.authenticate.secret"]) == 64
    assert conf["spark.penstock.shuffle.loopback"] == "true"
    folder = Path(conf["spark.python.unix.domain.socket.dir"])
    assert folder.stat().st_mode & 0o777 == 0o700
    assert len(str(folder)) <= 61
    session.close_session()
    assert not folder.exists()


@pytest.mark.parametrize("master", ["local[4]", "local-cluster[2,4,1024]", "spark://far:7077", "yarn"])
def test_the_shuffle_is_authenticated_everywhere(master):
    first, second, conf = session._secret_conf(master), session._secret_conf(master), session._port_conf(master)
    assert conf["spark.shuffle.manager.incremental"] == ports.SHUFFLE_MANAGER
    assert first["spark.penstock.shuffle.secret"] != second["spark.penstock.shuffle.secret"]
    assert ("spark.jars" in conf) == (master != "local[4]")
    session.close_session()


def test_a_long_temporary_folder_is_not_used_for_sockets(tmp_path):
    long = tmp_path / ("x" * 80)
    folder = ports.socket_folder(long)
    assert len(str(folder)) <= 61
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.rmdir()


def test_another_jar_needs_another_class_archive(monkeypatch, tmp_path):
    before = class_archive.archive_path()
    other = tmp_path / "other.jar"
    other.write_bytes(b"other")
    monkeypatch.setattr(class_archive, "JAR", other)
    assert class_archive.archive_path() != before
