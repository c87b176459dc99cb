"""The planner: a sequence of passes, each of which is a pure function.

fused groups -> stages -> tasks -> workers and routes -> streams and edges
"""

from __future__ import annotations

from penstock.plan.branches import why_not_migrated
from penstock.plan.model import Edge, Plan, RouteTable, Stage, Task, WorkerId
from penstock.topology.builder import Topology, TopologyNode
from penstock.topology.groupings import LocalOrShuffle
from penstock.topology.streams import Stream

FusedGroup = tuple[str, ...]


def make_plan(topology: Topology) -> Plan:
    """Make the plan of a validated topology."""
    fused_groups = find_fused_groups(topology)
    stages = assign_stages(topology, fused_groups)
    tasks = number_tasks(topology)
    routes = place_tasks(topology, stages, tasks)
    streams, edges = number_streams(topology, fused_groups)
    fused = {component for group in fused_groups for component in group[1:]}
    bolts = [node for node in topology.nodes.values() if not node.is_spout]
    why_not = {node.id: why_not_migrated(topology, node, fused) for node in bolts}
    plan = Plan(topology.name, stages, tasks, streams, edges, routes, why_not)
    plan.validate()
    return plan


def find_fused_groups(topology: Topology) -> list[FusedGroup]:
    """Group the components that share workers. A bolt joins the fused group of its parent if it reads only that
    component, by local-or-shuffle grouping, and both have the same number of executors and tasks. Task i then
    always sends to task i, so a hop between processes would gain nothing."""
    fused_groups: list[list[str]] = []
    fused_group_of: dict[str, list[str]] = {}
    for node in in_order(topology):
        parent = _fusing_parent(topology, node) if topology.settings.transport.fusing else None
        if parent is not None:
            group = fused_group_of[parent]
        else:
            group = []
            fused_groups.append(group)
        group.append(node.id)
        fused_group_of[node.id] = group
    return [tuple(group) for group in fused_groups]


def assign_stages(topology: Topology, fused_groups: list[FusedGroup]) -> tuple[Stage, ...]:
    """Assign each fused group the stage of its longest distance from a spout, with one worker per executor."""
    fused_group_of = {component: group for group in fused_groups for component in group}
    depth: dict[FusedGroup, int] = {}
    for node in in_order(topology):
        group = fused_group_of[node.id]
        if node.id == group[0]:
            parents = [depth[fused_group_of[i.component]] + 1 for i in node.inputs]
            depth[group] = max(parents, default=0)
    stages = []
    for index in range(max(depth.values()) + 1):
        members = tuple(group for group in fused_groups if depth[group] == index)
        workers = sum(topology.nodes[group[0]].parallelism for group in members)
        stages.append(Stage(index, members, workers))
    return tuple(stages)


def number_tasks(topology: Topology) -> tuple[Task, ...]:
    """Number the tasks from 1, over the components in the order in which they were added."""
    tasks: list[Task] = []
    for node in topology.nodes.values():
        tasks += [Task(len(tasks) + 1 + index, node.id, index) for index in range(node.tasks)]
    return tuple(tasks)


def place_tasks(topology: Topology, stages: tuple[Stage, ...], tasks: tuple[Task, ...]) -> RouteTable:
    """Make the first route table: each executor has its own worker; tasks are distributed evenly and in order."""
    worker_of: dict[int, WorkerId] = {}
    for stage in stages:
        first = 0
        for group in stage.fused_groups:
            executors = topology.nodes[group[0]].parallelism
            for task in tasks:
                if task.component in group:
                    executor = task.index * executors // topology.nodes[task.component].tasks
                    worker_of[task.id] = WorkerId(stage.index, first + executor)
            first += executors
    return RouteTable(0, {task.id: worker_of[task.id] for task in tasks})


def number_streams(
    topology: Topology, fused_groups: list[FusedGroup]
) -> tuple[tuple[Stream, ...], tuple[Edge, ...]]:
    """Number the streams for the frame header, and make an edge for each subscription."""
    fused_group_of = {component: group for group in fused_groups for component in group}
    streams = tuple(stream for node in topology.nodes.values() for stream in node.streams.values())
    edges = tuple(
        Edge(number, node.id, subscription.grouping, fused_group_of[stream.component] is fused_group_of[node.id])
        for number, stream in enumerate(streams)
        for node, subscription in topology.subscribers(stream)
    )
    return streams, edges


def in_order(topology: Topology) -> list[TopologyNode]:
    """Sort the components so that each comes after all components it reads. Otherwise they keep their order."""
    ordered: list[TopologyNode] = []
    placed: set[str] = set()
    waiting = list(topology.nodes.values())
    while waiting:
        ready = [node for node in waiting if all(i.component in placed for i in node.inputs)]
        ordered += ready
        placed |= {node.id for node in ready}
        waiting = [node for node in waiting if node.id not in placed]
    return ordered


def _fusing_parent(topology: Topology, node: TopologyNode) -> str | None:
    parents = {subscription.component for subscription in node.inputs}
    if len(parents) != 1 or not all(isinstance(i.grouping, LocalOrShuffle) for i in node.inputs):
        return None
    parent = topology.nodes[next(iter(parents))]
    same = (parent.parallelism, parent.tasks) == (node.parallelism, node.tasks)
    return parent.id if same and node.tasks == node.parallelism else None
