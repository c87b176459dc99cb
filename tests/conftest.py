"""Fixtures and limits of all tests. Hypothesis draws the same examples in every run, so a failing test keeps
failing until it is fixed. Every test has a time limit."""

import faulthandler
import fcntl
import gc
import os
import subprocess
import tempfile
from pathlib import Path

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key
from hypothesis import HealthCheck, settings

from penstock import redaction, signing
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

# Seconds per test with its fixtures, on two slow, shared cores. A server that is downloaded on first use needs
# minutes. ``pyproject.toml`` has the limit of all other tests.
_LIMITS = {"contract": 300, "stores": 300, "consistency": 300, "integration": 300, "fault": 600}
_FULL_LIMIT = 3600  # seconds, for a fault test with a long list of faults
_GRACE = 60  # seconds after the limit until a process whose main thread does not react to signals is killed


def pytest_collection_modifyitems(config, items):
    full = config.getoption("--full", default=False)
    for item in items:
        kind = item.path.parent.name
        limit = _FULL_LIMIT if full and kind == "fault" else _LIMITS.get(kind)
        if limit is not None and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(limit))


def pytest_collection_finish(session):
    """Exclude what was imported and collected from garbage collection. Thousands of collected tests made tests
    that allocate much several times slower."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """pytest-timeout fails a test with a signal, which Python handles between two bytecodes of the main thread. A
    C call that never returns is ended here, together with the whole process, by a thread that needs no Python."""
    marker = item.get_closest_marker("timeout")
    limit = float(marker.args[0] if marker else item.config.getini("timeout"))
    stderr = item.config.stash[fault_handler_stderr_fd_key]  # the stderr that is not captured
    faulthandler.dump_traceback_later(limit + _GRACE, exit=True, file=stderr)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture(autouse=True, scope="session")
def deployment_key(tmp_path_factory):
    """Tests and the processes they start use a separate deployment key, never the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(signing.KEY_FILE, str(tmp_path_factory.mktemp("deployment") / "key"))
        yield


@pytest.fixture(autouse=True)
def hidden_values():
    """A password that a test opens a connection with is hidden in that test only. Otherwise the word would be
    missing in the messages of other tests, depending on their order."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(redaction, "_hidden", redaction._hidden)
        yield


def started(server):
    """Start a server for a fixture, and close it at the end. If it cannot be started, the tests that need it are
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
    """A disk of 4 MB. Requires the permission to mount."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("cannot mount a small tmpfs here")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.fixture(scope="module")
def no_other_cluster():
    """Serialises the tests that look for what clusters leave on the machine."""
    with open(Path(tempfile.gettempdir()) / f"penstock-test-clusters-{os.getuid()}", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
