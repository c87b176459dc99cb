"""A topology that cannot keep up gets more tasks by itself, and returns them when the load is gone. Nothing is
lost. ``test_replacement.py`` has the policy ``rate``."""

import time

import pytest

from benchmarks.replacement_figures import lost, wrong_keys
from benchmarks.replacement_overload import Work
from benchmarks.replacement_topology import PacedNumbers, Schedule, committed
from penstock import TopologyBuilder
from penstock.connectors.parquet import ParquetSink
from tests.helpers import settings_with

pytestmark = pytest.mark.spark

PATIENCE = 90.0  # seconds; enough on a busy machine
KEYS = 50
LOAD = Schedule(((7, 320), (3600, 20)))
"""Tuples per second. One task processes about 180, two 360."""


def test_by_time_outs_and_latency_an_overload_gets_tasks_and_a_calm_returns_them(run):
    builder = TopologyBuilder()
    builder.set_spout("numbers", PacedNumbers(LOAD, KEYS, 0))
    builder.set_bolt("work", Work(0.005)).fields_grouping("numbers", "word")
    builder.set_bolt("sink", ParquetSink(run.folder / "committed")).global_grouping("work")
    settings = settings_with(
        delivery="exactly_once",
        state_dir=str(run.folder / "state"),
        epoch_interval=1.0,
        message_timeout=5.0,
        scaling="failures",
        scaling_interval=0.5,
        scaling_samples=6,
        scaling_cool_down=3.0,
        conf={"folder": str(run.folder)},
    )
    running = run.submit(builder.build("calms", settings))
    internals = running.internals

    def tasks():
        return [each.parallelism["work"] for each in internals.replacements]

    assert internals.server.wait(lambda: tasks() and tasks()[-1] == 1, PATIENCE), running.status()
    found = tasks()
    highest = found.index(max(found))
    assert found[0] == 2
    assert found == sorted(found[: highest + 1]) + sorted(found[highest + 1 :], reverse=True), "no flapping"
    (run.folder / "end").touch()
    deadline = time.monotonic() + PATIENCE
    while not (run.folder / "total").exists():
        assert time.monotonic() < deadline, running.status()
        time.sleep(0.1)  # polls a file of another process
    inputs = int((run.folder / "total").read_text())
    running.kill()
    numbers, counts = committed(run.folder)
    assert (lost(numbers, inputs), len(numbers)) == (0, inputs)
    assert wrong_keys(numbers, counts, inputs, KEYS) == 0
