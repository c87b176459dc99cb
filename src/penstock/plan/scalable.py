"""Which bolts get more or fewer tasks by themselves (SPEC 4), and why not. By hand any bolt can be scaled."""

from __future__ import annotations

from penstock.plan.planner import Chain, find_chains
from penstock.topology.builder import Node, Topology
from penstock.topology.components import BaseBolt
from penstock.topology.groupings import Fields, LocalOrShuffle, NoneGrouping, PartialKey, Shuffle
from penstock.topology.validation import brings_together

_SHARED = (Shuffle, NoneGrouping, LocalOrShuffle, Fields, PartialKey)
"""Each tuple goes to one task, and with twice as many tasks to one of twice as many. What a grouping of the user's
does with them is not known, one derived from these included."""
_MEET_NOWHERE = (Shuffle, NoneGrouping, LocalOrShuffle, PartialKey)
"""Tuples of one key come to several tasks."""


def why_fixed(topology: Topology, component: str) -> str:
    """Why a component never scales by itself; empty where it does. Bolts that are chained scale together or not at
    all, for alone one of them would lose its chain: a bolt is fixed if one that shares its slots is."""
    node = topology.nodes[component]
    if node.is_spout:
        return "is a spout, and positions in its source belong to its tasks"
    if why := _own_reason(node):
        return why
    chain = chain_of(topology, component)
    if topology.nodes[chain[0]].is_spout:
        return f"is chained to spout '{chain[0]}', which keeps its tasks"
    for other in chain:
        if other != component and (why := _own_reason(topology.nodes[other])):
            return f"shares its slots with '{other}', which {why}"
    return ""


def chain_of(topology: Topology, component: str) -> Chain:
    """The components that share slots with this one, itself included, each after the one it is chained to."""
    return next(chain for chain in find_chains(topology) if component in chain)


def _own_reason(node: Node) -> str:
    if node.fixed:
        return "is set fixed"
    for subscription in node.inputs:
        if type(subscription.grouping) not in _SHARED:
            way = f"reads '{subscription.component}' by {subscription.grouping} grouping"
            return f"{way}, so its tasks do not share the work"
    if node.tasks % node.parallelism:
        return f"has {node.tasks} tasks that {node.parallelism} executors do not share evenly"
    bolt = node.component
    for subscription in node.inputs:
        if not brings_together(bolt, subscription.grouping):
            return f"compares tuples, which by {subscription.grouping} grouping meet only in one task"
    if node.tasks == 1 and isinstance(bolt, BaseBolt) and bolt.merges_parts and not bolt.in_parts:
        for subscription in node.inputs:
            if type(subscription.grouping) in _MEET_NOWHERE:
                return f"merges parts, which by {subscription.grouping} grouping meet only in one task"
    return ""


def kept_numbers(declared: Topology, current: Topology, new: Topology) -> dict[str, int]:
    """Numbers of tasks that a replacement by ``new`` keeps: of bolts that were scaled while the topology ran, and
    whose number in the file is what it was. ``declared`` is the topology as its file had it before, ``current`` as
    it runs. A number that the new file changes is the new one's."""
    kept = {}
    for id, node in new.nodes.items():
        before, now = declared.nodes.get(id), current.nodes.get(id)
        if node.is_spout or before is None or now is None or now.is_spout:
            continue
        unchanged = (before.parallelism, before.tasks) == (node.parallelism, node.tasks)
        if unchanged and now.parallelism != node.parallelism:
            kept[id] = now.parallelism
    return kept
