"""What a policy decided about a running topology, and why."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PolicyDecision:
    """A decision and its reason, shown to users. ``time`` is on the monotonic clock."""

    time: float
    component: str
    """Empty if it concerns the whole topology."""
    text: str
