"""The Kafka of ``penstock.testing``."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient

from penstock.errors import EnvironmentFault
from penstock.spark.java import ensure_java
from penstock.testing.servers import jars
from penstock.testing.servers.kafka import KAFKA, KafkaServer, new_cluster_id
from tests.contract.kafka_helpers import PATIENCE, read, write


def _gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def _wait_until_gone(pid):
    deadline = time.monotonic() + PATIENCE
    while not _gone(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_topic_has_its_partitions(kafka, topic):
    name = topic(partitions=3)
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap})
    assert len(admin.list_topics(name, timeout=PATIENCE).topics[name].partitions) == 3
    kafka.add_partitions(name, 5)
    assert len(admin.list_topics(name, timeout=PATIENCE).topics[name].partitions) == 5


def test_data_and_address_survive_a_clean_stop(kafka, topic):
    name, address, pid = topic(), kafka.bootstrap, kafka.pid
    write(kafka, name, ["a"])
    kafka.stop()
    assert _gone(pid)
    with pytest.raises(EnvironmentFault, match=r"the broker is not running. Call start\(\)"):
        kafka.create_topic("other")
    kafka.start()
    assert kafka.bootstrap == address
    assert kafka.pid != pid
    assert read(kafka, name) == [(None, b"a")]


def _ignore_interrupts():
    """As a shell without job control does for a command in the background."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_the_command_and_its_end(kafka, signum):  # kafka: so that this is skipped where there can be none
    command = [sys.executable, "-m", "penstock.testing.servers.kafka", "--topic", "lines:2"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=_ignore_interrupts
    ) as process:
        said = process.stdout.readline()
        assert said.startswith("Kafka 4.3.1 at 127.0.0.1:"), process.stderr.read()
        broker = int(said.split("process ")[1].split(".")[0])
        assert not _gone(broker)
        process.send_signal(signum)
        process.wait(PATIENCE)
        _wait_until_gone(broker)
        if signum == signal.SIGINT:
            assert process.returncode == 0
            assert process.stderr.read().endswith("Kafka stopped.\n")


def test_without_maven_and_cache_it_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(jars.shutil, "which", lambda name: None)
    with pytest.raises(EnvironmentFault) as caught:
        KAFKA.jars()
    assert str(caught.value) == (
        "Kafka for tests: Apache Maven (mvn), which fetches Kafka on first use, is not on the PATH. "
        "Install it (on Debian: apt-get install maven), or use your own Kafka."
    )


def test_a_maven_that_fails_leaves_no_half_a_cache(monkeypatch, tmp_path):
    maven = tmp_path / "mvn"
    maven.write_text("#!/bin/sh\necho '[ERROR] no route to the repository'\nexit 1\n")
    maven.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    ensure_java()  # finds it now, and remembers
    monkeypatch.setattr(jars.shutil, "which", lambda name: str(maven))
    with pytest.raises(EnvironmentFault, match=r"Maven could not fetch Kafka \(\[ERROR\] no route"):
        KAFKA.jars()
    assert [path.name for path in Path(tmp_path / "cache" / "penstock").iterdir()] == ["kafka-4.3.1.lock"]


def test_a_broker_that_cannot_start_says_why(kafka):
    taken = int(kafka.bootstrap.split(":")[1])
    server = KafkaServer()
    server._port = taken
    with pytest.raises(EnvironmentFault) as caught:
        server.start()
    server.close()
    assert "the broker did not start" in str(caught.value)
    assert "Address already in use" in str(caught.value)


def test_no_cluster_id_looks_like_an_option():
    """Kafka's tools refuse one that begins with a dash, as one in 64 random ones does."""
    assert not any(new_cluster_id().startswith("-") for _ in range(2_000))
