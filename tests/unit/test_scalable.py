"""Which bolts are scaled automatically, and topologies with another parallelism."""

import pytest

from penstock import BasicBolt, DedupBolt, Spout, TopologyBuilder, TopologyError
from penstock.driver.requests import ReplaceRequest
from penstock.plan.planner import make_plan
from penstock.plan.render import as_text
from penstock.plan.scalable import kept_numbers, why_fixed
from penstock.topology.groupings import CustomGrouping, Shuffle
from tests.helpers import settings_with


class Source(Spout):
    def declare_output_fields(self, declarer):
        declarer.declare("key", "n")
        declarer.declare("key", "n", stream="direct", direct=True)

    def next_tuple(self): ...


class Pass(BasicBolt):
    def declare_output_fields(self, declarer):
        declarer.declare("key", "n")

    def execute(self, tup, collector):
        collector.emit(tup)


class Merge(Pass):
    merges_partials = True


class First(CustomGrouping):
    def prepare(self, targets):
        self._first = targets.tasks[:1]

    def choose(self, values):
        return self._first


class OwnShuffle(Shuffle):
    """A user's grouping, which may route in any way."""


def build(group=lambda bolt: bolt.fields_grouping("source", "key"), bolt=None, parallelism=2, **settings):
    builder = TopologyBuilder()
    builder.set_spout("source", Source(), 2)
    group(builder.set_bolt("work", bolt or Pass(), parallelism))
    builder.set_bolt("end", Pass()).global_grouping("work")
    return builder.build("t", settings_with(**settings))


def fused(first=lambda bolt: bolt, last=lambda bolt: bolt, **settings):
    """source -> a => b => c: three bolts in two workers."""
    builder = TopologyBuilder()
    builder.set_spout("source", Source())
    first(builder.set_bolt("a", Pass(), 2).shuffle_grouping("source"))
    builder.set_bolt("b", Pass(), 2).local_or_shuffle_grouping("a")
    last(builder.set_bolt("c", Pass(), 2).local_or_shuffle_grouping("b"))
    return builder.build("t", settings_with(**settings))


# ---- who scales --------------------------------------------------------------------------------------------

SHARED = "reads 'source' by {} grouping, so more tasks would not share the load"


@pytest.mark.parametrize(
    ("topology", "why"),
    [
        (build(), ""),
        (build(lambda bolt: bolt.shuffle_grouping("source")), ""),
        (build(lambda bolt: bolt.none_grouping("source")), ""),
        (build(lambda bolt: bolt.partial_key_grouping("source", "key")), ""),
        (build(lambda bolt: bolt.local_or_shuffle_grouping("source"), parallelism=3), ""),
        (build(lambda bolt: bolt.local_or_shuffle_grouping("source"), fusing=False), ""),
        (
            build(lambda bolt: bolt.local_or_shuffle_grouping("source")),
            "is fused with spout 'source', which keeps its tasks",
        ),
        (build(lambda bolt: bolt.shuffle_grouping("source").set_fixed()), "is set fixed"),
        (build(lambda bolt: bolt.all_grouping("source")), SHARED.format("all")),
        (build(lambda bolt: bolt.global_grouping("source")), SHARED.format("global")),
        (build(lambda bolt: bolt.direct_grouping("source", stream="direct")), SHARED.format("direct")),
        (build(lambda bolt: bolt.grouping("source", First())), SHARED.format("custom")),
        (build(lambda bolt: bolt.grouping("source", OwnShuffle())), SHARED.format("shuffle")),
        (build(lambda bolt: bolt.shuffle_grouping("source").set_num_tasks(4)), ""),
        (
            build(lambda bolt: bolt.shuffle_grouping("source").set_num_tasks(5)),
            "has 5 tasks, which 2 executors cannot share evenly",
        ),
        (build(bolt=Merge(), parallelism=1), ""),
        (
            build(lambda bolt: bolt.shuffle_grouping("source"), Merge(), 1),
            "merges partials, and shuffle grouping brings them together only in one task",
        ),
        (build(bolt=DedupBolt("key", "n"), parallelism=1), ""),
        (
            build(lambda bolt: bolt.shuffle_grouping("source"), DedupBolt("key", "n"), 1),
            "compares tuples, and shuffle grouping brings them together only in one task",
        ),
    ],
)
def test_the_plan_says_who_scales_and_why_not(topology, why):
    assert why_fixed(topology, "work") == why
    text = as_text(topology, make_plan(topology)).split("\nscaling\n")[1]
    line = next(line for line in text.splitlines() if line.split()[0] == "work")
    assert line.split(maxsplit=1)[1] == (f"no: {why}" if why else "yes")
    assert "source" not in [line.split()[0] for line in text.splitlines()], "spouts are not asked about"
    if not why:
        topology.scaled({"work": 2 * topology.nodes["work"].parallelism})  # raises nothing


def test_spouts_do_not_scale():
    assert why_fixed(build(), "source") == "is a spout, and positions in its source belong to its tasks"


def test_a_fused_group_is_fixed_as_a_whole():
    assert [why_fixed(fused(), each) for each in "abc"] == ["", "", ""]
    topology = fused(last=lambda bolt: bolt.set_fixed())
    shared = "shares its workers with 'c', which is set fixed"
    assert [why_fixed(topology, each) for each in "abc"] == [shared, shared, "is set fixed"]
    topology = fused(last=lambda bolt: bolt.set_fixed(), fusing=False)
    assert [why_fixed(topology, each) for each in "abc"] == ["", "", "is set fixed"]


# ---- another parallelism -----------------------------------------------------------------------------------


def test_a_scaled_copy_has_other_numbers_and_nothing_else():
    topology = build()
    scaled = topology.scaled({"work": 8})
    assert (scaled.nodes["work"].parallelism, scaled.nodes["work"].tasks) == (8, 8)
    assert (topology.nodes["work"].parallelism, topology.nodes["work"].tasks) == (2, 2)
    assert scaled.scaled({"work": 2}) == topology
    assert list(scaled.nodes) == list(topology.nodes)
    assert make_plan(scaled).workers == make_plan(topology).workers + 6
    assert topology.scaled({}) == topology


@pytest.mark.parametrize(
    ("old", "tasks", "new", "found"), [(2, 4, 4, 8), (4, 8, 2, 4), (2, 6, 3, 9), (2, 5, 1, 3)]
)
def test_more_tasks_than_executors_scale_by_the_same_factor(old, tasks, new, found):
    topology = build(lambda bolt: bolt.shuffle_grouping("source").set_num_tasks(tasks), parallelism=old)
    node = topology.scaled({"work": new}).nodes["work"]
    assert (node.parallelism, node.tasks) == (new, found)


def test_fused_bolts_stay_fused_when_they_are_scaled_together():
    topology = fused()
    assert len(make_plan(topology).stages) == 2
    assert len(make_plan(topology.scaled({"a": 4, "b": 4, "c": 4})).stages) == 2
    assert len(make_plan(topology.scaled({"a": 4, "b": 4})).stages) == 3


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"wrok": 2}, ("topology 't'", "it has no component 'wrok' to scale", "'wrok'", "mean 'work'?")),
        ({"xyz": 2}, ("topology 't'", "'xyz'", "The components are: source, work, end.")),
        (
            {"source": 4},
            (
                "component 'source' (test_scalable.py:",
                "keeps its number of tasks",
                "cannot get 4",
                "Scale the bolts",
            ),
        ),
        ({"work": 0}, ("component 'work' (test_scalable.py:", "at least 1", "not 0")),
        ({"work": 1.5}, ("component 'work' (test_scalable.py:", "at least 1", "not 1.5")),
    ],
)
def test_what_cannot_be_scaled(change, parts):
    with pytest.raises(TopologyError) as caught:
        build().scaled(change)
    for part in parts:
        assert part in str(caught.value), str(caught.value)


def test_the_copy_is_checked_as_the_first_was():
    topology = build(lambda bolt: bolt.shuffle_grouping("source"), Merge(), 1)
    with pytest.raises(TopologyError, match="its 2 tasks merge partials"):
        topology.scaled({"work": 2})


# ---- a replacement after a scaling ------------------------------------------------------------------------


def test_a_replacement_keeps_what_was_scaled_while_it_ran():
    declared = build(parallelism=2)
    assert kept_numbers(declared, declared.scaled({"work": 5}), build(parallelism=2)) == {"work": 5}


def test_a_number_that_the_new_file_changes_is_the_new_one():
    declared = build(parallelism=2)
    assert kept_numbers(declared, declared.scaled({"work": 5}), build(parallelism=3)) == {}


def test_nothing_is_kept_where_nothing_was_scaled():
    assert kept_numbers(build(), build(), build()) == {}


def test_a_request_keeps_the_numbers_of_the_form_that_runs_when_it_is_carried_out():
    declared = build(parallelism=2)
    request = ReplaceRequest(build(parallelism=2), "changed code", declared=declared)
    assert request.form(declared) is request.topology
    assert request.form(declared.scaled({"work": 5})).nodes["work"].parallelism == 5
    assert request.kept(declared.scaled({"work": 5})) == {"work": 5}


def test_a_request_of_the_same_topology_takes_the_form_that_runs_then():
    running = build(parallelism=2)
    assert ReplaceRequest(None, "all nodes").form(running) is running
    assert ReplaceRequest(None, "by hand", parallelism={"work": 5}).form(running).nodes["work"].parallelism == 5
