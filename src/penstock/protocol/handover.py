"""The handover state: the data that a worker sends to the process to which it moves, besides the state of its
tasks. It contains the numbers of the next frames, the state of flow control and the counters."""

from __future__ import annotations

from msgspec import Struct

from penstock.control.flow_states import DetectorState, LimiterState
from penstock.metrics.stats import TaskStats


class TaskHandover(Struct, frozen=True, array_like=True):
    """The handover state of one bolt task."""

    stats: TaskStats
    frames_done: int
    expected: list[tuple[int, int, int]]
    """Sending task, stream, and the number of the next frame from it."""
    arrived: tuple[int, int]
    """Tuples and bytes that have entered its inbox so far."""


class FlowHandover(Struct, frozen=True, array_like=True):
    """The handover state of flow control."""

    detectors: dict[int, DetectorState]
    """By receiving task."""
    limiters: dict[int, dict[str, LimiterState]]
    """By sending task and receiving component."""
    asked_to_wait: list[tuple[int, int]]
    """⟨Receiving task, sending task⟩ of the senders that were told to wait because they are epochs ahead."""


class HandoverState(Struct, frozen=True, array_like=True):
    """The handover state of one worker, taken when it has left."""

    epoch: int
    """The last epoch that the worker processed."""
    frames_sent: int
    streams: list[tuple[int, int, int, int]]
    """Sending task, receiving task, tuples and bytes so far."""
    sequence: list[tuple[int, int, int, int]]
    """Sending task, receiving task, stream, and the number of the next frame."""
    positions: list[tuple[int, int, int, int, dict[int, int]]]
    """For each subscription whose data may be migrated: sending task, stream, first receiving task, the position
    of the next tuple in the source data, and the number of tuples bound for each receiving task."""
    flow: FlowHandover
    tasks: dict[int, TaskHandover]
