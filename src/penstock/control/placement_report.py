"""Renders a placement plan as text (``penstock placement TOPOLOGY``) and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from penstock.control.erdm import PlacementPlan
from penstock.control.limits import amount

_SHOWN = 20
"""Lines shown per kind, because a plan may have thousands. JSON contains all."""


def explain(plan: PlacementPlan, shown: int = _SHOWN) -> list[str]:
    """Explain the plan, line by line: the critical path, nodes at a limit, executors that move or cannot move,
    released nodes, and the savings."""
    path = plan.critical.path
    if not path.hops:
        return ["nothing runs"]
    lines = [
        f"critical path: {path.cost:.3f} s of work per second "
        f"(computation {path.computation:.3f}, between nodes {path.communication:.3f})"
    ]
    for hop in path.hops:
        way = f" + {hop.communication:.3f} from the previous executor" if hop.communication else ""
        lines.append(f"  {hop.executor} on {hop.node}: {hop.computation:.3f}{way}")
    lines.append(
        f"critical: {_several(len(plan.critical.nodes), 'node')} ({_list(plan.critical.nodes, shown)}), "
        f"{_several(len(plan.critical.executors), 'executor')}"
    )
    lines += _part(
        "at a limit",
        [
            f"{at.node}: {at.resource} {amount(at.resource, at.used)} of {amount(at.resource, at.limit)}"
            for at in plan.limit_nodes
        ],
        shown,
    )
    lines += _part("moves", [f"{m.executor}: {m.source} -> {m.target}: {m.reason}" for m in plan.moves], shown)
    lines += _part("stay", [f"{s.executor} on {s.node}: {s.reason}" for s in plan.stays], shown)
    lines += _part("released", [f"{r.node}: {r.reason}" for r in plan.releases], shown)
    cost = plan.cost
    lines.append(
        f"between nodes: {cost.local} of {cost.paths} streams become local, {cost.opened} no longer are; "
        f"cost {cost.before:.3f} -> {cost.after:.3f} s per second ({-cost.saved:+.1%})"
    )
    if plan.moves and not plan.worthwhile:
        lines.append("not carried out: no node becomes free, and the traffic between nodes does not decrease")
    return lines


def as_json(plan: PlacementPlan) -> dict[str, Any]:
    """The plan as JSON values. Costs are in seconds of work per second; amounts in cores, bytes and bytes per
    second."""
    path = plan.critical.path
    return {
        "critical_path": {
            "cost": path.cost,
            "computation": path.computation,
            "communication": path.communication,
            "hops": [asdict(hop) for hop in path.hops],
        },
        "critical_nodes": list(plan.critical.nodes),
        "critical_executors": len(plan.critical.executors),
        "limit_nodes": [asdict(each) for each in plan.limit_nodes],
        "moves": [asdict(each) for each in plan.moves],
        "stays": [asdict(each) for each in plan.stays],
        "releases": [asdict(each) for each in plan.releases],
        "inter_node": asdict(plan.cost) | {"estimated": plan.cost.estimated, "saved": plan.cost.saved},
        "worthwhile": plan.worthwhile,
    }


def _part(title: str, entries: list[str], shown: int) -> list[str]:
    if not entries:
        return [f"{title}: none"]
    more = [f"  … and {len(entries) - shown} more"] if len(entries) > shown else []
    return [f"{title}: {len(entries)}", *(f"  {entry}" for entry in entries[:shown]), *more]


def _several(count: int, what: str) -> str:
    return f"{count} {what}" + ("" if count == 1 else "s")


def _list(names: tuple[str, ...], shown: int) -> str:
    return ", ".join(names[:shown]) + (", …" if len(names) > shown else "")
