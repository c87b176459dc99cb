"""Decides which bolts the scaling policy may scale, and gives the reason if not. Any bolt can be scaled
manually."""

from __future__ import annotations

from penstock.plan.fusing import Pair, find_pairs
from penstock.topology.builder import Topology, TopologyNode
from penstock.topology.components import BaseBolt
from penstock.topology.groupings import Fields, Forward, LocalOrShuffle, NoneGrouping, PartialKey, Shuffle
from penstock.topology.validation import brings_together

_SHARED = (Shuffle, NoneGrouping, LocalOrShuffle, Fields, PartialKey)
"""Groupings that send each tuple to one task and distribute the load over any number of tasks. A user's grouping
is not included, even if it derives from one of these, because its behaviour is unknown."""
_SPREADS_KEYS = (Shuffle, NoneGrouping, LocalOrShuffle, PartialKey)
"""Groupings by which the tuples of one key reach several tasks."""


def why_fixed(topology: Topology, component: str) -> str:
    """The reason why a component is never scaled automatically. Empty if it may be. Paired bolts are scaled
    together or not at all, because scaling one alone would separate them. So a bolt is fixed if any bolt that it
    is paired with is fixed."""
    node = topology.nodes[component]
    if node.is_spout:
        return "is a spout, and positions in its source belong to its tasks"
    if why := _own_reason(node):
        return why
    pair = pair_of(topology, component)
    if topology.nodes[pair[0]].is_spout:
        return f"is fused with spout '{pair[0]}', which keeps its tasks"
    for other in pair:
        if other != component and (why := _own_reason(topology.nodes[other])):
            return f"shares its workers with '{other}', which {why}"
    return ""


def pair_of(topology: Topology, component: str) -> Pair:
    """The components that are scaled together with this one, including itself. Each comes after the one it is
    paired with."""
    return next(pair for pair in find_pairs(topology) if component in pair)


def _own_reason(node: TopologyNode) -> str:
    if node.fixed:
        return "is set fixed"
    for subscription in node.data_inputs:
        if isinstance(subscription.grouping, Forward):
            return f"is a hop of the branches of '{subscription.component}'"
        if type(subscription.grouping) not in _SHARED:
            way = f"reads '{subscription.component}' by {subscription.grouping} grouping"
            return f"{way}, so more tasks would not share the load"
    if node.tasks % node.parallelism:
        return f"has {node.tasks} tasks, which {node.parallelism} executors cannot share evenly"
    bolt = node.component
    for subscription in node.data_inputs:
        if not brings_together(bolt, subscription.grouping):
            return f"compares tuples, and {subscription.grouping} grouping brings them together only in one task"
    if node.tasks == 1 and isinstance(bolt, BaseBolt) and bolt.merges_partials and not bolt.emits_partials:
        for subscription in node.data_inputs:
            if type(subscription.grouping) in _SPREADS_KEYS:
                way = f"{subscription.grouping} grouping brings them together only in one task"
                return f"merges partials, and {way}"
    return ""


def kept_numbers(declared: Topology, current: Topology, new: Topology) -> dict[str, int]:
    """The parallelism that bolts keep when the running topology is replaced by ``new``: that of bolts which were
    scaled at run time and whose parallelism in the file did not change. ``declared`` is the topology as its file
    previously defined it, ``current`` the topology as it runs. A parallelism that the new file changes takes
    effect."""
    kept = {}
    for id, node in new.nodes.items():
        before, now = declared.nodes.get(id), current.nodes.get(id)
        if node.is_spout or before is None or now is None or now.is_spout:
            continue
        unchanged = (before.parallelism, before.tasks) == (node.parallelism, node.tasks)
        if unchanged and now.parallelism != node.parallelism:
            kept[id] = now.parallelism
    return kept
