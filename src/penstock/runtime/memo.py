"""What a slot that moves to another process takes along besides its state: where its counts are, so that frames
are still told apart by their numbers, flow control goes on and no figure jumps."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.metrics.stats import TaskStats
from penstock.runtime.bolts import BoltExecutor
from penstock.runtime.sinks import SinkExecutor

if TYPE_CHECKING:
    from penstock.runtime.slot import Slot


@dataclass(frozen=True)
class Memo:
    """As JSON: it goes by the coordinator."""

    epoch: int
    """The last one that was done."""
    data: dict[str, Any]

    @classmethod
    def of(cls, slot: Slot, epoch: int) -> Memo:
        stats = slot.stats()
        return cls(
            epoch,
            {
                "frames_sent": slot.frames_sent,
                "streams": [[*pair, *count] for pair, count in slot.streams.items()],
                "sequence": [[*key, number] for key, number in slot.sequence.items()],
                "flow": slot.flow.memo(),
                "tasks": {
                    str(bolt.context.task): {
                        "stats": _counted(bolt, stats[bolt.context.task]),
                        "frames_done": bolt.frames_done,
                        "expected": [[*key, number] for key, number in bolt.expected.items()],
                        "arrived": bolt.arrived_inside,
                    }
                    for bolt in _bolts(slot)
                },
            },
        )

    def restore(self, slot: Slot) -> None:
        """Go on from here, in a slot that has just opened."""
        data = self.data
        slot.frames_sent += data["frames_sent"]
        for source, target, tuples, size in data["streams"]:
            slot.streams.add(source, target, tuples, size)
        slot.sequence.update(
            {(source, target, stream): number for source, target, stream, number in data["sequence"]}
        )
        slot.flow.restore(data["flow"])
        for bolt in _bolts(slot):
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


def _bolts(slot: Slot) -> list[BoltExecutor[Any]]:
    return [executor for executor in slot.executors if isinstance(executor, BoltExecutor)]
