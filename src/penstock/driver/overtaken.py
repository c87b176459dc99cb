"""Assigns tuples that a marker has overtaken to the tasks that process them, in the query run that begins with the
epoch of that marker.

The numbers of tasks and the packing may have changed. If the number of tasks of a component is the same, a tuple
goes to the task for which it waited. Otherwise a tuple whose grouping determines its task goes to the owner of its
key, or to the first task with global grouping; tuples that may go to any task are divided evenly; and any other
tuple goes to the task that succeeds the one for which it waited, just as state that belongs to no key does. So
every tuple is processed exactly once by each task that was to process it.

That last rule is wrong in one case: a tuple that all tasks get may concern the state of every key, but keys do not
follow their task. With such tuples waiting, a component with state keeps its number of tasks.
"""

from __future__ import annotations

from penstock.errors import StateError
from penstock.plan.model import LOCAL, Edge, Plan, WorkerId
from penstock.protocol.task_states import WaitingTuples
from penstock.state.manifest import OvertakenEntry, OvertakenFrames
from penstock.state.snapshots import SnapshotPart
from penstock.topology.groupings import Fields, Global, PartialKey

_BY_VALUE = (Fields, PartialKey, Global)
"""Groupings that find the task of a tuple again. A user's subclass is not included, because it may keep state."""


def waiting_of(plan: Plan, worker: WorkerId, overtaken: OvertakenFrames) -> WaitingTuples | None:
    """The tuples that may be for tasks of the worker. None if there are none."""
    mine = {plan.task[task].key for task in plan.routes.tasks_of(worker)}
    components = {key.rpartition("/")[0] for key in mine}
    before: dict[str, int] = {}
    for key in overtaken.tasks.values():
        component = key.rpartition("/")[0]
        before[component] = before.get(component, 0) + 1
    parts: list[tuple[str, SnapshotPart]] = []
    for key, entry in sorted(overtaken.entries.items(), key=lambda each: _place(each[0])):
        component = key.rpartition("/")[0]
        if component in components and (key in mine or before[component] != len(plan.tasks_of[component])):
            parts += [(key, part) for part in entry.parts]
    if not parts:
        return None
    numbers = {(stream.component, stream.name): number for number, stream in enumerate(plan.streams)}
    streams = [numbers.get((component, name), -1) for component, name, _ in overtaken.streams]
    return WaitingTuples(parts, before, streams, dict(overtaken.tasks))


def waiting_rows(plan: Plan, overtaken: OvertakenFrames | None) -> dict[str, int]:
    """How many tuples wait for each component whose data may be migrated; only components for which some wait."""
    rows: dict[str, int] = {}
    for key, entry in overtaken.entries.items() if overtaken is not None else ():
        component = key.rpartition("/")[0]
        if component in plan.migratable:
            rows[component] = rows.get(component, 0) + sum(part.rows for part in entry.parts)
    return rows


def check_waiting(plan: Plan, overtaken: OvertakenFrames, stateful: frozenset[str], where: str) -> None:
    """Raise ``StateError`` if a topology with this plan cannot process the tuples. ``stateful``: the components
    with state. ``where``: the state directory."""
    for key, entry in overtaken.entries.items():
        component, _, _ = key.rpartition("/")
        problem = _problem(plan, overtaken, component, entry, component in stateful)
        if problem:
            raise StateError(
                f"topology '{plan.topology}', component '{component}'",
                f"tuples wait for it in {where}, but {problem}",
                "Start it once more as it was, and end it with Ctrl-C; then change it.",
            )


def why_not_overtaken(old: Plan, new: Plan) -> str:
    """The reason why ``new`` might not be able to process the tuples that a marker overtakes in ``old``. Empty if
    it is. Any component may have state."""
    for edge in old.edges:
        source = old.streams[edge.stream]
        columns = [(field.name, str(field.type)) for field in source.fields]
        counts = len(old.tasks_of[edge.target]), len(new.tasks_of.get(edge.target, ()))
        problem = _stream_problem(new, (source.component, source.name, columns), edge.target)
        now = _edge(new, (source.component, source.name), edge.target)
        if now is not None and (type(now.grouping), str(now.grouping)) != (
            type(edge.grouping),
            str(edge.grouping),
        ):
            problem = problem or f"it reads '{source.component}' by another grouping now"
        if not problem:
            problem = _number_problem(new, (source.component, source.name), edge.target, counts, stateful=True)
        if problem:
            return f"component '{edge.target}': {problem}"
    return ""


def _problem(plan: Plan, overtaken: OvertakenFrames, component: str, entry: OvertakenEntry, stateful: bool) -> str:
    before = sum(each.rpartition("/")[0] == component for each in overtaken.tasks.values())
    counts = before, len(plan.tasks_of.get(component, ()))
    for number in entry.streams:
        stream = overtaken.streams[number]
        problem = _stream_problem(plan, stream, component) or _number_problem(
            plan, stream[:2], component, counts, stateful
        )
        if problem:
            return problem
    return ""


def _stream_problem(plan: Plan, stream: tuple[str, str, list[tuple[str, str]]], target: str) -> str:
    component, name, fields = stream
    if target not in plan.tasks_of:
        return "there is no such component any more"
    edge = _edge(plan, (component, name), target)
    if edge is None:
        return f"it does not read stream '{name}' of '{component}' any more"
    now = [(field.name, str(field.type)) for field in plan.streams[edge.stream].fields]
    if now != fields:
        return f"the fields of stream '{name}' of '{component}' have changed"
    return ""


def _number_problem(
    plan: Plan, stream: tuple[str, str], target: str, counts: tuple[int, int], stateful: bool
) -> str:
    before, now = counts
    edge = _edge(plan, stream, target)
    assert edge is not None
    if before == now or not stateful or type(edge.grouping) in (*_BY_VALUE, *LOCAL):
        return ""
    return f"it has {now} tasks now instead of {before}, and {edge.grouping} grouping does not say whose they are"


def _edge(plan: Plan, stream: tuple[str, str], target: str) -> Edge | None:
    found = (
        edge
        for edge in plan.edges
        if edge.target == target and (plan.source_of(edge), plan.streams[edge.stream].name) == stream
    )
    return next(found, None)


def _place(key: str) -> tuple[str, int]:
    component, _, index = key.rpartition("/")
    return component, int(index)
