"""Renders a plan as text and as a Mermaid graph."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.plan.model import Plan, WorkerId
from penstock.plan.scalable import why_fixed
from penstock.topology.builder import Topology
from penstock.topology.streams import DEFAULT_STREAM


def as_text(topology: Topology, plan: Plan) -> str:
    """The plan as text: the stages with their components and workers, the streams and groupings, and for which
    bolts data may be migrated and which may be scaled automatically."""
    lines = [
        f"topology {plan.topology}: {len(plan.stages)} stages, {plan.workers} workers, {len(plan.tasks)} tasks",
        "",
    ]
    for stage in plan.stages:
        lines.append(f"stage {stage.index}  ({stage.workers} worker{'s' if stage.workers > 1 else ''})")
        first = 0
        for group in stage.fused_groups:
            executors = topology.nodes[group[0]].parallelism
            for component in group:
                node = topology.nodes[component]
                kind = "spout" if node.is_spout else "bolt"
                fused = "" if component == group[0] else f"  fused with {node.inputs[0].component}"
                tick = f"  tick {node.tick_interval:g} s" if node.tick_interval else ""
                workers, tasks = _span(first, executors), _span(plan.tasks_of[component][0], node.tasks)
                lines.append(
                    f"  {component:<16} {kind:<6} {type(node.component).__name__:<20} "
                    f"workers {workers}  tasks {tasks}{fused}{tick}"
                )
            first += executors
    lines += ["", "streams"]
    for number, stream in enumerate(plan.streams):
        fields = ", ".join(
            field.name if field.type is None else f"{field.name}: {field.type}" for field in stream.fields
        )
        lines.append(f"  {stream} ({fields}){'  direct' if stream.direct else ''}")
        edges = plan.edges_from(number)
        lines += [f"    -> {edge.target}  {edge.grouping}{_hops(plan, number, edge.target)}" for edge in edges]
        if not edges:
            lines.append("    -> no subscriber")
    lines += ["", "data migration between tasks"]
    lines += _reasons(plan.not_migrated)
    lines += ["", "scaling"]
    bolts = [node.id for node in topology.nodes.values() if not node.is_spout]
    lines += _reasons({bolt: why_fixed(topology, bolt) for bolt in bolts})
    return "\n".join(lines)


def as_mermaid(topology: Topology, plan: Plan) -> str:
    """A graph for Markdown: one box per stage, rounded spouts, edges labelled with their grouping."""
    lines = ["graph LR"]
    name = {component: f"c{number}" for number, component in enumerate(topology.nodes)}
    for stage in plan.stages:
        lines.append(f'  subgraph s{stage.index}["stage {stage.index}"]')
        for group in stage.fused_groups:
            for component in group:
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


def _span(first: int, count: int) -> str:
    return str(first) if count == 1 else f"{first}-{first + count - 1}"


def _hops(plan: Plan, stream: int, target: str) -> str:
    def stage(component: str) -> int:
        worker: WorkerId = plan.routes.worker_of[plan.tasks_of[component][0]]
        return worker.stage

    distance = stage(target) - stage(plan.streams[stream].component)
    if distance == 0:
        return "  (fused: no hop)"
    return f"  (relayed: {distance} hops)" if distance > 1 else ""
