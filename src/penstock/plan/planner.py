"""The planner: a list of small passes, each a pure function.

chains -> stages -> tasks -> slots and routes -> streams and edges
"""

from __future__ import annotations

from penstock.plan.branches import why_not_migrated
from penstock.plan.model import Edge, Plan, RouteTable, SlotId, Stage, Task
from penstock.topology.builder import Node, Topology
from penstock.topology.groupings import LocalOrShuffle
from penstock.topology.streams import Stream

Chain = tuple[str, ...]


def make_plan(topology: Topology) -> Plan:
    """Plan a checked topology."""
    chains = find_chains(topology)
    stages = assign_stages(topology, chains)
    tasks = number_tasks(topology)
    routes = place_tasks(topology, stages, tasks)
    streams, edges = number_streams(topology, chains)
    chained = {component for chain in chains for component in chain[1:]}
    bolts = [node for node in topology.nodes.values() if not node.is_spout]
    why_not = {node.id: why_not_migrated(topology, node, chained) for node in bolts}
    plan = Plan(topology.name, stages, tasks, streams, edges, routes, why_not)
    plan.validate()
    return plan


def find_chains(topology: Topology) -> list[Chain]:
    """Components that share slots. A bolt joins its parent's chain when all it reads comes from that one
    component by local-or-shuffle grouping, with the same number of executors and tasks on both sides: then
    task i always sends to task i, and a hop would buy nothing."""
    chains: list[list[str]] = []
    chain_of: dict[str, list[str]] = {}
    for node in in_order(topology):
        parent = _chain_parent(topology, node) if topology.settings.chaining else None
        if parent is not None:
            chain = chain_of[parent]
        else:
            chain = []
            chains.append(chain)
        chain.append(node.id)
        chain_of[node.id] = chain
    return [tuple(chain) for chain in chains]


def assign_stages(topology: Topology, chains: list[Chain]) -> tuple[Stage, ...]:
    """A chain's stage is its longest distance from a spout; its slots are one per executor."""
    chain_of = {component: chain for chain in chains for component in chain}
    depth: dict[Chain, int] = {}
    for node in in_order(topology):
        chain = chain_of[node.id]
        if node.id == chain[0]:
            parents = [depth[chain_of[i.component]] + 1 for i in node.inputs]
            depth[chain] = max(parents, default=0)
    stages = []
    for index in range(max(depth.values()) + 1):
        members = tuple(chain for chain in chains if depth[chain] == index)
        slots = sum(topology.nodes[chain[0]].parallelism for chain in members)
        stages.append(Stage(index, members, slots))
    return tuple(stages)


def number_tasks(topology: Topology) -> tuple[Task, ...]:
    """Task ids run from 1 over the components in the order they were set."""
    tasks: list[Task] = []
    for node in topology.nodes.values():
        tasks += [Task(len(tasks) + 1 + index, node.id, index) for index in range(node.tasks)]
    return tuple(tasks)


def place_tasks(topology: Topology, stages: tuple[Stage, ...], tasks: tuple[Task, ...]) -> RouteTable:
    """The first route table: each executor has a slot of its own, tasks are spread evenly and in order."""
    slot_of: dict[int, SlotId] = {}
    for stage in stages:
        first = 0
        for chain in stage.chains:
            executors = topology.nodes[chain[0]].parallelism
            for task in tasks:
                if task.component in chain:
                    executor = task.index * executors // topology.nodes[task.component].tasks
                    slot_of[task.id] = SlotId(stage.index, first + executor)
            first += executors
    return RouteTable(0, {task.id: slot_of[task.id] for task in tasks})


def number_streams(topology: Topology, chains: list[Chain]) -> tuple[tuple[Stream, ...], tuple[Edge, ...]]:
    """Streams get numbers for the frame header; each subscription becomes an edge."""
    chain_of = {component: chain for chain in chains for component in chain}
    streams = tuple(stream for node in topology.nodes.values() for stream in node.streams.values())
    edges = tuple(
        Edge(number, node.id, subscription.grouping, chain_of[stream.component] is chain_of[node.id])
        for number, stream in enumerate(streams)
        for node, subscription in topology.subscribers(stream)
    )
    return streams, edges


def in_order(topology: Topology) -> list[Node]:
    """The components, each after all it reads from; otherwise as they were set."""
    ordered: list[Node] = []
    placed: set[str] = set()
    waiting = list(topology.nodes.values())
    while waiting:
        ready = [node for node in waiting if all(i.component in placed for i in node.inputs)]
        ordered += ready
        placed |= {node.id for node in ready}
        waiting = [node for node in waiting if node.id not in placed]
    return ordered


def _chain_parent(topology: Topology, node: Node) -> str | None:
    parents = {subscription.component for subscription in node.inputs}
    if len(parents) != 1 or not all(isinstance(i.grouping, LocalOrShuffle) for i in node.inputs):
        return None
    parent = topology.nodes[next(iter(parents))]
    same = (parent.parallelism, parent.tasks) == (node.parallelism, node.tasks)
    return parent.id if same and node.tasks == node.parallelism else None
