"""Renders a plan as text and as a Mermaid graph."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.plan.model import Edge, Plan
from penstock.plan.scalable import why_fixed
from penstock.topology.builder import Topology
from penstock.topology.streams import DEFAULT_STREAM


def as_text(topology: Topology, plan: Plan) -> str:
    """The plan as text: the stages with their workers and what is fused in them, the streams with their groupings
    and hops, and for which bolts data may be migrated and which may be scaled automatically."""
    lines = [
        f"topology {plan.topology}: {_count_of(len(plan.stages), 'stage')}, {_workers(plan)}, "
        f"{_count_of(len(plan.tasks), 'task')}",
        "",
    ]
    for stage in plan.stages:
        lines.append(f"stage {stage.index}  ({stage.workers} worker{'s' if stage.workers > 1 else ''})")
        first = 0
        for group in stage.fused_groups:
            lines += [_component(topology, plan, component, first) for component in group.components]
            first += group.workers
    lines += ["", "streams"]
    for number, stream in enumerate(plan.streams):
        fields = ", ".join(
            field.name if field.type is None else f"{field.name}: {field.type}" for field in stream.fields
        )
        lines.append(f"  {stream} ({fields}){'  direct' if stream.direct else ''}")
        edges = plan.edges_from(number)
        lines += [f"    -> {edge.target}  {edge.grouping}  ({_hops(plan, edge)})" for edge in edges]
        if not edges:
            lines.append("    -> no subscriber")
    lines += ["", "hops of a tuple between workers", *_all_hops(plan)]
    lines += _ackers(topology)
    lines += ["", "data migration between tasks"]
    lines += [f"{line}{_further_hops(plan, line.split()[0])}" for line in _reasons(plan.not_migrated)]
    lines += ["", "scaling"]
    bolts = [node.id for node in topology.nodes.values() if not node.is_spout]
    lines += _reasons({bolt: why_fixed(topology, bolt) for bolt in bolts})
    if cautions := list(topology.cautions()):
        lines += ["", "cautions", *(f"  {component:<16} {text}" for component, text in cautions)]
    return "\n".join(lines)


def _ackers(topology: Topology) -> list[str]:
    delivery = topology.settings.delivery
    if delivery.guarantee != "at_least_once":
        return []
    count = delivery.ackers
    return [
        "",
        "ackers",
        "  1, in the driver"
        if count == 1
        else f"  {count} processes, spread over the nodes; each has 1/{count} of the roots of every spout task",
    ]


def _workers(plan: Plan) -> str:
    limit, text = plan.fit.workers, _count_of(plan.workers, "worker")
    if limit is None:
        return text
    if not plan.blocking:
        return f"{text} (limit {limit})"
    waiting = sum(plan.group_of[component].workers for component in plan.blocking)
    return f"{text} ({plan.workers - waiting}, limit {limit}, and {waiting} of blocking components)"


def _count_of(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _component(topology: Topology, plan: Plan, component: str, first: int) -> str:
    """The line of a component. ``first``: the first worker of its group in the stage."""
    node, group = topology.nodes[component], plan.group_of[component]
    kind = "spout" if node.is_spout else "bolt"
    sources = [plan.source_of(edge) for edge in plan.edges if edge.fused and edge.target == component]
    notes = f"  fused with {', '.join(dict.fromkeys(sources))}" if sources else ""
    notes += "  blocking" if component in plan.blocking else ""
    notes += f"  tick {node.tick_interval:g} s" if node.tick_interval else ""
    workers, tasks = _span(first, group.workers), _span(plan.tasks_of[component][0], node.tasks)
    name = type(node.component).__name__
    return f"  {component:<16} {kind:<6} {name:<20} workers {workers}  tasks {tasks}{notes}"


def as_mermaid(topology: Topology, plan: Plan) -> str:
    """A graph for Markdown: one box per stage, rounded spouts, edges labelled with their grouping."""
    lines = ["graph LR"]
    name = {component: f"c{number}" for number, component in enumerate(topology.nodes)}
    for stage in plan.stages:
        lines.append(f'  subgraph s{stage.index}["stage {stage.index}"]')
        for group in stage.fused_groups:
            for component in group.components:
                node = topology.nodes[component]
                label = f'"{component} ×{node.parallelism}"'
                lines.append(f"    {name[component]}" + (f"([{label}])" if node.is_spout else f"[{label}]"))
        lines.append("  end")
    for edge in plan.edges:
        stream = plan.streams[edge.stream]
        label = str(edge.grouping) + ("" if stream.name == DEFAULT_STREAM else f" · {stream.name}")
        arrow = "==>" if edge.fused else "-->"
        lines.append(f'  {name[stream.component]} {arrow}|"{label}"| {name[edge.target]}')
    return "\n".join(lines)


def _reasons(why_not: Mapping[str, str]) -> list[str]:
    return [f"  {component:<16} {f'no: {why}' if why else 'yes'}" for component, why in why_not.items()]


def _further_hops(plan: Plan, component: str) -> str:
    """What follows the "yes" of a component whose branches have several hops."""
    if plan.not_migrated[component]:
        return ""
    branch = plan.branch_of(plan.tasks_of[component][0])
    hops = dict.fromkeys(plan.task[task].component for task in branch[1:])
    return f", its branches go on with {', '.join(hops)}" if hops else ""


def _span(first: int, count: int) -> str:
    return str(first) if count == 1 else f"{first}-{first + count - 1}"


def _hops(plan: Plan, edge: Edge) -> str:
    if edge.fused:
        return "fused: no hop"
    hops = plan.stage_of[edge.target] - plan.stage_of[plan.source_of(edge)]
    return f"{_count(hops)}: {edge.why_not_fused}"


def _all_hops(plan: Plan) -> list[str]:
    """A line for each spout and each component without subscribers that its tuples reach. All ways between the two
    have the same number of hops, because every stage in between relays."""
    readers: dict[str, set[str]] = {component: set() for component in plan.tasks_of}
    for edge in plan.edges:
        readers[plan.source_of(edge)].add(edge.target)
    lines = []
    for spout in plan.spouts:
        reached, new = {spout}, [spout]
        while new:
            found = readers[new.pop()] - reached
            reached |= found
            new += found
        ends = [component for component in plan.tasks_of if component in reached and not readers[component]]
        lines += [
            f"  {spout} -> {end}  {_count(plan.stage_of[end] - plan.stage_of[spout])}"
            for end in ends
            if end != spout
        ]
    return lines or ["  none: there are no bolts"]


def _count(hops: int) -> str:
    return "no hop" if not hops else f"{hops} hop{'s' if hops > 1 else ''}"
