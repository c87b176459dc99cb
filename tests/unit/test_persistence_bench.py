"""The benchmark of persistence, as far as it needs no Spark: its ways to the store, its store, its figures."""

import itertools
import os
import signal

import numpy as np
import pyarrow as pa
import pytest

from benchmarks import persistence_topology
from benchmarks.persistence import (
    Course,
    by_second,
    draw,
    growth,
    last_to_first,
    results_of,
    rise,
    slope,
    wrong_results,
)
from benchmarks.persistence_bulk import delayed, queue_speed, rows, targets
from benchmarks.persistence_topology import (
    WORDS,
    MemoryLimit,
    PacedLines,
    SleepingStore,
    acked,
    rows_stored,
    stored,
    times,
    times_stored,
    words_to_store,
)
from penstock import Failure
from penstock.persist.embedded import EmbeddedQueue
from penstock.persist.stores import Overtaken
from penstock.testing import LocalRunner


def ran(case, folder):
    """For a moment of the wall clock, which paces the lines: at a rate that even the direct way keeps up with."""
    runner = LocalRunner(words_to_store(case, folder, 100), folder=str(folder / "state"))
    runner.run(0.05)
    runner.deactivate()
    runner.run_until_idle()
    runner.close()
    assert runner.errors == []


@pytest.mark.parametrize("case", ["delayed", "instant", "direct"])
def test_what_is_acked_is_in_the_store_with_its_times(tmp_path, monkeypatch, case):
    monkeypatch.setattr(persistence_topology, "SLEEP", 0.001)
    ran(case, tmp_path)
    lines = acked(tmp_path)
    assert len(lines)
    assert wrong_results(lines, stored(tmp_path)) == 0
    assert rows_stored(tmp_path) == len(lines) * WORDS
    for since, came in (times(tmp_path), times_stored(tmp_path)):
        assert len(since) == len(lines) * WORDS
        assert (came >= since).all()


def test_a_queue_inside_the_worker_acks_what_only_it_holds(tmp_path, monkeypatch):
    monkeypatch.setattr(persistence_topology, "SLEEP", 60)
    ran("inner", tmp_path)
    assert len(acked(tmp_path))
    assert len(times(tmp_path)[0]) == len(acked(tmp_path)) * WORDS
    assert rows_stored(tmp_path) == 0


def test_a_process_that_uses_more_memory_than_it_may_is_killed(monkeypatch):
    killed = []
    monkeypatch.setattr("os.kill", lambda pid, number: killed.append((pid, number)))
    limit, free = MemoryLimit({"room_mb": 20}, settle=0.0), MemoryLimit({"room_mb": 0}, settle=0.0)
    limit.check()
    free.check()
    assert killed == []
    ballast = bytearray(b"x") * (40 << 20)
    free.check()
    assert killed == []
    limit.check()
    assert killed == [(os.getpid(), signal.SIGKILL)]
    del ballast


def test_the_store_is_one_that_processors_may_race_for(tmp_path):
    store = SleepingStore(str(tmp_path / "store"), 0)
    one, other = store.open(), store.open()
    table = pa.table({"result": [1, 2]})
    assert one.progress("q") == ""
    one.write("q", table, "", "a", None)
    assert (other.progress("q"), rows_stored(tmp_path)) == ("a", 2)
    with pytest.raises(Overtaken, match="another processor also writes for 'q'"):
        other.write("q", table, "", "b", None)
    assert not other._add(1, table, 2, "b"), "another was quicker since it looked"
    assert len(list((tmp_path / "store").iterdir())) == 1, "nothing staged is left"


class Caught:
    def __init__(self):
        self.numbers = []

    def ready(self):
        return True

    def emit_batch(self, columns, msg_ids):
        self.numbers += msg_ids


def test_a_new_spout_emits_just_what_is_not_acked(tmp_path):
    spout, caught = PacedLines(1e9), Caught()
    spout.open({"folder": str(tmp_path)}, None, caught)
    spout.activate()
    spout.next_batch()
    assert caught.numbers == list(range(1_000))
    spout.ack_many([0, 1, 5])
    spout.fail(3, Failure("persist", "killed"))
    spout.next_batch()
    assert caught.numbers[1_000:1_002] == [3, 1_000]
    again, caught = PacedLines(1e9), Caught()
    again.open({"folder": str(tmp_path)}, None, caught)
    again.activate()
    again.next_batch()
    assert caught.numbers[:5] == [2, 3, 4, 6, 7]


def test_lines_are_due_at_their_rate_however_late_they_are(tmp_path):
    class Columns(Caught):
        def emit_batch(self, columns, msg_ids):
            self.numbers += columns[2].to_pylist()

    spout, caught = PacedLines(1_000), Columns()
    spout.open({"folder": str(tmp_path)}, None, caught)
    spout.activate()
    spout._begun -= 0.5  # held back for so long
    spout.next_batch()
    assert len(caught.numbers) >= 500
    assert np.diff(caught.numbers) == pytest.approx(1_000, abs=1)  # µs


# ---- figures -------------------------------------------------------------------------------------------


def test_percentiles_are_those_of_what_came_in_a_second():
    came = np.array([0, 100_000, 900_000, 2_000_000, 2_500_000, 3_100_000]) + 1_000_000
    waited = np.array([1, 2, 3, 10, 20, 99]) * 1_000
    seconds, (p50, p100) = by_second(came - waited, came, 1_000_000, 4_000_000, (50, 100))
    assert list(seconds) == [0, 2]
    assert (list(p50), list(p100)) == ([2, 15], [3, 20])


def test_a_slope_is_not_bent_by_an_outlier():
    x = np.arange(20.0)
    y = 3 * x
    y[7] = 1_000
    assert slope(x, y) == pytest.approx(3)
    assert slope(x[:1], y[:1]) == 0
    flat = Course(seconds=x, p95=np.where(x == 7, 1_000.0, 50.0))
    assert rise(flat) == 0
    assert rise(Course(seconds=x, p95=50 + x / 60)) == pytest.approx(2, rel=0.01)  # % of 50 ms a minute
    assert last_to_first(np.repeat([2.0, 99.0, 3.0], 10)) == 1.5
    assert growth(np.arange(1.0, 41.0)) == pytest.approx(38.5 / 2.5)


def test_missing_doubled_and_strange_rows_are_wrong():
    lines = np.array([3, 4])
    right = results_of(lines)
    assert list(right) == list(range(30, 50))
    assert wrong_results(lines, right) == 0
    assert wrong_results(lines, right[2:]) == 2
    assert wrong_results(lines, np.append(right, right[:3])) == 3
    assert wrong_results(lines, np.append(right[1:], 7)) == 2


def test_the_figures_are_drawn(tmp_path):
    points = [{"seconds": float(at), "worker MB": 100.0, "processor MB": 0.0, "waiting": 5.0} for at in range(3)]
    course = Course(np.arange(3.0), np.ones(3), np.ones(3), np.ones(3), points)
    draw({"delayed": course, "direct": course}, tmp_path / "results")
    for name in ("latency", "memory"):
        assert (tmp_path / "results" / f"persistence-{name}.png").read_bytes().startswith(b"\x89PNG")


# ---- in bulk -------------------------------------------------------------------------------------------


def test_stores_take_rows_both_ways(tmp_path):
    part = list(itertools.islice(rows(), 5))
    for target in targets(tmp_path, None):
        assert delayed(tmp_path / "queue" / str(target), target.store(f"bulk-{target}"), 2_000) > 0
        assert target.one_by_one(f"single-{target}", part) > 0


def test_a_queue_has_four_figures(tmp_path):
    p50, p95, into, out = queue_speed(EmbeddedQueue(), str(tmp_path / "q"), 20, 2)
    assert 0 < p50 <= p95
    assert into > 0
    assert out > 0
