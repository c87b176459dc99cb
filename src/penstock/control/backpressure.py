"""The two sides of backpressure: what a task reports about its queue, and how a sender reacts.

An *overload detector* watches the inbox of one task and decides which messages its senders get. A *rate limiter*
belongs to a sender, one per component it sends to. It receives those messages and decides how many tuples may be
sent. Each mode has a pair of them: ``step`` (Lu 2020, algorithm 1), ``spout`` (Storm 1.x, Heron) and ``credit``
(Flink). Mode ``none`` has neither. The caller passes the time to all methods.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from penstock.control.overload_detectors import (
    LOAD_FACTOR,
    MAX_SENSITIVITY,
    MIN_SENSITIVITY,
    STEP,
    CreditDetector,
    Messages,
    OverloadDetector,
    SpoutDetector,
    StepDetector,
)
from penstock.control.rate_limiters import CreditLimiter, RateLimiter, SpoutLimiter, StepLimiter
from penstock.settings import Settings

__all__ = [
    "LOAD_FACTOR",
    "MAX_SENSITIVITY",
    "MIN_SENSITIVITY",
    "STEP",
    "CreditDetector",
    "CreditLimiter",
    "Messages",
    "OverloadDetector",
    "RateLimiter",
    "SpoutDetector",
    "SpoutLimiter",
    "StepDetector",
    "StepLimiter",
    "make_detector",
    "make_limiter",
    "queue_time",
]


def make_detector(
    mode: str,
    upstream: Collection[int],
    spouts: Collection[int],
    capacity: int,
    load_factor: float,
    step: float = STEP,
) -> OverloadDetector | None:
    """The overload detector of a mode for the inbox of one task. None in mode ``none``."""
    if mode == "step":
        return StepDetector(upstream, capacity, load_factor, step)
    if mode == "spout":
        return SpoutDetector(spouts, capacity, load_factor)
    return CreditDetector(upstream, capacity) if mode == "credit" else None


def make_limiter(mode: str, step: float) -> RateLimiter:
    """The rate limiter of a mode between a task and a component. In mode ``spout`` this one sets no limit; the
    spout has a ``SpoutLimiter`` of its own."""
    limiters: dict[str, Callable[[], RateLimiter]] = {"step": lambda: StepLimiter(step), "credit": CreditLimiter}
    return limiters.get(mode, RateLimiter)()


def queue_time(settings: Settings, hops: int) -> float:
    """Seconds of work that one queue may hold. ``hops``: of the longest path from a spout. Each has two queues,
    that of the sender and the inbox, and all of them can be full, because a task that is slowed down slows its own
    senders. They share half of the message timeout. The rest is for signals, which are late by some steps, and
    for the work itself."""
    return settings.flow.queue_time or settings.delivery.message_timeout / 2 / (2 * hops)
