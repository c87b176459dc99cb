"""A topology in another process, observed and controlled from this one."""

import json
import logging
import re
import socket
import subprocess
import sys
import textwrap
import time
import urllib.request

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.cli.main import main
from penstock.driver import discovery
from penstock.errors import PenstockError
from penstock.protocol.requests import OperatorRequest

pytestmark = pytest.mark.spark

PENSTOCK = [sys.executable, "-m", "penstock.cli.main"]
PATIENCE = 60.0  # seconds; a busy machine
PAUSED = 8  # looks in a row, a tenth of a second apart, without a tuple; there are 2,000 a second

TOPOLOGY = """
    import time
    from penstock import BasicBolt, Spout, TopologyBuilder

    class Steady(Spout):
        def declare_output_fields(self, declarer):
            declarer.declare(("n", int))

        def open(self, conf, context, collector):
            self.collector, self.n = collector, 0

        def next_tuple(self):
            self.collector.emit([self.n])
            self.n += 1

        def lag(self):
            return {"in/0": 7}

    class Counts(BasicBolt):
        def prepare(self, conf, context):
            self.context, self.count = context, 0

        def execute(self, tup, collector):
            self.count += 1
            if tup.n == 100:
                raise ValueError("one hundred is too many")
            self.context.publish([["counted", self.count]])

    builder = TopologyBuilder()
    builder.set_spout("steady", Steady()).set_max_rate(2000)
    builder.set_bolt("counts", Counts(), 2).shuffle_grouping("steady")
    topology = builder.build("watched")
"""


class Process:
    """``penstock run``, and what it says."""

    def __init__(self, folder):
        path, self.log = folder / "watched.py", folder / "log"
        path.write_text(textwrap.dedent(TOPOLOGY))
        options = [
            "--plain",
            "--http",
            "0",
            "--set",
            "delivery=exactly_once",
            "--set",
            "delivery.epoch_interval=1",
        ]
        options += ["--set", f"delivery.state_dir={folder / 'state'}"]
        with self.log.open("w") as out:
            self.process = subprocess.Popen(
                [*PENSTOCK, "run", str(path), *options], stdout=out, stderr=subprocess.STDOUT
            )

    def status(self):
        try:
            return json.loads(discovery.find("watched").ask(OperatorRequest("status")))
        except PenstockError:
            return None

    def until(self, condition, what):
        """Wait until the status fits; returns it."""
        deadline = time.monotonic() + PATIENCE
        while True:
            status = self.status()
            if status is not None and condition(status):
                return status
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, f"{what}\n{status}\n{self.log.read_text()[-3000:]}"
            time.sleep(0.1)  # polls, because another process cannot be waited for

    def end(self):
        """kill -9, where a test failed on the way."""
        if self.process.poll() is None:
            family = psutil.Process(self.process.pid).children(recursive=True)
            self.process.kill()
            self.process.wait(30)
            _, alive = psutil.wait_procs(family, 30)
            for orphan in alive:
                orphan.kill()


@pytest.fixture
def watched(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    process = Process(tmp_path)
    yield process
    process.end()


@pytest.fixture
def penstock(capsys):
    def penstock(*arguments):
        """Output of a command that succeeds; in this process, which is quicker."""
        log = logging.getLogger("penstock")
        handlers = log.handlers[:]
        capsys.readouterr()
        code = main(arguments)
        log.handlers[:] = handlers
        shown = capsys.readouterr()
        assert code == 0, shown.err
        return shown.out

    return penstock


def component(status, name):
    return {row["component"]: row for row in status["components"]}[name]


def test_a_topology_is_seen_and_steered_from_outside(watched, penstock):
    watched.until(
        lambda s: s["epoch"] >= 1 and s["rate_out"] > 0 and component(s, "counts")["published"] and s["errors"],
        "it runs, commits and shows something",
    )
    is_listed(watched, penstock)
    is_shown(watched, penstock)
    url = is_served(watched)
    pauses_and_goes_on(watched, penstock)
    ends(watched, penstock, url)


def is_listed(watched, penstock):
    (row,) = json.loads(penstock("list", "--json"))
    assert (row["topology"], row["state"], row["pid"]) == ("watched", "active", watched.process.pid)
    assert (row["tasks"], row["restarts"]) == (3, 0)
    assert row["epoch"] >= 1
    assert 0 < row["rate_in"] < 3000
    assert row["uptime"] > 0
    assert re.search(r"watched +│ active ", penstock("list"))


def is_shown(watched, penstock):
    status = json.loads(penstock("status", "watched", "--json"))
    steady, counts = component(status, "steady"), component(status, "counts")
    assert (steady["kind"], steady["max_rate"], counts["tasks"]) == ("spout", 2000, 2)
    assert counts["latency_p99"] > 0
    assert counts["execute_time"] > 0
    assert [name for name, _ in counts["published"]] == ["counted", "counted"], "each task's"
    assert counts["errors"] >= 1
    assert "one hundred is too many" in status["errors"][0]["text"]
    assert abs(status["errors"][0]["time"] - time.time()) < 300
    workers = {process.pid for process in psutil.Process(watched.process.pid).children(recursive=True)}
    assert {worker["pid"] for worker in status["workers"]} <= workers
    assert all(worker["connected"] and worker["node"] for worker in status["workers"])
    assert 0 <= status["commit_age"] < PATIENCE
    assert {task["task"]: task["lag"] for task in status["tasks"]}["steady/0"] == {"in/0": 7}
    text = penstock("status", "watched")
    for part in (
        "watched  active",
        "steady/0 has 7 records to read: in/0 7",
        "exactly_once",
        "steady: max_rate 2,000/s",
        "counts/1",
        "one hundred is too many",
    ):
        assert part in text


def is_served(watched):
    (url,) = re.findall(r"(http://127\.0\.0\.1:\d+)/status, /metrics, /healthz", watched.log.read_text())
    assert get(f"{url}/healthz") == "active\n"
    assert component(json.loads(get(f"{url}/status")), "counts")["executed"] > 0
    samples = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(get(f"{url}/metrics"))
        for sample in family.samples
    }
    for task in "01":
        labels = (("component", "counts"), ("task", task), ("topology", "watched"))
        assert samples["penstock_executed_total", *labels] > 0
        assert samples["penstock_latency_seconds_count", *labels] > 0
    assert 0 <= samples["penstock_commit_age_seconds", ("topology", "watched")] < PATIENCE
    return url


def get(url):
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read().decode()


def pauses_and_goes_on(watched, penstock):
    assert penstock("deactivate", "watched") == "'watched' is inactive\n"
    seen = []

    def rests(status):
        seen.append(component(status, "counts")["executed"])
        return status["state"] == "inactive" and not status["pending"] and len(set(seen[-PAUSED:])) == 1

    watched.until(lambda status: rests(status) and len(seen) >= PAUSED, "a pause")
    executed = seen[-1]
    assert penstock("activate", "watched") == "'watched' is active\n"
    watched.until(lambda s: s["state"] == "active" and component(s, "counts")["executed"] > executed, "it goes on")


def ends(watched, penstock, url):
    epoch = watched.status()["epoch"]
    assert penstock("kill", "watched") == "'watched' has ended\n"
    assert discovery.running() == []
    assert watched.process.wait(PATIENCE) == 0
    text = watched.log.read_text()
    assert "ended by penstock kill\n" in text
    (last,) = re.findall(r"watched ran .* s and took .* s to end, 0 restarts, epoch (\d+) committed", text)
    assert int(last) > epoch, "a last one, as tuples had come since"
    assert "Traceback" not in text
    assert not connects(url)


def connects(url):
    host, port = url.removeprefix("http://").split(":")
    with socket.socket() as client:
        return client.connect_ex((host, int(port))) == 0
