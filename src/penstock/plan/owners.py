"""Decides which task owns the keys in a component's state, from the groupings of its inputs.

The same rules are used to validate a replacement before it starts and to distribute state when a query run finds
the state of a different number of tasks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from penstock.plan.model import Edge, Plan
from penstock.state.shares import Share
from penstock.topology.groupings import All, Fields, Global, LocalOrShuffle, NoneGrouping, PartialKey, Shuffle
from penstock.topology.hashing import hash_keys

_UNOWNED = (Shuffle, NoneGrouping, LocalOrShuffle, PartialKey)
"""Groupings by which no single task owns a key. When tasks are merged, their states are merged as well."""


@dataclass(frozen=True)
class OwnerRule:
    """The rule that assigns keys to tasks. Commands carry it to the workers."""

    fields: int = 0
    """The number of fields whose hash determines the owner of a key. 0: keys have no owner."""
    first: bool = False
    """True: the first task owns all keys."""

    def share(self, index: int, before: int, now: int) -> Share:
        """The share of the state that the task with this index takes over when ``before`` tasks become ``now``
        tasks."""
        hash = partial(hash_keys, fields=self.fields) if self.fields else None
        return Share(index, before, now, hash, self.first, self.fields == 1)


def owner_rule(plan: Plan, component: str) -> OwnerRule | None:
    """The rule for the keys of a component. None if ``why_not_rescaled`` returns a reason."""
    found = _judge(plan, component)
    return found if isinstance(found, OwnerRule) else None


def why_not_rescaled(plan: Plan, component: str) -> str:
    """The reason why a component with state must keep its number of tasks. Empty if it need not."""
    found = _judge(plan, component)
    return found if isinstance(found, str) else ""


def grouped_by(plan: Plan, component: str) -> tuple[str, ...]:
    """The fields by which the input of a component is grouped. If several inputs use fields grouping, those of the
    first."""
    by_fields = (edge.grouping for edge in plan.edges_to(component) if type(edge.grouping) is Fields)
    return next((grouping.key_fields() for grouping in by_fields), ())


def _judge(plan: Plan, component: str) -> OwnerRule | str:
    # Compares exact types, because a subclass may route differently.
    edges = plan.edges_to(component)
    if not edges:
        return "is a spout, and positions in its source belong to its tasks"
    kinds = {type(edge.grouping) for edge in edges}
    if kinds & {Fields, Global}:
        # a stream that every task gets carries control data, not keys
        edges = [edge for edge in edges if type(edge.grouping) is not All]
        kinds.discard(All)
    for edge in edges:
        if type(edge.grouping) not in (Fields, Global, *_UNOWNED):
            return f"reads {_input(plan, edge)}, which does not assign keys to tasks"
    if kinds == {Global}:
        return OwnerRule(first=True)
    if kinds <= set(_UNOWNED):
        return OwnerRule()
    counts = {len(edge.grouping.key_fields()) for edge in edges}
    if kinds == {Fields} and len(counts) == 1:
        return OwnerRule(fields=counts.pop())
    inputs = " and ".join(_input(plan, edge) for edge in edges)
    return f"reads {inputs}, which do not assign a key to the same task"


def _input(plan: Plan, edge: Edge) -> str:
    return f"'{plan.source_of(edge)}' by {edge.grouping} grouping"
