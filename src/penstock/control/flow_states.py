"""The state of flow control that moves with a worker to another process."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class DetectorState:
    """What an overload detector has told its senders. Each mode of flow control uses the fields of its own."""

    steps: int = 0
    """Step: signals sent and not taken back."""
    rate: float = 0.0
    """Step: tuples a second that arrived before the first signal."""
    holds: bool = False
    """Spout: it has stopped the spouts."""
    credits: list[tuple[int, int, int]] = field(default_factory=list)
    """Credit: sender, tuples consumed, tuples granted."""


@dataclass(frozen=True)
class LimiterState:
    """What a rate limiter was asked for. Each mode of flow control uses the fields of its own."""

    paused_by: list[int] = field(default_factory=list)
    """Tasks that asked the sender to wait because it is epochs ahead."""
    initial: float | None = None
    """Step: tuples a second before the first signal."""
    steps: dict[int, int] = field(default_factory=dict)
    """Step: how many steps each task asks for."""
    excluded: list[int] = field(default_factory=list)
    """Step: tasks that nothing is sent to at the moment (migration)."""
    granted: dict[int, float] = field(default_factory=dict)
    """Credit: tuples that each task may be sent altogether."""
    sent: dict[int, int] = field(default_factory=dict)
    """Credit: tuples that each task was sent."""
