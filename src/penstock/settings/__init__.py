"""The typed settings of a topology, in groups. Each setting has a unit, a default and a reason."""

from __future__ import annotations

from penstock.settings.groups import (
    Delivery,
    Flow,
    Lifecycle,
    Migration,
    Monitor,
    Scaling,
    Transport,
    Workers,
)
from penstock.settings.model import BY_NAME, GROUPS, Settings, full_name
from penstock.settings.placement import Placement

__all__ = [
    "BY_NAME",
    "GROUPS",
    "Delivery",
    "Flow",
    "Lifecycle",
    "Migration",
    "Monitor",
    "Placement",
    "Scaling",
    "Settings",
    "Transport",
    "Workers",
    "full_name",
]
