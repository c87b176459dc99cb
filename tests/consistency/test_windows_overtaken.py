"""Windows over a restart that begins with tuples which a marker has overtaken."""

import pytest

from penstock import Reduce, Spout, TopologyBuilder
from penstock.aggregates import Count
from penstock.state import manifest as manifests
from penstock.state.store import StateStore
from penstock.testing import CaptureBolt, LocalRunner
from penstock.worker.bolts import BatchExecutor
from tests.helpers import settings_with

ROWS = [(f"k{n % 5}", n * 0.1) for n in range(400)]


class OneByOne(Spout):
    """Emits one row in a turn, so each is a range of its own."""

    def declare_output_fields(self, declarer):
        declarer.declare(("key", str), ("time", float))

    def open(self, conf, context, collector):
        self._collector, self.position = collector, context.state.value("position", 0)

    def next_tuple(self):
        if self.position.value < len(ROWS):
            self._collector.emit(ROWS[self.position.value])
            self.position.value += 1


def windows(tasks=3):
    reduce = Reduce("key", rows=Count()).window("time", length=2.0, slide=2.0, lateness=0.0)
    builder = TopologyBuilder()
    builder.set_spout("source", OneByOne()).set_max_rate(2000)
    builder.set_bolt("parts", reduce.partials(), tasks).fields_grouping("source", "key")
    builder.set_bolt("total", reduce.merged(), 2).fields_grouping("parts", "key")
    builder.set_bolt("out", CaptureBolt()).global_grouping("total")
    builder.set_bolt("late", CaptureBolt()).global_grouping("total", stream="late")
    given = {
        "delivery": "exactly_once",
        "epoch_interval": 0.004,
        "overtake_after": 0.0,
        "migration": False,
        "linger": 1e-5,
        "busy_linger": 1e-5,
    }
    return builder.build("t", settings_with(**given))


def oracle(until):
    found = {}
    for key, time in ROWS:
        end = (time // 2.0 + 1) * 2.0
        if end <= until:
            found[key, end] = found.get((key, end), 0) + 1
    return found


def waiting(folder, component):
    found = manifests.newest(StateStore(folder).child("t"))
    entries = {} if found is None or found.overtaken is None else found.overtaken.entries
    return sum(part.rows for key, each in entries.items() if key.startswith(component) for part in each.parts)


@pytest.fixture
def closed(monkeypatch):
    """The keys of the tasks that process nothing now, as if each of their calls took very long."""
    keys, run = set(), BatchExecutor.run
    monkeypatch.setattr(BatchExecutor, "run", lambda self: self.key not in keys and run(self))
    return keys


@pytest.mark.parametrize("heavy", range(3))
@pytest.mark.parametrize(("turns", "tasks"), [(1, 3), (3, 3), (1, 4)])
def test_a_window_waits_for_the_partials_of_tuples_that_waited_at_the_start(heavy, turns, tasks, folder, closed):
    """The heavy task's tuples wait, and later ones are migrated to another task."""
    late, found, overtaken = [], {}, 0
    closed.add(f"parts/{heavy}")

    def look(runner):
        late.extend(runner.captured("late"))
        found.update({(tup.key, tup.window_end): tup.rows for tup in runner.captured("out")})

    for turn in range(turns):
        runner = LocalRunner(windows(), seed=turn, folder=folder)
        runner.run(0.06)
        look(runner)
        overtaken = waiting(folder, f"parts/{heavy}")
    runner = LocalRunner(windows(tasks), seed=9, folder=folder)
    runner.reroute("parts", {heavy: (heavy + 1) % tasks})
    while runner.component("source")[0].position.value < len(ROWS):
        runner.run(0.01)
    closed.clear()
    runner.run_until_idle()
    look(runner)
    assert overtaken > 10, "or it proves nothing"
    assert late == []
    assert found == oracle(ROWS[-1][1])


def test_what_waited_for_partials_completes_its_windows(folder, closed):
    """Nothing follows the tuples that waited, so they have to complete the windows themselves."""
    closed.add("parts/0")
    runner = LocalRunner(windows(), folder=folder)
    while runner.component("source")[0].position.value < len(ROWS):
        runner.run(0.01)
    runner.commit()
    found = {(tup.key, tup.window_end): tup.rows for tup in runner.captured("out")}
    assert waiting(folder, "parts/0") > 10
    closed.clear()
    runner = LocalRunner(windows(), folder=folder)
    runner.run_until_idle()
    found.update({(tup.key, tup.window_end): tup.rows for tup in runner.captured("out")})
    assert runner.captured("late") == []
    assert found == oracle(ROWS[-1][1])
