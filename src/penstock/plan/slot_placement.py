"""Assigns the workers of a query run to slots (Spark tasks) on the nodes where the placement wants them.

Spark distributes the tasks of a stage over the nodes approximately evenly, and the distribution cannot be
controlled. A stage may therefore have more slots than workers, so that each node has enough slots for the workers
placed there. Nothing runs in an empty slot, but Spark keeps it, with one task slot and one process, until the
query ends. A worker can move into it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.plan.model import Plan, WorkerId

_MARGIN = 1  # extra slots per node, because Spark's distribution has been observed to be off by one


@dataclass(frozen=True)
class SlotPlacement:
    """The nodes on which workers should run."""

    nodes: Mapping[WorkerId, str]
    """The wanted node of each worker. A worker that is not listed may run anywhere."""
    exact: bool = True
    """True: it is an error if a worker cannot run on its wanted node. False: such a worker takes any slot, and no
    extra slots are requested to compensate for an uneven distribution."""


def slots_for(plan: Plan, placement: SlotPlacement, nodes: int, spare: int | None = 0) -> tuple[int, ...]:
    """The number of slots that each stage needs on ``nodes`` nodes, plus ``spare`` slots per node into which
    workers of bolts can move. None: as many as the stage has workers per node, so that half of the nodes can take
    those of the other half; none on a single node."""
    result = []
    for stage in plan.stages:
        wanted = Counter(node for worker, node in placement.nodes.items() if worker.stage == stage.index)
        most_per_node = max(wanted.values(), default=0) + (_MARGIN if placement.exact else 0)
        needed = max(stage.workers, most_per_node * nodes if wanted else 0)
        free = (-(-stage.workers // nodes) if nodes > 1 else 0) if spare is None else spare
        result.append(needed + (free * nodes if stage.index else 0))
    return tuple(result)


def fitted(plan: Plan, slots: Sequence[int], room: int) -> tuple[int, ...]:
    """Remove empty slots, from the stage with the most, until at most ``room`` are left. Every worker keeps a
    slot."""
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
    """Assign a slot to each worker. ``slots`` maps the available slots to their nodes; every stage must have at
    least as many as workers. Also returns a description of each worker that could not be placed on its wanted
    node."""
    assigned: dict[WorkerId, WorkerId] = {}
    unplaced: list[str] = []
    for stage in plan.stages:
        free = sorted(slot for slot in slots if slot.stage == stage.index)
        workers = [WorkerId(stage.index, number) for number in range(stage.workers)]
        # workers with a wanted node choose first
        for worker in sorted(workers, key=lambda worker: worker not in placement.nodes):
            wanted = placement.nodes.get(worker)
            found = next((slot for slot in free if slots[slot] == wanted), None)
            if found is None and wanted is not None:
                unplaced.append(f"worker {worker} on {wanted}")
            assigned[worker] = _any(free, slots) if found is None else found
            free.remove(assigned[worker])
    return assigned, unplaced


def _any(free: list[WorkerId], slots: Mapping[WorkerId, str]) -> WorkerId:
    """The first slot on the node with the most free slots, so that the remaining ones are spread over all
    nodes."""
    count = Counter(slots[slot] for slot in free)
    return min(free, key=lambda slot: (-count[slots[slot]], slot))
