"""The plan of a topology: stages, workers, tasks and routes. Inert and picklable; every worker receives it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from penstock.control.packing import PackedGroup
from penstock.topology.groupings import Forward, Grouping, LocalOrShuffle, NoneGrouping, Shuffle
from penstock.topology.streams import Stream

LOCAL = (Shuffle, NoneGrouping, LocalOrShuffle)
"""Groupings by which a tuple may go to any task, so that tuples may stay in their worker. A user's subclass is not
included, because it may route differently."""


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
class Fit:
    """What the planner knows of the machine and of the load when it packs components into workers."""

    workers: int | None = None
    """The most workers, without those of blocking components. None: each executor has its own worker."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """The measured load of components. Empty: every executor weighs the same."""
    traffic: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """Tuples per second from component to component, as measured. Empty: every stream carries the same."""
    enough: float = 0.0
    """A load, in the unit of the weights, that a worker carries without trouble. Packings below it are equally
    good, so the one with the fewest hops is taken. 0 if nothing was measured."""
    blocking: frozenset[str] = frozenset()
    """Components that were found to wait in their calls."""
    groups: tuple[PackedGroup, ...] = ()
    """The packing that was chosen for the very topology that is planned. Empty: the planner chooses it."""


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
    """Source and target are in one fused group: all tuples stay in their worker and are passed in memory."""
    paired: bool = False
    """Fused, and task i of the source sends only to task i of the target."""
    why_not_fused: str = ""
    """The reason in a few words. Empty if the edge is fused."""


@dataclass(frozen=True)
class FusedGroup:
    """Components that share the same workers of one stage, in an order in which each comes after the components it
    reads. The executors of each component are distributed over the workers evenly and in order."""

    components: tuple[str, ...]
    workers: int


@dataclass(frozen=True)
class Stage:
    """All fused groups at one distance from the spouts. A stage only sends to later stages."""

    index: int
    fused_groups: tuple[FusedGroup, ...]

    @property
    def workers(self) -> int:
        return sum(group.workers for group in self.fused_groups)


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
    fit: Fit = field(default_factory=lambda: Fit())
    """What the planner packed the components by."""
    blocking: tuple[str, ...] = ()
    """Components whose executors have workers of their own, because their calls wait: those of ``fit``, and those
    that the topology declares blocking."""

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

    def edges_to(self, component: str) -> list[Edge]:
        return [edge for edge in self.edges if edge.target == component]

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
        """The components that send to each component, without those it is fused with."""
        return {
            component: tuple(source for source, targets in self.downstream_of.items() if component in targets)
            for component in self.tasks_of
        }

    @cached_property
    def hops(self) -> int:
        """The most edges on a path from a spout, fused or not; at least 1."""
        depth = dict.fromkeys(self.tasks_of, 0)
        edges = [(self.source_of(edge), edge.target) for edge in self.edges]
        for _ in depth:  # a path has fewer edges than there are components
            for source, target in edges:
                depth[target] = max(depth[target], depth[source] + 1)
        return max(1, *depth.values())

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
        fused = [edge for edge in self.edges if edge.fused and self.source_of(edge) == component]
        return tuple(sorted({target for edge in fused for target in self.targets_of(task, edge)}))

    def branch_of(self, task: int) -> tuple[int, ...]:
        """The tasks of the branch that begins with a task (Sun 2022): those to which all its tuples go, until
        tuples of several branches meet."""
        found = [task]
        for each in found:
            component = self.task[each].component
            forward = [
                edge for edge in self.edges if type(edge.grouping) is Forward and self.source_of(edge) == component
            ]
            position = self.task[each].index
            ahead = [targets[position % len(targets)] for targets in (self.tasks_of[e.target] for e in forward)]
            found += [other for other in (*self.fused_tasks(each), *ahead) if other not in found]
        return tuple(found)

    def targets_of(self, task: int, edge: Edge) -> tuple[int, ...]:
        """The tasks to which a task of the edge's source may send tuples of the edge. On a fused edge these are
        tasks in its own worker."""
        targets = self.tasks_of[edge.target]
        if edge.paired:
            return (targets[self.task[task].index],)
        if edge.fused:
            worker = self.routes.worker_of[task]
            return tuple(target for target in targets if self.routes.worker_of[target] == worker)
        return targets

    def receivers_of(self, task: int, component: str) -> tuple[int, ...]:
        """The tasks of a component to which a task may send frames."""
        targets = self.tasks_of[component]
        if self._only_forward(self.task[task].component, component):
            return (targets[self.task[task].index % len(targets)],)
        return targets

    def senders_to(self, task: int) -> tuple[int, ...]:
        """The tasks that may send frames to a task."""
        component, index = self.task[task].component, self.task[task].index
        count = len(self.tasks_of[component])
        return tuple(
            sender
            for source in self.upstream_of[component]
            for sender in self.tasks_of[source]
            if self.task[sender].index % count == index or not self._only_forward(source, component)
        )

    def _only_forward(self, source: str, target: str) -> bool:
        """True if each task of ``source`` sends to one task of ``target``."""
        edges = [edge for edge in self.edges_to(target) if self.source_of(edge) == source and not edge.fused]
        return all(type(edge.grouping) is Forward for edge in edges)

    @cached_property
    def group_of(self) -> dict[str, FusedGroup]:
        """The fused group of each component."""
        groups = [group for stage in self.stages for group in stage.fused_groups]
        return {component: group for group in groups for component in group.components}

    @cached_property
    def stage_of(self) -> dict[str, int]:
        """The index of the stage of each component."""
        return {
            component: stage.index
            for stage in self.stages
            for group in stage.fused_groups
            for component in group.components
        }

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
        for edge in self.edges:
            source = self.source_of(edge)
            if edge.fused:
                self._validate_fused(edge)
            else:
                assert self.stage_of[source] < self.stage_of[edge.target], "an edge must point to a later stage"
                assert edge.why_not_fused, "an edge that is not fused must have a reason"
        for spout in self.spouts:
            assert self.stage_of[spout] == 0, "a spout must be in the first stage"
        for component in self.blocking:
            assert self.group_of[component].components == (component,), "a blocking component must be alone"

    def _validate_fused(self, edge: Edge) -> None:
        source, group = self.source_of(edge), self.group_of[edge.target]
        assert self.group_of[source] is group, "a fused edge must lie in one fused group"
        order = group.components
        assert order.index(source) < order.index(edge.target), "a component must come after those it reads"
        assert group.workers == 1 or type(edge.grouping) in LOCAL, f"{edge.grouping} over several workers"
        for task in self.tasks_of[source]:
            targets = self.targets_of(task, edge)
            assert targets, "a sender must have a target in its worker"
            assert {self.routes.worker_of[each] for each in targets} == {self.routes.worker_of[task]}
