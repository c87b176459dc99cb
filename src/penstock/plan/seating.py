"""Who sits where: a start's slots take seats, which are Spark's tasks, on the nodes where they are wanted.

Spark spreads the tasks of a stage over the nodes as it likes, about evenly. So that a node has seats enough
for all slots wanted there, a stage has more seats than slots. In those nobody takes nothing runs, but Spark keeps
them, with a task slot each, as long as the query lives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from penstock.plan.model import Plan, SlotId

_MARGIN = 1  # seats more on each node than are wanted there: "about" has been off by one

Placement = Mapping[SlotId, str]
"""The node each slot is wanted on; a slot that is not named goes anywhere."""


def seats_for(plan: Plan, placement: Placement, nodes: int) -> tuple[int, ...]:
    """How many seats each stage needs, so that a node in ``nodes`` has enough of them."""
    result = []
    for stage in plan.stages:
        wanted = Counter(node for slot, node in placement.items() if slot.stage == stage.index)
        result.append(max(stage.slots, (max(wanted.values()) + _MARGIN) * nodes if wanted else 0))
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
        for slot in sorted(slots, key=lambda slot: slot not in placement):  # those that mind come first
            wanted = placement.get(slot)
            found = next((seat for seat in free if seats[seat] == wanted), None)
            if found is None and wanted is not None:
                unmet.append(f"slot {slot} on {wanted}")
            taken[slot] = free[0] if found is None else found
            free.remove(taken[slot])
    return taken, unmet
