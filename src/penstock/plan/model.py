"""What the planner makes. Inert, picklable; it travels to every slot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from penstock.topology.groupings import Grouping
from penstock.topology.streams import Stream


@dataclass(frozen=True, order=True)
class SlotId:
    """One partition of one stage: one long-running Spark task, one Python process."""

    stage: int
    slot: int

    def __str__(self) -> str:
        return f"{self.stage}.{self.slot}"

    @classmethod
    def parse(cls, text: str) -> SlotId:
        """The slot that ``str`` gives this text for."""
        stage, slot = text.split(".")
        return cls(int(stage), int(slot))


@dataclass(frozen=True)
class Task:
    """Storm's logical task: one instance of a component."""

    id: int
    component: str
    index: int

    @property
    def key(self) -> str:
        """The task's name in manifests: other than its id it stays when components are added."""
        return f"{self.component}/{self.index}"


@dataclass(frozen=True)
class Edge:
    """One subscription: a stream of one component, read by another."""

    stream: int
    target: str
    grouping: Grouping
    chained: bool = False
    """Both ends of each pair of tasks share a slot: tuples pass by reference, without a hop."""


@dataclass(frozen=True)
class Stage:
    """All components at one distance from the spouts. A stage sends only to stages after it."""

    index: int
    chains: tuple[tuple[str, ...], ...]
    slots: int


@dataclass(frozen=True)
class RouteTable:
    """Which slot runs which task. Only its version and contents ever change while a topology runs."""

    version: int
    slot_of: Mapping[int, SlotId]

    def tasks_of(self, slot: SlotId) -> tuple[int, ...]:
        return tuple(task for task, owner in self.slot_of.items() if owner == slot)


@dataclass(frozen=True)
class Plan:
    """How a topology stands on Spark."""

    topology: str
    stages: tuple[Stage, ...]
    tasks: tuple[Task, ...]
    streams: tuple[Stream, ...]
    edges: tuple[Edge, ...]
    routes: RouteTable
    not_migrated: Mapping[str, str] = field(default_factory=dict)
    """Why a component's data is never migrated between its tasks; empty text where it may be."""

    @property
    def migratable(self) -> tuple[str, ...]:
        """Components that may have their data migrated."""
        return tuple(component for component, why in self.not_migrated.items() if not why)

    @property
    def slots(self) -> int:
        return sum(stage.slots for stage in self.stages)

    @cached_property
    def tasks_of(self) -> dict[str, tuple[int, ...]]:
        """Task ids per component, lowest first."""
        result: dict[str, tuple[int, ...]] = {}
        for task in self.tasks:
            result[task.component] = (*result.get(task.component, ()), task.id)
        return result

    @cached_property
    def task(self) -> dict[int, Task]:
        return {task.id: task for task in self.tasks}

    def slot_ids(self) -> list[SlotId]:
        return [SlotId(stage.index, slot) for stage in self.stages for slot in range(stage.slots)]

    def streams_of(self, component: str) -> list[tuple[int, Stream]]:
        """The streams a component declares, with their numbers on the wire."""
        return [(number, stream) for number, stream in enumerate(self.streams) if stream.component == component]

    def edges_from(self, stream: int) -> list[Edge]:
        return [edge for edge in self.edges if edge.stream == stream]

    @cached_property
    def downstream_of(self) -> dict[str, tuple[str, ...]]:
        """The components each one sends to, those chained to it left out."""
        result: dict[str, tuple[str, ...]] = {}
        for component in self.tasks_of:
            targets = [e.target for e in self.edges if self.source_of(e) == component and not e.chained]
            result[component] = tuple(dict.fromkeys(targets))
        return result

    @cached_property
    def upstream_of(self) -> dict[str, tuple[str, ...]]:
        """The components that send to each one, those it is chained to left out."""
        return {
            component: tuple(source for source, targets in self.downstream_of.items() if component in targets)
            for component in self.tasks_of
        }

    @cached_property
    def spouts(self) -> tuple[str, ...]:
        """The components that no stream goes to."""
        receivers = {edge.target for edge in self.edges}
        return tuple(component for component in self.tasks_of if component not in receivers)

    def source_of(self, edge: Edge) -> str:
        return self.streams[edge.stream].component

    def chained_tasks(self, task: int) -> tuple[int, ...]:
        """The tasks in the same slot that a task sends to by reference."""
        component = self.task[task].component
        targets = {edge.target for edge in self.edges if edge.chained and self.source_of(edge) == component}
        mine = self.routes.tasks_of(self.routes.slot_of[task])
        return tuple(each for each in mine if self.task[each].component in targets)

    def next_hop(self, source: SlotId, target: SlotId) -> int:
        """The slot of the following stage that a row from ``source`` to ``target`` goes to.

        A frame for a later stage is relayed. The relay depends on both ends only, so that frames between two
        tasks keep their order, and spreads the load over the slots in between.
        """
        if target.stage == source.stage + 1:
            return target.slot
        return (source.slot + target.slot) % self.stages[source.stage + 1].slots

    def validate(self) -> None:
        """The invariants every plan keeps."""
        assert [stage.index for stage in self.stages] == list(range(len(self.stages)))
        assert set(self.routes.slot_of) == set(self.task)
        known = set(self.slot_ids())
        assert all(slot in known for slot in self.routes.slot_of.values())
        assert all(self.routes.tasks_of(slot) for slot in known), "a slot without a task"
        stage_of = {
            component: stage.index for stage in self.stages for chain in stage.chains for component in chain
        }
        for edge in self.edges:
            source = self.streams[edge.stream].component
            if edge.chained:
                assert stage_of[source] == stage_of[edge.target]
            else:
                assert stage_of[source] < stage_of[edge.target], "an edge must point to a later stage"
