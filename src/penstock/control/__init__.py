"""Policies for backpressure, migration, scaling and placement. They are pure: no IO, clock, thread or Spark. The
workers, the driver and the simulator run the same code."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.control.erdm import ErdmPolicy
    from penstock.control.placement import ExecutorStream, PlacedExecutor, PlacementNode, PlacementSnapshot, Use
    from penstock.control.placement_report import explain

# Imported on first use, because a worker needs flow control but no placement.
_HOMES = {
    "ErdmPolicy": "penstock.control.erdm",
    "PlacedExecutor": "penstock.control.placement",
    "PlacementNode": "penstock.control.placement",
    "PlacementSnapshot": "penstock.control.placement",
    "ExecutorStream": "penstock.control.placement",
    "Use": "penstock.control.placement",
    "explain": "penstock.control.placement_report",
}

__all__ = [
    "ErdmPolicy",
    "ExecutorStream",
    "PlacedExecutor",
    "PlacementNode",
    "PlacementSnapshot",
    "Use",
    "explain",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
