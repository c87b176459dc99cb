"""The handover state: what a worker that moves to another process takes along besides its tasks' state. It has the
positions in the streams of frames, so that numbers of frames go on, and the state of flow control and counters."""

from __future__ import annotations

from msgspec import Struct

from penstock.control.flow_states import DetectorState, LimiterState
from penstock.metrics.stats import TaskStats


class TaskHandover(Struct, frozen=True, array_like=True):
    """Of one bolt task."""

    stats: TaskStats
    frames_done: int
    expected: list[tuple[int, int, int]]
    """Sender, stream and the number of the next frame."""
    arrived: tuple[int, int]
    """Tuples and bytes that its inbox ever took."""


class FlowHandover(Struct, frozen=True, array_like=True):
    """Of flow control."""

    detectors: dict[int, DetectorState]
    """By task."""
    limiters: dict[int, dict[str, LimiterState]]
    """By task and by the component that it sends to."""
    asked_to_wait: list[tuple[int, int]]
    """Tasks and senders that were told to wait because they are epochs ahead."""


class HandoverState(Struct, frozen=True, array_like=True):
    """Of one worker, when it has left."""

    epoch: int
    """The last one that it worked on."""
    frames_sent: int
    streams: list[tuple[int, int, int, int]]
    """Sender, receiver (tasks), tuples and bytes so far."""
    sequence: list[tuple[int, int, int, int]]
    """Sender, receiver, stream, and the number of the next frame."""
    flow: FlowHandover
    tasks: dict[int, TaskHandover]
