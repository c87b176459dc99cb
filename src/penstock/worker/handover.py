"""Takes and restores the handover state of a worker (``protocol.handover``)."""

from __future__ import annotations

import copy
import dataclasses

from penstock.metrics.stats import TaskStats
from penstock.protocol.handover import FlowHandover, HandoverState, TaskHandover
from penstock.worker.flow_control import FlowControl
from penstock.worker.migration_routes import MigrationRoutes
from penstock.worker.overload import OverloadDetectors
from penstock.worker.sender import FrameSender
from penstock.worker.sinks import SinkExecutor
from penstock.worker.tasks import Tasks


def take_handover(
    epoch: int,
    stats: dict[int, TaskStats],
    tasks: Tasks,
    flow: FlowControl,
    detectors: OverloadDetectors,
    sender: FrameSender,
) -> HandoverState:
    """The handover state of a worker that has left after ``epoch``. Called by the worker's loop; the worker's
    overload detectors send no signals from now on."""
    states, asked_to_wait = detectors.handover()
    return HandoverState(
        epoch,
        sender.frames_sent,
        sender.streams(),
        sender.sequence(),
        [(*key, *routes.positions) for key, routes in _migration_routes(tasks).items()],
        FlowHandover(states, flow.handover(), asked_to_wait),
        {
            bolt.context.task: TaskHandover(
                _counted(bolt, stats[bolt.context.task]),
                bolt.frames_done,
                [(*key, number) for key, number in bolt.expected.items()],
                bolt.arrived_inside,
            )
            for bolt in tasks.bolts
        },
    )


def restore_handover(
    state: HandoverState, tasks: Tasks, flow: FlowControl, detectors: OverloadDetectors, sender: FrameSender
) -> None:
    """Restore the handover state in a worker that has just opened its tasks. Called by the worker's loop."""
    sender.restore(state.frames_sent, state.streams, state.sequence)
    detectors.restore(state.flow.detectors, state.flow.asked_to_wait)
    flow.restore(state.flow.limiters)
    migration_routes = _migration_routes(tasks)
    for task, stream, receiver, position, bound in state.positions:
        migration_routes[task, stream, receiver].restore(position, bound)
    for bolt in tasks.bolts:
        before = state.tasks[bolt.context.task]
        for each in dataclasses.fields(before.stats):
            setattr(bolt.stats, each.name, getattr(before.stats, each.name))
        bolt.frames_done += before.frames_done
        bolt.expected.update({(source, stream): number for source, stream, number in before.expected})
        bolt.arrived_before = before.arrived


def _migration_routes(tasks: Tasks) -> dict[tuple[int, int, int], MigrationRoutes]:
    """By sending task, stream and first receiving task."""
    return {
        (executor.context.task, output.number, edge.tasks[0]): edge.migration_routes
        for executor in tasks.all
        for output in executor.outputs.values()
        for edge in output.edges
        if edge.migration_routes is not None
    }


def _counted(bolt: object, stats: TaskStats) -> TaskStats:
    """A copy of the stats. Rows that a sink has prepared count as written, because they are published before the
    other process takes over."""
    counted = copy.deepcopy(stats)
    if isinstance(bolt, SinkExecutor):
        counted.written += bolt.unpublished_rows
    return counted
