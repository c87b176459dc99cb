"""Settings and fixtures for all tests: Hypothesis generates the same examples in every run, so that a failure can
be reproduced; every test has a time limit; servers for tests of several kinds."""

import faulthandler
import fcntl
import os
import subprocess
import tempfile
from pathlib import Path

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key
from hypothesis import HealthCheck, settings

from penstock import signing
from penstock.errors import EnvironmentFault
from penstock.testing.servers.zookeeper import ZooKeeperServer

settings.register_profile(
    "penstock",
    derandomize=True,
    deadline=None,  # the tests run on two slow, shared cores
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("penstock")

# Seconds for one test with its fixtures, on two slow, shared cores. A server that is fetched on first use needs
# minutes. The limit of all other tests is in ``pyproject.toml``.
_LIMITS = {"contract": 300, "consistency": 300, "integration": 300, "fault": 600}
_FULL_LIMIT = 3600  # seconds for a fault test with a long list of faults
_GRACE = 60  # seconds after the limit until a process is killed whose main thread does not handle the signal


def pytest_collection_modifyitems(config, items):
    full = config.getoption("--full", default=False)
    for item in items:
        kind = item.path.parent.name
        limit = _FULL_LIMIT if full and kind == "fault" else _LIMITS.get(kind)
        if limit is not None and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(limit))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """pytest-timeout fails a test with a signal, which Python handles between two instructions of the main thread.
    If a call into C never returns, this ends the whole process, from a thread that does not need Python."""
    marker = item.get_closest_marker("timeout")
    limit = float(marker.args[0] if marker else item.config.getini("timeout"))
    stderr = item.config.stash[fault_handler_stderr_fd_key]  # the stream that is not captured
    faulthandler.dump_traceback_later(limit + _GRACE, exit=True, file=stderr)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture(autouse=True, scope="session")
def deployment_key(tmp_path_factory):
    """Give the tests and the processes they start their own deployment key instead of the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(signing.KEY_FILE, str(tmp_path_factory.mktemp("deployment") / "key"))
        yield


def started(server):
    """Start a server for a fixture and close it at the end. If it cannot be started, the tests that use it are
    skipped."""
    try:
        server.start()
    except EnvironmentFault as fault:
        server.close()
        pytest.skip(f"not run: {fault}")
    yield server
    server.close()


@pytest.fixture(scope="module")
def zookeeper_server():
    """A ZooKeeper server. A test that stops it must start it again."""
    yield from started(ZooKeeperServer())


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 4 MB. Needs the right to mount."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("cannot mount a small tmpfs here")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.fixture(scope="module")
def no_other_cluster():
    """Serializes tests that check what clusters leave behind on the machine, if tests run in parallel."""
    with open(Path(tempfile.gettempdir()) / f"penstock-test-clusters-{os.getuid()}", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
