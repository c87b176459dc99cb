"""The state of flow control that moves with a worker to another process."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class DetectorState:
    """The messages of an overload detector that are in force. Each mode of flow control uses its own fields."""

    steps: int = 0
    """Mode step: signals sent and not cancelled."""
    rate: float = 0.0
    """Mode step: tuples per second that arrived before the first signal."""
    holds: bool = False
    """Mode spout: the spouts are stopped."""
    credits: list[tuple[int, int, int]] = field(default_factory=list)
    """Mode credit: sender, consumed tuples, granted tuples."""


@dataclass(frozen=True)
class LimiterState:
    """The messages to a rate limiter that are in force. Each mode of flow control uses its own fields."""

    paused_by: list[int] = field(default_factory=list)
    """Tasks that told the sender to wait because it is epochs ahead."""
    initial: float | None = None
    """Mode step: tuples per second before the first signal."""
    steps: dict[int, int] = field(default_factory=dict)
    """Mode step: the steps that each task requests."""
    excluded: list[int] = field(default_factory=list)
    """Mode step: tasks to which nothing is sent during a migration."""
    granted: dict[int, float] = field(default_factory=dict)
    """Mode credit: total tuples that may be sent to each task."""
    sent: dict[int, int] = field(default_factory=dict)
    """Mode credit: tuples sent to each task."""
