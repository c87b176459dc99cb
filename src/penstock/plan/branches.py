"""Decides which components may have their data migrated between tasks (Sun 2022)."""

from __future__ import annotations

from penstock.topology.builder import Topology, TopologyNode
from penstock.topology.components import BaseBolt
from penstock.topology.groupings import All, Direct, Forward, Global

_FIXED = (All, Direct, Global)
"""Groupings that determine the receiving tasks exactly, so that no other task may get the tuples."""


def why_not_migrated(topology: Topology, node: TopologyNode, fused_with: str) -> str:
    """The reason why tuples for one task of the component are never sent to another of its tasks. Empty if they
    may be. ``fused_with``: a component that it reads inside its workers; empty if there is none.

    A component that may be migrated begins a branch, which ends where its partials are merged. On the way there
    may be other bolts that emit partials, in any number: of those behind a forward grouping, each task belongs to
    one branch; the others get the tuples of all branches, and begin branches themselves."""
    bolt = node.component
    if not isinstance(bolt, BaseBolt) or not bolt.emits_partials:
        return "does not emit partials"
    if node.tasks < 2:
        return "has one task"
    if fused_with:
        return f"is fused with '{fused_with}'"
    for subscription in node.data_inputs:
        if isinstance(subscription.grouping, Forward):
            return f"is a hop of the branches of '{subscription.component}'"
        if isinstance(subscription.grouping, _FIXED):
            return f"reads '{subscription.component}' by {subscription.grouping} grouping"
    return _why_not_merged(topology, node)


def _why_not_merged(topology: Topology, node: TopologyNode) -> str:
    """The reason why the partials of a component are not merged behind it. Empty if they are."""
    for stream in node.streams.values():
        for reader, subscription in topology.subscribers(stream):
            bolt = reader.component
            if isinstance(bolt, BaseBolt) and bolt.merges_partials:
                continue
            if not isinstance(bolt, BaseBolt) or not bolt.emits_partials:
                return f"'{reader.id}', which reads it, does not merge partials"
            if isinstance(subscription.grouping, _FIXED):
                return f"'{reader.id}' reads '{node.id}' by {subscription.grouping} grouping"
            if why := _why_not_merged(topology, reader):
                return why
    return ""
