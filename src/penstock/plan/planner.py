"""The planner: a sequence of passes, each of which is a pure function.

pairs -> fused groups (packing) -> stages -> tasks -> workers and routes -> streams and edges -> what may migrate
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from penstock.control.packing import UNCOUNTED_LOAD, Link, Part, in_dependency_order, pack
from penstock.plan.branches import why_not_migrated
from penstock.plan.fusing import Pair, find_pairs, why_not_fused
from penstock.plan.model import LOCAL, Edge, Fit, FusedGroup, Plan, RouteTable, Stage, Task, WorkerId
from penstock.topology.builder import Topology
from penstock.topology.components import BatchBolt, BatchSpout
from penstock.topology.streams import Stream

_TUPLE_HOP, _BATCH_HOP = 1.0, 0.4
"""What a hop is assumed to cost at each of its ends before anything is measured, as a share of the weight there.
Between tuple components as much as a light bolt, because values become Arrow columns and objects again. So two
cores alone are no reason for two workers, however many executors there are: the word count in one worker does four
fifths of the words of two, with a seventh of the latency. Between two batch components columns pass as they are:
in ``penstock bench ladder`` a hop takes a third of the time of the word count. A refit divides heavier work."""


def make_plan(topology: Topology, fit: Fit | None = None) -> Plan:
    """Make the plan of a validated topology. Without ``fit``, every executor has its own worker."""
    fit = fit or Fit()
    blocking = tuple(id for id, node in topology.nodes.items() if node.blocking or id in fit.blocking)
    pairs = find_pairs(topology, blocking)
    groups = pack_pairs(topology, pairs, fit, blocking)
    stages = assign_stages(topology, groups)
    tasks = number_tasks(topology)
    routes = place_tasks(topology, stages, tasks)
    streams, edges = make_edges(topology, pairs, groups, fit, blocking)
    fused_with = {edge.target: streams[edge.stream].component for edge in edges if edge.fused}
    bolts = [node for node in topology.nodes.values() if not node.is_spout]
    why_not = {node.id: why_not_migrated(topology, node, fused_with.get(node.id, "")) for node in bolts}
    plan = Plan(topology.name, stages, tasks, streams, edges, routes, why_not, fit, blocking)
    plan.validate()
    return plan


def pack_pairs(topology: Topology, pairs: Sequence[Pair], fit: Fit, blocking: Collection[str]) -> list[FusedGroup]:
    """Decide which pairs share workers. Each group comes after the groups it reads from."""
    pair_of = {component: pair for pair in pairs for component in pair}
    parts, links = parts_of(topology, pairs, fit, blocking)
    workers, light = fit.workers, UNCOUNTED_LOAD if fit.weights else 0.0
    if workers is None or not topology.settings.transport.fusing:
        workers = sum(part.parallelism for part in parts)
    packed = in_dependency_order(fit.groups or pack(parts, links, workers, fit.enough, light), links)
    return [
        FusedGroup(tuple(component for name in group.names for component in pair_of[name]), group.workers)
        for group in packed
    ]


def parts_of(
    topology: Topology, pairs: Sequence[Pair], fit: Fit, blocking: Collection[str]
) -> tuple[list[Part], list[Link]]:
    """The pairs and the streams between them, as the packing sees them. A part is named after the first component
    of its pair."""
    pair_of = {component: pair for pair in pairs for component in pair}
    weight = _all_weights(topology, fit.weights)
    parts = [
        Part(
            pair[0],
            sum(weight[component] for component in pair),
            topology.nodes[pair[0]].parallelism,
            pair[0] in blocking,
        )
        for pair in pairs
    ]
    local: dict[tuple[str, str], list[bool]] = {}
    for node in topology.nodes.values():
        for subscription in node.inputs:
            ends = pair_of[subscription.component][0], pair_of[node.id][0]
            if ends[0] != ends[1]:
                local.setdefault(ends, []).append(type(subscription.grouping) in LOCAL)
    traffic = {ends: float(len(every)) for ends, every in local.items()}
    if fit.traffic:
        traffic = dict.fromkeys(local, 0.0)
        for (source, target), tuples in fit.traffic.items():
            ends = pair_of.get(source, ("",))[0], pair_of.get(target, ("",))[0]
            if ends in traffic:
                traffic[ends] += tuples
    measured = bool(fit.traffic)
    in_batches = {pair[0] for pair in pairs if all(_in_batches(topology, component) for component in pair)}
    return parts, [
        Link(*ends, all(every), traffic[ends], measured, _BATCH_HOP if in_batches.issuperset(ends) else _TUPLE_HOP)
        for ends, every in local.items()
    ]


def _in_batches(topology: Topology, component: str) -> bool:
    return isinstance(topology.nodes[component].component, BatchSpout | BatchBolt)


def _all_weights(topology: Topology, measured: Mapping[str, float]) -> dict[str, float]:
    """The weight of every component. An executor of a component that was not measured weighs as much as the
    average of the measured ones."""
    known = [node for node in topology.nodes.values() if node.id in measured]
    executors = sum(node.parallelism for node in known)
    average = sum(measured[node.id] for node in known) / executors if executors else 1.0
    return {id: measured.get(id, average * node.parallelism) for id, node in topology.nodes.items()}


def assign_stages(topology: Topology, groups: Sequence[FusedGroup]) -> tuple[Stage, ...]:
    """Assign each fused group the stage of its longest distance from a group without inputs. ``groups``: each
    after the groups it reads from."""
    group_of = {component: group for group in groups for component in group.components}
    depth: dict[FusedGroup, int] = {}
    for group in groups:
        inputs = [i for component in group.components for i in topology.nodes[component].inputs]
        sources = {group_of[i.component] for i in inputs} - {group}
        depth[group] = max((depth[source] + 1 for source in sources), default=0)
    order = list(topology.nodes)
    return tuple(
        Stage(
            index,
            tuple(
                sorted(
                    (group for group in groups if depth[group] == index),
                    key=lambda group: min(order.index(component) for component in group.components),
                )
            ),
        )
        for index in range(max(depth.values()) + 1)
    )


def number_tasks(topology: Topology) -> tuple[Task, ...]:
    """Number the tasks from 1, over the components in the order in which they were added."""
    tasks: list[Task] = []
    for node in topology.nodes.values():
        tasks += [Task(len(tasks) + 1 + index, node.id, index) for index in range(node.tasks)]
    return tuple(tasks)


def place_tasks(topology: Topology, stages: tuple[Stage, ...], tasks: tuple[Task, ...]) -> RouteTable:
    """Make the first route table: the tasks of a component are distributed over its executors, and the executors
    over the workers of the fused group, evenly and in order."""
    worker_of: dict[int, WorkerId] = {}
    for stage in stages:
        first = 0
        for group in stage.fused_groups:
            for task in tasks:
                if task.component in group.components:
                    node = topology.nodes[task.component]
                    executor = executor_of(task.index, node.parallelism, node.tasks)
                    worker = executor * group.workers // node.parallelism
                    worker_of[task.id] = WorkerId(stage.index, first + worker)
            first += group.workers
    return RouteTable(0, {task.id: worker_of[task.id] for task in tasks})


def executor_of(index: int, parallelism: int, tasks: int) -> int:
    """The executor that runs task ``index`` of a component."""
    return index * parallelism // tasks


def make_edges(
    topology: Topology,
    pairs: Sequence[Pair],
    groups: Sequence[FusedGroup],
    fit: Fit,
    blocking: Collection[str],
) -> tuple[tuple[Stream, ...], tuple[Edge, ...]]:
    """Number the streams for the frame header, and make an edge for each subscription."""
    pair_of = {component: pair for pair in pairs for component in pair}
    group_of = {component: group for group in groups for component in group.components}
    streams = tuple(stream for node in topology.nodes.values() for stream in node.streams.values())
    edges = []
    for number, stream in enumerate(streams):
        for node, subscription in topology.subscribers(stream):
            source, target = group_of[stream.component], group_of[node.id]
            fused = source is target
            paired = pair_of[stream.component] is pair_of[node.id]
            why = (
                "" if fused else why_not_fused(topology, node, subscription, source, target, fit.workers, blocking)
            )
            edges.append(Edge(number, node.id, subscription.grouping, fused, paired, why))
    return streams, tuple(edges)
