"""The planner: stages, workers, fused groups, tasks and routes of small topologies, and how plans are rendered."""

from textwrap import dedent

import pytest

from penstock import Spout, TopologyBuilder, make_plan
from penstock.plan.model import WorkerId
from penstock.plan.render import as_mermaid, as_text
from penstock.testing import CaptureBolt, FeederSpout
from tests.helpers import Pass, settings_with


class TwoStreams(Spout):
    def declare_output_fields(self, declarer):
        declarer.declare(("word", str), "n")
        declarer.declare("late", stream="late")
        declarer.declare("unread", stream="unread", direct=True)

    def next_tuple(self):
        pass


def spout_of(*parallelism):
    """A builder with spouts s0, s1 ... of these parallelisms."""
    builder = TopologyBuilder()
    for number, executors in enumerate(parallelism):
        builder.set_spout(f"s{number}", FeederSpout("x"), executors)
    return builder


def planned(builder, **settings):
    plan = make_plan(builder.build("t", settings_with(**settings)))
    plan.validate()
    return plan


def layout(plan):
    return [tuple(group.components for group in stage.fused_groups) for stage in plan.stages]


def workers(plan, component):
    return [str(plan.routes.worker_of[task]) for task in plan.tasks_of[component]]


def test_a_spout_alone():
    plan = planned(spout_of(2))
    assert layout(plan) == [(("s0",),)]
    assert (plan.workers, workers(plan, "s0")) == (2, ["0.0", "0.1"])
    assert [(task.id, task.component, task.index) for task in plan.tasks] == [(1, "s0", 0), (2, "s0", 1)]


def test_a_line_has_a_stage_per_component():
    builder = spout_of(1)
    builder.set_bolt("a", Pass("x"), 2).shuffle_grouping("s0")
    builder.set_bolt("b", CaptureBolt(), 3).fields_grouping("a", "x")
    plan = planned(builder)
    assert layout(plan) == [(("s0",),), (("a",),), (("b",),)]
    assert [stage.workers for stage in plan.stages] == [1, 2, 3]
    assert plan.tasks_of == {"s0": (1,), "a": (2, 3), "b": (4, 5, 6)}
    assert workers(plan, "b") == ["2.0", "2.1", "2.2"]
    assert not any(edge.fused for edge in plan.edges)


def test_components_of_one_stage_stand_side_by_side():
    builder = spout_of(2)
    builder.set_bolt("a", CaptureBolt(), 2).shuffle_grouping("s0")
    builder.set_bolt("b", CaptureBolt(), 3).shuffle_grouping("s0")
    plan = planned(builder)
    assert layout(plan)[1] == (("a",), ("b",))
    assert (workers(plan, "a"), workers(plan, "b")) == (["1.0", "1.1"], ["1.2", "1.3", "1.4"])


def test_more_tasks_than_executors_share_workers_evenly_and_in_order():
    builder = spout_of(1)
    builder.set_bolt("a", CaptureBolt(), 2).shuffle_grouping("s0").set_num_tasks(5)
    plan = planned(builder)
    assert workers(plan, "a") == ["1.0", "1.0", "1.0", "1.1", "1.1"]
    assert plan.routes.tasks_of(WorkerId(1, 0)) == (2, 3, 4)
    assert plan.workers == 3


def test_equal_local_components_are_one_fused_group():
    builder = spout_of(2)
    builder.set_bolt("a", Pass("x"), 2).local_or_shuffle_grouping("s0")
    builder.set_bolt("b", CaptureBolt(), 2).local_or_shuffle_grouping("a")
    plan = planned(builder)
    assert layout(plan) == [(("s0", "a", "b"),)]
    assert plan.workers == 2
    assert workers(plan, "s0") == workers(plan, "a") == workers(plan, "b") == ["0.0", "0.1"]
    assert all(edge.fused for edge in plan.edges)


def test_fused_groups_do_not_depend_on_the_order_of_the_calls():
    builder = TopologyBuilder()
    builder.set_bolt("b", CaptureBolt(), 2).local_or_shuffle_grouping("a")
    builder.set_bolt("a", Pass("x"), 2).local_or_shuffle_grouping("s0")
    builder.set_spout("s0", FeederSpout("x"), 2)
    plan = planned(builder)
    assert layout(plan) == [(("s0", "a", "b"),)]
    assert plan.tasks_of == {"b": (1, 2), "a": (3, 4), "s0": (5, 6)}


@pytest.mark.parametrize("why", ["parallelism", "tasks", "tasks on both", "grouping", "setting", "two parents"])
def test_what_keeps_a_bolt_out_of_a_fused_group(why):
    builder = spout_of(2, 2)
    if why == "tasks on both":
        builder = TopologyBuilder()
        builder.set_spout("s0", FeederSpout("x"), 2).set_num_tasks(4)
    bolt = builder.set_bolt("a", CaptureBolt(), 3 if why == "parallelism" else 2)
    if why.startswith("tasks"):
        bolt.set_num_tasks(4)
    if why == "grouping":
        bolt.shuffle_grouping("s0")
    else:
        bolt.local_or_shuffle_grouping("s0")
    if why == "two parents":
        bolt.local_or_shuffle_grouping("s1")
    plan = planned(builder, fusing=why != "setting")
    assert layout(plan)[1] == (("a",),)
    assert not any(edge.fused for edge in plan.edges)


def test_a_fused_group_is_as_deep_as_its_head():
    builder = spout_of(1)
    builder.set_bolt("a", Pass("x"), 2).shuffle_grouping("s0")
    builder.set_bolt("b", Pass("x"), 2).local_or_shuffle_grouping("a")
    builder.set_bolt("c", CaptureBolt()).global_grouping("b")
    plan = planned(builder)
    assert layout(plan) == [(("s0",),), (("a", "b"),), (("c",),)]
    assert [(edge.target, edge.fused) for edge in plan.edges] == [("a", False), ("b", True), ("c", False)]


def test_a_diamond_meets_one_stage_later():
    builder = spout_of(1)
    builder.set_bolt("a", Pass("x")).shuffle_grouping("s0")
    builder.set_bolt("b", Pass("x")).shuffle_grouping("s0")
    builder.set_bolt("c", CaptureBolt()).shuffle_grouping("a").shuffle_grouping("b")
    assert layout(planned(builder)) == [(("s0",),), (("a",), ("b",)), (("c",),)]


def uneven_join():
    """s0 -> a -> b -> join, and s0 -> join over two relays."""
    builder = spout_of(2)
    builder.set_bolt("a", Pass("x"), 3).shuffle_grouping("s0")
    builder.set_bolt("b", Pass("x"), 2).shuffle_grouping("a")
    builder.set_bolt("join", CaptureBolt(), 4).fields_grouping("b", "x").fields_grouping("s0", "x")
    return builder


def test_a_join_stands_after_its_deepest_input():
    plan = planned(uneven_join())
    assert layout(plan) == [(("s0",),), (("a",),), (("b",),), (("join",),)]


def test_next_hop_reaches_the_target_whatever_the_distance():
    plan = planned(uneven_join())
    for source in (worker for worker in plan.worker_ids() if worker.stage == 0):
        for target in (worker for worker in plan.worker_ids() if worker.stage == 3):
            here, path = source, []
            while here != target:
                here = WorkerId(here.stage + 1, plan.next_hop(here, target))
                assert here in plan.worker_ids()
                path.append(here)
            assert len(path) == 3


def test_next_hop_to_the_following_stage_is_the_target():
    plan = planned(uneven_join())
    assert [plan.next_hop(WorkerId(0, 1), WorkerId(1, worker)) for worker in range(3)] == [0, 1, 2]


def test_relays_share_the_load():
    plan = planned(uneven_join())
    used = {plan.next_hop(WorkerId(0, s), WorkerId(3, t)) for s in range(2) for t in range(4)}
    assert used == {0, 1, 2}


def test_several_spouts_and_sinks():
    builder = spout_of(1, 2)
    builder.set_bolt("left", CaptureBolt()).shuffle_grouping("s0")
    builder.set_bolt("right", CaptureBolt(), 2).shuffle_grouping("s1")
    builder.set_bolt("both", CaptureBolt()).shuffle_grouping("s0").shuffle_grouping("s1")
    plan = planned(builder)
    assert layout(plan) == [(("s0",), ("s1",)), (("left",), ("right",), ("both",))]
    assert workers(plan, "s1") == ["0.1", "0.2"]
    assert [stage.workers for stage in plan.stages] == [3, 4]


def test_several_streams_have_numbers_and_edges_of_their_own():
    builder = TopologyBuilder()
    builder.set_spout("s", TwoStreams())
    builder.set_bolt("a", CaptureBolt()).shuffle_grouping("s").all_grouping("s", stream="late")
    plan = planned(builder)
    assert [(number, stream.name) for number, stream in plan.streams_of("s")] == [
        (0, "default"),
        (1, "late"),
        (2, "unread"),
    ]
    assert [[edge.grouping.name for edge in plan.edges_from(number)] for number in range(3)] == [
        ["shuffle"],
        ["all"],
        [],
    ]


def shown():
    builder = TopologyBuilder()
    builder.set_spout("lines", TwoStreams(), 2)
    builder.set_bolt("split", Pass("word", ("n", int)), 2).local_or_shuffle_grouping("lines")
    count = builder.set_bolt("count", Pass("word"), 2).fields_grouping("split", "word", "n")
    count.set_num_tasks(4).set_tick_interval(0.5)
    sink = builder.set_bolt("sink", CaptureBolt()).global_grouping("count")
    sink.shuffle_grouping("lines", stream="late")
    topology = builder.build("demo")
    return topology, make_plan(topology)


def test_the_plan_as_text():
    assert as_text(*shown()) == dedent("""\
        topology demo: 3 stages, 5 workers, 9 tasks

        stage 0  (2 workers)
          lines            spout  TwoStreams           workers 0-1  tasks 1-2
          split            bolt   Pass                 workers 0-1  tasks 3-4  fused with lines
        stage 1  (2 workers)
          count            bolt   Pass                 workers 0-1  tasks 5-8  tick 0.5 s
        stage 2  (1 worker)
          sink             bolt   CaptureBolt          workers 0  tasks 9

        streams
          lines (word: string, n)
            -> split  local_or_shuffle  (fused: no hop)
          lines:late (late)
            -> sink  shuffle  (2 hops: each executor has its own worker)
          lines:unread (unread)  direct
            -> no subscriber
          split (word, n: int64)
            -> count  fields(word, n)  (1 hop: each executor has its own worker)
          count (word)
            -> sink  global  (1 hop: each executor has its own worker)

        hops of a tuple between workers
          lines -> sink  2 hops

        data migration between tasks
          split            no: does not emit partials
          count            no: does not emit partials
          sink             no: does not emit partials

        scaling
          split            no: is fused with spout 'lines', which keeps its tasks
          count            yes
          sink             no: reads 'count' by global grouping, so more tasks would not share the load""")


def test_the_plan_as_mermaid():
    assert as_mermaid(*shown()) == dedent("""\
        graph LR
          subgraph s0["stage 0"]
            c0(["lines ×2"])
            c1["split ×2"]
          end
          subgraph s1["stage 1"]
            c2["count ×2"]
          end
          subgraph s2["stage 2"]
            c3["sink ×1"]
          end
          c0 ==>|"local_or_shuffle"| c1
          c0 -->|"shuffle · late"| c3
          c1 -->|"fields(word, n)"| c2
          c2 -->|"global"| c3""")


def test_two_bolts_fused_with_one_parent_both_name_it():
    builder = spout_of(1)
    builder.set_bolt("a", CaptureBolt()).local_or_shuffle_grouping("s0")
    builder.set_bolt("b", CaptureBolt()).local_or_shuffle_grouping("s0")
    topology = builder.build("t")
    text = as_text(topology, make_plan(topology))
    assert [row.count("fused with s0") for row in text.splitlines() if " bolt " in row] == [1, 1]
