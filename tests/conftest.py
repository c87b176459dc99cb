"""Hypothesis draws the same examples in every run: a red test stays red until it is mended. And servers that tests
of several kinds want."""

import subprocess

import pytest
from hypothesis import HealthCheck, settings

from penstock.errors import EnvironmentFault
from penstock.testing.zookeeper import ZooKeeperServer

settings.register_profile(
    "penstock",
    derandomize=True,
    deadline=None,  # two slow cores, shared
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("penstock")


def started(server):
    """A server for a fixture that yields it: started, or the tests that want it are skipped; closed at the end."""
    try:
        server.start()
    except EnvironmentFault as fault:
        server.close()
        pytest.skip(f"not run: {fault}")
    yield server
    server.close()


@pytest.fixture(scope="module")
def zookeeper_server():
    """A ZooKeeper. A test that stops it starts it again."""
    yield from started(ZooKeeperServer())


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 4 MB. Needs the right to mount."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("cannot mount a small tmpfs here")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)
