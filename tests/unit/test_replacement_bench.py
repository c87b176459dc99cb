"""The benchmark of replacement, as far as it needs no Spark: its topologies, its figures, and its parts with local
runners in place of Spark."""

import argparse
import json
import time
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import replacement, replacement_scaling, replacement_topology
from benchmarks.book import micros
from benchmarks.harness import Results
from benchmarks.replacement_figures import (
    Course,
    Turn,
    draw,
    longest_gap,
    lost,
    right_changes,
    rises,
    set_up,
    wrong_keys,
)
from benchmarks.replacement_scaling import LOAD, QUICK_LOAD, settings_of
from benchmarks.replacement_topology import (
    WORDS,
    Arrivals,
    PacedNumbers,
    Schedule,
    arrivals,
    committed,
    end_input,
    key_of,
    slow_word_count,
    total,
    word_count,
)
from penstock import Failure
from penstock.control.scaling import Scale
from penstock.sim.scaling import ScalingChange
from penstock.state.values import TaskState
from penstock.testing import LocalRunner

KEYS = 50
FAST = Schedule(((3600.0, 1e6),))


class Locally:
    """What ``submit`` returns, as far as the benchmark uses it: a local runner, replaced by the next one."""

    def __init__(self, topology):
        self.topology, self.replacements, self.runner = topology, [], None
        self.internals = self
        self.internals = self
        self.bus = SimpleNamespace(totals=self._totals)
        self._start()

    def _start(self):
        self.runner = LocalRunner(self.topology, folder=self.topology.settings.delivery.state_dir)

    def _totals(self):
        self.runner.run(0.002)
        return {
            name: SimpleNamespace(
                executed=sum(each.executed for each in self.runner.stats(name)),
                failed=sum(each.failed for each in self.runner.stats(name)),
            )
            for name in self.topology.nodes
        }

    def sleep(self, seconds):
        """Instead of ``time.sleep``."""
        self.runner.run(0.002)

    def run_to(self, number):
        """Until the spout has emitted so many."""
        (spout,) = self.runner.component("numbers")
        while spout._next < number:
            self.runner.run(0.002)

    def scale(self, parallelism):
        """All but the other number of tasks."""
        self._finish()
        self._start()
        self.replacements.append(SimpleNamespace(gap=0.1, seconds=0.5, parallelism=parallelism, reason="told to"))
        return self.replacements[-1]

    def kill(self, drain=True):
        if self.runner is not None:
            self._finish()
        self.runner = None

    def _finish(self):
        self.runner.deactivate()
        self.runner.run_until_idle()
        self.runner.commit()
        assert self.runner.errors == []
        self.runner.close()


@pytest.fixture
def local(monkeypatch):
    """The benchmark's parts run on local runners, which work while the benchmark sleeps."""
    handles = []

    def submit(topology):
        handles.append(Locally(topology))
        return handles[-1]

    for module in (replacement, replacement_scaling):
        monkeypatch.setattr(module, "submit", submit)
        clock = SimpleNamespace(sleep=lambda seconds: handles[-1].sleep(seconds), monotonic=time.monotonic)
        monkeypatch.setattr(module, "time", clock)
    return handles


def options(**given):
    return argparse.Namespace(**{"quick": True, "repeats": None, "json": None, **given})


# ---- the parts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["gap", "gap_1m"])
def test_gaps_are_told_for_both_levels_of_delivery(local, monkeypatch, part):
    monkeypatch.setattr(replacement, "KEYS", 3_000)
    monkeypatch.setattr(replacement, "MANY_KEYS", 4_000)
    results = Results("replacement")
    getattr(replacement, f"measure_{part}")(results, options(repeats=3))
    assert [row["case"] for row in results.rows] == ["exactly once", "at least once"]
    for row in results.rows:
        assert row["replacements"] == 3
        assert 0 < row["gap s"] <= row["worst gap s"]
        assert row["doubled"] == 0
    names = {"gap": "replace.longest_gap_s", "gap_1m": "replace.gap_1m_keys_s"}
    bar = next(bar for bar in results.bars if bar["name"] == names[part])
    assert bar["value"] == pytest.approx(results.rows[0]["worst gap s"], abs=1e-4)
    for handle in local:
        assert [each.parallelism for each in handle.replacements] == [{"count": 2}, {"count": 1}, {"count": 2}]


def test_results_are_compared_with_a_sequential_run(local, monkeypatch):
    monkeypatch.setattr(replacement, "FEW_KEYS", KEYS)
    monkeypatch.setattr(replacement, "RATE", 4_000)
    results = Results("replacement")
    replacement.measure_correct(results, options())
    assert {bar["name"]: bar["value"] for bar in results.bars} == {"replace.wrong": 0, "replace.lost": 0}
    for row, handle in zip(results.rows, local, strict=True):
        assert len(handle.replacements) == 4
        assert row["inputs"] > 100
        assert (row["missing"], row["keys wrong"]) == (0, 0)


def test_a_number_that_is_lost_on_the_way_is_seen(local, monkeypatch):
    class Forgets(Locally):
        def scale(self, parallelism):
            replaced = super().scale(parallelism)
            (spout,) = self.runner.component("numbers")
            spout._next += 3
            return replaced

    monkeypatch.setattr(replacement, "submit", lambda topology: local.append(Forgets(topology)) or local[-1])
    monkeypatch.setattr(replacement, "FEW_KEYS", KEYS)
    monkeypatch.setattr(replacement, "_LATE", 0.2)
    results = Results("replacement")
    replacement.measure_correct(results, options())
    bars = {bar["name"]: bar["value"] for bar in results.bars}
    assert bars["replace.lost"] == 4 * 3
    assert bars["replace.wrong"] > 0


# ---- topologies ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("delivery", "commits"), [("exactly_once", True), ("at_least_once", False)])
def test_counts_are_those_of_a_sequential_run(tmp_path, delivery, commits):
    schedule = Schedule(((3600.0, 20_000),))  # slow enough for a local runner to keep up with
    handle = Locally(word_count(tmp_path, delivery, KEYS, schedule, load=False, commits=commits))
    handle.run_to(500)
    handle.scale({"count": 2})
    handle.run_to(1_000)
    end_input(tmp_path)
    handle.runner.run_until_idle()
    handle.kill()
    inputs = total(tmp_path)
    noted = arrivals(tmp_path)
    numbers, counts = committed(tmp_path) if commits else (noted.number, noted.count)
    assert inputs >= 1_000
    assert wrong_keys(numbers, counts, inputs, KEYS) == 0
    assert len(committed(tmp_path)[0]) == (inputs if commits else 0)
    assert len(noted) == (0 if commits else inputs)
    assert (noted.came >= noted.since).all()


def test_the_slow_word_count_makes_four_counts_of_a_line(tmp_path, monkeypatch):
    monkeypatch.setattr(replacement_topology, "SPLIT", 1e-6)
    monkeypatch.setattr(replacement_topology, "COUNT", 1e-6)
    handle = Locally(slow_word_count(tmp_path, Schedule(((1e-6, 2e9),)), {"delivery.message_timeout": 60.0}))
    handle.runner.run_until_idle()
    handle.kill()
    noted = arrivals(tmp_path)
    assert sorted(noted.number) == list(range(2_000 * WORDS))
    assert wrong_keys(noted.number, noted.count, 2_000 * WORDS, replacement_topology.SLOW_KEYS) == 0


class Caught:
    def __init__(self):
        self.numbers, self.since = [], []

    def room(self):
        return 1_000_000

    def emit_batch(self, columns, msg_ids):
        self.numbers += columns[0].to_pylist()
        self.since += columns[2].to_pylist()


def opened(folder, state, loaded=0, schedule=FAST):
    spout, caught = PacedNumbers(schedule, KEYS, loaded), Caught()
    context = SimpleNamespace(delivery="at_least_once", state=state)
    spout.open({"folder": str(folder)}, context, caught)
    return spout, caught


def long_begun():
    """The state of a spout for which whole batches are due."""
    state = TaskState()
    state.value("position").value = 0, micros() - 10_000_000, ()
    return state


def test_a_new_spout_emits_what_was_under_way_and_goes_on(tmp_path):
    state = long_begun()
    spout, caught = opened(tmp_path, state)
    spout.next_batch()
    first = len(caught.numbers)
    spout.ack_many([n for n in caught.numbers if n not in (3, 7)])
    spout.fail(7, Failure("", "time-out"))
    spout.before_snapshot()
    time_of = dict(zip(caught.numbers, caught.since, strict=True))
    again, caught = opened(tmp_path, state)
    again.next_batch()
    assert caught.numbers[:3] == [3, 7, first]
    assert caught.since[0] == time_of[3], "it was due when it was due"


def test_numbers_of_the_load_are_due_at_once_and_the_schedule_begins_behind_them(tmp_path):
    spout, caught = opened(tmp_path, TaskState(), KEYS, Schedule(((1.0, 1.0),)))
    spout.next_batch()
    spout.next_batch()
    assert caught.numbers == [*range(KEYS), KEYS]
    assert max(caught.since[:KEYS]) <= caught.since[KEYS]


def test_the_source_ends_where_it_was_and_stays_so(tmp_path):
    spout, caught = opened(tmp_path, long_begun())
    spout.next_batch()
    assert total(tmp_path) is None
    end_input(tmp_path)
    spout.next_batch()
    assert total(tmp_path) == len(caught.numbers)
    behind, caught = opened(tmp_path, long_begun())  # as after a restart from an earlier epoch
    for _ in range(3):
        behind.next_batch()
    assert len(caught.numbers) == total(tmp_path)


def test_a_schedule_says_what_is_due_when():
    schedule = Schedule(((10, 5), (10, 20), (5, 1)))
    assert [schedule.due(at) for at in (0, 0.1, 0.2, 10, 10.05, 20, 99)] == [1, 1, 2, 51, 52, 251, 255]
    numbers = np.arange(255)
    when = schedule.when(numbers)
    assert [when[n] for n in (0, 50, 51, 250)] == pytest.approx([0, 10, 10.05, 20])
    assert all(schedule.due(float(at) + 1e-9) == n + 1 for n, at in zip(numbers, when, strict=True))
    assert schedule.text == "10:5,10:20,5:1"


def test_all_keys_come_once_and_then_evenly():
    keys = key_of(np.arange(100 * KEYS), KEYS)
    assert list(keys[:KEYS]) == list(range(KEYS))
    times = np.bincount(keys, minlength=KEYS)
    assert len(times) == KEYS
    assert times.min() > 60
    assert times.max() < 140


def test_arrivals_of_several_processes_are_one_series(tmp_path):
    np.array([[30, 3, 2, 1], [50, 4, 3, 1]]).tofile(tmp_path / "arrivals-1")
    np.array([40, 5, 4, 1, 60]).tofile(tmp_path / "arrivals-2")  # a row is being written
    found = arrivals(tmp_path)
    assert list(found.came) == [30, 40, 50]
    assert list(found.number) == [2, 4, 3]
    assert len(arrivals(tmp_path / "arrivals-1")) == 2
    (tmp_path / "none").mkdir()
    assert len(arrivals(tmp_path / "none")) == 0


# ---- figures -------------------------------------------------------------------------------------------


def test_a_gap_is_the_longest_time_without_an_arrival():
    came = np.array([0, 1, 2, 5, 6, 9]) * 1_000_000
    assert longest_gap(came, 0, 6_000_000) == 3
    assert longest_gap(came, 3_000_000, 5_500_000) == 2, "what is outside does not count"
    assert longest_gap(came, 5_000_000, 12_000_000) == 3, "nothing more comes"
    assert longest_gap(came, 20_000_000, 24_000_000) == 4
    turn = Turn(begin=1_000_000, end=4_000_000, quiet=5_000_000, tasks=2, silent=0.1, seconds=2)
    assert (turn.gap(came), turn.ordinary_gap(came)) == (2, 2)


def test_wrong_keys_are_those_with_anything_missing_doubled_or_miscounted():
    numbers = np.arange(10)
    counts = np.repeat([1, 2], 5)
    assert list(key_of(np.arange(5), 5)) == [0, 1, 2, 3, 4]
    keys = key_of(numbers, 5)
    for key in range(5):
        counts[keys == key] = 1 + np.arange((keys == key).sum())
    assert wrong_keys(numbers, counts, 10, 5) == 0
    assert wrong_keys(numbers[::-1], counts[::-1], 10, 5) == 0, "in any order"
    assert wrong_keys(numbers[1:], counts[1:], 10, 5) == 1
    assert wrong_keys(np.append(numbers, 2), np.append(counts, 1), 10, 5) == 1
    assert wrong_keys(np.append(numbers, 99), np.append(counts, 1), 10, 5) == 1, "nobody sent that"
    begun_anew = counts.copy()
    begun_anew[3:5] += 7
    assert wrong_keys(numbers, begun_anew, 10, 5) == 2
    assert wrong_keys(numbers[:0], counts[:0], 10, 5) == len(set(keys.tolist()))


def test_lost_are_inputs_that_never_arrived():
    assert lost(np.array([0, 1, 1, 3, 99]), 5) == 2
    assert lost(np.empty(0, np.int64), 5) == 5


def course(schedule, changes=(), silent=()):
    """A line every 10 ms, here a second late; none in the times that are silent."""
    begun = 1_700_000_000_000_000
    at = np.arange(0, int(schedule.ends[-1]) * 1_000_000, 10_000)
    for begin, end in silent:
        at = at[(at < begin * 1e6) | (at >= end * 1e6)]
    rows = np.arange(len(at))
    since = np.maximum(begun, begun + at - 20_000)
    return Course(schedule, Arrivals(begun + at, since, rows, rows), list(changes), failed=7)


def doubled(decided, tasks):
    return ScalingChange(decided, decided + 2, Scale({"split": tasks, "count": tasks}, "busy"))


def test_steps_and_overshoot_of_a_run_count_as_in_the_simulation():
    load = Schedule(((10, 65), (20, 130), (20, 65)))
    assert set_up(load).phases == [(0, 10, 65), (10, 30, 130), (30, 50, 65)]
    assert rises(load) == [1]
    run = course(load, [doubled(12, 2), doubled(20, 4), doubled(35, 1)])
    assert [run.outcome.steps(phase) for phase in range(3)] == [0, 2, 1]
    assert run.outcome.steps_up(1) == 1
    assert run.outcome.overshoot(1) == 2
    assert run.outcome.settled(1) == 12
    assert list(run.tasks("count")[[0, 13, 14, 21, 22, 49]]) == [1, 1, 2, 2, 4, 1]


def test_who_knows_the_load_takes_the_right_step_each_time():
    changes = right_changes(LOAD, 5.0)
    assert [change.scale.parallelism["count"] for change in changes] == [2, 4, 2, 1]
    assert [change.decided for change in changes] == [35, 95, 155, 215]
    run = course(LOAD, changes)
    assert [run.outcome.steps(phase) for phase in range(5)] == [0, 1, 1, 1, 1]
    assert max(run.outcome.overshoot(phase) for phase in rises(LOAD)) == 1
    assert [change.scale.parallelism["split"] for change in right_changes(QUICK_LOAD, 5.0)] == [2, 1]


def test_gaps_of_a_run_are_those_around_its_changes():
    load = Schedule(((10, 65), (20, 130)))
    run = course(load, [doubled(12, 2), doubled(28.5, 1)], silent=[(5, 8), (13, 13.5)])
    assert run.gaps(2.0) == pytest.approx([0.51, 0.01], abs=0.011)
    assert run.longest_gap() == pytest.approx(3.01, abs=0.011)
    p50, p95 = run.latency(50, 95)
    assert np.isnan(p50[[5, 6, 7]]).all()
    assert p95[20] == pytest.approx(20)
    assert (run.rate()[[4, 5, 13]] == [100, 0, 50]).all()


def test_a_run_is_drawn_and_written(tmp_path):
    load = Schedule(((3, 65), (3, 130)))
    run = course(load, [doubled(1, 2)], silent=[(2, 4)])
    draw({"rate": run, "storm": run}, tmp_path / "results" / "scaling.png")
    assert (tmp_path / "results" / "scaling.png").read_bytes().startswith(b"\x89PNG")
    told = json.loads(json.dumps(run.as_json(), allow_nan=False))
    assert told["p95 ms"][2] is None
    assert told["tasks"]["count"] == [1, 1, 1, 2, 2, 2]
    assert told["changes"][0]["reason"] == "busy"


# ---- scaling -------------------------------------------------------------------------------------------


def test_time_outs_count_over_all_buses_of_a_topology():
    seen = replacement_scaling._Failures()
    for bus in ([3, 5], [0, 2], [None, 1]):
        looks = iter({} if failed is None else {"numbers": SimpleNamespace(failed=failed)} for failed in bus)
        each = SimpleNamespace(totals=looks.__next__)
        seen.update(each)
        seen.update(each)
    assert seen.total == 8


def test_the_policies_run_as_they_were_simulated():
    assert settings_of("rate")["scaling.cool_down"] == 20
    assert settings_of("failures")["scaling.cool_down"] == 12
    assert settings_of("rate")["scaling.interval"] == 2


def test_storm_is_told_when_to_rebalance_and_read_as_penstock_is(tmp_path, monkeypatch):
    asked = {}

    def run(schedule, changes, out, wait, **more):
        asked.update(schedule=schedule, changes=changes, wait=wait, **more)
        whole = course(QUICK_LOAD, silent=[(16, 20)])
        arrived = whole.arrived
        np.stack([arrived.came, arrived.since, arrived.number, arrived.count], axis=1).tofile(out)
        moments = [{"at": whole.begun + at * 1_000_000, "executors": 2} for at in (15, 45)]
        return {"failed": 4, "changes": moments}

    monkeypatch.setattr(replacement_scaling, "run_storm_rebalance", run)
    results = Results("replacement")
    found = replacement_scaling.rebalanced(tmp_path / "arrivals", QUICK_LOAD, 1)
    replacement_scaling._report_storm(results, "storm, wait 1 s", found, 20.0)
    assert asked["schedule"] == "10:65,30:130,20:65"
    assert asked["changes"] == "15:2,45:1"
    assert (asked["split-ms"], asked["count-ms"], asked["wait"]) == (10, 2.5, 1)
    assert [(change.decided, change.done) for change in found.changes] == [(15, 16), (45, 46)]
    (bar,) = results.bars
    assert (bar["name"], bar["value"]) == ("replace.storm_gap_s", pytest.approx(4.01, abs=0.011))


def test_a_policy_is_reported_with_its_steps():
    results = Results("replacement")
    replacement_scaling._report(results, "rate", course(LOAD, right_changes(LOAD, 5.0), silent=[(35.1, 35.3)]))
    bars = {bar["name"]: bar["value"] for bar in results.bars}
    assert bars["replace.rate.steps"] == 1
    assert bars["replace.rate.overshoot"] == 1
    assert bars["replace.rate.gap_s"] == pytest.approx(0.21, abs=0.011)
    assert results.rows[0]["steps by phase"] == "0 1 1 1 1"
