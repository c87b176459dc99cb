"""What the planner makes. Inert, picklable; it travels to every worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from penstock.topology.groupings import Grouping
from penstock.topology.streams import Stream


@dataclass(frozen=True, order=True)
class WorkerId:
    """One partition of one stage: one long-running Spark task, one Python process."""

    stage: int
    index: int

    def __str__(self) -> str:
        return f"{self.stage}.{self.index}"

    @classmethod
    def parse(cls, text: str) -> WorkerId:
        """The worker that ``str`` gives this text for."""
        stage, worker = text.split(".")
        return cls(int(stage), int(worker))


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
    fused: bool = False
    """Both ends of each pair of tasks share a worker: tuples pass by reference, without a hop."""


@dataclass(frozen=True)
class Stage:
    """All components at one distance from the spouts. A stage sends only to stages after it."""

    index: int
    fused_groups: tuple[tuple[str, ...], ...]
    workers: int


@dataclass(frozen=True)
class RouteTable:
    """Which worker runs which task. Only its version and contents ever change while a topology runs."""

    version: int
    worker_of: Mapping[int, WorkerId]

    def tasks_of(self, worker: WorkerId) -> tuple[int, ...]:
        return tuple(task for task, owner in self.worker_of.items() if owner == worker)


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
    def workers(self) -> int:
        return sum(stage.workers for stage in self.stages)

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

    def worker_ids(self) -> list[WorkerId]:
        return [WorkerId(stage.index, worker) for stage in self.stages for worker in range(stage.workers)]

    def streams_of(self, component: str) -> list[tuple[int, Stream]]:
        """The streams a component declares, with their numbers on the wire."""
        return [(number, stream) for number, stream in enumerate(self.streams) if stream.component == component]

    def edges_from(self, stream: int) -> list[Edge]:
        return [edge for edge in self.edges if edge.stream == stream]

    @cached_property
    def downstream_of(self) -> dict[str, tuple[str, ...]]:
        """The components each one sends to, those fused with it left out."""
        result: dict[str, tuple[str, ...]] = {}
        for component in self.tasks_of:
            targets = [e.target for e in self.edges if self.source_of(e) == component and not e.fused]
            result[component] = tuple(dict.fromkeys(targets))
        return result

    @cached_property
    def upstream_of(self) -> dict[str, tuple[str, ...]]:
        """The components that send to each one, those it is fused with left out."""
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

    def fused_tasks(self, task: int) -> tuple[int, ...]:
        """The tasks in the same worker that a task sends to by reference."""
        component = self.task[task].component
        targets = {edge.target for edge in self.edges if edge.fused and self.source_of(edge) == component}
        mine = self.routes.tasks_of(self.routes.worker_of[task])
        return tuple(each for each in mine if self.task[each].component in targets)

    def next_hop(self, source: WorkerId, target: WorkerId) -> int:
        """The worker of the following stage that a row from ``source`` to ``target`` goes to.

        A frame for a later stage is relayed. The relay depends on both ends only, so that frames between two
        tasks keep their order, and spreads the load over the workers in between.
        """
        if target.stage == source.stage + 1:
            return target.index
        return (source.index + target.index) % self.stages[source.stage + 1].workers

    def validate(self) -> None:
        """The invariants every plan keeps."""
        assert [stage.index for stage in self.stages] == list(range(len(self.stages)))
        assert set(self.routes.worker_of) == set(self.task)
        known = set(self.worker_ids())
        assert all(worker in known for worker in self.routes.worker_of.values())
        assert all(self.routes.tasks_of(worker) for worker in known), "a worker without a task"
        stage_of = {
            component: stage.index for stage in self.stages for group in stage.fused_groups for component in group
        }
        for edge in self.edges:
            source = self.streams[edge.stream].component
            if edge.fused:
                assert stage_of[source] == stage_of[edge.target]
            else:
                assert stage_of[source] < stage_of[edge.target], "an edge must point to a later stage"
