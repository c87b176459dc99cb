"""What every slot is told, and how it makes its tasks from that."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.acking.ids import new_seed
from penstock.acking.pending import Pending
from penstock.clock import Clock
from penstock.errors import TopologyError
from penstock.metrics.stats import TaskStats
from penstock.plan.model import Edge, Plan, SlotId
from penstock.runtime.bolts import BasicExecutor, BatchExecutor, BoltExecutor, RichExecutor
from penstock.runtime.executor import Executor
from penstock.runtime.inbox import Inbox
from penstock.runtime.outputs import Connection, Send, StreamOutput
from penstock.runtime.sinks import SinkExecutor
from penstock.runtime.spouts import SpoutExecutor
from penstock.runtime.tracking import MessageIds, Origins, Tracker
from penstock.settings import Settings
from penstock.state.values import TaskState
from penstock.topology.components import (
    BaseBolt,
    BaseSpout,
    BasicBolt,
    BatchBolt,
    Component,
    Context,
    RichBolt,
    TransactionalSink,
)
from penstock.topology.groupings import Direct, Targets


@dataclass(frozen=True)
class Job:
    """All a slot needs to know; the same object goes to every slot."""

    plan: Plan
    settings: Settings
    components: Mapping[str, bytes]
    """Each component's instance, pickled: every task unpickles one of its own."""
    ticks: Mapping[str, float]
    folder: str = ""
    """Where the topology's state survives: a path or fsspec URL; empty where nothing does."""
    key: int = field(default_factory=new_seed)
    """Of the roots' ledgers; secret to no one in the run, and different in the next."""

    def instance(self, component: str) -> Component:
        made = pickle.loads(self.components[component])
        assert isinstance(made, Component)
        return made


@dataclass(frozen=True)
class Surroundings:
    """What a task's executor is connected to in its slot."""

    slot: SlotId
    nodes: Mapping[SlotId, str]
    clock: Clock
    send: Callable[[int], Send]
    """Makes the sender of a task."""
    report: Callable[[TaskStats], Callable[[Exception], None]]
    publish: Callable[[int], Callable[[Sequence[Sequence[Any]]], None]]


def make_executor(job: Job, task: int, around: Surroundings, inbox: Inbox, state: TaskState) -> Executor[Any]:
    """One task, not yet open."""
    plan, settings = job.plan, job.settings
    component = plan.task[task].component
    stats = TaskStats()
    tracked = settings.delivery == "at_least_once"
    tracker = Tracker(job.key, component) if tracked else None
    context = Context(
        topology=plan.topology,
        component=component,
        task=task,
        index=plan.task[task].index,
        tasks=plan.tasks_of,
        node=around.nodes.get(around.slot, ""),
        delivery=settings.delivery,
        state=state,
        folder=f"{job.folder}/tasks/{component}-{plan.task[task].index}" if job.folder else "",
        publish=around.publish(task),
    )
    instance = job.instance(component)
    is_spout = isinstance(instance, BaseSpout)
    pending = Pending(settings.message_timeout) if is_spout and tracked else None

    def origins() -> Origins | None:
        if tracker is None or pending is None:
            return None if tracker is None else Origins(tracker)
        return MessageIds(tracker, task, pending, around.clock.monotonic)

    outputs = {
        stream.name: StreamOutput(
            number,
            stream,
            [_connect(job, task, edge, around) for edge in plan.edges_from(number)],
            settings.frame_bytes,
            around.send(task),
            stats,
            around.report(stats),
            around.clock.now,
            origins(),
        )
        for number, stream in plan.streams_of(component)
    }
    shared = (context, outputs, stats, around.clock, tracker)
    if is_spout:
        return SpoutExecutor(instance, *shared, pending=pending, max_pending=settings.max_spout_pending)
    assert isinstance(instance, BaseBolt)
    return _bolt_executor(
        instance, *shared, inbox=inbox, streams=plan.streams, tick_interval=job.ticks.get(component)
    )


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


def _connect(job: Job, task: int, edge: Edge, around: Surroundings) -> Connection:
    tasks = job.plan.tasks_of[edge.target]
    if isinstance(edge.grouping, Direct):
        return Connection(None, tasks, str(edge.grouping))
    slots = [job.plan.routes.slot_of[target] for target in tasks]
    node = around.nodes.get(around.slot)
    targets = Targets(
        tasks,
        task,
        tuple(position for position, slot in enumerate(slots) if slot == around.slot),
        tuple(position for position, slot in enumerate(slots) if node and around.nodes.get(slot) == node),
        job.settings.seed,
    )
    return Connection(edge.grouping.router(targets), tasks, type(edge.grouping).__name__)


def pickle_components(components: Mapping[str, Component], dumps: Callable[[Any], bytes]) -> dict[str, bytes]:
    """The components' bytes for a ``Job``, with an error that names the one that cannot travel."""
    result = {}
    for id, component in components.items():
        try:
            result[id] = dumps(component)
        except Exception as error:  # pickling runs user code, which may raise anything
            raise TopologyError(
                f"component '{id}'",
                "must be picklable: it travels to the processes that run it",
                f"{type(error).__name__}: {error}",
                "Open connections, files and locks in open() or prepare(), not in __init__.",
            ) from error
    return result
