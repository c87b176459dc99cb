"""Checks docs/how-to/overload.md and decision 7: the code runs, and the defaults and figures are correct."""

import itertools
import re
import time
from pathlib import Path

import pytest

from penstock.cli.loading import load_topology
from penstock.control.backpressure import (
    LOAD_FACTOR,
    MAX_SENSITIVITY,
    MIN_SENSITIVITY,
    OverloadDetector,
    StepDetector,
    StepLimiter,
)
from penstock.control.pace import Meter
from penstock.control.signals import TaskMessage
from penstock.protocol.message_board import parse_url
from penstock.testing import LocalRunner
from penstock.testing.servers import zookeeper

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = DOCS / "how-to" / "overload.md"
DECISION = DOCS / "decisions" / "0007-steps-are-counted-per-task-and-judged-by-the-queues-trend.md"


def rows(page, first):
    """The cells of the table whose header begins with ``first``."""
    _, _, table = page.read_text().partition(f"| {first} |")
    lines = table.partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines]


def test_the_example_runs_and_does_what_is_said(tmp_path, monkeypatch):
    example, _ = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    (tmp_path / "orders.py").write_text(example)
    runner = LocalRunner(load_topology(str(tmp_path / "orders.py")))
    monkeypatch.setattr(time, "sleep", runner.clock.advance)
    runner.run(0.1)
    assert runner.stats("orders")[0].limit == 10_000, "its own max_rate"
    runner.run(19.9)
    before, begun = runner.stats("ship")[0].executed, runner.clock.now()
    runner.run(5.0)
    assert runner.errors == []
    shipped = (runner.stats("ship")[0].executed - before) / (runner.clock.now() - begun)
    assert shipped == pytest.approx(9_850, rel=0.02), "what is left of the 10,000"
    assert runner.stats("orders")[0].limit < 200, "towards audit, which takes 100"


def test_the_server_to_try_with_is_started_as_shown(monkeypatch, capsys):
    _, server = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    addresses = []

    class Server(zookeeper.ZooKeeperServer):
        def start(self):
            addresses.append(self.address)  # the contract tests cover the rest; this checks how the page uses it

    monkeypatch.setattr(zookeeper, "ZooKeeperServer", Server)
    monkeypatch.setattr("builtins.input", lambda text: "")
    exec(server, {})
    (url,) = re.findall(r"flow.board=(\S+)", capsys.readouterr().out)
    assert parse_url(url) == (addresses[0], "/penstock")


def test_the_comparison_shown_for_migrated_bolts_runs():
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "how-to" / "aggregate.md").read_text(), re.S)
    names = {}
    for code in blocks:
        exec(code, names)  # the last statement asserts
    assert names["totals"]({}) == [("tea", 2, 6.0, 3.0, 2)]


# ---- decision 7 --------------------------------------------------------------------------------------------

OFFERED, CAPACITY = 20_000, 16_384
TICK = 0.001  # seconds
WAY = 2  # ticks that a signal takes to arrive


class Literal(OverloadDetector):
    """Lu 2020, algorithm 1, taken literally: a signal at the end of each sensitivity while the queue is long."""

    def __init__(self, upstream, capacity):
        super().__init__(upstream, capacity)
        self.steps, self._arrived, self._rate, self._meter, self._timer = 0, 0, 0.0, Meter(), None

    def observe(self, now, length, arrived):
        self._meter.add(arrived - self._arrived, now)
        self._arrived = arrived
        high, low = LOAD_FACTOR * self.capacity, (1 - LOAD_FACTOR) * self.capacity
        kind = "slow" if length > high else "cancel" if length < low and self.steps else None
        if kind is None or self._timer is None or self._timer[0] != kind:
            if not self.steps:
                self._rate = self._meter.rate(now)
            wait = (self.capacity - length) / (2 * self._rate) if self._rate else MAX_SENSITIVITY
            self._timer = kind and (kind, now + min(MAX_SENSITIVITY, max(MIN_SENSITIVITY, wait)))
            return []
        if now < self._timer[1]:
            return []
        self._timer = None
        self.steps = min(10, self.steps + 1) if kind == "slow" else self.steps - 1
        return [(task, kind, float(self.steps)) for task in self.upstream]


def drive(detector, served):
    """Simulate two minutes of a sender, its rate limiter, an inbox and a task that processes ``served`` tuples per
    second. Returns the steps in the second minute, tick by tick, the idle seconds and the longest queue."""
    limiter, meter, wire = StepLimiter(), Meter(), []
    queue = arrived = idle = peak = 0
    offer = work = 0.0
    steps = []
    for tick in range(120_000):
        now = tick * TICK
        while wire and wire[0][0] <= tick:
            limiter.handle(wire.pop(0)[1], now, meter.rate(now))
            detector.on_sender_adjusted()
        offer = min(offer + OFFERED * TICK, 1280)
        frame = int(max(16, min(128, limiter.rate * 0.01)))
        while offer >= frame and limiter.room(1, now) > 0:
            offer -= frame
            queue, arrived = queue + frame, arrived + frame
            limiter.record_sent(1, frame)
            meter.add(frame, now)
        idle += not queue
        work += served * TICK
        queue, work = max(0, queue - int(work)), work - int(work)
        wire += [(tick + WAY, TaskMessage(1, *said)) for said in detector.observe(now, queue, arrived)]
        steps.append(max(limiter.steps.values(), default=0))
        peak = max(peak, queue)
    return steps[60_000:], idle * TICK, peak


def extremes(text):
    """The bounds of "1–10", or of "6"."""
    numbers = [int(number) for number in text.split("–")]
    return numbers[0], numbers[-1]


@pytest.mark.parametrize("row", rows(DECISION, "the task takes"), ids=lambda row: row[0])
def test_the_figures_of_decision_7_come_out(row):
    """Accurate to a few changes per minute, so that the page need not follow each change of a constant."""
    served = int(row[0].removesuffix("/s").replace(",", ""))
    for make, (span, changes, idle) in ((Literal, row[2:5]), (StepDetector, row[5:8])):
        steps, idled, _ = drive(make([0], CAPACITY), served)
        assert (min(steps), max(steps)) == extremes(span)
        assert sum(a != b for a, b in itertools.pairwise(steps)) == pytest.approx(int(changes), rel=0.1, abs=3)
        assert idled == pytest.approx(float(idle.removesuffix(" s")), abs=0.2)


def test_the_price_named_in_decision_7():
    peaks = [drive(make([0], CAPACITY), 2_000)[2] for make in (StepDetector, Literal)]
    said = re.search(r"([\d,]+) at the peak instead of ([\d,]+)", " ".join(DECISION.read_text().split())).groups()
    assert peaks == pytest.approx([int(number.replace(",", "")) for number in said], rel=0.05)
