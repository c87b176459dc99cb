"""The plan of a topology: stages, workers, tasks and routes. Inert and picklable; every worker receives it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from penstock.topology.groupings import Grouping
from penstock.topology.streams import Stream


@dataclass(frozen=True, order=True)
class WorkerId:
    """Identifies one worker: one partition of one stage, which is one long-running Spark task with one Python
    process."""

    stage: int
    index: int

    def __str__(self) -> str:
        return f"{self.stage}.{self.index}"

    @classmethod
    def parse(cls, text: str) -> WorkerId:
        """The inverse of ``str``."""
        stage, worker = text.split(".")
        return cls(int(stage), int(worker))


@dataclass(frozen=True)
class Task:
    """A task in Storm's meaning: one instance of a component."""

    id: int
    component: str
    index: int

    @property
    def key(self) -> str:
        """The name of the task in manifests. Unlike the id, it does not change when components are added."""
        return f"{self.component}/{self.index}"


@dataclass(frozen=True)
class Edge:
    """One subscription: a stream of one component, read by another."""

    stream: int
    target: str
    grouping: Grouping
    fused: bool = False
    """The two tasks of each pair share a worker, so tuples pass between them in memory."""


@dataclass(frozen=True)
class Stage:
    """All components at one distance from the spouts. A stage only sends to later stages."""

    index: int
    fused_groups: tuple[tuple[str, ...], ...]
    workers: int


@dataclass(frozen=True)
class RouteTable:
    """Which worker runs which task. The only part of a plan that may change while the topology runs."""

    version: int
    worker_of: Mapping[int, WorkerId]

    def tasks_of(self, worker: WorkerId) -> tuple[int, ...]:
        return tuple(task for task, owner in self.worker_of.items() if owner == worker)


@dataclass(frozen=True)
class Plan:
    """How a topology is laid out on Spark."""

    topology: str
    stages: tuple[Stage, ...]
    tasks: tuple[Task, ...]
    streams: tuple[Stream, ...]
    edges: tuple[Edge, ...]
    routes: RouteTable
    not_migrated: Mapping[str, str] = field(default_factory=dict)
    """For each component the reason why its data is never migrated between its tasks. Empty text if it may be."""

    @property
    def migratable(self) -> tuple[str, ...]:
        """The components whose data may be migrated."""
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
        """The streams that a component declares, with their numbers in the wire format."""
        return [(number, stream) for number, stream in enumerate(self.streams) if stream.component == component]

    def edges_from(self, stream: int) -> list[Edge]:
        return [edge for edge in self.edges if edge.stream == stream]

    @cached_property
    def downstream_of(self) -> dict[str, tuple[str, ...]]:
        """The components that each component sends to, without those fused with it."""
        result: dict[str, tuple[str, ...]] = {}
        for component in self.tasks_of:
            targets = [e.target for e in self.edges if self.source_of(e) == component and not e.fused]
            result[component] = tuple(dict.fromkeys(targets))
        return result

    @cached_property
    def upstream_of(self) -> dict[str, tuple[str, ...]]:
        """The components that send to each component, without the one it is fused with."""
        return {
            component: tuple(source for source, targets in self.downstream_of.items() if component in targets)
            for component in self.tasks_of
        }

    @cached_property
    def spouts(self) -> tuple[str, ...]:
        """The components without inputs."""
        receivers = {edge.target for edge in self.edges}
        return tuple(component for component in self.tasks_of if component not in receivers)

    def source_of(self, edge: Edge) -> str:
        return self.streams[edge.stream].component

    def fused_tasks(self, task: int) -> tuple[int, ...]:
        """The tasks in the same worker to which a task passes tuples in memory."""
        component = self.task[task].component
        targets = {edge.target for edge in self.edges if edge.fused and self.source_of(edge) == component}
        mine = self.routes.tasks_of(self.routes.worker_of[task])
        return tuple(each for each in mine if self.task[each].component in targets)

    def next_hop(self, source: WorkerId, target: WorkerId) -> int:
        """The worker of the next stage that receives a row on its way from ``source`` to ``target``.

        A frame for a later stage is relayed through the stages in between. The relay depends only on both ends, so
        frames between two tasks keep their order, and the load is spread over the workers of each stage.
        """
        if target.stage == source.stage + 1:
            return target.index
        return (source.index + target.index) % self.stages[source.stage + 1].workers

    def validate(self) -> None:
        """Check the invariants of every plan. Raises ``AssertionError``."""
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
