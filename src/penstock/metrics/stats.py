"""The counters of a task. They are cumulative, so a lost report does no harm."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from penstock.metrics.histogram import Histogram


@dataclass(slots=True)
class TaskStats:
    """The counters of one task since the query run started, and some values at the moment of the report."""

    arrived: int = 0
    """Tuples put into the inbox."""
    arrived_bytes: int = 0
    received: int = 0
    """Tuples taken from the inbox."""
    received_bytes: int = 0
    executed: int = 0
    emitted: int = 0
    """Emitted tuples. Copies for several subscribers count once."""
    expired: int = 0
    """Tuples that were not executed because all their roots had timed out."""
    late: int = 0
    """Tuples that arrived too late for at least one of their windows."""
    sent: int = 0
    """Tuples sent over all edges, including copies."""
    sent_bytes: int = 0
    errors: int = 0
    acked: int = 0
    failed: int = 0
    timed_out: int = 0
    """The part of ``failed`` that was not acked in time."""
    given_up: int = 0
    """In a spout: messages that failed too often and are not emitted again. In a sink: rejected rows. Each is a
    dead letter, or was passed to the user's ``on_give_up``."""
    written: int = 0
    """In a sink: rows stored in the external system."""
    in_call: float = 0.0
    """Seconds since the current call of the component's code began. 0 if no call is in progress."""
    away: float = 0.0
    """In a sink: seconds for which the external system has accepted nothing. 0 while it accepts rows."""
    held_back: float = 0.0
    """In a spout: seconds in which it had something to emit and was not permitted to, because of the pending limit
    or backpressure. The user's own rate limit and inactive time do not count."""
    busy: float = 0.0
    """Seconds in the code of the component, without encoding."""
    waited: float = 0.0
    """The part of ``busy`` in which calls of at least 0.25 ms used no CPU although a core was free: they slept, or
    waited for input or output."""
    slow_calls: int = 0
    """The calls for which ``waited`` was measured."""
    queued: int = 0
    """Tuples waiting in the inbox, including overflow."""
    overflowing: int = 0
    """The part of ``queued`` that is on disk."""
    capacity: int = 0
    """Tuples that the inbox holds."""
    peak: int = 0
    """The maximum of ``queued`` since the last report."""
    demand: float = 0.0
    """Tuples per second that arrived before it slowed its senders. 0 while it does not slow them."""
    limit: float = math.inf
    """Tuples per second that the task may send to the component that limits it most."""
    last_error: str = ""
    latency: Histogram = field(default_factory=Histogram)
    """Seconds from the emission by the spout until this task had processed the tuple. In a spout, until it was
    acked."""
    state_keys: int = 0
    """Current entries of the task's state."""
    state_bytes: int = 0
    """Their size in the state directory."""
    lag: dict[str, int] = field(default_factory=dict)
    """In a spout: unread records per partition of its source (``BaseSpout.lag``)."""

    def without_user_values(self) -> TaskStats:
        """A copy without the texts and names that come from user code."""
        return replace(self, lag={}, last_error="")


def bounded_count(count: int) -> int:
    """A count that user code has produced, as an ``int`` of 64 bits, because a message cannot contain a larger
    one. A count beyond that becomes the largest or smallest one. Raises as ``int`` does if it is no number."""
    return max(-(1 << 63), min(int(count), (1 << 63) - 1))
