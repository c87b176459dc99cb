"""Decides which components are paired, so that they always share workers, and explains why others do not."""

from __future__ import annotations

from collections.abc import Collection

from penstock.plan.model import LOCAL, FusedGroup
from penstock.topology.builder import Subscription, Topology, TopologyNode
from penstock.topology.groupings import LocalOrShuffle

Pair = tuple[str, ...]
"""Components that are always fused, each after the one it is paired with. One without a partner is alone."""


def find_pairs(topology: Topology, blocking: Collection[str] | None = None) -> list[Pair]:
    """Pair each bolt with its parent if it reads only that component, by local-or-shuffle grouping, and both have
    the same number of executors and tasks. Task i then always sends to task i, so a hop between processes would
    gain nothing. ``blocking``: components that stay alone; by default those that are declared blocking."""
    if blocking is None:
        blocking = [node.id for node in topology.nodes.values() if node.blocking]
    pairs: list[list[str]] = []
    pair_of: dict[str, list[str]] = {}
    for node in in_order(topology):
        parent = _partner(topology, node) if topology.settings.transport.fusing else None
        if parent is not None and parent not in blocking and node.id not in blocking:
            pair = pair_of[parent]
        else:
            pair = []
            pairs.append(pair)
        pair.append(node.id)
        pair_of[node.id] = pair
    return [tuple(pair) for pair in pairs]


def why_not_fused(
    topology: Topology,
    node: TopologyNode,
    subscription: Subscription,
    source: FusedGroup,
    target: FusedGroup,
    workers: int | None,
    blocking: Collection[str],
) -> str:
    """The reason in a few words why a component is not in the fused group of a component it reads. ``source`` and
    ``target``: the groups of the two. ``workers``: the limit that the topology was planned with."""
    if not topology.settings.transport.fusing:
        return "fusing is off"
    for component in (subscription.component, node.id):
        if component in blocking:
            return f"{component} is blocking"
    executors = sum(each.parallelism for each in topology.nodes.values() if each.id not in blocking)
    if workers is None or workers >= executors:
        return "each executor has its own worker"
    widest = max(source.workers, target.workers)
    if widest > 1 and type(subscription.grouping) not in LOCAL:
        return f"{subscription.grouping} grouping, and {widest} workers share the load"
    for component in (subscription.component, node.id):
        if topology.nodes[component].parallelism < widest:
            few = topology.nodes[component].parallelism
            return f"{component} has {few} executor{'s' if few > 1 else ''}, and {widest} workers share the load"
    return "another worker takes part of the load"


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


def _partner(topology: Topology, node: TopologyNode) -> str | None:
    parents = {subscription.component for subscription in node.data_inputs}
    if len(parents) != 1 or not all(isinstance(i.grouping, LocalOrShuffle) for i in node.data_inputs):
        return None
    parent = topology.nodes[next(iter(parents))]
    same = (parent.parallelism, parent.tasks) == (node.parallelism, node.tasks)
    return parent.id if same and node.tasks == node.parallelism else None
