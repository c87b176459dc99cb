"""The status of a running topology at a moment: what ``penstock status`` and the HTTP endpoint show."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.clock import Clock, SystemClock
from penstock.driver.energy_meter import NodeEnergy
from penstock.driver.load_monitor import LoadMonitor
from penstock.driver.migration_controller import MigrationController
from penstock.driver.placement_controller import PlacementController
from penstock.driver.registry import WorkerConnection
from penstock.driver.scaling_controller import ScalingController
from penstock.driver.server import Coordinator
from penstock.metrics.bus import ComponentView, MetricsBus, Note, QueueView
from penstock.metrics.stats import TaskStats
from penstock.plan.model import Plan, Task, WorkerId
from penstock.topology.builder import Topology

FORMAT = 1
"""Of the JSON: grows when a field goes or changes its meaning; new fields may come without that."""

_WHOLE = (
    "topology",
    "state",
    "delivery",
    "pid",
    "time",
    "uptime",
    "epoch",
    "commit_age",
    "restarts",
    "pending",
    "rate_in",
    "rate_out",
)
_DECISIONS = 64  # the newest that are shown


class Running(Protocol):
    """What a status is taken of: ``driver.internals.Internals``, or a double in tests."""

    server: Coordinator
    monitor: LoadMonitor

    @property
    def state(self) -> str: ...
    @property
    def scalings(self) -> ScalingController: ...
    @property
    def placements(self) -> PlacementController: ...
    @property
    def restarts(self) -> int: ...
    @property
    def topology(self) -> Topology: ...
    @property
    def plan(self) -> Plan: ...
    @property
    def bus(self) -> MetricsBus: ...
    @property
    def migrations(self) -> MigrationController: ...
    @property
    def workers(self) -> Mapping[WorkerId, WorkerConnection]: ...
    @property
    def begun(self) -> float | None: ...
    @property
    def committed(self) -> int: ...
    @property
    def commit_age(self) -> float | None: ...
    @property
    def max_rates(self) -> Mapping[str, float]: ...


@dataclass(frozen=True)
class TaskStatus:
    """One task."""

    task: Task
    worker: str
    queue: QueueView
    total: TaskStats
    """Counted since the topology was first started."""


@dataclass(frozen=True)
class WorkerStatus:
    """One worker: a Python process on a node. Node and process are unknown until it has connected."""

    worker: str
    node: str
    pid: int | None
    connected: bool
    cpu: float
    """Seconds so far."""
    rss: int
    """Resident bytes."""
    tasks: tuple[str, ...]
    clock_skew: float
    """Seconds by which the wall clock of its machine is ahead of the driver's."""


@dataclass(frozen=True)
class TopologyStatus:
    """A topology, now. Times are seconds since 1970, rates tuples a second over the last seconds."""

    topology: str
    state: str
    """``starting``, ``active``, ``inactive``, ``restarting``, ``ending``, ``ended`` or ``failed``."""
    delivery: str
    pid: int
    time: float
    uptime: float
    epoch: int
    """The newest committed one; 0 for none."""
    commit_age: float | None
    """Seconds since it was; None where the current query run has made none."""
    restarts: int
    pending: int
    rate_in: float
    """What the spouts emit."""
    rate_out: float
    """What the bolts that nothing follows take."""
    components: tuple[ComponentView, ...]
    spouts: frozenset[str]
    max_rates: Mapping[str, float]
    """Of every spout; ``inf`` for no limit."""
    published: Mapping[str, list[list[Any]]]
    tasks: tuple[TaskStatus, ...]
    workers: tuple[WorkerStatus, ...]
    decisions: tuple[Note, ...]
    errors: tuple[Note, ...]
    """Both oldest first, with times since 1970."""
    nodes: tuple[NodeEnergy, ...] = ()
    """All that ever had a worker of the topology."""

    @property
    def energy(self) -> dict[str, Any]:
        """Of all nodes. Joules and watts are modelled, but for ``measured``: known where every node with a worker
        has a measured figure, and ``source`` is then ``rapl``."""
        nodes = self.nodes
        told = [node.measured for node in nodes if node.measured is not None]
        measured = bool(told) and all(node.measured is not None for node in nodes if node.workers)
        return {
            "source": "rapl" if measured else "modelled",
            "watts": sum(node.watts for node in nodes),
            "base": sum(node.base for node in nodes),
            "dynamic": sum(node.dynamic for node in nodes),
            "total": sum(node.total for node in nodes),
            "measured": sum(told) if measured else None,
            "cpu_seconds": sum(node.cpu_seconds for node in nodes),
        }

    def to_json(self) -> dict[str, Any]:
        """One object of plain values, described in docs/reference/status.md; what is infinite or unknown is
        null."""
        plain: dict[str, Any] = _plain(
            {
                "format": FORMAT,
                **{name: getattr(self, name) for name in _WHOLE},
                "components": [self._component(view) for view in self.components],
                "tasks": [_task(task) for task in self.tasks],
                "workers": [dataclasses.asdict(worker) for worker in self.workers],
                "energy": self.energy,
                "nodes": [_node(node) for node in self.nodes],
                "decisions": [dataclasses.asdict(note) for note in self.decisions],
                "errors": [{"time": note.time, "text": note.text} for note in self.errors],
            }
        )
        return plain

    def _component(self, view: ComponentView) -> dict[str, Any]:
        spout = view.component in self.spouts
        return {
            **dataclasses.asdict(view),
            "kind": "spout" if spout else "bolt",
            "max_rate": self.max_rates.get(view.component),
            "published": self.published.get(view.component, []),
        }


def take(running: Running, clock: Clock | None = None) -> TopologyStatus:
    """Look at a topology; from any thread."""
    clock = clock or SystemClock()
    bus, plan = running.bus, running.plan
    since = clock.now() - clock.monotonic()
    views, totals = bus.view(), bus.task_totals()
    last = [component for component in plan.tasks_of if not _followers(plan, component)]
    notes = bus.notes()
    for kind, decisions in (
        ("migration", running.migrations.decisions.copy()),  # at once: other threads add to it meanwhile
        ("scaling", running.scalings.decisions.copy()),
        ("placement", running.placements.decisions.copy()),
    ):
        notes += [Note(each.time, kind, each.component, each.text) for each in decisions]
    return TopologyStatus(
        topology=plan.topology,
        state=running.state,
        delivery=running.topology.settings.delivery.guarantee,
        pid=os.getpid(),
        time=clock.now(),
        uptime=0.0 if running.begun is None else clock.monotonic() - running.begun,
        epoch=running.committed,
        commit_age=running.commit_age,
        restarts=running.restarts,
        pending=bus.pending(),
        rate_in=sum(view.rate_out for view in views if view.component in plan.spouts),
        rate_out=sum(view.rate_in for view in views if view.component in last),
        components=tuple(views),
        spouts=frozenset(plan.spouts),
        max_rates=running.max_rates,
        published=bus.published(),
        tasks=tuple(
            TaskStatus(task, str(plan.routes.worker_of[task.id]), queue, totals[task.id])
            for task, queue in zip(plan.tasks, bus.queues(), strict=True)
        ),
        workers=_workers(running),
        decisions=tuple(_dated(note, since) for note in sorted(notes, key=lambda note: note.time)[-_DECISIONS:]),
        errors=tuple(_dated(note, since) for note in bus.last_errors()),
        nodes=running.monitor.energy.nodes,
    )


def _followers(plan: Plan, component: str) -> list[str]:
    return [edge.target for edge in plan.edges if plan.source_of(edge) == component]


def _workers(running: Running) -> tuple[WorkerStatus, ...]:
    plan, processes = running.plan, running.bus.processes()
    with running.server.changed:
        known = dict(running.workers)
    result = []
    for id in plan.worker_ids():
        worker, (cpu, rss) = known.get(id), processes.get(id, (0.0, 0))
        result.append(
            WorkerStatus(
                str(id),
                worker.hello.node if worker else "",
                worker.hello.pid if worker else None,
                worker is not None and worker.connected,
                cpu,
                rss,
                tuple(plan.task[task].key for task in plan.routes.tasks_of(id)),
                worker.clock_skew if worker else 0.0,
            )
        )
    return tuple(result)


def _task(status: TaskStatus) -> dict[str, Any]:
    counted = (
        "executed",
        "emitted",
        "acked",
        "failed",
        "errors",
        "expired",
        "late",
        "given_up",
        "written",
        "in_call",
        "away",
        "busy",
        "last_error",
        "lag",
    )
    queue = dataclasses.asdict(status.queue)
    return {
        "task": queue.pop("task"),
        "component": status.task.component,
        "worker": status.worker,
        "queued": queue.pop("length"),
        **queue,
        **{name: getattr(status.total, name) for name in counted},
    }


def _node(node: NodeEnergy) -> dict[str, Any]:
    return {**dataclasses.asdict(node), "watts": node.watts, "total": node.total, "source": node.source}


def _dated(note: Note, since: float) -> Note:
    return dataclasses.replace(note, time=since + note.time)


def _plain(value: Any) -> Any:
    """JSON knows neither infinity nor NaN; what users publish may have them too."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value
