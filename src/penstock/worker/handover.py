"""What a worker that moves to another process takes along besides its state: where its counts are, so that frames
are still told apart by their numbers, flow control goes on and no figure jumps."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.metrics.stats import TaskStats
from penstock.worker.bolts import BoltExecutor
from penstock.worker.sinks import SinkExecutor

if TYPE_CHECKING:
    from penstock.worker.worker import Worker


@dataclass(frozen=True)
class HandoverState:
    """As JSON: it goes by the coordinator."""

    epoch: int
    """The last one that was done."""
    data: dict[str, Any]

    @classmethod
    def of(cls, worker: Worker, epoch: int) -> HandoverState:
        stats = worker.stats()
        return cls(
            epoch,
            {
                "frames_sent": worker.frames_sent,
                "streams": [[*pair, *count] for pair, count in worker.streams.items()],
                "sequence": [[*key, number] for key, number in worker.sequence.items()],
                "flow": worker.flow.handover(),
                "tasks": {
                    str(bolt.context.task): {
                        "stats": _counted(bolt, stats[bolt.context.task]),
                        "frames_done": bolt.frames_done,
                        "expected": [[*key, number] for key, number in bolt.expected.items()],
                        "arrived": bolt.arrived_inside,
                    }
                    for bolt in _bolts(worker)
                },
            },
        )

    def restore(self, worker: Worker) -> None:
        """Go on from here, in a worker that has just opened."""
        data = self.data
        worker.frames_sent += data["frames_sent"]
        for source, target, tuples, size in data["streams"]:
            worker.streams.add(source, target, tuples, size)
        worker.sequence.update(
            {(source, target, stream): number for source, target, stream, number in data["sequence"]}
        )
        worker.flow.restore(data["flow"])
        for bolt in _bolts(worker):
            of = data["tasks"][str(bolt.context.task)]
            counted = TaskStats.from_json(of["stats"])
            for each in dataclasses.fields(counted):
                setattr(bolt.stats, each.name, getattr(counted, each.name))
            bolt.frames_done += of["frames_done"]
            bolt.expected.update({(source, stream): number for source, stream, number in of["expected"]})
            bolt.arrived_before = tuple(of["arrived"])


def _counted(bolt: BoltExecutor[Any], stats: TaskStats) -> dict[str, Any]:
    """What a sink has prepared is published before another takes over."""
    counted = stats.to_json()
    if isinstance(bolt, SinkExecutor):
        counted["written"] += bolt.unpublished_rows
    return counted


def _bolts(worker: Worker) -> list[BoltExecutor[Any]]:
    return [executor for executor in worker.executors if isinstance(executor, BoltExecutor)]
