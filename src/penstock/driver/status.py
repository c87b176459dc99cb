"""The status of a running topology at one moment, as ``penstock status`` and the HTTP endpoint show it."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.clock import Clock, SystemClock
from penstock.driver.ackers import AckerStatus
from penstock.driver.coordinator import Coordinator
from penstock.driver.energy_meter import NodeEnergy
from penstock.driver.load_monitor import LoadMonitor
from penstock.driver.migration_controller import MigrationController
from penstock.driver.placement_controller import PlacementController
from penstock.driver.refit_controller import RefitController
from penstock.driver.registry import WorkerConnection
from penstock.driver.scaling_controller import ScalingController
from penstock.metrics.bus import ComponentView, MetricsBus, Note, QueueView
from penstock.metrics.stats import TaskStats
from penstock.plan.model import Plan, Task, WorkerId
from penstock.topology.builder import Topology

FORMAT = 1
"""Version of the JSON. It increases when a field is removed or changes its meaning, but not for new fields."""

# Fields of ``TopologyStatus`` that go into the JSON unchanged.
_PLAIN_FIELDS = (
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
    "most_workers",
    "blocking",
)
_DECISIONS = 64  # newest decisions shown: a few screens of text, which keeps the JSON small


class Running(Protocol):
    """What ``take`` reads: ``driver.internals.Internals``, or a double in tests."""

    server: Coordinator
    monitor: LoadMonitor

    @property
    def state(self) -> str: ...
    @property
    def scalings(self) -> ScalingController: ...
    @property
    def refits(self) -> RefitController: ...
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
    def ackers(self) -> Sequence[AckerStatus]: ...
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
    """Status of one task."""

    task: Task
    worker: str
    queue: QueueView
    total: TaskStats
    """Counters since the topology was submitted."""


@dataclass(frozen=True)
class WorkerStatus:
    """Status of one worker. ``node`` and ``pid`` are unknown until the worker has connected."""

    worker: str
    node: str
    pid: int | None
    connected: bool
    cpu: float
    """CPU seconds used so far."""
    rss: int
    """Resident memory in bytes."""
    tasks: tuple[str, ...]
    clock_skew: float
    """Seconds by which the wall clock of the worker's machine is ahead of the driver's."""


@dataclass(frozen=True)
class TopologyStatus:
    """Status of a topology. Times are in seconds since 1970; rates are in tuples per second, over the last
    seconds."""

    topology: str
    state: str
    """``starting``, ``active``, ``inactive``, ``restarting``, ``ending``, ``ended`` or ``failed``."""
    delivery: str
    pid: int
    time: float
    uptime: float
    epoch: int
    """The newest committed epoch, or 0."""
    commit_age: float | None
    """Seconds since that commit. None if the current query run has not committed an epoch yet."""
    restarts: int
    pending: int
    rate_in: float
    """Tuples emitted by the spouts."""
    rate_out: float
    """Tuples received by the last bolts."""
    components: tuple[ComponentView, ...]
    spouts: frozenset[str]
    max_rates: Mapping[str, float]
    """Maximum rate of each spout; ``inf`` for no limit."""
    published: Mapping[str, list[list[Any]]]
    tasks: tuple[TaskStatus, ...]
    workers: tuple[WorkerStatus, ...]
    decisions: tuple[Note, ...]
    errors: tuple[Note, ...]
    """Oldest first, as ``decisions``."""
    nodes: tuple[NodeEnergy, ...] = ()
    """All nodes that have ever had a worker of the topology."""
    most_workers: int | None = None
    """The most workers, without those of blocking components. None: one for each executor."""
    blocking: tuple[str, ...] = ()
    """Components whose executors have workers of their own."""
    placement: tuple[Note, ...] = ()
    """What ERDM made of each of the last load samples: an action, or why there is none. Oldest first."""
    ackers: tuple[AckerStatus, ...] = ()
    """Empty if acks are not tracked."""

    @property
    def energy(self) -> dict[str, Any]:
        """The energy of all nodes together, in joules and watts. All values but ``measured`` are modelled.
        ``measured`` is None, and ``source`` is not ``rapl``, unless every node with a worker has a measured
        value."""
        nodes = self.nodes
        measurements = [node.measured for node in nodes if node.measured is not None]
        measured = bool(measurements) and all(node.measured is not None for node in nodes if node.workers)
        return {
            "source": "rapl" if measured else "modelled",
            "watts": sum(node.watts for node in nodes),
            "base": sum(node.base for node in nodes),
            "dynamic": sum(node.dynamic for node in nodes),
            "total": sum(node.total for node in nodes),
            "measured": sum(measurements) if measured else None,
            "cpu_seconds": sum(node.cpu_seconds for node in nodes),
        }

    def to_json(self) -> dict[str, Any]:
        """Return the status as a JSON object, described in docs/reference/status.md. Infinite and unknown values
        are null."""
        plain: dict[str, Any] = _plain(
            {
                "format": FORMAT,
                **{name: getattr(self, name) for name in _PLAIN_FIELDS},
                "components": [self._component(view) for view in self.components],
                "tasks": [_task(task) for task in self.tasks],
                "workers": [dataclasses.asdict(worker) for worker in self.workers],
                "ackers": [dataclasses.asdict(acker) for acker in self.ackers],
                "energy": self.energy,
                "nodes": [_node(node) for node in self.nodes],
                "placement": [{"time": note.time, "text": note.text} for note in self.placement],
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
    """Return the status of a topology now. May be called by any thread."""
    clock = clock or SystemClock()
    bus, plan = running.bus, running.plan
    since = clock.now() - clock.monotonic()
    views, totals = bus.view(), bus.task_totals()
    last = [component for component in plan.tasks_of if not _followers(plan, component)]
    notes = bus.notes()
    for kind, decisions in (
        ("migration", running.migrations.decisions.copy()),  # copied, because other threads append to it
        ("scaling", running.scalings.decisions.copy()),
        ("refit", running.refits.decisions.copy()),
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
        most_workers=plan.fit.workers,
        blocking=plan.blocking,
        placement=tuple(
            _dated(Note(each.time, "placement", "", each.text), since)
            for each in running.placements.outcomes.copy()
        ),
        ackers=tuple(running.ackers),
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
    """Replace infinity and NaN by None, because JSON has neither. Values that users publish may contain them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value
