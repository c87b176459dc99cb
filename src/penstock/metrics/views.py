"""The values that the metrics bus returns. Inert; each describes one moment."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.plan.model import WorkerId


@dataclass(frozen=True)
class ComponentView:
    """One component. Rates are tuples per second over the last few seconds; times are seconds."""

    component: str
    tasks: int
    rate_in: float
    rate_out: float
    queued: int
    execute_time: float | None
    latency_p50: float | None
    latency_p99: float | None
    errors: int
    last_error: str
    executed: int
    emitted: int
    acked: int = 0
    failed: int = 0
    state_keys: int = 0
    state_bytes: int = 0
    capacity: int = 0
    """Tuples that all its inboxes hold together. Further queued tuples are on disk."""
    limit: float = math.inf
    """Tuples per second that its most limited task may send; ``inf``: no task is limited."""


@dataclass(frozen=True)
class QueueView:
    """The inbox of one task. Rates are tuples per second over the last few seconds."""

    task: str
    """The key of the task: component and index."""
    length: int
    capacity: int
    overflowing: int
    """The part of ``length`` that is on disk."""
    rate_in: float
    rate_out: float
    limit: float
    """Tuples per second that the task may send to the component that limits it most; ``inf``: not limited."""


@dataclass(frozen=True)
class Note:
    """An event and its reason, for display."""

    time: float
    """On the monotonic clock."""
    kind: str
    """``flow``, ``restart``, ``error`` …"""
    component: str
    """The component concerned. Empty for the whole topology, or if the text names it."""
    text: str


@dataclass(frozen=True)
class StreamCount:
    """The tuples that one task has sent to another."""

    tuples: int = 0
    bytes: int = 0
    """On the wire, or in memory if both tasks share a worker."""

    def __add__(self, other: StreamCount) -> StreamCount:
        return StreamCount(self.tuples + other.tuples, self.bytes + other.bytes)


Pair = tuple[int, int]
"""Two task ids: sender, receiver."""


@dataclass(frozen=True)
class WorkerLoad:
    """The load that a worker reported, and when, on the monotonic clock. CPU and memory are part of every report;
    streams and machine are reported less often."""

    time: float
    cpu: float
    rss: int
    detailed_at: float = -math.inf
    """The time of the last report with ``streams`` and ``machine``."""
    streams: Mapping[Pair, StreamCount] | None = None
    """The streams of its tasks since the query run started. None if not reported yet, or if the load monitor is
    off."""
    machine: Mapping[str, Any] = field(default_factory=dict)
    loop_cpu: float = 0.0
    """CPU seconds of the worker's loop. Part of every report."""


@dataclass(frozen=True)
class Load:
    """The load of all workers of one query run."""

    attempt: int
    workers: Mapping[WorkerId, WorkerLoad]
    busy: Mapping[int, float]
    """Busy seconds of each task."""
    links: Mapping[tuple[WorkerId, WorkerId], float] = field(default_factory=dict)
    """⟨Sending worker, receiving worker⟩ → the measured bytes per second of the link between them."""
