"""Who sits where: a start's workers take slots, which are Spark's tasks, on the nodes where they are wanted.

Spark spreads the tasks of a stage over the nodes as it likes, about evenly. So that a node has slots enough
for all workers wanted there, a stage may have more slots than workers. In those nobody takes nothing runs, but
Spark keeps them, with a task slot and a process each, as long as the query lives; a worker may move into one
meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.plan.model import Plan, WorkerId

_MARGIN = 1  # slots more on each node than are wanted there: "about" has been off by one


@dataclass(frozen=True)
class SlotPlacement:
    """Where workers are to be."""

    nodes: Mapping[WorkerId, str]
    """The node each worker is wanted on; a worker that is not named goes anywhere."""
    exact: bool = True
    """A worker that cannot be where it is wanted is an error. Else it goes where there is a slot, and no slot is
    there only in case that Spark spreads them unevenly."""


def slots_for(plan: Plan, placement: SlotPlacement, nodes: int, spare: int = 0) -> tuple[int, ...]:
    """How many slots each stage needs, so that a node in ``nodes`` has enough of them; and so many ``spare`` ones
    on each, for workers of bolts to move into."""
    result = []
    for stage in plan.stages:
        wanted = Counter(node for worker, node in placement.nodes.items() if worker.stage == stage.index)
        fullest = max(wanted.values(), default=0) + (_MARGIN if placement.exact else 0)
        needed = max(stage.workers, fullest * nodes if wanted else 0)
        result.append(needed + (spare * nodes if stage.index else 0))
    return tuple(result)


def fitted(plan: Plan, slots: Sequence[int], room: int) -> tuple[int, ...]:
    """So many fewer of them that there is room for all, as long as every worker has one."""
    result = list(slots)
    spare = [count - stage.workers for count, stage in zip(slots, plan.stages, strict=True)]
    for _ in range(min(sum(spare), max(0, sum(slots) - room))):
        most = spare.index(max(spare))
        spare[most] -= 1
        result[most] -= 1
    return tuple(result)


def assign_slots(
    plan: Plan, placement: SlotPlacement, slots: Mapping[WorkerId, str]
) -> tuple[dict[WorkerId, WorkerId], list[str]]:
    """The slot of each worker, of those there are (with their nodes); and what could not be as it was wanted, in
    words. Every stage has as many slots as workers, or more."""
    taken: dict[WorkerId, WorkerId] = {}
    unmet: list[str] = []
    for stage in plan.stages:
        free = sorted(slot for slot in slots if slot.stage == stage.index)
        workers = [WorkerId(stage.index, number) for number in range(stage.workers)]
        for worker in sorted(
            workers, key=lambda worker: worker not in placement.nodes
        ):  # those that mind come first
            wanted = placement.nodes.get(worker)
            found = next((slot for slot in free if slots[slot] == wanted), None)
            if found is None and wanted is not None:
                unmet.append(f"worker {worker} on {wanted}")
            taken[worker] = _any(free, slots) if found is None else found
            free.remove(taken[worker])
    return taken, unmet


def _any(free: list[WorkerId], slots: Mapping[WorkerId, str]) -> WorkerId:
    """The first on the node that has most of them, so that those that stay free are everywhere."""
    count = Counter(slots[slot] for slot in free)
    return min(free, key=lambda slot: (-count[slots[slot]], slot))
