"""Creates the executor of a task and connects it to its worker."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.acking.flights import FlightLog
from penstock.acking.pending import Pending
from penstock.clock import Clock
from penstock.control.pace import Pace
from penstock.metrics.stats import TaskStats, bounded_count
from penstock.plan.model import Edge, WorkerId
from penstock.plan.owners import grouped_by
from penstock.protocol.job import Job
from penstock.replay.records import ReplayRecord
from penstock.replay.state_dead_letters import FOLDER, StateDeadLetterStore
from penstock.state.store import StateStore
from penstock.state.values import TaskState
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
    Spout,
    TransactionalSink,
)
from penstock.topology.groupings import Direct, Targets
from penstock.worker.basic_bolts import BasicExecutor
from penstock.worker.bolts import BatchExecutor, BoltExecutor, RichExecutor
from penstock.worker.calls import CurrentCall
from penstock.worker.executor import Executor
from penstock.worker.flight_tracking import FlightOrigins, FlightTracker, MessageFlights
from penstock.worker.flow_control import FlowControl
from penstock.worker.inside import Count, InsideEdge, InsideStream, Receiver
from penstock.worker.intake import Intake
from penstock.worker.migration_routes import MigrationRoutes
from penstock.worker.outputs import OutputEdge, Send, StreamOutput
from penstock.worker.sinks import SinkExecutor
from penstock.worker.spouts import SAVED, SpoutExecutor
from penstock.worker.task_pass import PassOn
from penstock.worker.tracking import MessageIds, Origins, Tracker


@dataclass(frozen=True)
class Surroundings:
    """The parts of a worker to which the executors of its tasks are connected."""

    worker: WorkerId
    nodes: Mapping[WorkerId, str]
    clock: Clock
    intake: Intake
    flow: FlowControl
    call: CurrentCall
    send: Callable[[int], Send]
    """Makes the function with which a task sends frames."""
    count: Count
    """Counts tuples that are passed on inside the worker."""
    report: Callable[..., Callable[[Exception], None]]
    """Makes the function with which a task reports errors, from its stats and a flag: may a reported error stop
    the topology (default True)?"""
    publish: Callable[[int], Callable[[Sequence[Sequence[Any]]], None]]
    """Makes the function with which a task publishes rows for display."""
    wake: Callable[[], None]
    """Ends the loop's wait. May be called from any thread."""
    generation: int = 0
    """The generation with which the query run claimed the state directory."""
    behind: Mapping[str, int] = field(default_factory=dict)
    """See ``OpenTasks``."""
    flights: FlightLog | None = None
    """See ``Tasks.flights``."""


def make_executor(
    job: Job, task: int, instance: Component, around: Surroundings, state: TaskState
) -> Executor[Any]:
    """Create the executor of a task; its component is not opened yet. Called by the worker's loop when it opens
    its tasks."""
    plan, settings, flow = job.plan, job.settings, around.flow
    component = plan.task[task].component
    stats = TaskStats()
    tracker = _tracker(job, component, around)
    is_spout = isinstance(instance, BaseSpout)
    pending = Pending(settings.delivery.message_timeout) if is_spout and tracker is not None else None

    def origins() -> Origins | None:
        if tracker is None:
            return None
        if pending is None:
            return FlightOrigins(tracker) if around.flights else Origins(tracker)
        now = around.clock.monotonic
        if around.flights is None:
            return MessageIds(tracker, task, pending, now)
        return MessageFlights(tracker, task, pending, now, around.flights)

    outputs = {
        stream.name: StreamOutput(
            number,
            stream,
            [_connect(job, task, edge, around) for edge in plan.edges_from(number)],
            settings.transport.frame_bytes,
            around.send(task),
            stats,
            around.report(stats),
            around.clock.now,
            origins(),
        )
        for number, stream in plan.streams_of(component)
    }
    queues = flow.send_queues(task, [around.intake.inboxes[target] for target in plan.fused_tasks(task)])
    context = _context(job, task, around, state, stats)
    shared = (context, outputs, stats, around.clock, tracker, queues, around.call)
    if is_spout:
        rate = job.max_rates.get(component, math.inf) / len(plan.tasks_of[component])
        return SpoutExecutor(
            instance,
            *shared,
            pending=pending,
            max_pending=settings.delivery.max_spout_pending,
            pace=Pace(rate, SAVED),
        )
    assert isinstance(instance, BaseBolt)
    return _bolt_executor(
        instance,
        *shared,
        inbox=around.intake.inboxes[task],
        streams=plan.streams,
        tick_interval=job.ticks.get(component),
        overload_detector=around.intake.detectors.of_task(task),
        timeout=settings.delivery.message_timeout,
    )


def _context(job: Job, task: int, around: Surroundings, state: TaskState, stats: TaskStats) -> Context:
    """The context that the component's ``open`` or ``prepare`` receives."""
    plan, component, index = job.plan, job.plan.task[task].component, job.plan.task[task].index
    return Context(
        topology=plan.topology,
        component=component,
        task=task,
        index=index,
        tasks=plan.tasks_of,
        node=around.nodes.get(around.worker, ""),
        delivery=job.settings.delivery.guarantee,
        state=state,
        folder=f"{job.folder}/tasks/{component}-{index}" if job.folder else "",
        generation=around.generation,
        shared=f"{job.shared}/{component}",
        grouped_by=grouped_by(plan, component),
        inputs=tuple((plan.source_of(edge), plan.streams[edge.stream].name) for edge in plan.edges_to(component)),
        report=around.report(stats, False),
        waiting={**around.behind, component: around.intake.inboxes[task].length},
        add_dead_letters=_dead_letters(job, task, stats, around),
        gave_up=_counter(stats),
        late=_late_counter(stats),
        publish=around.publish(task),
        wake=around.wake,
    )


def _tracker(job: Job, component: str, around: Surroundings) -> Tracker | None:
    if job.settings.delivery.guarantee != "at_least_once":
        return None
    return Tracker(job.key, component) if around.flights is None else FlightTracker(job.key, component)


def _counter(stats: TaskStats) -> Callable[[int], None]:
    def gave_up(count: int) -> None:
        stats.given_up = bounded_count(stats.given_up + bounded_count(count))

    return gave_up


def _dead_letters(job: Job, task: int, stats: TaskStats, around: Surroundings) -> AddDeadLetters:
    """Make the function that stores and counts a task's dead letters. The store is created with the first one."""
    plan = job.plan
    component, index = plan.task[task].component, plan.task[task].index
    place = f"{job.dead_letters or job.shared}/{component}/{FOLDER}/{index}"
    lock = threading.Lock()  # a sink publishes on another thread than it writes on
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
    """The executor for any kind of bolt."""
    forms: list[tuple[type[BaseBolt], type[BoltExecutor[Any]]]] = [
        (BasicBolt, BasicExecutor),
        (RichBolt, RichExecutor),
        (BatchBolt, BatchExecutor),
        (TransactionalSink, SinkExecutor),
    ]
    kind = next(executor for form, executor in forms if isinstance(bolt, form))
    return kind(bolt, *args, **more)


def _connect(job: Job, task: int, edge: Edge, around: Surroundings) -> OutputEdge:
    tasks = job.plan.targets_of(task, edge)
    send_queue = None if edge.fused else around.flow.send_queue(task, tasks[0])
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
        job.plan.task[task].index,
    )
    keys = {target: job.plan.task[target].key for target in tasks}
    migratable = edge.target in job.plan.migratable
    migration_routes = MigrationRoutes(keys, around.generation) if migratable else None
    return OutputEdge(
        edge.grouping.router(targets), tasks, type(edge.grouping).__name__, send_queue, migration_routes
    )


def connect_inside(
    job: Job, executors: Sequence[Executor[Any]], around: Surroundings, tracker: Tracker | None
) -> dict[str, list[PassOn]]:
    """For each component of a worker, the functions that pass on its streams whose receivers are all in the same
    worker. ``tracker``: see ``InsideStream``."""
    by_task = {executor.context.task: executor for executor in executors}
    result: dict[str, list[PassOn]] = {}
    for component in dict.fromkeys(executor.context.component for executor in executors):
        mine = [executor for executor in executors if executor.context.component == component]
        for number, stream in job.plan.streams_of(component):
            outputs = {executor.context.task: executor.outputs[stream.name] for executor in mine}
            if not next(iter(outputs.values())).stays_inside:
                continue
            flushes = result.setdefault(component, [])
            if stream.direct or not isinstance(mine[0].component, Spout | BasicBolt | RichBolt):
                flushes += [output.flush for output in outputs.values()]
                continue
            for same in _with_the_same_receivers(outputs):
                edges = [_inside_edge(edge, by_task) for edge in next(iter(same.values())).edges]
                inside = InsideStream(
                    around.worker, number, stream, same, edges, tracker, around.count, around.clock.now
                )
                flushes.append(inside.flush)
    return result


def _with_the_same_receivers(outputs: Mapping[int, StreamOutput]) -> list[dict[int, StreamOutput]]:
    """The outputs of one stream, by task, divided by their receivers: a paired task has its own."""
    found: dict[tuple[tuple[int, ...], ...], dict[int, StreamOutput]] = {}
    for task, output in outputs.items():
        found.setdefault(tuple(edge.tasks for edge in output.edges), {})[task] = output
    return list(found.values())


def _inside_edge(edge: OutputEdge, executors: Mapping[int, Executor[Any]]) -> InsideEdge:
    assert edge.router is not None
    receivers = []
    for task in edge.tasks:
        bolt = executors[task]
        assert isinstance(bolt, BoltExecutor)
        receivers.append(Receiver(task, bolt.inbox, bolt.takes_columns))
    return InsideEdge(edge.router, receivers)


def _late_counter(stats: TaskStats) -> Callable[[int], None]:
    def count(rows: int) -> None:
        stats.late = bounded_count(stats.late + bounded_count(rows))

    return count
