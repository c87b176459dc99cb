"""What every worker is told, and how it makes its tasks from that."""

from __future__ import annotations

import math
import pickle
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.acking.ids import new_seed
from penstock.acking.pending import Pending
from penstock.clock import Clock
from penstock.control.pace import Pace
from penstock.errors import TopologyError
from penstock.metrics.stats import TaskStats
from penstock.plan.model import Edge, Plan, WorkerId
from penstock.plan.owners import grouped_by
from penstock.replay.records import ReplayRecord
from penstock.replay.state_dead_letters import FOLDER, StateDeadLetterStore
from penstock.settings import Settings
from penstock.state.store import StateStore
from penstock.state.values import TaskState
from penstock.topology.builder import Topology, TopologyNode
from penstock.topology.components import (
    AddDeadLetters,
    BaseBolt,
    BaseSpout,
    BasicBolt,
    BatchBolt,
    Component,
    Context,
    Failure,
    RichBolt,
    TransactionalSink,
)
from penstock.topology.groupings import Direct, Targets
from penstock.worker.bolts import BasicExecutor, BatchExecutor, BoltExecutor, RichExecutor
from penstock.worker.executor import Executor
from penstock.worker.flow_control import FlowControl
from penstock.worker.inbox import Inbox
from penstock.worker.migration_routes import MigrationRoutes
from penstock.worker.outputs import OutputEdge, Send, StreamOutput
from penstock.worker.sinks import SinkExecutor
from penstock.worker.spouts import SpoutExecutor
from penstock.worker.tracking import MessageIds, Origins, Tracker


@dataclass(frozen=True)
class Job:
    """All a worker needs to know; the same object goes to every worker."""

    plan: Plan
    settings: Settings
    components: Mapping[str, bytes]
    """Each component's instance, pickled: every task unpickles one of its own."""
    ticks: Mapping[str, float]
    max_rates: Mapping[str, float] = field(default_factory=dict)
    """Tuples a second each spout may emit, its tasks together, where that is limited."""
    folder: str = ""
    """Where the topology's state survives: a path or fsspec URL; empty where nothing does."""
    shared: str = ""
    """Where components may keep what survives at every level."""
    dead_letters: str = ""
    """Where dead letters of tasks are kept; empty: in ``shared``."""
    archive: str = ""
    """Where workers write their tasks' state: ``folder``, or a place to hand it over at where nothing survives."""
    key: int = field(default_factory=new_seed)
    """Of the roots' ledgers; secret to no one in the run, and different in the next."""

    def instance(self, component: str) -> Component:
        made = pickle.loads(self.components[component])
        assert isinstance(made, Component)
        return made


@dataclass(frozen=True)
class Surroundings:
    """What a task's executor is connected to in its worker."""

    worker: WorkerId
    nodes: Mapping[WorkerId, str]
    clock: Clock
    send: Callable[[int], Send]
    """Makes the sender of a task."""
    report: Callable[..., Callable[[Exception], None]]
    """Of a task's stats, and whether what is reported may stop the topology; by default it may."""
    publish: Callable[[int], Callable[[Sequence[Sequence[Any]]], None]]
    generation: int = 0
    """Of the state directory, as the start claimed it."""


def make_executor(
    job: Job,
    task: int,
    instance: Component,
    around: Surroundings,
    inbox: Inbox,
    state: TaskState,
    flow: FlowControl,
) -> Executor[Any]:
    """One task of a component, not yet open."""
    plan, settings = job.plan, job.settings
    component = plan.task[task].component
    stats = TaskStats()
    tracked = settings.delivery.guarantee == "at_least_once"
    tracker = Tracker(job.key, component) if tracked else None
    context = Context(
        topology=plan.topology,
        component=component,
        task=task,
        index=plan.task[task].index,
        tasks=plan.tasks_of,
        node=around.nodes.get(around.worker, ""),
        delivery=settings.delivery.guarantee,
        state=state,
        folder=f"{job.folder}/tasks/{component}-{plan.task[task].index}" if job.folder else "",
        generation=around.generation,
        shared=f"{job.shared}/{component}",
        grouped_by=grouped_by(plan, component),
        report=around.report(stats, False),
        add_dead_letters=_dead_letters(job, task, stats, around),
        gave_up=_counter(stats),
        late=_late_counter(stats),
        publish=around.publish(task),
    )
    is_spout = isinstance(instance, BaseSpout)
    pending = Pending(settings.delivery.message_timeout) if is_spout and tracked else None

    def origins() -> Origins | None:
        if tracker is None or pending is None:
            return None if tracker is None else Origins(tracker)
        return MessageIds(tracker, task, pending, around.clock.monotonic)

    outputs = {
        stream.name: StreamOutput(
            number,
            stream,
            [_connect(job, task, edge, around, flow) for edge in plan.edges_from(number)],
            settings.transport.frame_bytes,
            around.send(task),
            stats,
            around.report(stats),
            around.clock.now,
            origins(),
        )
        for number, stream in plan.streams_of(component)
    }
    shared = (context, outputs, stats, around.clock, tracker, flow.send_queues(task))
    if is_spout:
        rate = job.max_rates.get(component, math.inf) / len(plan.tasks_of[component])
        return SpoutExecutor(
            instance, *shared, pending=pending, max_pending=settings.delivery.max_spout_pending, pace=Pace(rate)
        )
    assert isinstance(instance, BaseBolt)
    return _bolt_executor(
        instance,
        *shared,
        inbox=inbox,
        streams=plan.streams,
        tick_interval=job.ticks.get(component),
        overload_detector=flow.overload_detector(task),
        timeout=settings.delivery.message_timeout,
    )


def _counter(stats: TaskStats) -> Callable[[int], None]:
    def gave_up(count: int) -> None:
        stats.given_up += count

    return gave_up


def _dead_letters(job: Job, task: int, stats: TaskStats, around: Surroundings) -> AddDeadLetters:
    """Keeps a task's dead letters and counts them. Nothing is made before the first."""
    plan = job.plan
    component, index = plan.task[task].component, plan.task[task].index
    place = f"{job.dead_letters or job.shared}/{component}/{FOLDER}/{index}"
    lock = threading.Lock()  # a sink publishes in another thread than it writes in
    dead_letters: StateDeadLetterStore | None = None

    def add(rows: Sequence[Sequence[Any]], failure: Failure | Sequence[Failure], *, once: str = "") -> None:
        nonlocal dead_letters
        if not rows and not once:
            return
        now = around.clock.now()
        failures = [failure] * len(rows) if isinstance(failure, Failure) else failure
        records = [
            ReplayRecord(tuple(row), why.attempts, why.error, why.component, now)
            for row, why in zip(rows, failures, strict=True)
        ]
        with lock:
            if dead_letters is None:
                dead_letters = StateDeadLetterStore(StateStore(place), around.generation)
            if rows:
                dead_letters.about(plan.topology, component, index)
            if once and job.folder:
                stats.given_up += dead_letters.add_once(records, once)
            else:
                dead_letters.add(records)
                stats.given_up += len(rows)

    return add


def _bolt_executor(bolt: BaseBolt, *args: Any, **more: Any) -> BoltExecutor[Any]:
    """The executor for a bolt of any form."""
    forms: list[tuple[type[BaseBolt], type[BoltExecutor[Any]]]] = [
        (BasicBolt, BasicExecutor),
        (RichBolt, RichExecutor),
        (BatchBolt, BatchExecutor),
        (TransactionalSink, SinkExecutor),
    ]
    kind = next(executor for form, executor in forms if isinstance(bolt, form))
    return kind(bolt, *args, **more)


def _connect(job: Job, task: int, edge: Edge, around: Surroundings, flow: FlowControl) -> OutputEdge:
    tasks = job.plan.tasks_of[edge.target]
    send_queue = None if edge.fused else flow.send_queue(task, tasks[0])
    if isinstance(edge.grouping, Direct):
        return OutputEdge(None, tasks, str(edge.grouping), send_queue)
    workers = [job.plan.routes.worker_of[target] for target in tasks]
    node = around.nodes.get(around.worker)
    targets = Targets(
        tasks,
        task,
        tuple(position for position, worker in enumerate(workers) if worker == around.worker),
        tuple(position for position, worker in enumerate(workers) if node and around.nodes.get(worker) == node),
        job.settings.seed,
    )
    keys = {target: job.plan.task[target].key for target in tasks}
    migration_routes = MigrationRoutes(keys) if edge.target in job.plan.migratable else None
    return OutputEdge(
        edge.grouping.router(targets), tasks, type(edge.grouping).__name__, send_queue, migration_routes
    )


def make_job(topology: Topology, plan: Plan, folder: str, dumps: Callable[[Any], bytes], archive: str = "") -> Job:
    """What the workers of a topology are told."""
    nodes = topology.nodes.values()
    return Job(
        plan,
        topology.settings,
        {node.id: _pickled(node, dumps) for node in nodes},
        {node.id: node.tick_interval for node in nodes if node.tick_interval},
        {node.id: node.max_rate for node in nodes if node.is_spout},
        folder,
        f"{folder or StateStore(topology.settings.delivery.state_dir).child(topology.name).url}/shared",
        archive=archive or folder,
    )


def _pickled(node: TopologyNode, dumps: Callable[[Any], bytes]) -> bytes:
    try:
        return dumps(node.component)
    except Exception as error:  # pickling runs user code, which may raise anything
        raise TopologyError(
            f"component '{node.id}'",
            f"it cannot be pickled to be sent to the processes that run it ({type(error).__name__}: {error})",
            "Open connections, files and locks in open() or prepare(), not in __init__.",
        ) from error


def _late_counter(stats: TaskStats) -> Callable[[int], None]:
    def count(rows: int) -> None:
        stats.late += rows

    return count
