"""Which bolts get more or fewer tasks by themselves (SPEC 4), and why not. By hand any bolt can be scaled."""

from __future__ import annotations

from penstock.plan.planner import FusedGroup, find_fused_groups
from penstock.topology.builder import Topology, TopologyNode
from penstock.topology.components import BaseBolt
from penstock.topology.groupings import Fields, LocalOrShuffle, NoneGrouping, PartialKey, Shuffle
from penstock.topology.validation import brings_together

_SHARED = (Shuffle, NoneGrouping, LocalOrShuffle, Fields, PartialKey)
"""Each tuple goes to one task, and with twice as many tasks to one of twice as many. What a grouping of the user's
does with them is not known, one derived from these included."""
_MEET_NOWHERE = (Shuffle, NoneGrouping, LocalOrShuffle, PartialKey)
"""Tuples of one key come to several tasks."""


def why_fixed(topology: Topology, component: str) -> str:
    """Why a component never scales by itself; empty where it does. Bolts that are fused scale together or not at
    all, for alone one of them would lose its fused group: a bolt is fixed if one that shares its workers is."""
    node = topology.nodes[component]
    if node.is_spout:
        return "is a spout, and positions in its source belong to its tasks"
    if why := _own_reason(node):
        return why
    group = fused_group_of(topology, component)
    if topology.nodes[group[0]].is_spout:
        return f"is fused with spout '{group[0]}', which keeps its tasks"
    for other in group:
        if other != component and (why := _own_reason(topology.nodes[other])):
            return f"shares its workers with '{other}', which {why}"
    return ""


def fused_group_of(topology: Topology, component: str) -> FusedGroup:
    """The components that share workers with this one, itself included, each after the one it is fused with."""
    return next(group for group in find_fused_groups(topology) if component in group)


def _own_reason(node: TopologyNode) -> str:
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
    if node.tasks == 1 and isinstance(bolt, BaseBolt) and bolt.merges_partials and not bolt.emits_partials:
        for subscription in node.inputs:
            if type(subscription.grouping) in _MEET_NOWHERE:
                return f"merges partials, which by {subscription.grouping} grouping meet only in one task"
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
