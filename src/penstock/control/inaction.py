"""Why ERDM leaves a placement as it is, in one sentence with figures, and what it would need to act. Pure."""

from __future__ import annotations

from penstock.control.erdm import PlacementPlan
from penstock.control.limits import Loads, amount
from penstock.control.placement import RESOURCES, PlacementSnapshot


def why_no_move(snapshot: PlacementSnapshot, plan: PlacementPlan, least_saved: float) -> str:
    """Called for a plan that is not carried out. ``least_saved``: share of the cost between nodes that moves must
    save if they empty no node."""
    nodes = len({executor.node for executor in snapshot.executors})
    if nodes <= 1:
        return "no move: all executors are on one node"
    if plan.moves:
        return _not_worthwhile(plan, least_saved)
    if plan.stays:
        stay = plan.stays[0]
        more = f"; {len(plan.stays) - 1} more executors stay" if len(plan.stays) > 1 else ""
        return f"no move: {stay.executor} stays on {stay.node}, because {stay.reason}{more}{_fullest(snapshot)}"
    return _all_critical(snapshot, nodes)


def _not_worthwhile(plan: PlacementPlan, least_saved: float) -> str:
    moves = "1 move" if len(plan.moves) == 1 else f"{len(plan.moves)} moves"
    text = f"no move: {moves} would empty no node and save {plan.cost.saved:.1%} of the cost between nodes"
    text += f"; at least {least_saved:.0%} is needed"
    if plan.stays:
        text += f". {plan.stays[0].executor} could not leave {plan.stays[0].node}: {plan.stays[0].reason}"
    return text


def _all_critical(snapshot: PlacementSnapshot, nodes: int) -> str:
    """All nodes are on the critical path, or the executors of no node fit on the others."""
    loads = Loads(snapshot)
    at = {node: [e for e in snapshot.executors if e.node == snapshot.nodes[node].name] for node in _used(loads)}
    least = min(at, key=lambda node: (sum(e.cpu for e in at[node]), node))
    others = [node for node in at if node != least]
    name, count = snapshot.nodes[least].name, len(at[least])
    executors = "its executor needs" if count == 1 else f"its {count} executors need"
    for resource, kind in enumerate(RESOURCES[:2]):
        needed = sum(getattr(executor, kind) for executor in at[least])
        room = sum(max(0.0, loads.limits[resource][node] - loads.used[resource][node]) for node in others)
        if needed > room:
            return (
                f"no move: to empty {name}, {executors} {amount(resource, needed)}, but the other nodes together "
                f"have room for {amount(resource, room)}{_fullest(snapshot, resource)}"
            )
    return (
        f"no move: all {nodes} nodes with executors are critical nodes. To empty {name}, {executors} "
        f"{amount(0, sum(e.cpu for e in at[least]))} on the others; that is decided only if the critical path "
        "crosses fewer nodes"
    )


def _fullest(snapshot: PlacementSnapshot, resource: int = 0) -> str:
    """The use of the node with the least room, divided into the use of Spark's processes and of executors."""
    loads = Loads(snapshot)
    full = max(_used(loads), key=lambda node: loads.used[resource][node] / loads.limits[resource][node])
    node = snapshot.nodes[full]
    other: float = getattr(node.other, RESOURCES[resource])
    used, limit = loads.used[resource][full], loads.limits[resource][full]
    return (
        f"; {node.name} uses {amount(resource, used)} of the {amount(resource, limit)} that may be used, of which "
        f"{amount(resource, other)} are reserved for Spark's processes"
    )


def _used(loads: Loads) -> list[int]:
    """The nodes with executors."""
    return [node for node, count in enumerate(loads.counts) if count]
