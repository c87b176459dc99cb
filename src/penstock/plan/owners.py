"""Who owns the keys of a component's state: what its input's groupings say of that (SPEC 4).

Pure, and the same before a replacement is begun as when a start finds state of another number of tasks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from penstock.plan.model import Edge, Plan
from penstock.state.shares import Share
from penstock.topology.groupings import All, Fields, Global, LocalOrShuffle, NoneGrouping, PartialKey, Shuffle
from penstock.topology.hashing import hash_keys

_NOBODYS = (Shuffle, NoneGrouping, LocalOrShuffle, PartialKey)
"""Any task may get any tuple, or one of two: tasks that become one put together what they have."""


@dataclass(frozen=True)
class Owners:
    """The rule by which keys have owners. Commands carry it to the workers."""

    fields: int = 0
    """A key's owner is found by the hash of so many fields; 0: it has none."""
    first: bool = False
    """The first task has all of them."""

    def share(self, index: int, before: int, now: int) -> Share:
        """What the task of that index takes over."""
        hash = partial(hash_keys, fields=self.fields) if self.fields else None
        return Share(index, before, now, hash, self.first, self.fields == 1)


def owner_rule(plan: Plan, component: str) -> Owners | None:
    """The rule for a component's keys; None where ``why_not_rescaled`` has a reason."""
    found = _judge(plan, component)
    return found if isinstance(found, Owners) else None


def why_not_rescaled(plan: Plan, component: str) -> str:
    """Why a component that keeps state must keep its number of tasks; empty where it need not."""
    found = _judge(plan, component)
    return found if isinstance(found, str) else ""


def grouped_by(plan: Plan, component: str) -> tuple[str, ...]:
    """The fields that a component's input is grouped by; of several inputs grouped by fields, the first's."""
    by_fields = (edge.grouping for edge in _inputs(plan, component) if type(edge.grouping) is Fields)
    return next((grouping.key_fields() for grouping in by_fields), ())


def _judge(plan: Plan, component: str) -> Owners | str:
    # By exact type: a subclass may route in its own way.
    edges = _inputs(plan, component)
    if not edges:
        return "is a spout: what it has read belongs to its task"
    kinds = {type(edge.grouping) for edge in edges}
    if Fields in kinds:
        edges = [edge for edge in edges if type(edge.grouping) is not All]  # what all get is there to steer them
        kinds.discard(All)
    for edge in edges:
        if type(edge.grouping) not in (Fields, Global, *_NOBODYS):
            return f"reads {_input(plan, edge)}, which does not say whose a key is"
    if kinds == {Global}:
        return Owners(first=True)
    if kinds <= set(_NOBODYS):
        return Owners()
    counts = {len(edge.grouping.key_fields()) for edge in edges}
    if kinds == {Fields} and len(counts) == 1:
        return Owners(fields=counts.pop())
    inputs = " and ".join(_input(plan, edge) for edge in edges)
    return f"reads {inputs}, which do not give a key the same owner"


def _inputs(plan: Plan, component: str) -> list[Edge]:
    return [edge for edge in plan.edges if edge.target == component]


def _input(plan: Plan, edge: Edge) -> str:
    return f"'{plan.source_of(edge)}' by {edge.grouping} grouping"
