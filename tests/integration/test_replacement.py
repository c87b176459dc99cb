"""A running topology is replaced by another form of itself: same results, one owner of the state, and the old form
continues if the new one cannot run."""

import math
import os
import signal
import threading
import time
from collections import Counter

import pyarrow.dataset as ds
import pytest

from penstock import Delivery, Settings, TopologyBuilder, Workers
from penstock.connectors.parquet import ParquetSink
from penstock.errors import NotEnoughSlots, PenstockError, StateError, TopologyError, TopologyFailed
from penstock.spark import capacity
from tests.fault.components import Count, Numbers, Pass
from tests.helpers import MANY, settings_with

pytestmark = pytest.mark.spark

PATIENCE = 90.0  # seconds; enough on a busy machine
SLOW = 500  # tuples per second, so that the input outlasts any replacement
LEVELS = pytest.mark.parametrize("delivery", ["at_most_once", "at_least_once", "exactly_once"])


class Shows(Count):
    """Says at the end what it has counted."""

    def prepare(self, conf, context):
        super().prepare(conf, context)
        self.publish = context.publish

    def cleanup(self):
        self.publish(sorted(self.counts.items()))


class Tens(Shows):
    """Changed code: counts each tuple as ten."""

    def execute(self, tup, collector):
        self.counts[tup.key] += 10
        collector.emit(tup)


class Refuses(Shows):
    def prepare(self, conf, context):
        raise ValueError("no such table")


class KeepsAList(Shows):
    """A state of another form under the same name."""

    def prepare(self, conf, context):
        context.state.value("counts", [])


class Dies(Shows):
    """Ends the process that loads it, where that is not the one that made it."""

    def __init__(self):
        self.made_by = os.getpid()

    def __setstate__(self, state):
        self.__dict__.update(state)
        if os.getpid() != self.made_by:
            os.kill(os.getpid(), signal.SIGKILL)


class Slow(Count):
    """Takes five milliseconds for a tuple: 200 a second at most."""

    def execute(self, tup, collector):
        time.sleep(0.005)
        super().execute(tup, collector)


class World:
    """A topology that runs, and what it must have done in the end."""

    def __init__(self, run, delivery, count=20_000):
        self.count, self.output = count, str(run.folder / "output")
        self.settings = Settings(
            delivery=Delivery(delivery, state_dir=str(run.folder / "state"), epoch_interval=0.5),
            workers=Workers(MANY),
        )
        self.running = run.submit(self.topology())

    def topology(self, bolt=None, tasks=2, name="replaced", **ids):
        builder = TopologyBuilder()
        builder.set_spout("numbers", Numbers(self.count, 1_000_000), 2).set_max_rate(SLOW)
        builder.set_bolt("pass", Pass(), 1).shuffle_grouping("numbers")
        counts = ids.get("counts", "count")
        builder.set_bolt(counts, bolt or Shows(), tasks).fields_grouping("pass", "key")
        builder.set_bolt("sink", ParquetSink(self.output)).shuffle_grouping(counts)
        return builder.build(name, self.settings)

    def until(self, condition, what):
        assert self.running.internals.server.wait(condition, PATIENCE), (
            f"{what}\n{self.running.status().to_json()}"
        )

    def executed(self):
        return self.running.internals.bus.totals()["count"].executed

    def scale_aside(self, tasks):
        """In a thread, and the list that its error comes to."""
        failed = []

        def scale():
            try:
                self.running.scale({"count": tasks})
            except PenstockError as error:
                failed.append(error)

        thread = threading.Thread(target=scale)
        thread.start()
        return thread, failed

    def goes_on(self):
        before = self.executed()
        self.until(lambda: self.executed() > before, "it goes on")

    def finish(self):
        """Ends it when all input is through; what was counted, and the rows in the output."""
        self.running.set_max_rate("numbers", math.inf)
        self.until(lambda: self.executed() >= 2 * self.count, "all input is counted")
        self.running.kill()
        shown = self.running.internals.bus.published()["count"]
        assert len({key for key, _ in shown}) == len(shown), "every key has one owner"
        table = ds.dataset(self.output, format="parquet").to_table(columns=["origin", "n"])
        return dict(shown), Counter(zip(table["origin"].to_pylist(), table["n"].to_pylist(), strict=True))

    def oracle(self):
        return dict(Counter(f"key-{n % 50}" for n in range(self.count) for _ in range(2)))

    def rows(self):
        return Counter({(origin, n): 1 for origin in (0, 1) for n in range(self.count)})


@LEVELS
def test_results_are_the_same_across_doublings_and_halvings(run, delivery):
    world = World(run, delivery)
    for tasks in (4, 1, 3):
        done = world.running.scale({"count": tasks})
        assert done.parallelism["count"] == tasks
        assert len(world.running.internals.plan.tasks_of["count"]) == tasks
        world.goes_on()
    counts, rows = world.finish()
    assert rows.keys() == world.rows().keys()
    if delivery != "at_least_once":  # nothing has failed, so nothing came twice
        assert counts == world.oracle()
        assert rows == world.rows()
    assert all(counts[key] >= number for key, number in world.oracle().items())
    notes = [note.text for note in world.running.internals.bus.notes() if note.kind == "replacement"]
    assert [text.partition(";")[0] for text in notes] == [
        "by hand: count 2 → 4, 6 → 8 workers",
        "by hand: count 4 → 1, 8 → 5 workers",
        "by hand: count 1 → 3, 5 → 7 workers",
    ]


def test_changed_code_goes_on_with_the_state(run):
    world = World(run, "exactly_once")
    world.until(lambda: world.executed() > 500, "some are counted")
    before = world.executed()
    world.running.replace(world.topology(Tens(), 4))
    counts, rows = world.finish()
    assert rows == world.rows()
    ones = 40_000 - (sum(counts.values()) - 40_000) / 9
    assert before <= ones < 40_000, "those before count one, those after it ten"


@pytest.mark.parametrize("bolt", [Refuses(), KeepsAList()], ids=["prepare", "state"])
def test_a_form_that_does_not_run_is_taken_back(run, bolt):
    world = World(run, "exactly_once")
    with pytest.raises(PenstockError, match=r"no such table|was called, but it"):
        world.running.replace(world.topology(bolt))
    counts, rows = world.finish()
    assert (counts, rows) == (world.oracle(), world.rows())


def test_what_cannot_take_over_is_refused_before_anything_happens(run, spark):
    world = World(run, "exactly_once")
    world.running.commit()
    with pytest.raises(
        TopologyError, match="the new topology has 'other', but a replacement must keep 'replaced'"
    ):
        world.running.replace(world.topology(name="other"))
    with pytest.raises(
        StateError,
        match=r"component 'count': .* holds state of its 2 tasks, but the topology has no such component",
    ):
        world.running.replace(world.topology(counts="renamed"))
    with pytest.raises(TopologyError, match="a spout keeps its number of tasks"):
        world.running.scale({"numbers": 3})
    free = capacity.total_slots(spark) - world.running.internals.plan.workers
    capacity.reserve(spark, 1, free - 2)
    try:
        with pytest.raises(NotEnoughSlots, match=r"in addition to the 6 in use.*--stop-and-go"):
            world.running.scale({"count": 4})
        before = world.running.internals.supervisor.runs.current.number
        done = world.running.scale({"count": 3}, pause=True)
        assert done.parallelism["count"] == 3
        assert world.running.internals.supervisor.runs.current.number > before
    finally:
        capacity.release(1)
    counts, rows = world.finish()
    assert (counts, rows) == (world.oracle(), world.rows())
    assert not world.running.internals.restarts


def test_a_form_that_dies_while_it_stands_by_is_dropped(run):
    world = World(run, "exactly_once")
    with pytest.raises(TopologyFailed, match="its replacement could not be made ready"):
        world.running.replace(world.topology(Dies()))
    counts, rows = world.finish()
    assert (counts, rows) == (world.oracle(), world.rows())
    assert not world.running.internals.restarts


def test_a_topology_that_ends_is_not_replaced(run):
    world = World(run, "at_least_once")
    thread, failed = world.scale_aside(4)
    server = world.running.internals.server
    world.until(lambda: len(server.registries) == 2, "the second one begins")
    world.running.kill()
    thread.join(PATIENCE)
    assert failed
    assert world.running.state == "ended"
    with pytest.raises(TopologyFailed, match="not running"):
        world.running.scale({"count": 4})


def test_a_bolt_that_cannot_keep_up_gets_more_tasks_by_itself(run):
    scaling = {"scaling": "rate", "scaling_interval": 1.0, "scaling_cool_down": 5.0, "scaling_most": 4}
    builder = TopologyBuilder()
    builder.set_spout("numbers", Numbers(1_000_000, 1_000_000)).set_max_rate(350)
    builder.set_bolt("count", Slow(), 1).fields_grouping("numbers", "key")
    settings = settings_with(delivery="at_least_once", state_dir=str(run.folder / "state"), **scaling)
    running = run.submit(builder.build("grows", settings))
    assert running.internals.server.wait(lambda: running.internals.replacements, PATIENCE), running.status()
    assert len(running.internals.plan.tasks_of["count"]) > 1
    decided = [note for note in running.status().decisions if note.kind in ("scaling", "replacement")]
    assert [note.kind for note in decided][:2] == ["scaling", "replacement"]
    assert "count: the busiest task can process" in decided[0].text
    before = running.internals.bus.totals()["count"].executed
    assert running.internals.server.wait(
        lambda: running.internals.bus.totals()["count"].executed > before + 500, PATIENCE
    )
    assert not running.internals.restarts
