"""Fault tests have a short form, inside ``make test``, and a full one, ``make fault``, which also writes a report
of all seeds."""

import json
import subprocess
from pathlib import Path

import pytest

_REPORT = Path("results/faults.json")
_done = []


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="all seeds of the fault tests")


@pytest.fixture
def full(request):
    return request.config.getoption("--full")


@pytest.fixture
def campaign(request):
    """Call with a finished run: its faults enter the report."""
    name = request.node.name
    outcome = {"test": name, "survived": False, "faults": [], "seed": None}
    _done.append(outcome)

    def finished(run):
        outcome.update(survived=True, faults=run.faults, seed=run.seed, delivery=run.delivery)

    return finished


def pytest_generate_tests(metafunc):
    """``seed`` runs over the test's own range: ``@pytest.mark.seeds(short, full)``."""
    if "seed" in metafunc.fixturenames:
        short, full = metafunc.definition.get_closest_marker("seeds").args
        metafunc.parametrize("seed", range(full if metafunc.config.getoption("--full") else short))


def pytest_sessionfinish(session):
    if not session.config.getoption("--full", default=False) or not _done:
        return
    tried = sum(max(1, len(one["faults"])) for one in _done)
    survived = sum(len(one["faults"]) for one in _done if one["survived"])
    worker = sorted(seconds for one in _done for kind, seconds in one["faults"] if kind == "worker")
    bars = [
        {"name": "faults.tried", "value": tried, "unit": ""},
        {"name": "faults.survived", "value": survived, "unit": ""},
    ]
    if worker:
        bars.append({"name": "recovery.worker_s", "value": worker[len(worker) // 2], "unit": "s, median"})
        bars.append({"name": "recovery.worker_s.longest", "value": worker[-1], "unit": "s"})
    _REPORT.parent.mkdir(exist_ok=True)
    _REPORT.write_text(json.dumps({"runs": _done, "bars": bars}, indent=1))
    print(f"\n{survived} of {tried} faults survived; {_REPORT} has the seeds")


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
