"""``penstock set`` and ``penstock queues`` against a topology that runs in a process of its own."""

import contextlib
import json
import logging
import math
import os
import re
import signal
import stat
import subprocess
import sys
import textwrap
import time

import psutil
import pytest

from penstock import Settings, TopologyBuilder
from penstock.cli.main import main
from penstock.driver import discovery
from penstock.errors import PenstockError
from penstock.protocol.requests import OperatorRequest
from tests.integration.components import Numbers, Witness

pytestmark = pytest.mark.spark

PENSTOCK = [sys.executable, "-m", "penstock.cli.main"]
PATIENCE = 60.0  # seconds; a busy machine
FREE = 5_000  # tuples a second at most, without a limit
LIMIT = 400
STEADY = 10  # looks in a row, a tenth of a second apart

TOPOLOGY = f"""
    import time
    from penstock import BasicBolt, Spout, TopologyBuilder

    class Steady(Spout):
        def declare_output_fields(self, declarer):
            declarer.declare(("n", int))

        def open(self, conf, context, collector):
            self.collector, self.n, self.began = collector, 0, time.monotonic()

        def next_tuple(self):
            if self.n < {FREE} * (time.monotonic() - self.began):
                self.collector.emit([self.n])
                self.n += 1

    class Counts(BasicBolt):
        def execute(self, tup, collector):
            pass

    builder = TopologyBuilder()
    builder.set_spout("steady", Steady())
    builder.set_bolt("counts", Counts(), 2).shuffle_grouping("steady")
    topology = builder.build("operated")
"""


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    """Runs of this test alone are found."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def penstock(*arguments):
    return subprocess.run(
        [*PENSTOCK, *map(str, arguments)], capture_output=True, text=True, timeout=PATIENCE, check=False
    )


class Process:
    """``penstock run``, and what it says."""

    def __init__(self, path, log):
        self.log = log
        with log.open("w") as out:
            self.process = subprocess.Popen([*PENSTOCK, "run", str(path)], stdout=out, stderr=subprocess.STDOUT)

    def until(self, condition, what):
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, f"{what}\n{self.log.read_text()[-3000:]}"
            time.sleep(0.1)  # polls, because another process cannot be waited for

    def rate(self):
        """Tuples a second the bolt gets, over the last three; 0 while nothing can be asked."""
        try:
            tasks = json.loads(discovery.find("operated").ask(OperatorRequest("queues")))
        except PenstockError:
            return 0.0
        return sum(task["rate_in"] for task in tasks)

    def goes(self, low, high):
        """Wait until the rate is between these, and stays there."""
        fits = []

        def steady():
            fits.append(low <= self.rate() <= high)
            return len(fits) >= STEADY and all(fits[-STEADY:])

        self.until(steady, f"{low} to {high} tuples a second")

    def workers(self):
        """The Python workers, which have threads, of its tasks."""
        found = set()
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):  # it has just ended
                if "penstock.spark.daemon" in process.cmdline() and process.num_threads() > 1:
                    found.add(process.pid)
        return found

    def kill(self):
        """kill -9, and wait for all that it has started to end."""
        if self.process.poll() is None:
            family = psutil.Process(self.process.pid).children(recursive=True)
            self.process.kill()
            self.process.wait(30)
            _, alive = psutil.wait_procs(family, 30)
            for orphan in alive:
                orphan.kill()


@pytest.fixture
def operated(tmp_path):
    path = tmp_path / "operated.py"
    path.write_text(textwrap.dedent(TOPOLOGY))
    process = Process(path, tmp_path / "log")
    yield process
    process.kill()


def test_a_running_topology_is_found_shown_and_slowed(operated, capsys):
    operated.goes(2 * LIMIT, math.inf)
    (listed,) = json.loads(penstock("list", "--json").stdout)
    assert (listed["topology"], listed["pid"]) == ("operated", operated.process.pid)
    (path,) = discovery.folder().glob("*.json")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600, "it has the run's secret"

    done = penstock("set", "operated", f"steady.max_rate={LIMIT}")
    assert (done.returncode, done.stdout) == (0, f"'steady' of 'operated' now emits at most {LIMIT} tuples/s\n")
    operated.goes(0.9 * LIMIT, 1.1 * LIMIT)

    before = operated.workers()
    victim = max(before)
    os.kill(victim, signal.SIGKILL)
    operated.until(lambda: "starting again" in operated.log.read_text(), "the query is started again")
    operated.until(lambda: len(operated.workers() - {victim}) == len(before), "with as many workers")
    operated.goes(0.9 * LIMIT, 1.1 * LIMIT)

    table = penstock("queues", "operated").stdout
    assert re.search(r"counts/0 [^\n]* 16,384 ", table), table
    assert all(task in table for task in ("steady/0", "counts/0", "counts/1"))

    done = penstock("set", "operated", "steady.max_rate=none")
    assert done.stdout == "'steady' of 'operated' now emits without a limit\n"
    operated.goes(2 * LIMIT, math.inf)
    wrong_words(capsys)
    two_of_one_name(capsys)
    operated.kill()
    assert path.exists(), "nobody was left to remove it"
    assert penstock("list").stdout == "no topology of this user is running on this machine\n"
    assert not path.exists()


def refused(capsys, *arguments):
    """Code and text of a command that is refused; in this process, which is quicker."""
    log = logging.getLogger("penstock")
    handlers = log.handlers[:]
    code, text = main(arguments), capsys.readouterr().err
    log.handlers[:] = handlers  # the command's writes to what is captured here
    assert "Traceback" not in text
    return code, text


def wrong_words(capsys):
    for arguments, code, message in (
        (
            ["set", "operatet", "steady.max_rate=9"],
            2,
            "topology 'operatet': no topology of that name is running.*'operated'",
        ),
        (
            ["set", "operated", "counts.max_rate=9"],
            2,
            "counts.max_rate: 'counts' is not a spout; the spouts are steady",
        ),
        (
            ["set", "operated", "nobody.max_rate=9"],
            2,
            "nobody.max_rate: 'nobody' is not a spout; the spouts are steady",
        ),
        (
            ["set", "operated", "steady.max_rate=0"],
            2,
            "'0' is neither a number of tuples per second above 0 nor none",
        ),
        (["set", "operated", "steady.min_rate=9"], 2, "does not have the form SPOUT.max_rate=N"),
        (["queues", "operatet"], 2, "topology 'operatet': no topology of that name is running.*'operated'"),
    ):
        returned, text = refused(capsys, *arguments)
        assert returned == code, arguments
        assert re.search(message, text), text


def two_of_one_name(capsys):
    (found,) = discovery.running()
    twin = discovery.DriverEntry(
        "operated", found.host, found.port + 1, found.secret, os.getpid(), discovery.start_time(os.getpid())
    )
    twin.announce()
    code, text = refused(capsys, "set", "operated", "steady.max_rate=9")
    assert code == 2
    assert f"process {found.pid}" in text
    assert f"process {twin.pid}" in text
    twin.withdraw()


def test_a_topology_that_ends_is_found_no_more(run):
    builder = TopologyBuilder()
    builder.set_spout("numbers", Numbers(10))
    builder.set_bolt("witness", Witness()).shuffle_grouping("numbers")
    handle = run.submit(builder.build("short", Settings(conf={"folder": str(run.folder)})))
    assert discovery.find("short").pid == os.getpid()
    handle.kill()
    assert discovery.running() == []
    assert list(discovery.folder().glob("*.json")) == []


STATEFUL = """
    import time
    from penstock import BasicBolt, Delivery, Settings, Spout, TopologyBuilder
    from neighbour import worth

    class Steady(Spout):
        def declare_output_fields(self, declarer):
            declarer.declare(("key", int))

        def open(self, conf, context, collector):
            self.collector, self.n = collector, 0

        def next_tuple(self):
            self.n += 1
            self.collector.emit([self.n % 10])

    class Counts(BasicBolt):
        def prepare(self, conf, context):
            self.total, self.context = context.state.map("total", default=0), context

        def execute(self, tup, collector):
            self.total[tup.key] += worth()
            self.context.publish([[f"worth {worth()}", sum(self.total.values())]])

    builder = TopologyBuilder()
    builder.set_spout("steady", Steady()).set_max_rate(1000)
    builder.set_bolt("counts", Counts(), 1).fields_grouping("steady", "key")
    topology = builder.build("operated", Settings(delivery=Delivery("exactly_once", state_dir="state")))
"""


def test_a_running_topology_is_scaled_and_its_code_replaced(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path, neighbour = tmp_path / "operated.py", tmp_path / "neighbour.py"
    path.write_text(textwrap.dedent(STATEFUL))
    neighbour.write_text("def worth():\n    return 1\n")
    operated = Process(path, tmp_path / "log")

    def shown():
        """What each task of the bolt shows: what a tuple is worth, and the sum of all its keys."""
        (status,) = [json.loads(penstock("status", "operated", "--json").stdout or "{}")]
        return next((c["published"] for c in status.get("components", []) if c["component"] == "counts"), [])

    try:
        operated.until(lambda: sum(total for _, total in shown()) > 100, "it counts")
        said = penstock("scale", "operated", "counts=2")
        assert re.match(
            r"'operated' now runs with steady 1, counts 2; the interruption took \d+ ms", said.stdout
        ), said
        operated.until(lambda: len(shown()) == 2, "both tasks count")
        neighbour.write_text("def worth(:\n")
        said = penstock("replace", "operated", path)
        assert said.returncode == 2, said
        assert "neighbour.py:1: it is not valid Python" in said.stderr
        neighbour.write_text("def worth():\n    return 1_000_000\n")
        before = sum(total for _, total in shown())
        said = penstock("replace", "operated", "operated.py")
        assert "now runs with steady 1, counts 2" in said.stdout, "as it was scaled"
        operated.until(lambda: [what for what, _ in shown()] == 2 * ["worth 1000000"], "the new code runs")
        assert sum(total % 1_000_000 for _, total in shown()) >= before, "with the state of the old one"
        said = penstock("scale", "operated", "count=2")
        assert said.returncode == 2
        assert "Did you mean 'counts'?" in said.stderr
        said = penstock("scale", "operated", "counts=0")
        assert (said.returncode, "does not have the form COMPONENT=N" in said.stderr) == (2, True)
        operated.kill()
        operated = Process(path, tmp_path / "log")
        operated.until(lambda: len(shown()) == 2, "a new driver begins with the tasks that were chosen")
        assert "begins with parallelism 2, which was chosen while it ran" in penstock("status", "operated").stdout
    finally:
        operated.kill()
