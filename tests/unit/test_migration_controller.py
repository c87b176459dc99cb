"""The enactor of data migration: what tasks report becomes route changes; and what may be migrated at all."""

import pytest

from penstock import BasicBolt, RichBolt, Settings, Spout, TopologyBuilder
from penstock.driver.migration_controller import MigrationController
from penstock.metrics.stats import TaskStats
from penstock.plan.planner import make_plan
from penstock.plan.render import as_text
from penstock.protocol.commands import SetMigrationRoutes


class Source(Spout):
    def declare_output_fields(self, declarer):
        declarer.declare("key", "n")
        declarer.declare("key", "n", stream="direct", direct=True)

    def next_tuple(self): ...


class Partials(BasicBolt):
    emits_partials = True

    def declare_output_fields(self, declarer):
        declarer.declare("key", "n")

    def execute(self, tup, collector):
        collector.emit(tup)


class Whole(Partials):
    emits_partials = False


class Merge(BasicBolt):
    merges_partials = True

    def execute(self, tup, collector): ...


class Plain(RichBolt):
    def execute(self, tup): ...


def build(partials=None, merge=None, tasks=3, group=lambda bolt: bolt.fields_grouping("source", "key")):
    builder = TopologyBuilder()
    builder.set_spout("source", Source())
    group(builder.set_bolt("partials", partials or Partials(), tasks))
    builder.set_bolt("merge", merge or Merge()).fields_grouping("partials", "key")
    return builder.build("t", Settings())


# ---- who may be migrated -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("topology", "why"),
    [
        (build(), ""),
        (build(group=lambda bolt: bolt.shuffle_grouping("source")), ""),
        (build(partials=Whole()), "does not emit partials"),
        (build(tasks=1), "has one task"),
        (build(merge=Plain()), "'merge', which reads it, does not merge partials"),
        (build(group=lambda bolt: bolt.all_grouping("source")), "reads 'source' by all"),
        (build(group=lambda bolt: bolt.global_grouping("source")), "reads 'source' by global"),
        (build(group=lambda bolt: bolt.direct_grouping("source", stream="direct")), "reads 'source' by direct"),
    ],
    ids=["fields", "shuffle", "whole", "one task", "unmerged", "all", "global", "direct"],
)
def test_the_plan_says_who_is_migrated_and_why_not(topology, why):
    plan = make_plan(topology)
    found = plan.not_migrated["partials"]
    assert found.startswith(why) if why else not found
    assert plan.migratable == (() if why else ("partials",))
    text = as_text(topology, plan).split("data migration between tasks")[1]
    line = next(line for line in text.splitlines() if line.split()[:1] == ["partials"])
    assert line.split(maxsplit=1)[1] == (f"no: {found}" if why else "yes")
    assert MigrationController(plan, topology.settings).idle == bool(why)


def test_the_plan_tells_the_truth_about_fused_bolts():
    """They have no way to choose: their tuples never leave the worker."""
    builder = TopologyBuilder()
    builder.set_spout("source", Source(), 2)
    builder.set_bolt("partials", Partials(), 2).local_or_shuffle_grouping("source")
    builder.set_bolt("merge", Merge()).fields_grouping("partials", "key")
    topology = builder.build("t", Settings())
    plan = make_plan(topology)
    assert plan.migratable == ()
    assert "parts            yes" not in as_text(topology, plan)


# ---- the loop ----------------------------------------------------------------------------------------------


def stats(arrived, received, peak, busy=1.0, demand=0.0):
    return TaskStats(
        arrived=arrived,
        arrived_bytes=arrived * 10,
        received=received,
        received_bytes=received * 10,
        peak=peak,
        capacity=100,
        busy=busy,
        demand=demand,
    )


@pytest.fixture
def plan():
    return make_plan(build())


def decide(migrations, plan, now, *tasks):
    return migrations.decide(now, dict(zip(plan.tasks_of["partials"], tasks, strict=True)))


IDLE = stats(0, 0, 0)


def test_the_first_call_only_remembers(plan):
    assert decide(MigrationController(plan, Settings()), plan, 0.0, stats(1000, 10, 95), IDLE, IDLE) == []


def test_an_overloaded_task_is_migrated_to_the_lightest_and_restored(plan):
    migrations = MigrationController(plan, Settings())
    one, two, three = plan.tasks_of["partials"]
    decide(migrations, plan, 0.0, stats(0, 0, 0), stats(0, 0, 0), stats(0, 0, 0))
    (order,) = decide(migrations, plan, 0.5, stats(500, 400, 95), stats(400, 400, 40), stats(300, 300, 5))
    assert order == SetMigrationRoutes("partials", {one: three}, 1)
    assert decide(migrations, plan, 1.0, stats(500, 450, 60), stats(500, 500, 40), stats(600, 600, 30)) == []
    (order,) = decide(migrations, plan, 1.5, stats(500, 480, 49), stats(600, 600, 40), stats(900, 900, 30))
    assert order == SetMigrationRoutes("partials", {}, 2)
    texts = [decision.text for decision in migrations.decisions]
    assert "partials/0 → partials/2" in texts[0]
    assert "95% of a queue, more than 80%" in texts[0]
    assert "partials/0 restored" in texts[1]
    assert "less than 50%" in texts[1]
    assert (two, migrations.decisions[0].time) == (two, 0.5)


def test_a_full_queue_that_shrinks_is_left_alone(plan):
    migrations = MigrationController(plan, Settings())
    decide(migrations, plan, 0.0, stats(100, 0, 99), IDLE, IDLE)
    assert decide(migrations, plan, 0.5, stats(110, 60, 95), IDLE, IDLE) == []


def test_who_has_slowed_its_senders_is_judged_by_what_it_would_be_sent(plan):
    """Backpressure makes its input equal to its output; its queue is full all the same."""
    migrations = MigrationController(plan, Settings())
    decide(migrations, plan, 0.0, stats(1000, 900, 85), IDLE, IDLE)
    (order,) = decide(migrations, plan, 0.5, stats(1050, 950, 85, demand=1000.0), IDLE, IDLE)
    assert list(order.routes) == [plan.tasks_of["partials"][0]]


def test_without_a_light_task_nothing_is_migrated(plan):
    migrations = MigrationController(plan, Settings())
    decide(migrations, plan, 0.0, IDLE, IDLE, IDLE)
    heavy = stats(500, 300, 95)
    assert decide(migrations, plan, 0.5, heavy, heavy, heavy) == []


def test_a_task_that_has_not_reported_yet_is_no_error(plan):
    migrations = MigrationController(plan, Settings())
    migrations.decide(0.0, {})
    assert migrations.decide(0.5, {}) == []
    assert migrations.decide(0.5, {}) == [], "no time has passed"
    one = plan.tasks_of["partials"][0]
    (order,) = migrations.decide(1.0, {one: stats(500, 300, 95)})
    assert order.routes


def test_versions_grow_from_the_plans(plan):
    migrations = MigrationController(plan, Settings())
    decide(migrations, plan, 0.0, IDLE, IDLE, IDLE)
    versions = []
    for number in range(1, 5):
        busy = stats(number * 500, number * 300, 95) if number % 2 else stats(number * 500, number * 300, 10)
        versions += [order.version for order in decide(migrations, plan, number * 0.5, busy, IDLE, IDLE)]
    assert versions == [plan.routes.version + n for n in (1, 2, 3, 4)]
