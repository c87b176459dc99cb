"""Decides which components may have their data migrated between tasks (Sun 2022)."""

from __future__ import annotations

from penstock.topology.builder import Topology, TopologyNode
from penstock.topology.components import BaseBolt
from penstock.topology.groupings import All, Direct, Global

_FIXED = (All, Direct, Global)
"""Groupings that determine the receiving tasks exactly, so that no other task may get the tuples."""


def why_not_migrated(topology: Topology, node: TopologyNode, fused_with: str) -> str:
    """The reason why tuples for one task of the component are never sent to another of its tasks. Empty if they
    may be. ``fused_with``: a component that it reads inside its workers; empty if there is none."""
    bolt = node.component
    if not isinstance(bolt, BaseBolt) or not bolt.emits_partials:
        return "does not emit partials"
    if node.tasks < 2:
        return "has one task"
    if fused_with:
        return f"is fused with '{fused_with}'"
    for subscription in node.inputs:
        if isinstance(subscription.grouping, _FIXED):
            return f"reads '{subscription.component}' by {subscription.grouping} grouping"
    for stream in node.streams.values():
        for reader, _ in topology.subscribers(stream):
            if not (isinstance(reader.component, BaseBolt) and reader.component.merges_partials):
                return f"'{reader.id}', which reads it, does not merge partials"
    return ""
