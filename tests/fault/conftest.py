"""Fault tests have a short form, in ``make test``, and a full one, ``make fault``, which also writes a report of
all seeds."""

import json
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from penstock.errors import EnvironmentFault
from penstock.testing.servers.kafka import KafkaServer
from penstock.testing.servers.memcached import MemcachedServer
from penstock.testing.servers.postgres import PostgresServer
from penstock.testing.servers.redis import RedisServer
from tests.conftest import started
from tests.fault import chaos_report as chaos
from tests.fault.persist_harness import PersistRun

_REPORT = Path("results/faults.json")
_done = []
_campaigns = []


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="all seeds of the fault tests")
    parser.addoption("--events", type=int, help="how many events each of the chaos tests has at most")
    parser.addoption("--seed", type=int, action="append", help="a seed of the chaos tests to run alone, in full")


@pytest.fixture
def full(request):
    return bool(request.config.getoption("--full") or request.config.getoption("--seed"))


@pytest.fixture
def campaign(request):
    """Call with a finished run: its faults enter the report."""
    name = request.node.name
    outcome = {"test": name, "survived": False, "faults": [], "seed": None}
    if "persist" in request.node.nodeid:
        outcome["wrong"] = 1  # at least, should it not even come to be judged
    _done.append(outcome)

    def finished(run):
        outcome.update(survived=True, faults=run.faults, seed=run.seed, delivery=run.delivery)
        if isinstance(run, PersistRun):
            queue, store = type(run.queue).__name__, type(run.table.store).__name__
            outcome.update(survived=run.wrong == 0, wrong=run.wrong, queue=queue, store=store, again=run.again)
        elif "wrong" in outcome:
            outcome.update(wrong=0, queue="EmbeddedQueue", store="SQLiteStore")

    return finished


@pytest.fixture
def chaos_report():
    """Call with a campaign before it runs: it enters the report, whatever becomes of it."""
    return _campaigns.append


def pytest_generate_tests(metafunc):
    """``seed`` runs over the test's own range: ``@pytest.mark.seeds(short, full)``; ``form`` over what the test
    lists: ``@pytest.mark.forms(short=[...], full=[...])``."""
    wanted = "full" if metafunc.config.getoption("--full") else "short"
    if "seed" in metafunc.fixturenames:
        short, full = metafunc.definition.get_closest_marker("seeds").args
        alone = metafunc.config.getoption("--seed") if "chaos_report" in metafunc.fixturenames else None
        metafunc.parametrize("seed", alone or range(full if wanted == "full" else short))
    if "form" in metafunc.fixturenames:
        forms = metafunc.definition.get_closest_marker("forms").kwargs[wanted]
        metafunc.parametrize("form", forms, ids=["-".join(map(str, form)) for form in forms])


def pytest_sessionfinish(session):
    if _campaigns and session.config.getoption("--full", default=False):
        print("\n" + chaos.write([run.report() for run in _campaigns]))
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
    bars += _persist_bars([one for one in _done if "wrong" in one])
    bars += _replace_bars([one for one in _done if "replace" in one["test"]])
    _REPORT.parent.mkdir(exist_ok=True)
    _REPORT.write_text(json.dumps({"runs": _done, "bars": bars}, indent=1))
    print(f"\n{survived} of {tried} faults survived; {_REPORT} has the seeds")


def _persist_bars(runs):
    """What the delayed persistent queue lost, doubled or disordered; a crash of memcached is another matter."""
    runs = [one for one in runs if "memcached" not in one["test"]]
    if not runs:
        return []
    kills = Counter(one["queue"] for one in runs for kind, _ in one["faults"] if " kill " in kind)
    bars = [{"name": "persist.wrong", "value": sum(one["wrong"] for one in runs), "unit": "results"}]
    return bars + [
        {"name": f"persist.kills.{queue}", "value": count, "unit": ""} for queue, count in kills.items()
    ]


def _replace_bars(runs):
    """Kills while a topology was being replaced; a run that did not come to its end counts as one not survived."""
    if not runs:
        return []
    tried = sum(max(1, len(one["faults"])) for one in runs)
    survived = sum(len(one["faults"]) for one in runs if one["survived"])
    return [
        {"name": "replace.kills_tried", "value": tried, "unit": ""},
        {"name": "replace.kills_survived", "value": survived, "unit": ""},
    ]


@pytest.fixture
def redis():
    yield from started(RedisServer())


@pytest.fixture
def memcached():
    yield from started(MemcachedServer())


@pytest.fixture
def memcacheds():
    with MemcachedServer() as one, MemcachedServer() as two, MemcachedServer() as three:
        yield [one, two, three]


@pytest.fixture(scope="session")
def kafka():
    """A Kafka broker. A test that kills it starts it again."""
    pytest.importorskip("confluent_kafka")
    yield from started(KafkaServer())


@pytest.fixture(scope="session")
def postgres():
    """A PostgreSQL. A test that kills it starts it again."""
    pytest.importorskip("psycopg")
    try:
        server = PostgresServer()
    except EnvironmentFault as fault:
        pytest.skip(f"not run: {fault}")
    with server:
        yield server


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
