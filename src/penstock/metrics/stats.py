"""What a task counts, and how it travels: cumulative numbers, so a lost report costs nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from penstock.metrics.histogram import Histogram


@dataclass(slots=True)
class TaskStats:
    """Counters of one task since its start; ``queued`` is the inbox length at the moment of the report."""

    arrived: int = 0
    """Tuples put in the inbox."""
    arrived_bytes: int = 0
    received: int = 0
    """Tuples taken from it."""
    received_bytes: int = 0
    executed: int = 0
    emitted: int = 0
    """Tuples emitted; a copy for each subscriber is not counted."""
    expired: int = 0
    """Tuples not executed because all they stem from had timed out."""
    late: int = 0
    """Tuples that came too late for one of their windows or more."""
    sent: int = 0
    """Tuples sent over all edges, copies counted."""
    sent_bytes: int = 0
    errors: int = 0
    acked: int = 0
    failed: int = 0
    timed_out: int = 0
    """Those of ``failed`` that were not acked in time."""
    given_up: int = 0
    """Of a spout: messages that failed too often and are not emitted again; of a sink: rows that it rejected. Each
    is a dead letter, or was handed to the user's ``on_give_up``."""
    written: int = 0
    """Of a sink: rows that the other system has."""
    in_call: float = 0.0
    """Seconds for which the component's code has not returned, at the moment of the report; 0 where it has."""
    away: float = 0.0
    """Of a sink: seconds for which the other system has taken nothing; 0 while it takes something."""
    held_back: float = 0.0
    """Of a spout: seconds in which it had something to emit and might not, for too much was pending or others
    slowed it. Not counted: the user's own limit, and while it is inactive."""
    busy: float = 0.0
    """Seconds in the component's own code, encoding excluded."""
    queued: int = 0
    """Tuples that wait in the inbox, those that overflow it included."""
    overflowing: int = 0
    """Those that do."""
    capacity: int = 0
    """Tuples the inbox holds."""
    peak: int = 0
    """The most that have waited since the last report."""
    demand: float = 0.0
    """Tuples a second it was sent before it slowed its senders; 0 while it does not."""
    limit: float = math.inf
    """Tuples a second the task may send to the component that slows it most."""
    last_error: str = ""
    latency: Histogram = field(default_factory=Histogram)
    """Seconds from the spout's emit until this task was done with the tuple; of a spout, until it was acked."""
    state_keys: int = 0
    """Entries of the task's state now."""
    state_bytes: int = 0
    """What they take in the state directory."""
    lag: dict[str, int] = field(default_factory=dict)
    """Of a spout: records of each partition of its source that it has not read yet (``BaseSpout.lag``)."""
