"""Discrete-event simulations of a cluster that run the production code of ``penstock.control``. They use neither
wall time nor threads, and the same seed gives the same run. Needs the extra ``sim``."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from penstock.errors import EnvironmentFault

try:
    import simpy  # noqa: F401
except ImportError:
    raise EnvironmentFault(
        "simulator", "the package simpy is not installed", 'Install it with: pip install "penstock[sim]".'
    ) from None

if TYPE_CHECKING:
    from penstock.sim.cluster import run
    from penstock.sim.storm_benchmarks import BENCHMARKS, STRATEGIES

# Imported on first use: the network of nodes needs less than the cluster.
_HOMES = {
    "BENCHMARKS": "penstock.sim.storm_benchmarks",
    "STRATEGIES": "penstock.sim.storm_benchmarks",
    "run": "penstock.sim.cluster",
}

__all__ = [
    "BENCHMARKS",
    "STRATEGIES",
    "run",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
