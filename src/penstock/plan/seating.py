"""Who sits where: a start's slots take seats, which are Spark's tasks, on the nodes where they are wanted.

Spark spreads the tasks of a stage over the nodes as it likes, about evenly. So that a node has seats enough
for all slots wanted there, a stage may have more seats than slots. In those nobody takes nothing runs, but Spark
keeps them, with a task slot and a process each, as long as the query lives; a slot may move into one meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.plan.model import Plan, SlotId

_MARGIN = 1  # seats more on each node than are wanted there: "about" has been off by one


@dataclass(frozen=True)
class Placement:
    """Where slots are to be."""

    nodes: Mapping[SlotId, str]
    """The node each slot is wanted on; a slot that is not named goes anywhere."""
    exact: bool = True
    """A slot that cannot be where it is wanted is an error. Else it goes where there is a seat, and no seat is
    there only in case that Spark spreads them unevenly."""


def seats_for(plan: Plan, placement: Placement, nodes: int, spare: int = 0) -> tuple[int, ...]:
    """How many seats each stage needs, so that a node in ``nodes`` has enough of them; and so many ``spare`` ones
    on each, for slots of bolts to move into."""
    result = []
    for stage in plan.stages:
        wanted = Counter(node for slot, node in placement.nodes.items() if slot.stage == stage.index)
        fullest = max(wanted.values(), default=0) + (_MARGIN if placement.exact else 0)
        needed = max(stage.slots, fullest * nodes if wanted else 0)
        result.append(needed + (spare * nodes if stage.index else 0))
    return tuple(result)


def fitted(plan: Plan, seats: Sequence[int], room: int) -> tuple[int, ...]:
    """So many fewer of them that there is room for all, as long as every slot has one."""
    result = list(seats)
    spare = [count - stage.slots for count, stage in zip(seats, plan.stages, strict=True)]
    for _ in range(min(sum(spare), max(0, sum(seats) - room))):
        most = spare.index(max(spare))
        spare[most] -= 1
        result[most] -= 1
    return tuple(result)


def take_seats(
    plan: Plan, placement: Placement, seats: Mapping[SlotId, str]
) -> tuple[dict[SlotId, SlotId], list[str]]:
    """The seat of each slot, of those there are (with their nodes); and what could not be as it was wanted, in
    words. Every stage has as many seats as slots, or more."""
    taken: dict[SlotId, SlotId] = {}
    unmet: list[str] = []
    for stage in plan.stages:
        free = sorted(seat for seat in seats if seat.stage == stage.index)
        slots = [SlotId(stage.index, number) for number in range(stage.slots)]
        for slot in sorted(slots, key=lambda slot: slot not in placement.nodes):  # those that mind come first
            wanted = placement.nodes.get(slot)
            found = next((seat for seat in free if seats[seat] == wanted), None)
            if found is None and wanted is not None:
                unmet.append(f"slot {slot} on {wanted}")
            taken[slot] = _any(free, seats) if found is None else found
            free.remove(taken[slot])
    return taken, unmet


def _any(free: list[SlotId], seats: Mapping[SlotId, str]) -> SlotId:
    """The first on the node that has most of them, so that those that stay free are everywhere."""
    count = Counter(seats[seat] for seat in free)
    return min(free, key=lambda seat: (-count[seats[seat]], seat))
