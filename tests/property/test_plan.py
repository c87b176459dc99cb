"""Random topologies: the plan is valid, and every tuple arrives as often as there are paths for it."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import BasicBolt, BatchBolt, TopologyBuilder, make_plan
from penstock.plan.model import WorkerId
from penstock.testing import LocalRunner, NumberSpout
from tests.helpers import settings_with

GROUPINGS = ["shuffle", "fields", "partial_key", "all", "global", "none", "local_or_shuffle"]
COUNT = 25  # tuples per spout task


class Tally(BasicBolt):
    """Counts its tuples and passes them on."""

    def __init__(self):
        self.seen = Counter()

    def declare_output_fields(self, declarer):
        declarer.declare(("task", int), ("n", int))

    def execute(self, tup, collector):
        self.seen[tuple(tup)] += 1
        collector.emit(tup)


class BatchTally(BatchBolt):
    """The same in batches."""

    def __init__(self):
        self.seen = Counter()

    declare_output_fields = Tally.declare_output_fields

    def execute_batch(self, batch, source, collector):
        self.seen.update(zip(*(column.to_pylist() for column in batch.columns), strict=True))
        collector.emit_batch(batch)


@st.composite
def graphs(draw):
    """Spouts (parallelism, tasks) and bolts (form, parallelism, tasks, inputs). Each bolt reads earlier
    components."""
    size = st.tuples(st.integers(1, 3), st.integers(0, 2)).map(lambda pair: (pair[0], sum(pair)))
    spouts = draw(st.lists(size, min_size=1, max_size=2))
    names = [f"s{number}" for number in range(len(spouts))]
    bolts = []
    for number in range(draw(st.integers(1, 5))):
        parents = draw(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True))
        inputs = [(parent, draw(st.sampled_from(GROUPINGS))) for parent in parents]
        bolts.append((draw(st.sampled_from([Tally, BatchTally])), *draw(size), inputs))
        names.append(f"b{number}")
    return spouts, bolts


def built(graph, **options):
    spouts, bolts = graph
    builder = TopologyBuilder()
    # Bolts first, because nothing may depend on the order in which components are added.
    for number, (form, parallelism, tasks, inputs) in enumerate(bolts):
        bolt = builder.set_bolt(f"b{number}", form(), parallelism).set_num_tasks(tasks)
        for parent, grouping in inputs:
            keys = ("n",) if grouping in ("fields", "partial_key") else ()
            getattr(bolt, f"{grouping}_grouping")(parent, *keys)
    for number, (parallelism, tasks) in enumerate(spouts):
        builder.set_spout(f"s{number}", NumberSpout(COUNT), parallelism).set_num_tasks(tasks)
    return builder.build("random", settings_with(**options))


def copies(graph):
    """Component -> spout -> how often each of the spout's tuples reaches the component."""
    spouts, bolts = graph
    paths = {f"s{number}": Counter({f"s{number}": 1}) for number in range(len(spouts))}
    for number, (_, _, tasks, inputs) in enumerate(bolts):
        paths[f"b{number}"] = Counter()
        for parent, grouping in inputs:
            for spout, times in paths[parent].items():
                paths[f"b{number}"][spout] += times * (tasks if grouping == "all" else 1)
    return paths


@given(graphs(), st.booleans())
def test_every_topology_gives_a_valid_plan(graph, fusing):
    topology = built(graph, fusing=fusing)
    plan = make_plan(topology)
    plan.validate()
    assert [task.id for task in plan.tasks] == list(range(1, len(plan.tasks) + 1))
    for node in topology.nodes.values():
        tasks = plan.tasks_of[node.id]
        workers = [plan.routes.worker_of[task] for task in tasks]
        assert len(tasks) == node.tasks
        assert len(set(workers)) == node.parallelism
        assert workers == sorted(workers)
        loads = Counter(workers).values()
        assert max(loads) - min(loads) <= 1
    assert len(plan.edges) == sum(len(node.inputs) for node in topology.nodes.values())
    stages = [component for stage in plan.stages for group in stage.fused_groups for component in group.components]
    assert sorted(stages) == sorted(topology.nodes)
    if not fusing:
        assert all(len(group.components) == 1 for stage in plan.stages for group in stage.fused_groups)


@given(graphs())
def test_a_frame_finds_its_way_from_any_worker_to_any_later_one(graph):
    plan = make_plan(built(graph))
    for source in plan.worker_ids():
        for target in plan.worker_ids():
            here = source
            for _ in range(target.stage - source.stage):
                here = WorkerId(here.stage + 1, plan.next_hop(here, target))
                assert 0 <= here.index < plan.stages[here.stage].workers
            assert here == target or target.stage <= source.stage


@settings(max_examples=25)
@given(graphs(), st.booleans())
def test_every_tuple_arrives_as_often_as_there_are_paths(graph, fusing):
    topology = built(graph, fusing=fusing, frame_bytes=400, inbox_capacity=20)
    paths = copies(graph)
    for seed in (0, 1):
        runner = LocalRunner(topology, seed=seed)
        runner.run_until_idle()
        assert runner.errors == []
        spout_of = {task: name for name, tasks in runner.plan.tasks_of.items() for task in tasks}
        for number in range(len(graph[1])):
            seen = sum((bolt.seen for bolt in runner.component(f"b{number}")), Counter())
            expected = {
                (task, n): paths[f"b{number}"][spout_of[task]]
                for task in spout_of
                if paths[f"b{number}"][spout_of[task]]
                for n in range(COUNT)
            }
            assert seen == expected
